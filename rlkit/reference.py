"""`update_reference`: move a reference towards its policy. `Policy.reference` makes one; for PEFT see adapters.py."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rlkit.distributed.sharding import fsdp_modules, gathered
from rlkit.policy import AdapterReference, Policy

if TYPE_CHECKING:
    from torch.nn import Parameter


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
    with torch.no_grad(), _whole_if_needed(reference, policy):  # gathering replaces the parameters of a module
        pairs = _adapter_pairs(reference) if isinstance(reference, AdapterReference) else _pairs(reference, policy)
        for mine, other in pairs:
            mine.lerp_(other.to(mine.dtype), mixing_alpha)


@contextlib.contextmanager
def _whole_if_needed(reference: Policy, policy: Policy) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        ours, theirs = reference.local_scorer, policy.local_scorer
        if ours.zero3 or theirs.zero3:  # its parameters are empty tensors outside `gathered`
            stack.enter_context(gathered(ours, write=True))
            stack.enter_context(gathered(theirs))
        elif bool(fsdp_modules(ours)) != bool(fsdp_modules(theirs)):  # the policy alone is sharded
            stack.enter_context(gathered(theirs))
        yield


def _pairs(reference: Policy, policy: Policy) -> "list[tuple[Parameter, Parameter]]":
    ours, theirs = dict(reference.model.named_parameters()), dict(policy.model.named_parameters())
    if ours.keys() != theirs.keys():
        raise ValueError("update_reference: the reference and the policy have different parameters.")
    return [(ours[name], theirs[name]) for name in ours]


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
