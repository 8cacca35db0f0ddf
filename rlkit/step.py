"""`loss_step`: one optimizer step on a rollout, in as many micro-batches as memory asks for.

The divisor is counted once, over the whole update and all processes: rows (or tokens) that count in the loss. Each
micro-batch adds its *sum* over that number, so the gradient does not depend on the split (known_faults B12). Processes
take the same number of passes; one with fewer micro-batches fills up with passes of weight 0. Masked rows are out of
the sum and out of the divisor alike (B13). A batch without a trainable token, or whose gradient is exactly 0, steps
nothing and says so.
"""

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.causal_lm import evaluation_mode
from rlkit.distributed import collectives
from rlkit.losses import RLOO, LossFunction, LossInputs, importance_ratio
from rlkit.step_checks import check_inputs, check_precision, check_tools, check_weights
from rlkit.strategies.updater import Updater, updater_of, verify_gradients
from rlkit.support.timing import phase
from rlkit.token_scorer import EntropyMode
from rlkit.types import Rollout, Update

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

CLIPPED_LOW, CLIPPED_HIGH = "clip_ratio/low_mean", "clip_ratio/high_mean"  # row_metrics of a loss with a clip range
ROWS, TOKENS = "per row: ", "per token: "  # what a sum is divided by; the loss is a share of the mean already


@runtime_checkable
class LRScheduler(Protocol):
    """What loss_step needs of a learning-rate scheduler: torch's and transformers' all have it."""

    def step(self) -> None:
        """Move on by one optimizer step."""
        ...


@phase("loss_step")
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
    router_aux_loss_coef: float = 0.0,
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
            is then exactly 1. For further updates on the same rollout pass `first_update.logp`; without them the step
            would not be corrected, and a warning says so.
        micro_batch_size: rows per forward and backward pass; None takes all at once. The result is the same.
        max_grad_norm: clip the gradient's total norm to this; None does not clip.
        scheduler: stepped once after the optimizer.
        mask_truncated: leave completions that the length limit cut off out of the loss (their rewards still count in
            the baseline of their group). The gradient is then biased: the policy does not learn from being cut off, and
            the other rows weigh more (docs/rloo.md).
        router_aux_loss_coef: weight of the load-balancing loss of a mixture-of-experts model, >= 0. The balance is that
            of one pass, weighted by its rows: unlike everything else it depends on the split into micro-batches.

    Returns:
        An `Update`. If nothing could be learned (`skipped` says why: nothing counts, every advantage of RLOO is 0, or
        the gradient norm is 0, infinite or NaN) the policy, optimizer and scheduler are unchanged.

    Raises:
        ValueError: shapes that do not fit, a missing reference, a bad micro_batch_size or max_grad_norm.
        FloatingPointError: the loss is NaN or infinite: the policy is unchanged and holds no gradient. Or the
            optimizer's step made weights NaN or infinite: the error names them, and the policy must be loaded again.
    """
    loss = RLOO() if loss is None else loss
    check_inputs(policy, rollout, advantages, loss, ref_logps, old_logps, micro_batch_size, max_grad_norm)
    if not router_aux_loss_coef >= 0:
        raise ValueError(f"loss_step: router_aux_loss_coef must be at least 0, got {router_aux_loss_coef}.")
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

    totals = _Totals.count(mask, advantages)
    reason = _nothing_to_learn(totals, loss, balanced=router_aux_loss_coef > 0)
    updater = updater_of(policy, optimizer)
    updater.zero_grad()
    if reason is not None:
        logger.warning("loss_step: update skipped, %s.", reason)
        logp = entropy = torch.zeros(mask.shape, device=device)
        with policy.without_gradient():  # an exchange: also for a process without rows
            if len(rollout):
                logp, entropy, *_ = policy.score_tokens(rollout)
        metrics = {"frac_masked": totals.frac_masked, "skipped": 1.0}
        ratio = _ratio_fields(loss, logp, old_logps, mask, [])
        return Update(math.nan, metrics, logp, entropy, mask, skipped=reason, **ratio)

    size = micro_batch_size or max(1, len(rollout))
    passes = int(collectives.maxima({"passes": float(math.ceil(len(rollout) / size))})["passes"])
    pieces = []
    # Around the backward passes too: gradient checkpointing runs layers again there, and dropout must still be off.
    with evaluation_mode(policy.model):
        for number in range(passes):
            part = slice(number * size, (number + 1) * size)
            with updater.micro_batch(last=number == passes - 1):
                if part.start >= len(rollout):  # other processes have more to do
                    updater.backward(_loss_of_weight_zero(policy, rollout))
                    continue
                pieces.append(
                    _backward(
                        policy,
                        updater,
                        rollout.select(part),
                        advantages[part],
                        mask[part],
                        loss,
                        totals,
                        _part(ref_logps, part),
                        _part(old_logps, part),
                        router_aux_loss_coef,
                    )
                )
    metrics = _merge(pieces, totals)
    value = metrics["loss"]
    if not math.isfinite(value):
        updater.zero_grad()
        raise FloatingPointError(
            f"loss_step: the loss is {value}; the policy is unchanged. Look for NaN in advantages and ref_logps, for "
            "exploding log-ratios (clip_ratio, kl) and for a learning rate that is too high."
        )
    if policy.strategy == "ddp" and not policy.gradients_checked:  # not by the version: a resumed run starts above 0
        verify_gradients(policy.trainable_parameters(), collectives.gather)
        policy.gradients_checked = True
    grad_norm = updater.clip(math.inf if max_grad_norm is None else max_grad_norm)
    metrics["grad_norm"] = grad_norm
    metrics["learning_rate"] = float(optimizer.param_groups[0]["lr"])
    metrics["frac_masked"] = totals.frac_masked
    blank = torch.zeros(0, mask.shape[1], device=device)
    logp = torch.cat([p.logp for p in pieces]) if pieces else blank
    entropy = torch.cat([p.entropy for p in pieces]) if pieces else blank
    ratio = _ratio_fields(loss, logp, old_logps, mask, [p.clipped for p in pieces])
    if not 0 < grad_norm < math.inf:
        # Where the gradient is 0, weight decay, momentum and the schedule would move weights that nothing speaks about.
        zero = "the gradient is 0 everywhere, as with advantages that are all 0 or where the loss clips every row"
        reason = zero if grad_norm == 0 else f"the gradient norm is {grad_norm}"
        updater.zero_grad()
        logger.warning("loss_step: update skipped, %s.", reason)
        metrics["skipped"] = 1.0
        return Update(math.nan, metrics, logp, entropy, mask, skipped=reason, **ratio)
    if policy.not_finite is None:
        policy.not_finite = check_precision(policy, updater)
    updater.step()
    updater.zero_grad()
    if scheduler is not None:
        scheduler.step()
    policy.version += 1
    check_weights(policy, updater)
    metrics["skipped"] = 0.0
    return Update(value, metrics, logp, entropy, mask, **ratio)


class _Totals:
    """What the whole update divides by, over all processes."""

    def __init__(self, *, rows: int, tokens: int, all_rows: int, with_signal: int) -> None:
        self.rows, self.tokens, self.with_signal = rows, tokens, with_signal
        self.frac_masked = 1 - rows / max(1, all_rows)

    @classmethod
    def count(cls, mask: Tensor, advantages: Tensor) -> "_Totals":
        local = {
            "rows": float(mask.any(-1).sum()),
            "tokens": float(mask.sum()),
            "all_rows": float(len(mask)),
            "with_signal": float((advantages != 0).sum()),
        }
        return cls(**{name: int(value) for name, value in collectives.sums(local).items()})


class _Piece:
    """What one micro-batch leaves behind: its share of the loss, its log-probabilities, and sums and extremes."""

    def __init__(
        self,
        loss: float,
        logp: Tensor,
        entropy: Tensor,
        clipped: Tensor | None,
        sums: dict[str, float],
        top: dict[str, float],
    ) -> None:
        self.loss, self.logp, self.entropy, self.clipped, self.sums, self.top = loss, logp, entropy, clipped, sums, top


def _backward(
    policy: "Policy",
    updater: Updater,
    rollout: Rollout,
    advantages: Tensor,
    mask: Tensor,
    loss: Any,
    totals: _Totals,
    ref_logps: Tensor | None,
    old_logps: Tensor | None,
    balance: float,
) -> _Piece:
    """Forward and backward of one micro-batch; the gradient adds up in the parameters."""
    entropy: EntropyMode = "grad" if getattr(loss, "needs_entropy_grad", False) else "detached"
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
        advantages=advantages,
    )
    share = _share_of_mean(loss(inputs), inputs, totals, loss)
    if not share.requires_grad:
        raise ValueError(
            "loss_step: the loss does not depend on the policy's parameters. Expected a loss that uses x.logp with its "
            "gradient."
        )
    aux = 0.0
    if scores.balance_loss is not None:
        weighted = scores.balance_loss * (float(mask.any(-1).sum()) / totals.rows)
        aux, share = float(weighted.detach()), share + balance * weighted
    # Wrappers for several processes average the gradient over them; the mean is over the rows of all.
    updater.backward(share * collectives.size())
    with torch.no_grad():
        measured = loss.row_metrics(inputs) if hasattr(loss, "row_metrics") else {}
        sums, top = _measure(measured, mask.any(-1))
        gap = (inputs.old_logp - sampler_logp).abs()  # of the policy that sampled: later updates move on from it
        sums |= {"loss": float(share.detach()), TOKENS + "entropy": float(inputs.entropy.sum())}
        sums[TOKENS + "sampler_gap/mean"] = float(gap.sum())
        if balance > 0:
            sums["aux_loss"] = aux
        top["sampler_gap/max"] = float(gap.max()) if gap.numel() else 0.0
        clipped = None
        if {CLIPPED_LOW, CLIPPED_HIGH} <= set(measured):
            clipped = (measured[CLIPPED_HIGH] - measured[CLIPPED_LOW]).to(torch.int8)
    return _Piece(sums["loss"], scores.logp.detach(), scores.entropy.detach(), clipped, sums, top)


def _ratio_fields(
    loss: Any, logp: Tensor, old_logps: Tensor | None, mask: Tensor, clipped: list[Tensor | None]
) -> dict[str, Any]:
    """What an Update says of its ratio, row by row; the loss itself looked at one micro-batch at a time."""
    old = logp if old_logps is None else old_logps.detach().to(logp)
    known = [part for part in clipped if part is not None]
    epsilon, high = getattr(loss, "epsilon", None), getattr(loss, "epsilon_high", None)
    return {
        "old_logp": old,
        "ratio": importance_ratio(logp, old, mask),
        "clipped": torch.cat(known) if known and len(known) == len(clipped) else None,
        "epsilon": epsilon,
        "epsilon_high": epsilon if high is None else high,
    }


def _measure(measured: Mapping[str, Tensor], rows: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Sums over the rows that count, and maxima; for a name that ends in _min the maximum of the negated values."""
    sums, top = {}, {}
    for name, values in measured.items():
        values = values.detach()[rows]
        if name.endswith(("_min", "_max")):
            values = -values if name.endswith("_min") else values
            top[name] = float(values.max()) if len(values) else -math.inf
        else:
            sums[ROWS + name] = float(values.sum())
    return sums, top


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


def _loss_of_weight_zero(policy: "Policy", rollout: Rollout) -> Tensor:
    """For a pass that adds nothing, so that every process takes part in every exchange."""
    if len(rollout):
        row = rollout.select([0])
    else:
        end = torch.tensor([[policy.eos_ids[0]]])
        yes, zero = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
        row = Rollout(end, yes, end, yes, torch.zeros(1, 1), zero, zero, yes[0], ("",), ("",))
    return policy.score_tokens(row).logp.sum() * 0.0


def _merge(pieces: list[_Piece], totals: _Totals) -> dict[str, float]:
    """Means over the whole update from the sums of its micro-batches and processes, never means of means."""
    names = collectives.gather(([*pieces[0].sums], [*pieces[0].top]) if pieces else ([], []))
    sum_names = list(dict.fromkeys(name for sums, _ in names for name in sums))
    top_names = list(dict.fromkeys(name for _, top in names for name in top))
    sums = collectives.sums({name: math.fsum(piece.sums[name] for piece in pieces) for name in sum_names})
    tops = collectives.maxima(
        {name: max((piece.top[name] for piece in pieces), default=-math.inf) for name in top_names}
    )
    divisor = {ROWS: totals.rows, TOKENS: totals.tokens}
    metrics = {}
    for name, value in sums.items():
        kind = next((kind for kind in divisor if name.startswith(kind)), "")
        metrics[name.removeprefix(kind)] = value / divisor.get(kind, 1)
    return metrics | {name: -value if name.endswith("_min") else value for name, value in tops.items()}


def _part(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


def _nothing_to_learn(totals: _Totals, loss: Any, *, balanced: bool) -> str | None:
    """Why no gradient can come out; where the experts' load is balanced, its loss has one of its own."""
    if totals.tokens == 0:
        return "no token counts in the loss: every completion is masked or has no reward"
    if getattr(loss, "zero_advantage_is_no_signal", False) and totals.with_signal == 0 and not balanced:
        return "every advantage is 0: all completions of each prompt got the same reward, or none"
    return None
