r"""The advantages of one group written out in numbers, and the rule that explains the stored ones.

Leave-one-out: r_i = R_i - beta * KL_i, A_i = r_i - mean of the other r_j of the group (`rlkit.advantages`). Stored
advantages may follow another rule: without the KL, with an unrecorded beta, normalised over the batch or the group, or
R - V* (A*-PO). Each is tried in turn, and the first that explains every row of the group is named; if none does, the
answer says so.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkit.run.reader import RunReader
from rlkit.view.json_values import number

TOLERANCE = 2e-4
"""Relative size up to which a difference is rounding: stored advantages are sums of float32."""
SPELLED_OUT = 4
"""Most peers that are listed one by one; beyond, the mean is written as (sum - own) / count."""


@dataclass(frozen=True)
class Group:
    """The numbers of a group, (n,) each, NaN where a row has none; `kl` and `stored` are None where no row has one."""

    reward: np.ndarray
    kl: np.ndarray | None
    stored: np.ndarray | None


def leave_one_out(values: np.ndarray) -> np.ndarray:
    """Each value minus the mean of the other known ones; 0 for an unknown value and where there is no other.

    Example:
        >>> leave_one_out(np.array([1.0, 0.0, float("nan")])).tolist()
        [1.0, -1.0, 0.0]
    """
    known = ~np.isnan(values)
    count = int(known.sum())
    if count < 2:
        return np.zeros(len(values))
    values = values - values[known].min()  # the differences are the same, and equal values cancel exactly
    total = float(values[known].sum())
    return np.where(known, values - (total - values) / (count - 1), 0.0)


def known_beta(reader: RunReader, metrics: dict[str, Any]) -> tuple[float | None, str]:
    """Return the weight of the KL in the reward, and where it was found: step's log, live numbers or parameters."""
    places = (
        (metrics, "knobs/beta", "the step's metrics"),
        (metrics, "beta", "the step's metrics"),
        (reader.state.get("numbers"), "beta", "state.json"),
        (reader.config.get("parameters"), "beta", "config.json"),
    )
    for place, key, name in places:
        value = place.get(key) if isinstance(place, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value), name
    return None, ""


def explain(group: Group, *, step: Group, loo_of_step: np.ndarray, beta: float | None, where: str) -> dict[str, Any]:
    """Explain how the stored advantages of a group follow from its rewards.

    Args:
        group: the rows of the group.
        step: all rows of the step, for a normalisation over the batch.
        loo_of_step: leave-one-out of every row of the step, with `beta` if it is known.
        beta: weight of the KL, if it is written down.
        where: the place where it is written.

    Returns:
        {"rule", "said", "beta", "rows"}; `_rows` has the fields of a row.
    """
    rule, said, used = _rule(group, step, loo_of_step, beta, where)
    own = group.reward if not used or group.kl is None else group.reward - used * group.kl
    return {"rule": rule, "said": said, "beta": number(used), "rows": _rows(group, own)}


def _rule(
    group: Group, step: Group, loo_of_step: np.ndarray, beta: float | None, where: str
) -> tuple[str, str, float | None]:
    plain = leave_one_out(group.reward)
    penalty = None if group.kl is None else leave_one_out(np.where(np.isnan(group.reward), np.nan, group.kl))
    use_kl = bool(beta) and penalty is not None
    if group.stored is None:
        said = "No advantage is stored for this step; this is the leave-one-out advantage of its rewards."
        return "not stored", said, beta if use_kl else None
    stored, scored = group.stored, ~np.isnan(group.reward)
    if int(scored.sum()) < 2:
        if _same(stored, np.zeros(len(stored))):
            return "alone", "Fewer than two completions have a reward: nothing to compare with, advantage 0.", None
    elif _same(stored, plain) and not (use_kl and penalty is not None and np.abs(penalty).max() > 0):
        return "leave-one-out", "Leave-one-out: each reward minus the mean of the others.", None
    elif penalty is not None and use_kl and beta is not None and _same(stored, plain - beta * penalty):
        return "leave-one-out", f"Leave-one-out, with beta = {beta:g} (from {where}) times the KL in the reward.", beta
    elif _same(stored, plain):
        return "leave-one-out", "Leave-one-out of the rewards, without a KL penalty.", None
    elif penalty is not None and (guess := _slope(penalty, plain - stored)) is not None:
        said = f"Leave-one-out with the KL in the reward; beta = {guess:.4g} is not written anywhere, it follows from "
        return "leave-one-out", said + "the stored advantages.", guess
    return _other_rule(group, step, loo_of_step)


def _other_rule(group: Group, step: Group, loo_of_step: np.ndarray) -> tuple[str, str, float | None]:
    assert group.stored is not None and step.stored is not None
    known = ~np.isnan(group.reward) & ~np.isnan(group.stored)
    mean = float(np.nanmean(group.reward)) if known.any() else 0.0
    gap = group.reward[known] - mean - group.stored[known]  # relative to a large mean, every gap would be the same
    if len(gap) and _same(gap, np.full(len(gap), gap.mean())):
        if len(gap) > 1 and _same(gap, np.zeros(len(gap))):
            said = f"Reward minus the group's mean, {mean:.4g}, own reward included: not leave-one-out."
            return "mean", said, None
        said = (
            f"Reward minus {mean + gap.mean():.4g} in every row: a baseline of the prompt itself, such as V* (A*-PO)."
        )
        return "baseline", said + " The other completions play no part.", None
    fit = _line(loo_of_step, step.stored)
    if fit is not None:
        slope, shift = fit
        said = f"Leave-one-out, then normalised over the batch: stored = {slope:.4g} × A"
        return "normalised", said + (f" {shift:+.4g}." if abs(shift) > TOLERANCE else "."), None
    fit = _line(group.reward[known], group.stored[known]) if len(np.unique(group.reward[known])) > 2 else None
    if fit is not None:
        said = f"A straight line of the reward within the group (stored = {fit[0]:.4g} × R {fit[1]:+.4g}): normalised"
        return "normalised", said + " within the group, not plain leave-one-out.", None
    of = "the rewards and the KL" if group.kl is not None else "the rewards"
    said = f"The stored advantages do not follow from {of}"
    return "other", said + " by leave-one-out; the sums below are leave-one-out, for comparison only.", None


def _rows(group: Group, own: np.ndarray) -> list[dict[str, Any]]:
    """The sums of each row; "others" is None where there are more than `SPELLED_OUT`."""
    advantage = leave_one_out(own)
    known = ~np.isnan(own)
    total = float(own[known].sum())
    rows = []
    for i in range(len(own)):
        others = own[known & (np.arange(len(own)) != i)]
        stored = None if group.stored is None else group.stored[i]
        rows.append(
            {
                "r": number(own[i]),
                "others": [number(value) for value in others] if len(others) <= SPELLED_OUT else None,
                "total": number(total),
                "count": len(others) if known[i] else 0,
                "mean": number(others.mean() if len(others) and known[i] else math.nan),
                "advantage": number(advantage[i]),
                "stored": number(stored),
                "agrees": None if stored is None else _same(np.array([stored]), advantage[i : i + 1]),
                "scored": bool(known[i]),
            }
        )
    return rows


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    size = max(1.0, float(np.abs(right[~np.isnan(right)]).max(initial=0.0)))
    return bool(np.all(np.abs(left - right) <= TOLERANCE * size)) if len(left) else True


def _slope(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return b of y = b x, if it holds in every row and there are at least three."""
    if len(x) < 3 or np.abs(x).max() < 1e-6 or np.isnan(y).any():
        return None
    b = float(x @ y / (x @ x))
    return b if b > 0 and _same(b * x, y) else None


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Return (a, b) of y = a x + b, if it holds in every row that has both and there are at least three."""
    known = ~np.isnan(x) & ~np.isnan(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) < 1e-9:
        return None
    a, b = np.polyfit(x, y, 1)
    return (float(a), float(b)) if a > 0 and _same(a * x + b, y) else None
