"""Checks of the steps: that records belong together, the inputs of `loss_step`, and the weights after it."""

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.losses import Loss, loss_name
from rlkit.strategies.updater import Updater
from rlkit.types import Rollout, Scores, Update

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)
MASTER_WEIGHTS = (
    "Keep float32 weights and compute in bfloat16: rl.load_policy(..., dtype=torch.float32, autocast=torch.bfloat16)"
    "; of a model object, pass model.float()"
)


def check_pairing(
    where: str,
    rollout: Rollout | None,
    scores: Scores | None = None,
    advantages: Tensor | None = None,
    update: Update | None = None,
    **logps: Tensor | None,
) -> None:
    """Refuse records of different rollouts. An update may be of some rows of the rollout: a mini-batch."""
    if rollout is not None and scores is not None and rollout.group_id.tolist() != scores.group_id.tolist():
        raise ValueError(
            f"{where}: the scores ({len(scores)} rows) are not those of the rollout ({len(rollout)} rows): their group "
            "ids differ. Pass what rl.score(rollout, ...) returned."
        )
    rows = next((part for part in (rollout, scores, advantages) if part is not None), None)
    if rows is not None and advantages is not None and advantages.shape != (len(rows),):
        raise ValueError(
            f"{where}: expected one advantage per completion ({len(rows)},), got {tuple(advantages.shape)}: were they "
            "computed from other scores?"
        )
    if rollout is None:
        if update is not None and rows is not None and len(update.loss_mask) > len(rows):
            raise ValueError(
                f"{where}: the update is of {len(update.loss_mask)} rows, the scores or advantages are of {len(rows)}: "
                "they are of different rollouts."
            )
        if alone := [name for name, values in logps.items() if values is not None]:
            raise ValueError(f"{where}: {alone[0]} needs the rollout that they belong to.")
        return
    mask = rollout.completion_mask
    for name, values in logps.items():
        if values is not None and values.shape != mask.shape:
            raise ValueError(
                f"{where}: {name} must have the rollout's (B,T) shape {tuple(mask.shape)}, got {tuple(values.shape)}: "
                "was it computed from another rollout?"
            )
    if update is None:
        return
    loss_mask = update.loss_mask.to(mask.device)
    fits = loss_mask.shape[1] == mask.shape[1] and len(loss_mask) <= len(mask)
    if fits and len(loss_mask) < len(mask):  # which rows these are is not recorded: compare the longest ones
        longest = mask.sum(-1).sort(descending=True).values[: len(loss_mask)]
        fits = bool((loss_mask.sum(-1).sort(descending=True).values <= longest).all())
    elif fits:
        fits = not bool((loss_mask & ~mask).any())
    if not fits:
        raise ValueError(
            f"{where}: the update, with loss tokens of shape {tuple(loss_mask.shape)}, is of another rollout than "
            f"the one given, {tuple(mask.shape)}. Pass what loss_step returned for this rollout, or for a part of it."
        )


def check_tools(policy: "Policy", optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Refuse an optimizer or scheduler of another policy, or whose step() takes arguments."""
    own = {id(parameter) for parameter in policy.trainable_parameters()}
    given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if not own:
        raise ValueError(
            f"loss_step: {policy.name!r} has no trainable parameter; a reference (policy.reference()) is frozen and "
            "cannot be trained."
        )
    zero3 = policy.local_scorer.zero3  # its shards have replaced the optimizer's parameters
    if optimizer is not zero3.optimizer if zero3 else own.isdisjoint(given):
        raise ValueError(
            "loss_step: the optimizer holds no parameter of this policy, so it would train another one: was the policy "
            "loaded again after world.prepare? Write: policy, optimizer = world.prepare(policy, lambda params: ...)."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "loss_step: the scheduler was made for another optimizer, whose learning rate it would change. Make it "
            "from the optimizer that world.prepare returned."
        )
    _check_step("optimizer", optimizer)
    if scheduler is not None:
        _check_step("scheduler", scheduler)


def _check_step(name: str, tool: Any) -> None:
    try:
        inspect.signature(type(tool).step).bind(tool)  # of the class: a scheduler wraps its optimizer's own
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"loss_step: the {name} {type(tool).__name__} needs a step() without arguments ({error}). Closures (LBFGS) "
            "and metrics (ReduceLROnPlateau) are not supported; step such a scheduler yourself."
        ) from error


def check_inputs(
    rollout: Rollout,
    advantages: Tensor,
    loss: Loss,
    ref_logps: Tensor | None,
    old_logps: Tensor | None,
    micro_batch_size: int | None,
    max_grad_norm: float | None,
    router_aux_loss_coef: float,
) -> None:
    """Check shapes, types and ranges of the arguments of loss_step."""
    if not isinstance(advantages, Tensor):
        raise TypeError(
            f"loss_step: advantages must be a (B,) tensor, got {type(advantages).__name__}; call "
            "rl.compute_loo_advantage(scores) or rl.compute_optimal_advantage(scores, v_star)."
        )
    check_pairing("loss_step", rollout, advantages=advantages, ref_logps=ref_logps, old_logps=old_logps)
    if bool(advantages.isinf().any()):
        raise FloatingPointError("loss_step: an advantage is infinite; check the rewards and the KL.")
    if loss.needs_reference and ref_logps is None:
        raise ValueError(
            f"loss_step: {loss_name(loss)} needs ref_logps=rl.compute_logps(reference, rollout); got None."
        )
    if micro_batch_size is not None and (not isinstance(micro_batch_size, int) or micro_batch_size < 1):
        raise ValueError(f"loss_step: micro_batch_size must be at least 1 or None, got {micro_batch_size!r}.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"loss_step: max_grad_norm must be > 0 or None, got {max_grad_norm}.")
    if not router_aux_loss_coef >= 0:
        raise ValueError(f"loss_step: router_aux_loss_coef must be at least 0, got {router_aux_loss_coef}.")


def check_precision(policy: "Policy", updater: Updater) -> dict[str, int]:
    """Warn of 16-bit weights before a policy's first update; returns the number of non-finite values by parameter.

    An update below 2^-9 of a bfloat16 weight (2^-12 in float16) is rounded away. In float16 AdamW's eps of 1e-8 is
    also 0, so 0 / 0 makes weights NaN.
    """
    weights = updater.weights()
    short = [part for part in weights.values() if part.is_floating_point() and part.dtype.itemsize <= 2]
    if short:
        logger.warning(
            "loss_step: the optimizer trains %d parameters of %r in %s, where small updates round to nothing%s. %s. "
            "With float32 copies inside the optimizer, or stochastic rounding, this does not matter. Said once.",
            len(short),
            policy.name,
            str(short[0].dtype).removeprefix("torch."),
            " and AdamW's eps is 0" if short[0].dtype == torch.float16 else "",
            MASTER_WEIGHTS,
        )
    return _not_finite(weights)


def check_weights(policy: "Policy", updater: Updater) -> None:
    """Raise, on every process, if the optimizer's step made a weight NaN or infinite. Costs 3 % of AdamW's own time."""
    known = policy.not_finite or {}
    broken = {name: n for name, n in _not_finite(updater.weights()).items() if n > known.get(name, 0)}
    if collectives.maxima({"broken": float(len(broken))})["broken"]:
        _raise_broken(policy, broken)


def _raise_broken(policy: "Policy", broken: dict[str, int]) -> None:
    everywhere = [item for part in collectives.gather(list(broken.items())) for item in part]
    (name, count), names = everywhere[0], {name for name, _ in everywhere}
    dtype = next(p.dtype for p in policy.trainable_parameters())
    advice = "Check the optimizer's eps, weight_decay and learning rate."
    if dtype.itemsize <= 2:
        advice = f"The weights are {str(dtype).removeprefix('torch.')}. {MASTER_WEIGHTS}."
    raise FloatingPointError(
        f"loss_step: the optimizer's step made weights NaN or infinite in {len(names)} parameter(s), the first is "
        f"{name!r} with {count} such values. The gradient was finite. Load the policy again, or resume from a "
        f"checkpoint. {advice}"
    )


def _not_finite(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of NaN or infinite values by parameter, where there are any."""
    if bool(torch.nn.utils.get_total_norm(list(weights.values())).isfinite()):  # 40 times faster than counting
        return {}
    counts = {name: int((~part.isfinite()).sum()) for name, part in weights.items()}
    return {name: count for name, count in counts.items() if count}
