"""Offline tasks: a train split, a test split, and the reward functions that judge an answer.

`load(name, **options)` gives a `Task`. Nothing is fetched from a hub, so every lesson and test runs without a network.
A new task is one module with a `load(**options) -> Task`, plus one line in `TASKS`. `datasets` is imported when a task
is loaded, not when rlkit is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.support.text import did_you_mean, table_html

if TYPE_CHECKING:
    import datasets

# name -> module that builds it
TASKS: dict[str, str] = {
    "addition": "rlkit.tasks.addition",
    "countdown": "rlkit.tasks.countdown",
    "format": "rlkit.tasks.answer_format",
}
GYM = "reasoning-gym/"  # and a name of that package


@dataclass(frozen=True)
class Task:
    """Rows with a `prompt` column, and the reward functions of the task in TRL's calling form.

    Attributes:
        name: the name it was loaded by.
        train: rows to learn from.
        test: held-out rows, none of which is in `train`.
        rewards: functions `f(completions, **columns) -> list[float]`, one number per completion.
    """

    name: str
    train: datasets.Dataset
    test: datasets.Dataset
    rewards: tuple[Callable[..., list[float]], ...]

    def __repr__(self) -> str:
        names = ", ".join(getattr(reward, "__name__", repr(reward)) for reward in self.rewards)
        return f"Task({self.name!r}, train={len(self.train)} rows, test={len(self.test)} rows, rewards=({names}))"

    def _repr_html_(self) -> str:
        """The line of `repr`, and the first three training rows as a table."""
        rows = self.train.select(range(min(3, len(self.train)))).to_pandas()
        return table_html(repr(self), rows)


def load(name: str, **options: Any) -> Task:
    """Load a task by name.

    Args:
        name: one of `TASKS`, or "reasoning-gym/NAME" with any name of that package.
        **options: the task's own options, see its module (`addition`: `conversational`, `seed`).

    Returns:
        The `Task`; the same name and options give the same rows in the same order.

    Raises:
        ValueError: if no task has this name.

    Example:
        >>> task = load("addition")
        >>> sorted(task.train.column_names)
        ['answer', 'prompt']
    """
    if str(name).startswith(GYM):
        from rlkit.tasks import reasoning_gym

        return reasoning_gym.load(name.removeprefix(GYM), **options)
    if name not in TASKS:
        hint = did_you_mean(str(name), TASKS)
        raise ValueError(
            f"tasks.load: unknown task {name!r}. Known tasks: {', '.join(sorted(TASKS))}, {GYM}NAME.{hint}"
        )
    return importlib.import_module(TASKS[name]).load(**options)


from rlkit.tasks.templates import prepare  # noqa: E402 - the modules of tasks need Task

__all__ = ["TASKS", "Task", "load", "prepare"]
