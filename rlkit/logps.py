"""`compute_logps`: log-probabilities of a rollout's tokens without gradient, for references and later updates."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.support.timing import phase
from rlkit.types import Rollout

if TYPE_CHECKING:
    from rlkit.policy import Policy


@phase("compute_logps")
def compute_logps(policy: "Policy", rollout: Rollout, *, micro_batch_size: int | None = None) -> Float[Tensor, "B T"]:
    r"""Log-probabilities of a rollout's tokens under a policy or reference, without gradient.

    .. math:: \log \mathrm{softmax}(\text{logits} / \text{temperature})[\text{token}]

    Args:
        policy: the policy or a reference.
        rollout: B completions; its temperature is used.
        micro_batch_size: rows per forward pass; None takes all at once.

    Returns:
        (B,T) nats, float32 or better, on the policy's device; 0 in masked slots.

    Raises:
        ValueError: micro_batch_size < 1.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"compute_logps: micro_batch_size must be at least 1 or None, got {micro_batch_size}.")
    size = micro_batch_size or max(1, len(rollout))
    with policy.without_gradient():
        parts = [
            policy.score_tokens(rollout.select(slice(start, start + size))).logp
            for start in range(0, len(rollout), size)
        ]
    return torch.cat(parts) if parts else rollout.sampler_logp.new_zeros(rollout.completion_ids.shape)
