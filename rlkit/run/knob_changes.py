"""The live changes of a run by step, so that steps which are done again see the numbers that they saw the first time.

    changes.jsonl   {"step": 12, "name": "beta", "value": 0.1, "declared": 0.02}

A checkpoint holds the numbers of its moment. What was changed after the last one would be lost when the process is
killed, and the steps after it, done again, would have another result. So every change that comes from outside the loop
is noted with the first step that saw it, and a run that goes back to step k makes those of step k and later once more,
each before its step. A loop that declares another value than it did then, and a new change of the same number, are
newer than the notes and end them.

Left out: changes that the loop's own code makes. It makes them again.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlkit.distributed import collectives
from rlkit.run.folder import append_line, keep_lines
from rlkit.run.line_files import is_step, read_lines

FILE = "changes.jsonl"


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        step: the first step that saw it.
        name: of the number.
        value: what it became.
        declared: what the loop had declared it as; None for a learning rate, which comes with its optimizer.
    """

    step: int
    name: str
    value: float
    declared: float | None


class Changes:
    """The changes of one run; every process has the same ones to come, and the main one writes."""

    def __init__(self) -> None:
        self._to_come: list[Change] = []

    def go_back(self, folder: Path, step: int) -> None:
        """Take up what was changed from a step on: the run is there again. Every process calls it."""
        found = [change for change in _read(folder) if change.step >= step] if collectives.rank() == 0 else []
        self._to_come = collectives.from_main(found)

    def before(self, step: int) -> Iterator[Change]:
        """Those to make again before a step, in the order in which they were made; each is given once."""
        while self._to_come and self._to_come[0].step <= step:
            yield self._to_come.pop(0)

    def note(self, folder: Path, change: Change) -> None:
        """A change of now: it is noted, and ends what was noted for later steps of the same number."""
        if any(other.name == change.name for other in self._to_come):
            self.forget(folder, change.name, change.step + 1)
        if collectives.rank() == 0:
            append_line(folder / FILE, asdict(change))

    def forget(self, folder: Path, name: str, step: int) -> None:
        """Never again make the changes of a number that were noted from a step on."""
        self._to_come = [change for change in self._to_come if change.name != name]
        if collectives.rank() == 0:
            keep_lines(folder / FILE, lambda line: _stays(_change(line), name, step))


def _read(folder: Path) -> list[Change]:
    """What was noted, by step; several of one step in their order. A line of nonsense is left out."""
    found = [_change(line) for line in read_lines(folder / FILE)]
    return sorted((change for change in found if change is not None), key=lambda change: change.step)


def _stays(change: Change | None, name: str, step: int) -> bool:
    return change is not None and (change.name != name or change.step < step)


def _change(line: dict[str, Any]) -> Change | None:
    step: Any = line.get("step")
    name, value, declared = (line.get(key) for key in ("name", "value", "declared"))
    numbers = all(type(number) in (int, float) for number in (value, declared) if number is not None)
    if not is_step(step) or not isinstance(name, str) or value is None or not numbers:
        return None
    return Change(int(step), name, value, declared)
