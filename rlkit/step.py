"""`loss_step`: one optimizer step on a rollout, in as many micro-batches as memory asks for.

The divisor is counted once, over the whole update: rows (or tokens) that count in the loss. Each micro-batch adds its
*sum* over that number, so the gradient does not depend on the split (known_faults B12). Masked rows are out of the
sum and out of the divisor alike (B13). A batch without a trainable token steps nothing and says so.
"""

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.losses import RLOO, LossFunction, LossInputs
from rlkit.rollout import Rollout, Update

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)


@runtime_checkable
class LRScheduler(Protocol):
    """What loss_step needs of a learning-rate scheduler: torch's and transformers' all have it."""

    def step(self) -> None:
        """Move on by one optimizer step."""
        ...


def loss_step(
    policy: "Policy",
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    advantages: Float[Tensor, " B"],
    *,
    loss: LossFunction | None = None,
    ref_logps: Float[Tensor, "B T"] | None = None,
    old_logps: Float[Tensor, "B T"] | None = None,
    micro_batch_size: int | None = None,
    max_grad_norm: float | None = 1.0,
    scheduler: LRScheduler | None = None,
    mask_truncated: bool = False,
) -> Update:
    """Take one optimizer step on the policy.

    Args:
        policy: the policy that `optimizer` was made for.
        optimizer: any torch optimizer. Gradients that it holds from before are dropped.
        rollout: B completions.
        advantages: (B,) advantages. NaN means that a row has no target: it is left out of the loss and its divisor.
        loss: `RLOO()` (the default), `AStarPO()`, or your own function of a `LossInputs` that returns (B,) values, one
            per sequence, or (B,T), one per token. The mean is taken here, over what counts.
        ref_logps: (B,T) log-probabilities of the reference, for losses that need them.
        old_logps: (B,T) log-probabilities before the first update on this rollout. None on the first update: the ratio
            is then exactly 1. For further updates on the same rollout pass `first_update.logp`.
        micro_batch_size: rows per forward and backward pass; None takes all at once. The result is the same.
        max_grad_norm: clip the gradient's total norm to this; None does not clip.
        scheduler: stepped once after the optimizer.
        mask_truncated: leave completions that the length limit cut off out of the loss (their rewards still count in
            the baseline of their group).

    Returns:
        An `Update`. If nothing could be learned (`skipped` says why) the policy, optimizer and scheduler are unchanged.

    Raises:
        ValueError: shapes that do not fit, a missing reference, a bad micro_batch_size or max_grad_norm.
        FloatingPointError: the loss is NaN or infinite. The policy is unchanged and holds no gradient.
    """
    loss = RLOO() if loss is None else loss
    _check(policy, rollout, advantages, loss, ref_logps, old_logps, micro_batch_size, max_grad_norm)
    device = policy.device
    advantages = advantages.detach().to(device, torch.promote_types(advantages.dtype, torch.float32))
    mask = rollout.completion_mask.to(device) & ~advantages.isnan()[:, None]
    if mask_truncated:
        mask = mask & ~rollout.truncated.to(device)[:, None]
    advantages = torch.where(mask.any(-1), advantages, 0.0)

    totals = _Totals(rows=int(mask.any(-1).sum()), tokens=int(mask.sum()))
    reason = _nothing_to_learn(totals, advantages, loss)
    optimizer.zero_grad(set_to_none=True)
    if reason is not None:
        logger.warning("loss_step: update skipped, %s.", reason)
        with torch.no_grad():
            scores = policy.score_tokens(rollout)
        metrics = {"frac_masked": 1 - totals.rows / max(1, len(rollout)), "skipped": 1.0}
        return Update(math.nan, metrics, scores.logp, scores.entropy, mask, skipped=reason)

    size = micro_batch_size or len(rollout)
    pieces = []
    for start in range(0, len(rollout), size):
        part = slice(start, start + size)
        pieces.append(
            _backward(
                policy,
                rollout.select(part),
                advantages[part],
                mask[part],
                loss,
                totals,
                _part(ref_logps, part),
                _part(old_logps, part),
            )
        )
    value = sum(piece.loss for piece in pieces)
    if not math.isfinite(value):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"loss_step: the loss is {value}; the policy is unchanged. Look for NaN in advantages and ref_logps, for "
            "exploding log-ratios (clip_ratio, kl) and for a learning rate that is too high."
        )
    metrics = _merge(pieces, totals)
    grad_norm = _grad_norm(policy, max_grad_norm)
    metrics["grad_norm"] = grad_norm
    metrics["learning_rate"] = float(optimizer.param_groups[0]["lr"])
    metrics["frac_masked"] = 1 - totals.rows / len(rollout)
    logp, entropy = torch.cat([p.logp for p in pieces]), torch.cat([p.entropy for p in pieces])
    if not math.isfinite(grad_norm):
        reason = f"the gradient norm is {grad_norm}"
        optimizer.zero_grad(set_to_none=True)
        logger.warning("loss_step: update skipped, %s.", reason)
        metrics["skipped"] = 1.0
        return Update(value, metrics, logp, entropy, mask, skipped=reason)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scheduler is not None:
        scheduler.step()
    policy.version += 1
    metrics["skipped"] = 0.0
    return Update(value, metrics, logp, entropy, mask)


class _Totals:
    """What the whole update divides by."""

    def __init__(self, *, rows: int, tokens: int) -> None:
        self.rows, self.tokens = rows, tokens


class _Piece:
    """What one micro-batch leaves behind: its share of the loss, its log-probabilities, sums and extremes."""

    def __init__(self, loss: float, logp: Tensor, entropy: Tensor, row_sums: dict[str, float]) -> None:
        self.loss, self.logp, self.entropy, self.row_sums = loss, logp, entropy, row_sums
        self.entropy_sum = self.gap_sum = self.gap_max = 0.0


def _backward(
    policy: "Policy",
    rollout: Rollout,
    advantages: Tensor,
    mask: Tensor,
    loss: Any,
    totals: _Totals,
    ref_logps: Tensor | None,
    old_logps: Tensor | None,
) -> _Piece:
    """Forward and backward of one micro-batch; the gradient adds up in the parameters."""
    scores = policy.score_tokens(rollout, entropy="grad" if getattr(loss, "needs_entropy_grad", False) else "detached")
    device = scores.logp.device
    sampler_logp = torch.where(mask, rollout.sampler_logp.to(device), 0.0)
    inputs = LossInputs(
        logp=torch.where(mask, scores.logp, 0.0),
        old_logp=torch.where(mask, (scores.logp if old_logps is None else old_logps.to(device)).detach(), 0.0),
        ref_logp=None if ref_logps is None else torch.where(mask, ref_logps.detach().to(device), 0.0),
        sampler_logp=sampler_logp,
        entropy=torch.where(mask, scores.entropy, 0.0),
        mask=mask,
        advantages=advantages,
    )
    share = _share_of_mean(loss(inputs), inputs, totals, loss)
    if not share.requires_grad:
        raise ValueError(
            "loss_step: the loss does not depend on the policy's parameters. Expected at least one trainable parameter "
            "and a loss that uses x.logp; a reference (policy.reference()) is frozen and cannot be trained."
        )
    share.backward()
    with torch.no_grad():
        rows = mask.any(-1)
        measured = loss.row_metrics(inputs) if hasattr(loss, "row_metrics") else {}
        sums = {name: float(torch.where(rows, values.detach(), 0.0).sum()) for name, values in measured.items()}
        piece = _Piece(float(share.detach()), scores.logp.detach(), scores.entropy.detach(), sums)
        gap = (inputs.logp.detach() - sampler_logp).abs()
        piece.entropy_sum = float(inputs.entropy.sum())
        piece.gap_sum, piece.gap_max = float(gap.sum()), float(gap.max()) if gap.numel() else 0.0
    return piece


def _share_of_mean(values: Any, x: LossInputs, totals: _Totals, loss: Any) -> Tensor:
    """This micro-batch's share of the mean over the whole update, from what the loss returned."""
    if isinstance(values, Tensor) and values.shape == x.advantages.shape:
        return torch.where(x.mask.any(-1), values, 0.0).sum() / totals.rows
    if isinstance(values, Tensor) and values.shape == x.mask.shape:
        return torch.where(x.mask, values, 0.0).sum() / totals.tokens
    got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    name = getattr(loss, "__name__", type(loss).__name__)
    raise ValueError(
        f"loss_step: the loss {name!r} must return a tensor of shape (B,) = {tuple(x.advantages.shape)}, one value per "
        f"sequence, or (B,T) = {tuple(x.mask.shape)}, one per token; got {got}. loss_step takes the mean itself."
    )


def _merge(pieces: list[_Piece], totals: _Totals) -> dict[str, float]:
    """Means over the whole update from the sums of its micro-batches, never means of means."""
    metrics = {"loss": sum(piece.loss for piece in pieces)}
    for name in pieces[0].row_sums:
        metrics[name] = sum(piece.row_sums[name] for piece in pieces) / totals.rows
    # The extremes over processes that TRL logs beside the means; with one process they are the means.
    for name, extreme in (
        ("clip_ratio/low_mean", "clip_ratio/low_min"),
        ("clip_ratio/high_mean", "clip_ratio/high_max"),
    ):
        if name in metrics:
            metrics[extreme] = metrics[name]
    metrics["entropy"] = sum(piece.entropy_sum for piece in pieces) / totals.tokens
    metrics["sampler_gap/mean"] = sum(piece.gap_sum for piece in pieces) / totals.tokens
    metrics["sampler_gap/max"] = max(piece.gap_max for piece in pieces)
    return metrics


def _grad_norm(policy: "Policy", max_grad_norm: float | None) -> float:
    """Total norm of the gradient before clipping; clips in place."""
    limit = math.inf if max_grad_norm is None else max_grad_norm
    return float(torch.nn.utils.clip_grad_norm_(policy.trainable_parameters(), limit))


def _part(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


def _nothing_to_learn(totals: _Totals, advantages: Tensor, loss: Any) -> str | None:
    if totals.tokens == 0:
        return "no token counts in the loss: every completion is masked or has no reward"
    if getattr(loss, "zero_advantage_is_no_signal", False) and not bool(advantages.any()):
        return "every advantage is 0: all completions of each prompt got the same reward, or none"
    return None


def _check(
    policy: "Policy",
    rollout: Rollout,
    advantages: Tensor,
    loss: Any,
    ref_logps: Tensor | None,
    old_logps: Tensor | None,
    micro_batch_size: int | None,
    max_grad_norm: float | None,
) -> None:
    if not len(rollout):
        raise ValueError("loss_step: the rollout has no rows.")
    if advantages.shape != (len(rollout),):
        raise ValueError(
            f"loss_step: expected one advantage per completion ({len(rollout)},), got {tuple(advantages.shape)}."
        )
    if bool(advantages.isinf().any()):
        raise FloatingPointError("loss_step: an advantage is infinite; look at the rewards and at the KL.")
    if not callable(loss):
        raise TypeError(
            f"loss_step: loss must be RLOO(), AStarPO() or a function of LossInputs, got {type(loss).__name__}."
        )
    if getattr(loss, "needs_reference", False) and ref_logps is None:
        raise ValueError(
            f"loss_step: {type(loss).__name__} needs ref_logps=rl.compute_logps(reference, rollout); got None."
        )
    tensors: Mapping[str, Tensor | None] = {"ref_logps": ref_logps, "old_logps": old_logps}
    for name, value in tensors.items():
        if value is not None and value.shape != rollout.completion_mask.shape:
            raise ValueError(
                f"loss_step: {name} must have the rollout's (B,T) shape {tuple(rollout.completion_mask.shape)}, got "
                f"{tuple(value.shape)}: was it computed from another rollout?"
            )
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"loss_step: micro_batch_size must be at least 1 or None, got {micro_batch_size}.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"loss_step: max_grad_norm must be > 0 or None, got {max_grad_norm}.")
