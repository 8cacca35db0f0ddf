"""RunReader: reads the folder of a run, for the view, another notebook, or later.

A run that is being written ends in half a line, one that was killed may end in half a file, and old rollouts get
deleted (rlkit/run/rollouts.py): what cannot be read is left out, and `notes` says so. A refresh parses only the new
lines, so its cost does not grow with the run. Numbers are kept as columns of float64.

Left out: watching the folder through the operating system; reading five short files costs microseconds, and works on
network file systems too.
"""

import contextlib
import math
import os
import threading
from array import array
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from rlkit.record import printable
from rlkit.run import evaluations
from rlkit.run.line_files import Lines, is_step, read_json
from rlkit.run.rollouts import kept_steps, part_of, read_part
from rlkit.support.text import fits

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, ...]
ABSENT = -math.inf
"""In a column: the step did not log this number. (NaN: it logged null, a number that is not finite.)"""


class RunReader:
    """A run's folder, read-only; `rl.Run.open("runs/x")` returns one.

    Args:
        path: the folder of a run.

    Attributes:
        path: the folder.
        config: contents of `config.json`: parameters, versions, git, notebook or script.
        state: contents of `state.json`: step, status, declared numbers.

    Raises:
        FileNotFoundError: there is no such folder, or none of the files of a run in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # a notebook may change its working directory
        if not any((self.path / name).exists() for name in ("config.json", "metrics.jsonl", "state.json")):
            raise FileNotFoundError(
                f"Run.open: {self.path} is not the folder of a run: expected config.json, metrics.jsonl or state.json "
                "in it. Give the folder that rl.Run printed or that run.path says."
            )
        self.config: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self._metrics = _Table(self.path / "metrics.jsonl")
        self._timings = _Table(self.path / "timings.jsonl")
        self._evaluation_lines = Lines(self.path / evaluations.FILE)
        self._evaluations: list[dict[str, Any]] = []
        self._steps: list[int] = []
        self._seen: set[int] = set()
        self._notes: dict[Key, str] = {}
        self._lock = threading.RLock()  # a view reads in a thread of its own
        self.refresh()

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def notes(self) -> list[str]:
        """What could not be read, a sentence each."""
        with self._lock:
            tables = (self._metrics, self._timings, self._evaluation_lines)
            return [*(note for table in tables for note in table.notes), *self._notes.values()]

    def refresh(self) -> bool:
        """Read what was written since the last call. Returns True if there was anything."""
        with self._lock:
            # The state first: it is written after the lines of its step, so the tables have all steps that it counts.
            news = [self._refresh_json("state"), self._refresh_json("config")]
            news += [self._metrics.refresh(), self._timings.refresh(), self._refresh_evaluations()]
            steps = kept_steps(self.path)
            news.append(steps != self._steps)
            self._steps = steps
            self._seen.update(steps)
            return any(news)

    def _refresh_evaluations(self) -> bool:
        news = False
        for lines, replaced in self._evaluation_lines.read():
            known = [] if replaced else self._evaluations
            self._evaluations = [*known, *(_printable(line) for line in lines if isinstance(line, dict))]
            news = news or replaced or bool(lines)
        return news

    def _refresh_json(self, name: str) -> bool:
        file, key = self.path / f"{name}.json", (name,)
        values = read_json(file)
        if values is None:  # what was read before stays
            self._notes[key] = f"{file.name} is {'not whole' if file.exists() else 'missing'}."
            return False
        self._notes.pop(key, None)
        news = values != getattr(self, name)
        setattr(self, name, values)
        return news

    @property
    def names(self) -> list[str]:
        """The metrics that were logged, in the order of their first appearance."""
        with self._lock:
            return [name for name in self._metrics.columns if name != "step"]

    def series(self, name: str) -> tuple[Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        """Return one metric over the steps that logged it: (n,) steps and (n,) values, NaN where the log has null.

        Raises:
            KeyError: the metric was not logged; says which were.
        """
        with self._lock:
            columns = self._metrics.columns
            if name not in columns:
                raise KeyError(f"series: no metric {name!r} was logged; there are {sorted(columns)}.")
            values = np.array(columns[name])  # as long as the last step that logged it
            steps, logged = np.array(columns["step"])[: len(values)], values != ABSENT
            return steps[logged], values[logged]

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per logged step; NaN where a step did not have a number."""
        with self._lock:
            return self._metrics.frame()

    @property
    def timings(self) -> "pd.DataFrame":
        """One row per finished step, in seconds: its wall time `step_time`, and each phase as `phases/<name>`."""
        with self._lock:
            return self._timings.frame()

    @property
    def evaluations(self) -> "pd.DataFrame":
        """One row per evaluation that `run.log_evaluation` saved: its name, step, file (in the folder; read it with
        `rl.Evaluation.load`) and metrics, NaN where one has none.
        """
        import pandas as pd

        with self._lock:
            return pd.DataFrame(
                self._evaluations or None, columns=None if self._evaluations else ["name", "step", "file"]
            )

    @property
    def rollout_steps(self) -> list[int]:
        """The steps whose rollout is kept, in order."""
        with self._lock:
            return list(self._steps)

    def rollouts(self, step: int | None = None, *, columns: Sequence[str] | None = None) -> "pd.DataFrame":
        """The completions of a step, one row each; see rlkit/run/rollouts.py for the columns.

        Args:
            step: one of `rollout_steps`; None for all of them.
            columns: read only these, of those that a step has.

        Returns:
            The table. It is empty, with a note in `notes`, if the step's file was deleted or damaged meanwhile.

        Raises:
            KeyError: the rollout of that step was not kept; names the nearest that was.
        """
        import pandas as pd

        if step is not None and step not in self._seen:
            self.refresh()
            if step not in self._seen:
                raise KeyError(f"rollouts: step {step} was not kept{_nearest(step, self._steps)}.")
        frames = []
        for wanted in self.rollout_steps if step is None else [step]:
            file = part_of(self.path, wanted)
            try:
                frames.append(read_part(file, columns))
            except FileNotFoundError:
                self._note(("rollouts", file.name), f"{file.name} was removed, to keep within the limit.")
            except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
                self._note(("rollouts", file.name), f"{file.name} cannot be read and was left out: {error}"[:300])
        return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0] if frames else pd.DataFrame()

    def _note(self, key: Key, text: str) -> None:
        with self._lock:
            self._notes[key] = text

    def __repr__(self) -> str:
        last = self._metrics.columns["step"]
        done = f"{len(last)} steps logged" + (f", the last is {last[-1]:.0f}" if last else "")
        return fits(f"RunReader({str(self.path)!r}, {done}, rollouts of {len(self._steps)} steps)")


class _Table:
    """The numbers of a JSON-lines file, by column."""

    def __init__(self, file: Path) -> None:
        self._lines = Lines(file)
        self.columns: dict[str, array[float]] = {"step": array("d")}
        self._strange = 0

    @property
    def notes(self) -> list[str]:
        strange = f"{self._lines.file.name}: {self._strange} lines without a step were left out."
        return self._lines.notes + [strange] * (self._strange > 0)

    def refresh(self) -> bool:
        news = False
        for lines, replaced in self._lines.read():
            if replaced:
                self.columns, self._strange = {"step": array("d")}, 0
            known = [_flat(line) for line in lines if isinstance(line, dict) and is_step(line.get("step"))]
            self._strange += len(lines) - len(known)
            for names, rows in groupby(known, key=tuple):  # column by column: lines of a run have the same names
                self._extend(names, list(rows))
            news = news or replaced or bool(lines)
        return news

    def _extend(self, names: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
        before = len(self.columns["step"])
        for name, values in zip(names, zip(*(row.values() for row in rows), strict=True), strict=True):
            numbers = _numbers(values)
            if numbers is None:
                continue
            column = self.columns.setdefault(printable(name), array("d"))
            if len(column) <= before:  # else two names became one by `printable`
                column.extend(array("d", [ABSENT]) * (before - len(column)))
                column.extend(numbers)

    def frame(self) -> "pd.DataFrame":
        import pandas as pd

        found = {name: np.full(len(self.columns["step"]), math.nan) for name in self.columns}
        for name, column in self.columns.items():
            values = np.array(column)
            found[name][: len(values)] = np.where(values == ABSENT, math.nan, values)
        return pd.DataFrame(found).astype({"step": np.int64})


def _printable(line: dict[str, Any]) -> dict[str, Any]:
    return {printable(name): printable(value) for name, value in line.items()}


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with nested objects flattened to `<name of the object>/<name>`."""
    if dict not in map(type, line.values()):
        return line
    flat: dict[str, Any] = {}
    for name, value in line.items():
        inner = {f"{name}/{key}": cell for key, cell in _flat(value).items()} if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else inner
    return flat


def _numbers(values: Sequence[Any]) -> "array[float] | None":
    """Return a column as numbers, NaN for other values; None if it has neither numbers nor nulls."""
    kinds = set(map(type, values))
    if not kinds & {int, float, bool, NoneType}:
        return None
    if NoneType not in kinds and kinds <= {int, float, bool}:
        with contextlib.suppress(OverflowError):
            return array("d", values)
    return array("d", map(_number, values))


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _nearest(step: int, steps: Sequence[int]) -> str:
    if not steps:
        return "; the run has kept none"
    return f"; the nearest that was is {min(steps, key=lambda other: abs(other - step))}, see .rollout_steps"
