"""The policy's weights for an engine that holds a copy: whole tensors under the names of the plain checkpoint.

`named_parameters()` would leave an engine silently stale or wrong in three ways:

- a tied head is one parameter with two names, and an engine that packs the head separately needs both;
- an adapter is not in the checkpoint: each adapted layer is merged on a *copy*, one layer at a time, so the model's own
  weights do not change by a bit, and `modules_to_save` replace what they wrap;
- sharded weights are gathered on every process while the stream is read.

Left out: merging into quantised weights, which would round them at every step; the adapter alone is transferred then
(`save_adapter`).
"""

import contextlib
import copy
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlkit.causal_lm import causal_lm_of
from rlkit.distributed.sharding import gathered

if TYPE_CHECKING:
    from rlkit.policy import Policy

Manifest = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor by its name in the checkpoint."""


def named_weights(policy: "Policy") -> Generator[tuple[str, Tensor], None, None]:
    """Stream the policy's weights under the names of its plain Hugging Face checkpoint, a tied head under both.

    Every process must read it (sharded weights are whole only meanwhile), to the end or until `close()`. The tensors
    are the model's own or a merged copy: neither keep nor change them.

    Raises:
        ValueError: an adapter on quantised weights, or one that unties what the checkpoint ties.
    """
    with gathered(policy.local_scorer), policy.adapter_in_place():
        yield from _as_in_checkpoint(causal_lm_of(policy.model), _as_in_memory(policy))


def manifest(policy: "Policy") -> Manifest:
    """Name, shape and dtype of each tensor of `named_weights`. Every process must call it."""
    with contextlib.closing(named_weights(policy)) as weights:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights}


def plain_manifest(lm: Any) -> Manifest:
    """The manifest of a transformers model without adapters, which may be on the meta device."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _as_in_checkpoint(lm, _tensors(lm))}


def finite(
    weights: Iterable[tuple[str, Tensor]], where: str, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Pass a stream on, checking that each tensor is finite. Read it to the end before anything is sent.

    NaN would stay in an engine's KV cache after the weights are correct again. `dtype` is that of the engine's weights,
    whose largest number is the limit; None takes each tensor's own.

    Raises:
        ValueError: names the first tensor with NaN, an infinity, or a number that is one in the engine's dtype.

    Example:
        >>> list(finite([("head", torch.tensor([1.0, torch.nan]))], "sync"))
        Traceback (most recent call last):
        ...
        ValueError: sync: policy weights not finite in float32: head (1 of 2 values); nothing was sent...
    """
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.numel():
            kind = dtype or tensor.dtype
            limit = torch.finfo(kind).max
            low, high = torch.stack(torch.aminmax(tensor.detach())).tolist()
            if not (low >= -limit and high <= limit):  # a comparison with NaN is False
                bad = int((~(tensor.detach().abs() <= limit)).sum())
                raise ValueError(
                    f"{where}: policy weights not finite in {str(kind).removeprefix('torch.')}: {name} ({bad} of "
                    f"{tensor.numel()} values); nothing was sent, and the engine is as it was. Go back to a checkpoint "
                    "from before the step that did it; a smaller learning rate or max_grad_norm= avoids it."
                )
        yield name, tensor


def check_manifest(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Compare names and shapes of two manifests before an engine is changed; dtypes may differ (bf16 into fp32).

    Raises:
        ValueError: names that only one has, or shapes that differ.

    Example:
        >>> check_manifest({"a": ((2,), torch.float32)}, {"a": ((3,), torch.float32)}, "sync")
        Traceback (most recent call last):
        ...
        ValueError: sync: the engine was loaded from another model than the policy: 1 shape differs (a: policy (2,), ...
    """
    missing = sorted(theirs.keys() - ours.keys())
    unknown = sorted(ours.keys() - theirs.keys())
    shapes = [name for name in ours if name in theirs and tuple(ours[name][0]) != tuple(theirs[name][0])]
    problems = []
    if shapes:
        first, differ = shapes[0], "shape differs" if len(shapes) == 1 else "shapes differ"
        problems.append(
            f"{len(shapes)} {differ} ({first}: policy {tuple(ours[first][0])}, engine {tuple(theirs[first][0])})"
        )
    if missing:
        problems.append(f"the policy lacks {len(missing)} name(s), such as {missing[0]}")
    if unknown:
        problems.append(f"the engine does not know {len(unknown)} name(s), such as {unknown[0]}")
    if problems:
        raise ValueError(
            f"{where}: the engine was loaded from another model than the policy: {'; '.join(problems)}. Nothing was "
            "changed. Start the engine with the policy's own model."
        )


def weights_mark(policy: "Policy") -> int:
    """A hash that changes with the weights: by a step, by another optimizer, by `load_state_dict`, or by hand.

    It reads each parameter's version counter; one element of each, which changes with writes that bypass the counter
    (`parameter.data`); and the active adapters with their scale. Left out: single elements written through `.data`; of
    packed bytes and of DeepSpeed's shards only the counter is read.
    """
    adapted = hasattr(policy.model, "peft_config")
    parts: list[Any] = [policy.model.active_adapters if adapted else None]
    middles: dict[Any, list[Tensor]] = {}
    buffers: list[Tensor] = []  # persistent ones; others may change in every forward pass
    for module in policy.model.modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        buffers += [buffer for name, buffer in module._buffers.items() if buffer is not None and name in saved]
        if hasattr(module, "_disable_adapters"):
            parts.append((module._disable_adapters, getattr(module, "scaling", None)))
    for parameter in [*policy.model.parameters(), *buffers]:
        parts.append((id(parameter), 0 if parameter.is_inference() else parameter._version))
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.numel() and not local.is_meta and local.element_size() > 1:
            middle = local[tuple(size // 2 for size in local.shape)]
            middles.setdefault((local.device, local.dtype), []).append(middle)
    for values in middles.values():
        parts.append(tuple(repr(value) for value in torch.stack(values).double().tolist()))
    return hash(repr(parts))


def whole_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU: safetensors writes neither strides nor two names for one memory."""
    return torch.clone(tensor.detach().to("cpu"), memory_format=torch.contiguous_format)


def is_tied(policy: "Policy") -> bool:
    """True if the head and the token embedding are one parameter."""
    lm = causal_lm_of(policy.model)
    return bool(lm.config.get_text_config().tie_word_embeddings)


def is_quantised(model: nn.Module) -> bool:
    """True if some weights are packed integers, which can neither be merged with an adapter nor transferred."""
    lm = causal_lm_of(model)
    return bool(getattr(lm, "is_quantized", False)) or any(
        not (parameter.is_floating_point() or parameter.is_complex()) for parameter in lm.parameters()
    )


def _as_in_checkpoint(lm: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """The tensors as the checkpoint has them: transformers fuses the experts of a mixture in memory."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    found = getattr(lm, "_weight_conversions", None)
    if found is None:
        found = get_model_conversion_mapping(lm, add_legacy=False)
    if any(isinstance(step, WeightConverter) for step in found or []):
        return revert_weight_conversion(lm, dict(tensors)).items()
    return tensors


def _as_in_memory(policy: "Policy") -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, adapters merged, under the names of the model."""
    model = policy.model
    lm = causal_lm_of(model)
    if is_quantised(model):
        raise ValueError(
            f"named_weights: {policy.name!r} has quantised weights, which cannot be transferred whole: merging would "
            "round them at every step. Transfer the adapter alone: an engine with lora='adapter'."
        )
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    seen: dict[str, Tensor] = {}
    for name, tensor in _tensors(lm):
        if tensor.is_meta:
            raise ValueError(f"named_weights: {name} of {policy.name!r} has no data (meta device).")
        seen[name] = tensor
        yield name, tensor
    if hasattr(model, "peft_config") and is_tied(policy):
        _check_still_tied(lm, head, embedding, seen)


def _tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters, shared ones under every name, and persistent buffers, as without adapters."""
    module = _without_adapter(module, prefix)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, tensor.detach()
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.")


def _without_adapter(module: Any, prefix: str) -> nn.Module:
    """A layer with its active adapters merged on a copy, or the module that is in use in place of the original."""
    if "peft" not in sys.modules:  # it is an extra
        return module
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        if module.disable_adapters or module.merged:
            return module.get_base_layer()
        with torch.no_grad():
            twin = copy.deepcopy(module)
            twin.merge()
        return twin.get_base_layer()
    if isinstance(module, ModulesToSaveWrapper):
        off = module.disable_adapters or not module.active_adapters
        return module.original_module if off else module.modules_to_save[module.active_adapters[0]]
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(
            f"named_weights: the adapter trains {prefix.removesuffix('.')} by {type(module).__name__}, which rlkit "
            "does not merge. Use target_modules and modules_to_save, or the transformers engine."
        )
    return module


def _check_still_tied(lm: Any, head: Any, embedding: Any, seen: Mapping[str, Tensor]) -> None:
    names = {module: name for name, module in lm.named_modules(remove_duplicate=False)}
    pair = [seen.get(f"{names.get(module)}.weight") for module in (head, embedding)]
    if pair[0] is not None and pair[1] is not None and pair[0] is not pair[1] and not torch.equal(pair[0], pair[1]):
        raise ValueError(
            "named_weights: the model ties its head to the embedding, but the adapter changes only one of them, which "
            "an engine cannot hold. Leave lm_head and embed_tokens out of the adapter, or load the model with "
            "tie_word_embeddings=False."
        )


def check_plain_lora(policy: "Policy", where: str) -> None:
    """Raise `ValueError` unless vLLM can load the adapter from a file: plain LoRA without `modules_to_save`."""
    config = policy.model.peft_config[policy.model.active_adapter]
    whole = sorted(getattr(config, "modules_to_save", None) or [])
    kind = "DoRA" if getattr(config, "use_dora", False) else config.peft_type.value
    if whole or kind != "LORA":
        what = f"also trains {whole} (modules_to_save)" if whole else f"is {kind}"
        raise ValueError(
            f"{where}: lora='adapter' is for plain LoRA, but the adapter {what}, which vLLM does not take from a file. "
            "Use lora='merge', or another adapter if the weights are quantised."
        )


def save_adapter(policy: "Policy", folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Path:
    """Write the active adapter in peft's format and return the folder of `adapter_config.json`.

    Every process calls it; rank 0 writes. `dtype` is that of the engine's weights, see `finite`.

    Raises:
        TypeError: the policy has no adapter.
        ValueError: not plain LoRA (`check_plain_lora`), or not finite; nothing was written.
    """
    from rlkit.distributed import collectives

    model = policy.model
    if not hasattr(model, "peft_config"):
        raise TypeError(f"save_adapter: {policy.name!r} has no adapter; its whole weights are transferred instead.")
    from peft import get_peft_model_state_dict

    check_plain_lora(policy, "save_adapter")
    active = model.active_adapter
    folder = Path(folder)
    with gathered(policy.local_scorer):
        for _ in finite(get_peft_model_state_dict(model, adapter_name=active).items(), "save_adapter", dtype):
            pass
        if collectives.rank() == 0:
            model.save_pretrained(folder, selected_adapters=[active])
    collectives.barrier()
    return folder if active == "default" else folder / active
