"""The policy's weights as an engine with a copy of its own wants them: names of the plain checkpoint, whole tensors.

Three things a stream of `named_parameters()` gets wrong, each of which leaves an engine silently stale or wrong:

- a tied head is one parameter with two names; engines that pack the head need both (notes on vLLM, trap 1);
- an adapter is not in the checkpoint: each adapted layer is merged on a *copy*, one layer at a time, so that the
  model's own weights stay bit for bit what they were, and `modules_to_save` are taken (known_faults B57);
- sharded weights are gathered first, on every process, for as long as the stream is read.

Left out: merging into quantised weights, which would round them at every step. There the adapter alone is handed over
(`save_adapter`).
"""

import contextlib
import copy
import os
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
    """The policy's weights with the names of its plain Hugging Face checkpoint, a tied head included.

    Every process must read it (sharded weights are whole only while it is read), to the end or until `close()`. The
    tensors are the model's own or a merged copy: read them, do not keep or change them.

    Raises:
        ValueError: an adapter on quantised weights, or one that unties what the checkpoint ties.
    """
    with gathered(policy.local_scorer), policy.adapter_in_place():
        lm = causal_lm_of(policy.model)
        if converts_names(lm):
            from transformers.core_model_loading import revert_weight_conversion

            yield from revert_weight_conversion(lm, dict(_as_in_memory(policy))).items()
        else:
            yield from _as_in_memory(policy)


def manifest(policy: "Policy") -> Manifest:
    """Name, shape and dtype of everything that `named_weights` gives. Every process must call it."""
    with contextlib.closing(named_weights(policy)) as weights:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights}


def plain_manifest(lm: Any) -> Manifest:
    """The same of a transformers model without adapters, which may be empty (on the meta device)."""
    tensors = dict(_own(lm))
    if converts_names(lm):
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(lm, tensors)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def finite(
    weights: Iterable[tuple[str, Tensor]], where: str, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The same stream, each tensor checked as it passes. Read it to the end before anything is sent.

    NaN that an engine has drawn with stay in its cache of keys and values when the weights are right again, so they
    must not get there. The check reads each tensor once: 5 ms for 128 MB on one core, less than copying them.

    Args:
        weights: names and tensors.
        where: who asks, for the message.
        dtype: of the engine's weights, whose largest number is the limit; None takes each tensor's own.

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
    """Compare names and shapes of two manifests before an engine is touched; dtypes may differ (bf16 into fp32).

    Args:
        ours: manifest of the policy.
        theirs: that of the engine's checkpoint.
        where: who asks, for the message.

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
        first = shapes[0]
        problems.append(
            f"{len(shapes)} shape{'s differ' if len(shapes) > 1 else ' differs'} ({first}: policy "
            f"{tuple(ours[first][0])}, engine {tuple(theirs[first][0])})"
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
    """A number that changes with the weights: also by an optimizer of the user's own, `load_state_dict`, or by hand.

    It reads torch's counter of changes in place of each parameter, one element of each, which shows what is written
    past the counter (`parameter.data`), and which adapters are active, at what scale; so it costs next to nothing. Left
    out: single elements written through `.data`; and packed bytes and what DeepSpeed has taken apart, of which only the
    counter is read.
    """
    adapted = hasattr(policy.model, "peft_config")
    parts: list[Any] = [policy.model.active_adapters if adapted else None]
    middles: dict[Any, list[Tensor]] = {}
    buffers: list[Tensor] = []  # those of a checkpoint; others may change in every forward pass
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
    """True if the head and the embedding of tokens are one parameter."""
    lm = causal_lm_of(policy.model)
    return bool(lm.config.get_text_config().tie_word_embeddings)


def is_quantised(model: nn.Module) -> bool:
    """True if some weights are packed integers, which cannot be merged with an adapter or handed over as they are."""
    lm = causal_lm_of(model)
    return bool(getattr(lm, "is_quantized", False)) or any(
        not (parameter.is_floating_point() or parameter.is_complex()) for parameter in lm.parameters()
    )


def converts_names(lm: Any) -> bool:
    """True if transformers keeps this model in other tensors than its checkpoint has (fused experts of a mixture)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = getattr(lm, "_weight_conversions", None)
    if found is None:
        found = get_model_conversion_mapping(lm, add_legacy=False)
    return any(isinstance(step, WeightConverter) for step in found or [])


def _as_in_memory(policy: "Policy") -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, adapters merged, under the names that they have in the model itself."""
    model = policy.model
    lm = causal_lm_of(model)
    adapted = hasattr(model, "peft_config")
    if is_quantised(model):
        raise ValueError(
            f"named_weights: {policy.name!r} has quantised weights, which cannot be handed over whole: merging would "
            "round them at every step. Hand over the adapter alone: an engine with lora='adapter'."
        )
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    seen: dict[str, Tensor] = {}
    for name, tensor in _walk(lm, "") if adapted else _own(lm):
        if tensor.is_meta:
            raise ValueError(f"named_weights: {name} of {policy.name!r} has no data (meta device).")
        seen[name] = tensor
        yield name, tensor
    if adapted and is_tied(policy):
        _check_still_tied(lm, head, embedding, seen)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, every name of a shared one, and the buffers that belong to a checkpoint."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter.detach()
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer.detach()


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model with adapters inside, as if there were none: each adapted layer merged on a copy."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        yield from ((_join(prefix, name), tensor) for name, tensor in _own(_merged_copy(module)))
        return
    if isinstance(module, ModulesToSaveWrapper):
        off = module.disable_adapters or not module.active_adapters
        inner = module.original_module if off else module.modules_to_save[module.active_adapters[0]]
        yield from _walk(inner, prefix)
        return
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(
            f"named_weights: the adapter trains {prefix} by {type(module).__name__}, which rlkit does not merge. Use "
            "target_modules and modules_to_save, or the transformers engine."
        )
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield _join(prefix, name), parameter.detach()
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield _join(prefix, name), buffer.detach()
    for name, child in module.named_children():
        yield from _walk(child, _join(prefix, name))


def _merged_copy(layer: Any) -> nn.Module:
    """The plain layer with its active adapters merged in; the layer itself is not touched."""
    if layer.disable_adapters or layer.merged:
        return layer.get_base_layer()
    with torch.no_grad():
        twin = copy.deepcopy(layer)
        twin.merge()
    return twin.get_base_layer()


def _check_still_tied(lm: Any, head: Any, embedding: Any, seen: Mapping[str, Tensor]) -> None:
    names = {module: name for name, module in lm.named_modules(remove_duplicate=False)}
    pair = [seen.get(_join(names.get(module, ""), "weight")) for module in (head, embedding)]
    if pair[0] is not None and pair[1] is not None and pair[0] is not pair[1] and not torch.equal(pair[0], pair[1]):
        raise ValueError(
            "named_weights: the model ties its head to the embedding, but the adapter changes only one of them, which "
            "an engine cannot hold. Leave lm_head and embed_tokens out of the adapter, or load the model with "
            "tie_word_embeddings=False."
        )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def check_plain_lora(policy: "Policy", where: str) -> None:
    """The adapter is one that vLLM takes from a file.

    Raises:
        ValueError: it is not plain LoRA, or trains whole modules besides.
    """
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
    """Write the active adapter alone, as peft and vLLM's LoRARequest read it. Every process calls it; rank 0 writes.

    Args:
        policy: whose adapter it is.
        folder: where to.
        dtype: of the engine's weights, see `finite`.

    Returns:
        The folder that holds `adapter_config.json`.

    Raises:
        TypeError: the policy has no adapter.
        ValueError: the adapter also trains whole modules, which an adapter file cannot bring to an engine; or it is not
            finite, then nothing was written.
    """
    from rlkit.distributed import collectives

    model = policy.model
    if not hasattr(model, "peft_config"):
        raise TypeError(f"save_adapter: {policy.name!r} has no adapter; its whole weights are handed over instead.")
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
