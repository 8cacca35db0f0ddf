"""Loads weights in vLLM's workers: `--worker-extension-cls rlkit.engines.worker.WeightLoader`.

vLLM mixes the class into its worker, and the server's `/collective_rpc` calls its methods by name with JSON arguments.
In vLLM 0.32 a load that raises half-way leaves layers without storage, and the next request kills the server. So the
file is read and compared before a layer is changed; a later failure is caught, the layers get their storage back, and
the answer says that the weights are a mixture of old and new. Nothing here raises.

The expected names and shapes are those of an empty transformers model of the same config. A tied head is among them:
vLLM on a CPU packs it separately and would silently keep the old one.
"""

import copy
import os
from typing import Any

import torch

from rlkit.engines.vllm.llm import clear_blocks, restore_layers
from rlkit.engines.weights import check_manifest, plain_manifest
from rlkit.support.processes import DIES_WITH_PARENT, die_with_parent

if DIES_WITH_PARENT in os.environ:  # in a process of a server that rlkit has started, never in a notebook
    die_with_parent()

Shapes = dict[str, list[int]]


class WeightLoader:
    """Methods that vLLM adds to its worker."""

    def rlkit_describe(self) -> dict[str, Any]:
        """The worker's dtype, limits, and the shape of every weight that a sync must contain.

        `shapes` is None where transformers has no class for the model; then only vLLM's own checks apply.
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        model = config.model_config
        return {
            "protocol": 2,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "logprobs_mode": model.logprobs_mode,
            "lora_rank": config.lora_config.max_lora_rank if config.lora_config else None,
            "shapes": self._rlkit_shapes(),
            # vLLM unties the config if the checkpoint has both tensors, and ties the model again if they are equal.
            "tied": bool(
                getattr(model.hf_text_config, "tie_word_embeddings", False)
                or getattr(model, "word_embeddings_untied_by_checkpoint", False)
            ),
        }

    def rlkit_clear_blocks(self) -> None:
        """Overwrite the KV cache by zeros; no request may be alive."""
        clear_blocks(self)

    def rlkit_base_replaced(self, becomes: bool = False) -> dict[str, bool]:
        """Whether the base weights were replaced since the start; `becomes` records that they are.

        A dict, because vLLM turns any other answer into a string.
        """
        self._rlkit_replaced = becomes or getattr(self, "_rlkit_replaced", False)
        return {"replaced": self._rlkit_replaced}

    def rlkit_load(self, file: str) -> dict[str, Any]:
        """Load the weights of a safetensors file.

        Returns:
            ok; error, None if ok; mixed: True if some layers have new weights and some old ones, so that the engine
            must not be used until a sync succeeds.
        """
        mixed = getattr(self, "_rlkit_mixed", False)
        try:
            weights = _read(file)
            expected = self._rlkit_shapes()
            if expected is not None:
                given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
                check_manifest(given, {name: (tuple(shape), None) for name, shape in expected.items()}, "rlkit_load")
            restore_layers(self.model_runner.get_model())  # type: ignore[attr-defined]  # after another client's failed load
        except Exception as error:  # any error raised here would end the server
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "mixed": mixed}
        self.rlkit_base_replaced(True)
        try:
            self.reload_weights(weights_iterator=iter(weights.items()))  # type: ignore[attr-defined]
        except Exception as error:
            self._rlkit_mixed = True
            restore_layers(self.model_runner.get_model())  # type: ignore[attr-defined]
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "mixed": True}
        self._rlkit_mixed = False
        return {"ok": True, "error": None, "mixed": False}

    def _rlkit_shapes(self) -> Shapes | None:
        if not hasattr(self, "_rlkit_known_shapes"):
            self._rlkit_known_shapes = shapes_of_config(self.vllm_config.model_config.hf_config)  # type: ignore[attr-defined]
        return self._rlkit_known_shapes


def _read(file: str) -> dict[str, torch.Tensor]:
    if not os.path.isfile(file):
        raise FileNotFoundError(
            f"the server sees no file {file}. Client and server must see the same folder: give VLLMServer a folder= on "
            "a disk that both have."
        )
    from safetensors.torch import load_file

    return load_file(file)


def shapes_of_config(config: Any) -> Shapes | None:
    """Shape of every weight of a config's transformers model, tied ones under each name; None without such a class."""
    import transformers

    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if kind is None or not hasattr(kind, "_from_config"):
        return None
    with torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config))
    return {name: list(shape) for name, (shape, _) in plain_manifest(model).items()}
