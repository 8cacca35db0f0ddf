"""What a vLLM server loads: a folder with a plain checkpoint for a policy or an offline model, else what is named."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.engines.vllm.colocate_settings import write_skeleton
from rlkit.engines.weights import named_weights
from rlkit.loading import OFFLINE_MODELS

if TYPE_CHECKING:
    from rlkit.policy import Policy


def served_model(model: "Policy | str | os.PathLike[str]", scratch: Path) -> str:
    """What vLLM loads: a folder, written to `scratch` for a policy and for the offline models, or a hub id as it is.

    Raises:
        FileNotFoundError: a path that leads nowhere.
    """
    if not isinstance(model, (str, os.PathLike)):
        return str(save_served(model, scratch / "model"))
    name = os.fspath(model)
    if name in OFFLINE_MODELS or name.endswith(".gguf"):
        from rlkit.loading import load_policy

        return str(save_served(load_policy(name, device="cpu"), scratch / "model"))
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"rlkit serve: there is no folder {name}. Give a saved model's folder, or a hub id.")
    return name


def whole_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, for safetensors: it does not write two names for one memory, nor strides."""
    return torch.clone(tensor.detach().to("cpu"), memory_format=torch.contiguous_format)


def save_served(policy: "Policy", folder: Path) -> Path:
    """Write a policy as a checkpoint that vLLM can load: an adapter is left out, since it comes with the first sync.

    Raises:
        ValueError: quantised weights; serve the base model by its name instead.
    """
    from safetensors.torch import save_file

    adapted = hasattr(policy.model, "peft_config")
    with policy.model.disable_adapter() if adapted else contextlib.nullcontext():
        weights = {name: whole_copy(tensor) for name, tensor in named_weights(policy)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_skeleton(policy, str(folder))
    return folder
