"""Advantages, as pure functions of tensors: leave-one-out for RLOO, reward minus V* for A*-PO.

Sources: Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740) for RLOO; Brantley et al. 2025, "Accelerating RL for
LLM Reasoning with Optimal Advantage Regression" (arXiv 2505.20686) for A*-PO; TRL's trainers for names and order.

Two rules hold throughout. *No reward* is NaN: such a row is out of every baseline and every mean. *Groups are labels*,
never positions: rows may come in any order, groups may have any size. Left out: division by a group's standard
deviation, which explodes when one sample of a binary group differs.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Real, Shaped
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.types import Scores

GroupIds = Shaped[Tensor, " B"] | Sequence[object]


def group_index(group_id: GroupIds) -> Int[Tensor, " B"]:
    """Dense indices 0..n-1 of (B,) group labels: an integer tensor, or a sequence of hashable labels.

    Example:
        >>> group_index(["b", "a", "b", -1]).tolist()
        [0, 1, 0, 2]
    """
    if isinstance(group_id, Tensor):
        if group_id.is_floating_point():
            raise TypeError(
                f"group_index: group ids must be integers or strings, got a {group_id.dtype} tensor; "
                "floating-point labels that differ in the last bit would split a group."
            )
        return torch.unique(group_id, return_inverse=True)[1].reshape(group_id.shape)
    seen: dict[object, int] = {}
    return torch.tensor([seen.setdefault(label, len(seen)) for label in group_id], dtype=torch.int64)


def compute_loo_advantage(
    rewards: Real[Tensor, " B"] | Sequence[float | None] | Scores,
    *,
    group_id: GroupIds | None = None,
    kl: Float[Tensor, " B"] | None = None,
    beta: float = 0.0,
    normalize: bool = False,
) -> Float[Tensor, " B"]:
    r"""Leave-one-out advantage: each row's reward minus the mean reward of the *other* rows of its group.

    .. math:: r_i = R_i - \beta\,\mathrm{KL}_i, \qquad A_i = r_i - \frac{1}{n_g - 1}\sum_{j \in g,\, j \ne i} r_j

    where g runs over the scorable rows only. The KL is part of the reward *before* the baseline is taken, so the
    baseline contains the KL of the other rows as well (TRL's order). A row without a reward (NaN) gets 0, and so does
    every row of a group with fewer than two scorable rows. The result is never NaN.

    Args:
        rewards: (B,) rewards, NaN (in a list also None) for a row without one; or the `Scores` that hold them.
        group_id: (B,) group labels; taken from the `Scores` when they are given.
        kl: (B,) KL of each sequence in nats, see `compute_kl`. May be negative: it is an estimate.
        beta: weight of the KL in the reward, >= 0.
        normalize: divide by the standard deviation (plus 1e-4) of the advantages of all scorable rows of the batch,
            those of other processes included.

    Returns:
        (B,) float32 (float64 for float64 rewards), without gradient; exactly 0 in a group whose (penalised) rewards are
        equal. Computed in float64, so that a large common offset costs no digits.

    Raises:
        ValueError: shapes differ, `group_id` is missing, beta is negative, beta without kl, NaN in the KL of a scorable
            row, a difference that overflows, or every group has a single row (RLOO needs `num_generations` >= 2).

    Source: Ahmadian et al. 2024, eq. 7; `RLOOTrainer._generate_and_score_completions`.

    Example:
        >>> compute_loo_advantage(torch.tensor([1.0, 0.0]), group_id=[0, 0], kl=torch.tensor([2.0, 0.0]), beta=0.1)
        tensor([ 0.8000, -0.8000])
    """
    where = "compute_loo_advantage"
    if isinstance(rewards, Scores):
        group_id = rewards.group_id if group_id is None else group_id
        rewards = rewards.reward
    dtype = _result_dtype(rewards)
    rewards = as_rewards(rewards, torch.float64)
    if group_id is None:
        raise ValueError(f"{where}: group_id is missing: give one label per reward, or pass the Scores of rl.score.")
    if len(group_id) != len(rewards):
        raise ValueError(f"{where}: expected one group id per reward ({len(rewards)}), got {len(group_id)}.")
    total = penalised_reward(rewards, kl=kl, beta=beta, where=where)

    group = group_index(group_id).to(total.device)
    rows_in_group = torch.bincount(group)
    if len(total) and int(rows_in_group.max()) < 2:
        raise ValueError(
            f"{where}: every group has a single completion, so there is no other one to compare with. "
            "Expected at least 2 per prompt: call rl.sample(..., num_generations=2 or more)."
        )
    if len(total) and int(rows_in_group.min()) < 2:
        lonely = int((rows_in_group < 2).sum())
        warnings.warn(f"{where}: {lonely} group(s) with a single completion get advantage 0.", stacklevel=2)

    scorable = ~total.isnan()
    groups = total.new_zeros(len(rows_in_group))
    # Subtracting the group's lowest reward changes no difference and makes equal rewards exactly 0.
    lowest = groups.scatter_reduce(0, group[scorable], total[scorable], "amin", include_self=False)
    value = torch.where(scorable, total - lowest[group], 0.0)
    count = groups.index_add(0, group, scorable.to(total.dtype))[group]
    group_sum = groups.index_add(0, group, value)[group]
    advantage = value - (group_sum - value) / (count - 1).clamp(min=1)
    if normalize:
        # Without groups of one, as in TRL. The mean is 0; subtracting it would add its rounding error.
        known = collectives.gather_rows({"known": advantage[scorable & (count > 1)]})["known"].to(advantage)
        advantage = advantage / ((known.std() if len(known) > 1 else 0.0) + 1e-4)
    result = torch.where(scorable, advantage, 0.0).to(dtype)
    if not bool(result.isfinite().all()):
        raise ValueError(
            f"{where}: the rewards of a group are further apart than {dtype} can hold. Bound them, as "
            "rl.score(..., clip_range=(-10, 10)) does."
        )
    return result


def as_rewards(rewards: Tensor | Sequence[float | None], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Rewards as a tensor; None in a list becomes NaN.

    Example:
        >>> as_rewards([1, None], torch.float32)
        tensor([1., nan])
    """
    if isinstance(rewards, Tensor):
        return rewards.to(dtype)
    return torch.tensor([math.nan if value is None else float(value) for value in rewards], dtype=dtype)


def _result_dtype(rewards: Tensor | Sequence[float | None]) -> torch.dtype:
    """float64 for a float64 tensor, else float32."""
    if isinstance(rewards, Tensor) and rewards.is_floating_point():
        return torch.promote_types(rewards.dtype, torch.float32)
    return torch.float32


def penalised_reward(
    rewards: Float[Tensor, " B"], *, kl: Float[Tensor, " B"] | None, beta: float, where: str = "penalised_reward"
) -> Float[Tensor, " B"]:
    """Reward minus beta times KL, in float32 or better and without gradient; rows without a reward stay NaN.

    Example:
        >>> penalised_reward(torch.tensor([1.0, float("nan")]), kl=torch.tensor([0.5, 0.5]), beta=0.2)
        tensor([0.9000,    nan])
    """
    if beta < 0 or not math.isfinite(beta):
        raise ValueError(f"{where}: beta must be a finite number >= 0, got {beta}.")
    total = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    _refuse_infinite(total, "reward", where)
    if beta == 0:
        return total
    if kl is None:
        raise ValueError(f"{where}: beta={beta} needs kl=compute_kl(rollout, ref_logps); got kl=None.")
    if kl.shape != rewards.shape:
        raise ValueError(
            f"{where}: kl must have the shape of the rewards {tuple(rewards.shape)}, got {tuple(kl.shape)}."
        )
    kl = kl.detach().to(total)
    _refuse_infinite(kl, "KL", where)
    bad = kl.isnan() & ~total.isnan()
    if bool(bad.any()):
        raise ValueError(f"{where}: the KL of row(s) {bad.nonzero().flatten()[:5].tolist()} is NaN.")
    return total - beta * kl


def _refuse_infinite(values: Tensor, what: str, where: str) -> None:
    bad = values.isinf().nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"{where}: the {what} of row(s) {bad[:5].tolist()} is infinite, so the baseline would be too. Bound it, or "
            "use NaN (None in a reward function) for a row that has none."
        )


def optimal_value(rewards: Real[Tensor, "... N"] | Sequence[float | None], *, beta1: float) -> Float[Tensor, "..."]:
    r"""V*, the value of the best policy that stays near the reference, from N samples of the reference.

    .. math:: V^*(x) = \beta_1 \log \frac1N \sum_{i=1}^N e^{r_i / \beta_1}

    with N the number of *scored* samples. It lies between the mean and the maximum of the rewards: beta1 to infinity
    gives the mean, beta1 to 0 the maximum. A solution that the reference never sampled does not count.

    Args:
        rewards: (..., N) rewards of N reference samples per prompt, NaN for a sample without one.
        beta1: temperature of the value, > 0, in units of reward.

    Returns:
        (...,) values in units of reward, float32 (float64 for float64 rewards); NaN where no sample has a reward.

    Raises:
        ValueError: beta1 is not a finite number > 0, or there is no sample.

    Source: Brantley et al. 2025, eq. 3 (stage 1); `A2POTrainer._estimate_optimal_values`.

    Example:
        >>> optimal_value(torch.tensor([1.0, 0.0, 0.0, 0.0]), beta1=0.5)
        tensor(0.4772)
    """
    if not (beta1 > 0 and math.isfinite(beta1)):
        raise ValueError(f"optimal_value: beta1 must be a finite number > 0, got {beta1}; 0.5 is the usual choice.")
    rewards = as_rewards(rewards, _result_dtype(rewards))
    if rewards.ndim == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"optimal_value: expected rewards of shape (..., N) with N >= 1, got {tuple(rewards.shape)}.")
    value = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    scored = ~value.isnan()
    count = scored.sum(-1)
    # expm1 and log1p around the maximum: logsumexp - log N would cancel in float32 for a large beta1.
    top = torch.where(scored, value, -math.inf).amax(-1, keepdim=True)
    weight = torch.where(scored, torch.expm1((value - top) / beta1), 0.0)
    result = top.squeeze(-1) + beta1 * torch.log1p(weight.sum(-1) / count.clamp(min=1))
    return torch.where(count > 0, result, math.nan)


def compute_optimal_advantage(
    rewards: Float[Tensor, " B"] | Scores, v_star: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Optimal advantage of A*-PO: reward minus V* of the prompt.

    Args:
        rewards: (B,) rewards, NaN for a row without one; or the `Scores` that hold them.
        v_star: (B,) V* of each row's prompt, in units of reward: `table(rollout)` of a `ValueTable`.

    Returns:
        (B,) float32 or better, without gradient; NaN where the row has no reward: `loss_step` leaves it out.

    Raises:
        ValueError: shapes differ, or V* of a row with a reward is NaN.

    Source: Brantley et al. 2025, eq. 5 (stage 2).

    Example:
        >>> compute_optimal_advantage(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25]))
        tensor([ 0.7500, -0.2500])
    """
    reward = rewards.reward if isinstance(rewards, Scores) else rewards
    if v_star.shape != reward.shape:
        raise ValueError(
            f"compute_optimal_advantage: expected one V* per row {tuple(reward.shape)}, got {tuple(v_star.shape)}."
        )
    dtype = torch.promote_types(reward.dtype, torch.float32)
    advantage = (reward.detach().double() - v_star.detach().double().to(reward.device)).to(dtype)
    bad = advantage.isnan() & ~reward.isnan()
    if bool(bad.any()):
        raise ValueError(
            f"compute_optimal_advantage: V* of row(s) {bad.nonzero().flatten()[:5].tolist()} is NaN: no reference "
            "sample of those prompts had a reward. Drop the prompts with table.keep_solvable(dataset)."
        )
    return advantage
