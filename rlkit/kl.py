"""The KL of each sequence from the reference, estimated from its sampled tokens (Schulman 2020: k1, k2, k3)."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit.types import Rollout

KLEstimator = Literal["k1", "k2", "k3"]


def compute_kl(
    logp: Rollout | Float[Tensor, "B T"],
    ref_logps: Float[Tensor, "B T"],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    estimator: KLEstimator = "k1",
) -> Float[Tensor, " B"]:
    r"""KL of each sequence from the reference, summed over its sampled tokens.

    With d = log pi - log pi_ref of a token: k1 = d (the default, RLOO's), k2 = d^2/2, k3 = e^{-d} - 1 + d. k1 is
    unbiased and may be negative. Summed into the reward it gives the gradient of the true KL; k2 and k3 have less
    variance but are biased in that role.

    Args:
        logp: the `Rollout` (its sampler's log-probabilities and mask are used), or (B,T) log-probabilities of the
            policy that sampled, in nats.
        ref_logps: (B,T) log-probabilities under the reference, from `compute_logps(reference, rollout)`.
        mask: (B,T) True where a token counts; needed with a bare tensor.
        estimator: "k1", "k2" or "k3" (Schulman, "Approximating KL divergence", 2020).

    Returns:
        (B,) nats per sequence, float32 or better, without gradient. Masked slots may hold anything.

    Raises:
        ValueError: shapes differ, mask missing, unknown estimator.

    Example:
        >>> compute_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), mask=torch.tensor([[True, True]]))
        tensor([-0.5000])
    """
    if isinstance(logp, Rollout):
        mask = logp.completion_mask if mask is None else mask
        logp = logp.sampler_logp
    if mask is None:
        raise ValueError("compute_kl: mask is missing: give a (B,T) bool tensor, or pass the rollout instead of logp.")
    if not logp.shape == ref_logps.shape == mask.shape:
        raise ValueError(
            f"compute_kl: logp {tuple(logp.shape)}, ref_logps {tuple(ref_logps.shape)} and mask {tuple(mask.shape)} "
            "must have one (B,T) shape: were they computed from the same rollout?"
        )
    dtype = torch.promote_types(logp.dtype, torch.float32)
    delta = torch.where(mask, logp.detach().to(dtype) - ref_logps.detach().to(dtype), 0.0)
    if estimator == "k1":
        return delta.sum(-1)
    if estimator == "k2":
        return (delta.square() / 2).sum(-1)
    if estimator == "k3":
        return (torch.expm1(-delta) + delta).sum(-1)
    raise ValueError(f"compute_kl: estimator must be one of {get_args(KLEstimator)}, got {estimator!r}.")
