"""PEFT adapters of a model that is its own reference.

A *fresh* adapter changes nothing yet, so the reference is the model with its adapter off. A *pretrained* adapter is
part of the starting point: the reference is the model with a frozen copy of it, since without it the KL would not start
at 0. `adapter_changes_nothing` measures which of the two an adapter is.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rlkit.causal_lm import causal_lm_of, vocabulary_size

REFERENCE_ADAPTER = "reference"


def add_reference_adapter(model: Any) -> str:
    """Add a frozen copy of the active adapter for the reference; returns its name."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    active = model.active_adapter
    if REFERENCE_ADAPTER in model.peft_config:
        raise ValueError(f"policy.reference: the model has an adapter named {REFERENCE_ADAPTER!r} already; rename it.")
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    weights = get_peft_model_state_dict(model, adapter_name=active)
    model.add_adapter(REFERENCE_ADAPTER, model.peft_config[active])
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE_ADAPTER)
    model.set_adapter(active)
    known = {id(parameter) for parameter, _ in trainable}
    for parameter in model.parameters():
        if id(parameter) not in known:
            parameter.requires_grad_(False)
    for parameter, was in trainable:
        parameter.requires_grad_(was)
    return REFERENCE_ADAPTER


def adapter_changes_nothing(model: Any) -> bool:
    """True if the model gives the same logits with its adapter on and off, on a probe of a few tokens."""
    probe = torch.arange(16, device=next(model.parameters()).device)[None] * 7919 % vocabulary_size(model)
    inputs = {"input_ids": probe, "attention_mask": torch.ones_like(probe), "use_cache": False}
    lm = causal_lm_of(model)
    with torch.no_grad():
        with_adapter = lm(**inputs).logits
        with model.disable_adapter():
            without = lm(**inputs).logits
    return torch.equal(with_adapter, without)


@contextlib.contextmanager
def adapter_active(model: Any, adapter: str | None) -> Iterator[None]:
    """Inside, `adapter` (or no adapter) is active; which parameters are trained does not change."""
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    active = model.active_adapter
    try:
        if adapter is None:
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(adapter)
            yield
    finally:
        if adapter is not None:
            model.set_adapter(active)
        for parameter, was in trainable:  # switching adapters changes what is trained
            parameter.requires_grad_(was)
