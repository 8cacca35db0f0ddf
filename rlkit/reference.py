"""References: what a policy is measured against, and how a reference follows it.

Without an adapter a reference is a frozen copy. With a PEFT adapter no second model is needed. A *fresh* adapter
changes nothing yet, so the reference is the same model with the adapter off. A *pretrained* adapter is part of where
the run starts, so the reference is the same model with a frozen copy of that adapter: taking it off would measure KL
from another model, and it would not be 0 at step 0 (known_faults B22). Which of the two it is gets measured.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rlkit.causal_lm import causal_lm_of, vocabulary_size
from rlkit.distributed.sharding import fsdp_modules, gathered
from rlkit.policy import Policy

if TYPE_CHECKING:
    from torch.nn import Parameter

REFERENCE_ADAPTER = "reference"


class AdapterReference(Policy):
    """The reference of a policy with an adapter: the policy's own model with other adapter settings.

    Attributes:
        adapter: name of the frozen adapter that is active inside, or None where the adapter is off.
    """

    def __init__(self, policy: Policy, adapter: str | None) -> None:
        self.__dict__.update(policy.__dict__)  # one model, one scorer, also after world.prepare has wrapped them
        self.name = f"{policy.name} (reference)"
        self.adapter = adapter
        self.engine = None
        self.strategy = "shared"
        self._trained = policy

    @contextlib.contextmanager
    def inference_settings(self) -> Iterator[None]:
        """The reference's adapter instead of the trained one, and everything else as the policy has it."""
        self.autocast = self._trained.autocast
        with self.adapter_in_place(), super().inference_settings():
            yield

    @contextlib.contextmanager
    def adapter_in_place(self) -> Iterator[None]:
        """The reference's adapter is the active one inside; what is trained stays as it was."""
        trainable = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        active = self.model.active_adapter
        try:
            if self.adapter is None:
                with self.model.disable_adapter():
                    yield
            else:
                self.model.set_adapter(self.adapter)
                yield
        finally:
            if self.adapter is not None:
                self.model.set_adapter(active)
            for parameter, was in trainable:  # switching adapters changes what is trained
                parameter.requires_grad_(was)

    def trainable_parameters(self) -> "list[Parameter]":
        """None: a reference is frozen."""
        return []

    def reference(self) -> Policy:
        """The reference itself."""
        return self

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the weights are the policy's."""
        raise RuntimeError("A reference with an adapter shares the policy's weights; save the policy before training.")


def adapter_reference(policy: Policy) -> AdapterReference:
    """The reference of a policy whose model is inside a PEFT wrapper, as the adapter is now.

    Raises:
        ValueError: an adapter named "reference" exists already.
    """
    model = policy.model
    if adapter_changes_nothing(policy):
        return AdapterReference(policy, None)
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
    return AdapterReference(policy, REFERENCE_ADAPTER)


def adapter_changes_nothing(policy: Policy) -> bool:
    """True if the model gives the same logits with its adapter on and off, on a probe of a few tokens."""
    size = vocabulary_size(policy.model)
    probe = torch.arange(16, device=policy.device)[None] * 7919 % size
    with torch.no_grad(), policy.inference_settings():
        inputs = {"input_ids": probe, "attention_mask": torch.ones_like(probe), "use_cache": False}
        lm = causal_lm_of(policy.model)
        with_adapter = lm(**inputs).logits
        with policy.model.disable_adapter():
            without = lm(**inputs).logits
    return torch.equal(with_adapter, without)


def update_reference(reference: Policy, policy: Policy, *, mixing_alpha: float = 0.6) -> None:
    r"""Move a reference towards the policy, as TR-DPO and TRL's `sync_ref_model` do; call it every n steps.

    .. math:: \theta_{ref} \leftarrow \alpha\,\theta + (1 - \alpha)\,\theta_{ref}

    Args:
        reference: from `policy.reference()`.
        policy: the policy that is trained.
        mixing_alpha: share of the policy, in (0, 1]; 1 copies it.

    Raises:
        ValueError: mixing_alpha out of range, or the two have different parameters.
        RuntimeError: the reference is the policy with its adapter off, which cannot move.

    Source: Gorbatovski et al. 2024, "Learn your reference model for real good alignment" (arXiv 2404.09656).

    Example: `if step % 64 == 63: rl.update_reference(reference, policy, mixing_alpha=0.6)`
    """
    if not 0 < mixing_alpha <= 1:
        raise ValueError(f"update_reference: mixing_alpha must be in (0, 1], got {mixing_alpha}.")
    if isinstance(reference, AdapterReference):
        pairs = _adapter_pairs(reference)
    else:
        ours, theirs = dict(reference.model.named_parameters()), dict(policy.model.named_parameters())
        if ours.keys() != theirs.keys():
            raise ValueError("update_reference: the reference and the policy have different parameters.")
        pairs = [(ours[name], theirs[name]) for name in ours]
    # A whole reference beside a sharded policy needs the policy's weights whole for a moment.
    sharded_alike = bool(fsdp_modules(reference.local_scorer)) == bool(fsdp_modules(policy.local_scorer))
    with torch.no_grad(), _whole_if_needed(reference, policy, sharded_alike):
        if not sharded_alike:
            theirs = dict(policy.model.named_parameters())
            pairs = [(parameter, theirs[name]) for name, parameter in reference.model.named_parameters()]
        for mine, other in pairs:
            mine.lerp_(other.to(mine.dtype), mixing_alpha)


@contextlib.contextmanager
def _whole_if_needed(reference: Policy, policy: Policy, sharded_alike: bool) -> Iterator[None]:
    if reference.local_scorer.zero3 or policy.local_scorer.zero3:  # its shards hide behind empty tensors
        with gathered(reference.local_scorer, write=True), gathered(policy.local_scorer):
            yield
    elif sharded_alike:
        yield
    else:
        with gathered(policy.local_scorer):
            yield


def _adapter_pairs(reference: AdapterReference) -> "list[tuple[Parameter, Parameter]]":
    if reference.adapter is None:
        raise RuntimeError(
            "update_reference: this reference is the model without its adapter, which cannot follow the policy. Merge "
            "the adapter, or load the policy from a saved adapter to get a reference of its own."
        )
    parameters = dict(reference.model.named_parameters())
    active = reference.model.active_adapter
    marks = f".{reference.adapter}.", f".{active}."
    return [(p, parameters[n.replace(*marks)]) for n, p in parameters.items() if marks[0] in n]
