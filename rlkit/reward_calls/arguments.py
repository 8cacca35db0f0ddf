"""What a reward function is offered, which of it a function accepts, and under which name it is logged.

The arguments are TRL's: prompts, completions, completion_ids, trainer_state, log_extra, log_metric and every dataset
column, one value per completion. One is ours: `group_ids`, for functions that compare the completions of a prompt. Each
function gets copies of the arguments that it accepts by name, and nothing else.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.metrics import describe
from rlkit.support.scalars import number_of
from rlkit.types import Rollout, text_of

OWN = ("prompts", "completions", "completion_ids", "group_ids", "trainer_state", "log_extra", "log_metric")
NOT_COLUMNS = ("prompt", "completion", *OWN)


@dataclass(frozen=True)
class StepState:
    """What a reward function sees as `trainer_state`, for rewards that change during a run; TRL's names.

    Made by `score` inside `run.steps`; elsewhere `rl.score(rollout, rewards, state=StepState(step, max_steps))`.

    Attributes:
        global_step: optimizer steps done before this one.
        max_steps: steps of the whole run; None outside `run.steps`, if the caller of `score` does not say.
    """

    global_step: int = 0
    max_steps: int | None = None

    @property
    def step(self) -> int:
        """`global_step`, under rlkit's name."""
        return self.global_step


class RewardLog:
    """Collects what one call of a reward function logs beside its rewards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.columns: dict[str, list[Any]] = {}
        self.numbers: dict[str, list[float]] = {}

    def extra(self, column: str, values: Any) -> None:
        """`log_extra`: a further column of the completions table."""
        if column in ("group_id", "reward") or column.startswith(("rewards/", "failures/")):
            raise ValueError(f"log_extra({column!r}): the table has a column of that name; choose another one.")
        listed = hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0
        if isinstance(values, str | bytes | Mapping) or not listed:
            raise TypeError(f"log_extra({column!r}): expected a list of values, got {type(values).__name__}.")
        if len(values) != self._count:
            raise ValueError(
                f"log_extra({column!r}): expected {self._count} values, one per completion, got {len(values)}."
            )
        self.columns[column] = list(values.tolist() if hasattr(values, "tolist") else values)

    def metric(self, name: str, value: Any) -> None:
        """`log_metric`: a number for the log, averaged over the calls of the step; None is left out of the average."""
        with contextlib.suppress(KeyError):
            describe(name)
            raise ValueError(f"log_metric({name!r}): rlkit measures a metric of that name; choose another one.")
        if value is not None:
            self.numbers.setdefault(name, []).append(number_of("log_metric", name, value))

    def merge(self, rows: Sequence[int], other: "RewardLog") -> None:
        """Take over what a call on some of the rows logged; the other rows of its columns are None."""
        for column, values in other.columns.items():
            whole = self.columns.setdefault(column, [None] * self._count)
            for row, value in zip(rows, values, strict=True):
                whole[row] = value
        for name, numbers in other.numbers.items():
            self.numbers.setdefault(name, []).extend(numbers)


@dataclass(frozen=True)
class Accepted:
    """The arguments that a function takes of those offered."""

    positional: tuple[str, ...]  # positional-only
    named: tuple[str, ...]
    by_group: bool = False  # it asks for `group_ids`, so it must see whole groups


def accepted(function: Any, offered: Iterable[str]) -> Accepted:
    """Which of the offered arguments a function accepts; a TypeError if it needs another. Bound ones of a partial stay.

    Example:
        >>> accepted(lambda completions, scale=2: None, ["prompts", "completions"]).named
        ('completions',)
    """
    names = [name for name in offered if name not in _bound(function)]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-ins without a signature
        return Accepted((), tuple(names))
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in names]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name in names]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for p in parameters:
        if p.default is p.empty and p.kind not in variable and p.name not in (*positional, *named):
            raise TypeError(f"missing a required argument: {p.name!r}")
    by_group = "group_ids" in (*positional, *named)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named += [name for name in names if name not in (*positional, *named)]
    return Accepted(tuple(positional), tuple(named), by_group)


def _bound(function: Any) -> set[str]:
    names: set[str] = set()
    while isinstance(function, functools.partial):
        names |= function.keywords.keys()
        function = function.func
    return names


def unwrapped(function: Any) -> Any:
    """The function inside of partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def own_name(function: Any) -> str:
    """The function's own name; a partial's is that of its function, an object's that of its class.

    Example:
        >>> own_name(len), own_name(lambda: 0)
        ('len', 'lambda')
    """
    function = unwrapped(function)
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or not name:
        name = type(function).__name__
    return "lambda" if name == "<lambda>" else name


def unique_names(functions: Sequence[Any]) -> tuple[str, ...]:
    """The functions' own names, numbered where two are alike."""
    names: list[str] = []
    taken: set[str] = set()
    for function in functions:
        name = own_name(function)
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        taken.add(unique)
        names.append(unique)
    return tuple(names)


class Offer:
    """The arguments that a rollout offers, for all its rows or some."""

    def __init__(self, rollout: Rollout, state: Any) -> None:
        self.rollout = rollout
        self.state = state
        self._columns = {name: values for name, values in rollout.columns.items() if name not in NOT_COLUMNS}
        self._groups = rollout.group_id.tolist()

    @functools.cached_property
    def _ids(self) -> list[list[int]]:
        lengths, ids = self.rollout.lengths.tolist(), self.rollout.completion_ids.tolist()
        return [row[:length] for row, length in zip(ids, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all arguments."""
        return (*self._columns, *OWN)

    def value(self, name: str, rows: Sequence[int]) -> Any:
        """One argument for the given rows, as a copy: a function may change it."""
        if name == "trainer_state":
            return self.state
        whole: Sequence[Any]
        if name == "completion_ids":
            whole = self._ids
        elif name == "group_ids":
            whole = self._groups
        else:
            whole = getattr(self.rollout, name) if name in OWN else self._columns[name]
        return [copy.deepcopy(whole[row]) if isinstance(whole[row], (list, dict)) else whole[row] for row in rows]

    def units(self, by_group: bool) -> list[list[int]]:
        """The rows one by one, or group by group."""
        if not by_group:
            return [[row] for row in range(len(self))]
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(self._groups):
            rows.setdefault(group, []).append(row)
        return list(rows.values())

    def show(self, row: int) -> str:
        """A completion for a message."""
        return f"completion {row}: {text_of(self.rollout.completions[row])[:200]!r}"
