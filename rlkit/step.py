"""`loss_step`: one optimizer step on a rollout, in micro-batches that fit in memory.

The divisor is counted once, over the whole update and all processes: the rows (or tokens) that count in the loss. Each
micro-batch adds its *sum* over that number, so the gradient does not depend on the split; a mean of means would weigh
the tokens of short micro-batches more. A batch without a token in the loss, or whose gradient is exactly 0, does not
step the optimizer, and the `Update` says why.
"""

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.causal_lm import evaluation_mode
from rlkit.distributed import collectives
from rlkit.losses import RLOO, Loss, LossFunction, LossInputs, as_loss, importance_ratio
from rlkit.step_checks import check_inputs, check_precision, check_tools, check_weights
from rlkit.strategies.updater import Updater, updater_of, verify_gradients
from rlkit.support.timing import phase
from rlkit.token_scorer import EntropyMode
from rlkit.types import Rollout, Update
from rlkit.update_means import Piece, Totals, measure, merge, share_of_mean

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

CLIPPED_LOW, CLIPPED_HIGH = "clip_ratio/low_mean", "clip_ratio/high_mean"  # row_metrics of a loss with a clip range


@runtime_checkable
class LRScheduler(Protocol):
    """A learning-rate scheduler of torch or transformers."""

    def step(self) -> None:
        """Move on by one optimizer step."""


@phase("loss_step")
def loss_step(
    policy: "Policy",
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    advantages: Float[Tensor, " B"],
    *,
    loss: Loss | LossFunction | None = None,
    ref_logps: Float[Tensor, "B T"] | None = None,
    old_logps: Float[Tensor, "B T"] | None = None,
    micro_batch_size: int | None = None,
    max_grad_norm: float | None = 1.0,
    scheduler: LRScheduler | None = None,
    mask_truncated: bool = False,
    router_aux_loss_coef: float = 0.0,
) -> Update:
    """Take one optimizer step on the policy.

    Args:
        policy: the policy that `optimizer` was made for.
        optimizer: any torch optimizer; gradients from before are dropped.
        rollout: B completions.
        advantages: (B,) advantages; a row with NaN is left out of the loss and its divisor.
        loss: `RLOO()` (the default), `AStarPO()`, a `Loss` of your own, or a function of a `LossInputs` that returns
            (B,) or (B,T) values. The mean is taken here.
        ref_logps: (B,T) log-probabilities of the reference, for losses that need them.
        old_logps: (B,T) log-probabilities before the first update on this rollout; None on the first update. For
            further updates pass `first_update.logp`: without it the ratio is taken as 1, and a warning says so.
        micro_batch_size: rows per forward and backward pass; None takes all at once. The result is the same.
        max_grad_norm: clip the gradient's total norm to this; None does not clip.
        scheduler: stepped once after the optimizer.
        mask_truncated: leave completions that the length limit cut off out of the loss (not out of the baseline). This
            biases the gradient, see docs/rloo.md.
        router_aux_loss_coef: weight of the load-balancing loss of a mixture-of-experts model, >= 0. It is averaged over
            the passes by their rows, so unlike everything else it depends on the split into micro-batches.

    Returns:
        An `Update`. If `skipped` names a reason (nothing counts, every advantage of RLOO is 0, or the gradient norm is
        0, infinite or NaN) the policy, optimizer and scheduler are unchanged.

    Raises:
        ValueError: shapes that do not fit, a missing reference, a number out of its range.
        TypeError: a loss, optimizer or scheduler that cannot be used.
        FloatingPointError: the loss is NaN or infinite (the policy is unchanged), or the optimizer's step made weights
            NaN or infinite (the error names them; the policy must be loaded again).
    """
    loss = as_loss(RLOO() if loss is None else loss)
    check_inputs(rollout, advantages, loss, ref_logps, old_logps, micro_batch_size, max_grad_norm, router_aux_loss_coef)
    check_tools(policy, optimizer, scheduler)
    if old_logps is None and rollout.policy_version != policy.version:
        logger.warning(
            "loss_step: the policy took %d step(s) since it drew this rollout, and old_logps is None, so the ratio is "
            "taken as 1. Pass old_logps=first_update.logp, or sample again.",
            policy.version - rollout.policy_version,
        )
    device = policy.device
    advantages = advantages.detach().to(device, torch.promote_types(advantages.dtype, torch.float32))
    mask = rollout.completion_mask.to(device) & ~advantages.isnan()[:, None]
    if mask_truncated:
        mask = mask & ~rollout.truncated.to(device)[:, None]
    advantages = torch.where(mask.any(-1), advantages, 0.0)
    batch = _Batch(rollout, advantages, mask, ref_logps, old_logps)
    totals = Totals.count(mask, advantages)
    metrics = {"frac_masked": 1 - totals.rows / max(1, totals.all_rows)}
    updater = updater_of(policy, optimizer)
    updater.zero_grad()
    if (reason := _nothing_to_learn(totals, loss, balanced=router_aux_loss_coef > 0)) is not None:
        return _update(loss, batch, _scores_only(policy, rollout), metrics, reason)

    pieces = _backward_in_passes(policy, updater, batch, loss, totals, micro_batch_size, router_aux_loss_coef)
    metrics |= merge(pieces)
    if not math.isfinite(metrics["loss"]):
        updater.zero_grad()
        raise FloatingPointError(
            f"loss_step: the loss is {metrics['loss']}; the policy is unchanged. Look for NaN in advantages, "
            "ref_logps and the weights as loaded, for exploding log-ratios (clip_ratio, kl) and for a "
            "learning rate that is too high."
        )
    if policy.strategy == "ddp" and not policy.gradients_checked:  # not by the version: a resumed run starts above 0
        verify_gradients(policy.trainable_parameters(), collectives.gather)
        policy.gradients_checked = True
    grad_norm = updater.clip(math.inf if max_grad_norm is None else max_grad_norm)
    metrics |= {"grad_norm": grad_norm, "learning_rate": float(optimizer.param_groups[0]["lr"])}
    if not 0 < grad_norm < math.inf:
        # With a gradient of 0, weight decay, momentum and the schedule would still move the weights.
        reason = f"the gradient norm is {grad_norm}"
        if grad_norm == 0:
            reason = "the gradient is 0 everywhere, as with advantages that are all 0 or where the loss clips every row"
        updater.zero_grad()
        return _update(loss, batch, pieces, metrics, reason)
    if policy.not_finite is None:
        policy.not_finite = check_precision(policy, updater)
    updater.step()
    updater.zero_grad()
    if scheduler is not None:
        scheduler.step()
    policy.version += 1
    check_weights(policy, updater)
    return _update(loss, batch, pieces, metrics)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Rows of a step; `mask` is that of the loss, `advantages` are 0 in rows without a token in it."""

    rollout: Rollout
    advantages: Tensor
    mask: Tensor
    ref_logps: Tensor | None
    old_logps: Tensor | None

    def select(self, rows: slice) -> "_Batch":
        ref, old = (None if logps is None else logps[rows] for logps in (self.ref_logps, self.old_logps))
        return _Batch(self.rollout.select(rows), self.advantages[rows], self.mask[rows], ref, old)


def _nothing_to_learn(totals: Totals, loss: Loss, *, balanced: bool) -> str | None:
    """Why no gradient can come out; the loss of an MoE's balance has a gradient without any advantage."""
    if totals.tokens == 0:
        return "no token counts in the loss: every completion is masked or has no reward"
    if loss.zero_advantage_is_no_signal and totals.with_signal == 0 and not balanced:
        return "every advantage is 0: all completions of each prompt got the same reward, or none"
    return None


def _scores_only(policy: "Policy", rollout: Rollout) -> list[Piece]:
    with policy.without_gradient():  # gathers sharded weights, so processes without rows enter it too
        if not len(rollout):
            return []
        scores = policy.score_tokens(rollout)
        return [Piece(scores.logp, scores.entropy)]


def _backward_in_passes(
    policy: "Policy",
    updater: Updater,
    batch: _Batch,
    loss: Loss,
    totals: Totals,
    micro_batch_size: int | None,
    balance: float,
) -> list[Piece]:
    """Add up the gradient of the whole update, micro-batch by micro-batch, in the same number of passes everywhere."""
    rows = len(batch.rollout)
    size = micro_batch_size or max(1, rows)
    passes = int(collectives.maxima({"passes": float(math.ceil(rows / size))})["passes"])
    pieces = []
    # Around the backward passes too: gradient checkpointing runs layers again there, and dropout must still be off.
    with evaluation_mode(policy.model):
        for number in range(passes):
            part = slice(number * size, (number + 1) * size)
            with updater.micro_batch(last=number == passes - 1):
                if part.start < rows:
                    pieces.append(_backward(policy, updater, batch.select(part), loss, totals, balance))
                else:  # other processes have more micro-batches
                    updater.backward(_loss_of_weight_zero(policy, batch.rollout))
    return pieces


def _backward(policy: "Policy", updater: Updater, batch: _Batch, loss: Loss, totals: Totals, balance: float) -> Piece:
    """Forward and backward pass of one micro-batch; its gradient is added to the parameters'."""
    rollout, mask, ref_logps, old_logps = batch.rollout, batch.mask, batch.ref_logps, batch.old_logps
    entropy: EntropyMode = "grad" if loss.needs_entropy_grad else "detached"
    scores = policy.score_tokens(rollout, entropy=entropy, balance=balance > 0)
    device = scores.logp.device
    sampler_logp = torch.where(mask, rollout.sampler_logp.to(device), 0.0)
    inputs = LossInputs(
        logp=torch.where(mask, scores.logp, 0.0),
        old_logp=torch.where(mask, (scores.logp if old_logps is None else old_logps.to(device)).detach(), 0.0),
        ref_logp=None if ref_logps is None else torch.where(mask, ref_logps.detach().to(device), 0.0),
        sampler_logp=sampler_logp,
        entropy=torch.where(mask, scores.entropy, 0.0),
        mask=mask,
        advantages=batch.advantages,
    )
    share = share_of_mean(loss(inputs), inputs, totals, loss)
    if not share.requires_grad:
        raise ValueError(
            "loss_step: the loss does not depend on the policy's parameters. Expected a loss that uses x.logp with its "
            "gradient."
        )
    weighted = None
    if scores.balance_loss is not None:
        weighted = scores.balance_loss * (float(mask.any(-1).sum()) / totals.rows)
        share = share + balance * weighted
    # Wrappers for several processes average the gradient over them; the mean is over the rows of all.
    updater.backward(share * collectives.size())
    with torch.no_grad():
        measured = loss.row_metrics(inputs)
        shares, top = measure(measured, mask.any(-1), totals)
        gap = (inputs.old_logp - sampler_logp).abs()  # of the policy that sampled: later updates move on from it
        shares |= {"loss": float(share.detach()), "entropy": float(inputs.entropy.sum()) / totals.tokens}
        shares["sampler_gap/mean"] = float(gap.sum()) / totals.tokens
        top["sampler_gap/max"] = float(gap.max()) if gap.numel() else 0.0
        if weighted is not None:
            shares["aux_loss"] = float(weighted)
        clipped = None
        if {CLIPPED_LOW, CLIPPED_HIGH} <= set(measured):
            clipped = (measured[CLIPPED_HIGH] - measured[CLIPPED_LOW]).to(torch.int8)
    return Piece(scores.logp.detach(), scores.entropy.detach(), clipped, shares, top)


def _loss_of_weight_zero(policy: "Policy", rollout: Rollout) -> Tensor:
    """The loss of a pass that adds nothing, so that every process takes part in every exchange."""
    if len(rollout):
        row = rollout.select([0])
    else:
        end = torch.tensor([[policy.eos_ids[0]]])
        yes, zero = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
        row = Rollout(end, yes, end, yes, torch.zeros(1, 1), zero, zero, yes[0], ("",), ("",))
    return policy.score_tokens(row).logp.sum() * 0.0


def _update(
    loss: Loss, batch: _Batch, pieces: list[Piece], metrics: dict[str, float], skipped: str | None = None
) -> Update:
    if skipped is not None:
        logger.warning("loss_step: update skipped, %s.", skipped)
    blank = torch.zeros(0, batch.mask.shape[1], device=batch.mask.device)  # a process without rows
    logp = torch.cat([blank, *(piece.logp for piece in pieces)])
    old = logp if batch.old_logps is None else batch.old_logps.detach().to(logp)
    clipped = [piece.clipped for piece in pieces if piece.clipped is not None]
    return Update(
        loss=metrics["loss"] if skipped is None else math.nan,
        metrics=metrics | {"skipped": float(skipped is not None)},
        logp=logp,
        entropy=torch.cat([blank, *(piece.entropy for piece in pieces)]),
        loss_mask=batch.mask,
        skipped=skipped,
        old_logp=old,
        ratio=importance_ratio(logp, old, batch.mask),
        clipped=torch.cat(clipped) if clipped else None,
        epsilon=loss.epsilon,
        epsilon_high=loss.epsilon if loss.epsilon_high is None else loss.epsilon_high,
    )
