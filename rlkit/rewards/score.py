"""`score`: call the reward functions on a rollout and check what they return.

A reward function gets TRL's keyword arguments (prompts, completions, completion_ids, trainer_state, log_extra,
log_metric, and every dataset column, one value per completion), but only those that it accepts, and returns one number
or None per completion. None (or NaN) means "no opinion": the function is left out of that row's sum. If all abstain the
row has no reward (NaN), which is not the same as a reward of 0 (known_faults B01).

Left out for now: async functions, reward models, timeouts.
"""

import contextlib
import copy
import inspect
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlkit.metrics import describe
from rlkit.rollout import Rollout, Scores, text_of
from rlkit.timing import phase

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Sequence[float | None]]
NOT_COLUMNS = (
    "prompt",
    "prompts",
    "completion",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


@dataclass(frozen=True)
class StepState:
    """What a reward function sees as `trainer_state`, for rewards that change during a run.

    Attributes:
        global_step: optimizer steps done before this one.
        max_steps: steps of the whole run, or None.
    """

    global_step: int = 0
    max_steps: int | None = None


@phase("score")
def score(
    rollout: Rollout,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    weights: Sequence[float] | None = None,
    clip_range: tuple[float, float] | None = None,
    state: Any = None,
) -> Scores:
    r"""Score B completions with K reward functions.

    .. math:: R_i = \mathrm{clip}\Big(\sum_{k\ \text{not abstaining}} w_k \hat r_{ik}\Big)

    Args:
        rollout: B completions.
        reward_funcs: one function, or K of them.
        weights: K weights; None means 1 each. Weight 0 keeps a function as a metric only.
        clip_range: (low, high) bounds of the weighted sum.
        state: passed to the functions as `trainer_state`; by default a `StepState` with the number of optimizer steps
            that the policy had taken when it drew the rollout.

    Returns:
        `Scores` on the rollout's device.

    Raises:
        ValueError: no function, wrong number of weights, a bad clip range; a function that returns another number of
            rewards than there are completions, or one that is infinite.
        TypeError: a function that returns something else than numbers, bools or None. Both name the function and row.
        RuntimeError: a reward function failed; the original exception is its cause.

    Example:
        def short(completions, **kwargs):
            return [-len(text) for text in completions]

        scores = rl.score(rollout, [correct, short], weights=[1.0, 0.01])
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
    if not functions:
        raise ValueError("score: expected at least one reward function, got an empty list.")
    names = unique_names(functions)
    if weights is None:
        weights = [1.0] * len(functions)
    if not isinstance(weights, Sequence):
        raise TypeError(f"score: weights must be a list with one number per reward function, got {weights!r}.")
    if len(weights) != len(functions):
        raise ValueError(
            f"score: expected one weight per reward function ({len(functions)}: {list(names)}), got {len(weights)}."
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"score: weights must be finite numbers, got {list(weights)}.")
    if clip_range is not None and (None in clip_range or not clip_range[0] < clip_range[1]):
        raise ValueError(
            f"score: clip_range must be (low, high) with low < high, got {clip_range}; float('-inf') and "
            "float('inf') leave a side open."
        )

    log = _RewardLog(len(rollout))
    state = StepState(global_step=rollout.policy_version) if state is None else state
    parts = torch.empty(len(rollout), len(functions), dtype=torch.float32)
    for k, (function, name) in enumerate(zip(functions, names, strict=True)):
        parts[:, k] = torch.tensor(
            _call(function, name, _arguments(rollout, state, log), len(rollout)), dtype=torch.float32
        )
    weight = torch.tensor(list(weights), dtype=torch.float32)
    reward = weighted_sum(parts, weight)
    if clip_range is not None:
        reward = reward.clamp(*clip_range)
    _warn_about_unscored(reward, rollout)
    device = rollout.completion_ids.device
    return Scores(
        parts=parts.to(device),
        names=names,
        weights=weight.to(device),
        reward=reward.to(device),
        group_id=rollout.group_id,
        extra=log.columns(),
        metrics=log.averages(),
    )


def weighted_sum(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(B,) weighted sum over the functions that did not abstain; NaN where all did.

    A function of weight 0 is a metric: its answer alone does not make a row scorable.

    Example:
        >>> nan = float("nan")
        >>> weighted_sum(torch.tensor([[1.0, nan], [nan, nan]]), torch.tensor([0.5, 1.0]))
        tensor([0.5000,    nan])
    """
    total = torch.where(parts.isnan(), 0.0, parts * weights).sum(-1)
    return torch.where((parts.isnan() | (weights == 0)).all(-1), math.nan, total)


def unique_names(functions: Sequence[Any]) -> tuple[str, ...]:
    """Readable, unique names of reward functions: the function's own, numbered where two are alike."""
    names: list[str] = []
    taken: set[str] = set()
    for function in functions:
        inner = function
        while hasattr(inner, "func"):  # functools.partial
            inner = inner.func
        name = getattr(inner, "__name__", type(inner).__name__)
        if name == "<lambda>":
            name = "lambda"
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        taken.add(unique)
        names.append(unique)
    return tuple(names)


def _arguments(rollout: Rollout, state: Any, log: "_RewardLog") -> dict[str, Any]:
    """What a function is offered, as its own copies: what it does to them reaches nobody else."""
    lengths = rollout.lengths.tolist()
    ids = rollout.completion_ids.tolist()
    columns = {name: _own(values) for name, values in rollout.columns.items() if name not in NOT_COLUMNS}
    return {
        **columns,
        "prompts": _own(rollout.prompts),
        "completions": _own(rollout.completions),
        "completion_ids": [row[:length] for row, length in zip(ids, lengths, strict=True)],
        "trainer_state": state,
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


def _own(values: Sequence[Any]) -> list[Any]:
    return [copy.deepcopy(value) if isinstance(value, (list, dict)) else value for value in values]


def _accepted(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function accepts by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-ins without a signature
        return dict(arguments)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    accepted = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return {name: value for name, value in arguments.items() if name in accepted}


def _call(function: Any, name: str, arguments: Mapping[str, Any], count: int) -> list[float]:
    if count == 0:  # this process has no share of the step
        return []
    if not callable(function):
        raise TypeError(f"score: expected a reward function, got {type(function).__name__}: {function!r}.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise TypeError(
            f"score: reward function {name!r} is async; async rewards are not supported yet. Make it a plain def."
        )
    accepted = _accepted(function, arguments)
    try:
        returned = function(**accepted)
    except Exception as error:
        missing = ""
        if isinstance(error, TypeError) and "argument" in str(error):
            missing = f" It was offered: {', '.join(sorted(arguments))}."
        raise RuntimeError(
            f"score: reward function {name!r} failed with {type(error).__name__}: {error}.{missing}"
        ) from error
    return [_number(value, name, row) for row, value in enumerate(_as_list(returned, name, count))]


def _as_list(returned: Any, name: str, count: int) -> list[Any]:
    expected = f"score: reward function {name!r} must return {count} rewards, one number or None per completion"
    if isinstance(returned, torch.Tensor) or type(returned).__module__ == "numpy":
        if returned.ndim != 1:
            raise ValueError(f"{expected}; got an array of shape {tuple(returned.shape)}. Flatten it to one axis.")
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Sequence):
        raise TypeError(f"{expected}; got {type(returned).__name__}: {str(returned)[:80]!r}.")
    if len(returned) != count:
        raise ValueError(f"{expected}; got {len(returned)}.")
    return list(returned)


def _number(value: Any, name: str, row: int) -> float:
    if value is None:
        return math.nan
    if (isinstance(value, torch.Tensor) or type(value).__module__ == "numpy") and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"score: reward function {name!r} returned {type(value).__name__} {str(value)[:60]!r} for completion "
            f"{row}; expected a number, a bool or None."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if abs(number) > torch.finfo(torch.float32).max:
        raise ValueError(
            f"score: reward function {name!r} returned {number} for completion {row}; rewards must be finite."
        )
    return number


class _RewardLog:
    """Collects what reward functions log beside their rewards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: dict[str, tuple[Any, ...]] = {}
        self._numbers: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """`log_extra`: a further column of the completions table."""
        if column in ("group_id", "reward") or column.startswith("rewards/"):
            raise ValueError(f"log_extra({column!r}): the table has a column of that name; choose another one.")
        if len(values) != self._count:
            raise ValueError(
                f"log_extra({column!r}): expected {self._count} values, one per completion, got {len(values)}."
            )
        self._columns[column] = tuple(values)

    def metric(self, name: str, value: float) -> None:
        """`log_metric`: a number for the log, averaged over the calls of the step."""
        with contextlib.suppress(KeyError):
            describe(name)
            raise ValueError(f"log_metric({name!r}): rlkit measures a metric of that name; choose another one.")
        self._numbers.setdefault(name, []).append(float(value))

    def columns(self) -> dict[str, tuple[Any, ...]]:
        return self._columns

    def averages(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._numbers.items()}


def _warn_about_unscored(reward: torch.Tensor, rollout: Rollout) -> None:
    unscored = reward.isnan().nonzero().flatten().tolist()
    if not unscored:
        return
    row = unscored[0]
    columns = {name: values[row] for name, values in rollout.columns.items()}
    everything = len(unscored) == len(rollout)
    logger.warning(
        "score: every reward function returned None for %s of %d completions%s. The first one: prompt %r, "
        "completion %r, columns %s.",
        "ALL" if everything else len(unscored),
        len(rollout),
        ", so this step has nothing to learn from" if everything else "; they take no part in baseline and update",
        text_of(rollout.prompts[row])[-200:],
        text_of(rollout.completions[row])[:200],
        {name: str(value)[:80] for name, value in columns.items()},
    )
