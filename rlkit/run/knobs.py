"""Knobs: the numbers of a loop that may be changed while it runs.

    knobs = run.knobs(beta=beta, temperature=1.0, learning_rate=optimizer, bounds={"beta": (0, 1)})
    for step, batch in run.steps(prompts, max_steps):
        rollout = rl.sample(policy, batch, temperature=knobs.temperature)

A change from outside the loop takes effect between two steps, so a step sees one value. Every declared number is logged
with each step as `knobs/NAME`, and saved with a checkpoint.
"""

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from rlkit.run.commands import check_number
from rlkit.support.scalars import scalar
from rlkit.support.text import fits

Bounds = tuple[float | None, float | None]
RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})  # of a parameter group


class Rate:
    """The learning rate of an optimizer as one number; with a scheduler, the rate that the schedule is built on.

    A change scales the whole schedule. Parameter groups with different rates keep their proportions.
    """

    def __init__(self, source: Any) -> None:
        self._schedules = list(_schedules(source)) if isinstance(source, LRScheduler) else []
        self._optimizer = source.optimizer if self._schedules else source
        if not self._schedules and any("initial_lr" in group for group in source.param_groups):
            raise ValueError(
                "run.knobs: this optimizer has a scheduler, which would overwrite the rate; give the scheduler instead."
            )

    @property
    def value(self) -> float:
        """The rate now."""
        if self._schedules:
            return float(self._schedules[0].base_lrs[0])
        return float(self._optimizer.param_groups[0]["lr"])

    @value.setter
    def value(self, rate: float) -> None:
        now = self.value
        if rate == now:
            return

        def scaled(old: float) -> float:
            return rate if old == now or not now else float(old) * rate / now

        for group in self._optimizer.param_groups:
            for key in RATES & group.keys():
                if isinstance(group[key], torch.Tensor):
                    group[key].fill_(scaled(float(group[key])))
                else:
                    group[key] = scaled(group[key])
        for schedule in self._schedules:
            schedule.base_lrs = [scaled(float(old)) for old in schedule.base_lrs]


def _schedules(source: Any) -> Iterator[Any]:
    """Yield a scheduler, or those that a composed one consists of."""
    for inner in getattr(source, "_schedulers", []):
        yield from _schedules(inner)
    if not hasattr(source, "_schedulers"):
        yield source


def _limit(side: float | None) -> float | None:
    """Return a bound, None if it is infinite, which JSON cannot hold."""
    return None if side is None or math.isinf(side) else side


@dataclass
class Plain:
    """A number that is not a learning rate."""

    value: float


class Numbers:
    """The declared numbers by name."""

    def __init__(self) -> None:
        self._now: dict[str, Plain | Rate] = {}
        self._declared: dict[str, float] = {}
        self._kinds: dict[str, type] = {}
        self._saved: dict[str, Any] = {}  # of a checkpoint, for names that are declared after it was loaded
        self.bounds: dict[str, Bounds] = {}

    def declare(self, given: Mapping[str, Any], bounds: Mapping[str, Bounds]) -> list[str]:
        """Declare numbers; see `Run.knobs`. Returns notes on those for which the checkpoint had another value."""
        stray = sorted(set(bounds) - set(given))
        if stray:
            raise ValueError(f"run.knobs: bounds for {', '.join(stray)}, but no such number is declared here.")
        for name, (low, high) in bounds.items():
            if any(side is not None and math.isnan(side) for side in (low, high)) or (
                low is not None and high is not None and low > high
            ):
                raise ValueError(f"run.knobs: bounds of {name} must be (lowest, highest), got {(low, high)}.")
        limited = {name: (_limit(low), _limit(high)) for name, (low, high) in bounds.items()}
        fresh: dict[str, tuple[Plain | Rate, type, Bounds]] = {}
        for name, value in given.items():
            if name.startswith("_"):
                raise ValueError(f"run.knobs: choose a name without a leading underscore, got {name!r}.")
            if isinstance(value, LRScheduler) or hasattr(value, "param_groups"):
                rate, limits = Rate(value), limited.get(name, (0.0, None))
                check_number("run.knobs", name, rate.value, float, limits)
                fresh[name] = rate, float, limits
            else:
                kind: type = int if isinstance(scalar(value), numbers.Integral) else float
                limits = limited.get(name, (None, None))
                fresh[name] = Plain(check_number("run.knobs", name, value, kind, limits)), kind, limits
        for name, (number, kind, limits) in fresh.items():  # only now, so that an error changes nothing
            self._now[name], self._kinds[name], self.bounds[name] = number, kind, limits
            self._declared[name] = number.value
        return self._restore()

    def set(self, name: str, value: Any, where: str = "run.knobs") -> tuple[float, float]:
        """Change a number and return the old value and the new one; errors as in `check_number`."""
        if name not in self._now:
            known = ", ".join(sorted(self._now)) or "nothing"
            raise ValueError(f"{where}: there is no number {name!r}; declared: {known}.")
        before = self._now[name].value
        self._now[name].value = check_number(where, name, value, self._kinds[name], self.bounds[name])
        return before, self._now[name].value

    def declared(self, name: str) -> float | None:
        """Return the declared value; None for a learning rate, which the optimizer holds."""
        return self._declared[name] if isinstance(self._now.get(name), Plain) else None

    def values(self) -> dict[str, float]:
        """Return the present values in the order of declaration."""
        return {name: number.value for name, number in self._now.items()}

    def state(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint holds. A learning rate is saved with its optimizer."""
        return {
            name: {"declared": self._declared[name], "value": number.value}
            for name, number in self._now.items()
            if isinstance(number, Plain)
        }

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore the numbers of a checkpoint, also those that are declared only later. Returns notes."""
        self._saved = dict(saved)
        return self._restore()

    def _restore(self) -> list[str]:
        """Set the declared numbers to the saved values. A value that is declared differently now takes precedence."""
        notes = []
        for name in [name for name in self._saved if isinstance(self._now.get(name), Plain)]:
            saved, given = self._saved.pop(name), self._declared[name]
            if saved["declared"] == given:
                try:
                    self.set(name, saved["value"])
                except ValueError as error:  # other bounds now, or a whole number
                    notes.append(f"rlkit: {name} is {given}, not {saved['value']} as in the checkpoint: {error}")
            elif saved["value"] != given:
                notes.append(f"rlkit: {name} is {given}, as given now; the checkpoint had {saved['value']}")
        return notes


class Knobs:
    """The declared numbers as attributes; `Run.knobs` returns it.

    Assigning one changes it: at once in the loop's thread, from another thread after the step.
    """

    def __init__(self, known: Numbers, change: Callable[[str, Any], None]) -> None:
        object.__setattr__(self, "_known", known)
        object.__setattr__(self, "_change", change)

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_known").values()
        if name not in values:
            raise AttributeError(f"knobs: there is no number {name!r}; declared: {', '.join(values) or 'nothing'}.")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._change(name, value)

    def __dir__(self) -> list[str]:
        return list(self._known.values())

    def __repr__(self) -> str:
        return fits(f"Knobs({', '.join(f'{name}={value}' for name, value in self._known.values().items())})")
