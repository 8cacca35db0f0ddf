"""The live changes of a run by step, so that steps which are done again see the numbers that they saw the first time.

    changes.jsonl   {"step": 12, "name": "beta", "value": 0.1, "declared": 0.02}

Changes after the last checkpoint would be lost when the process is killed, and the repeated steps would have another
result. So every change from outside the loop is recorded with the first step that saw it. A run that goes back to step
k repeats those of step k and later, each before its step. A loop that declares another value, and a new change of the
same number, take precedence over the recorded ones and delete them.

Left out: changes by the loop's own code, which makes them again.
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
    """One change: `step` is the first that saw it, `declared` the value that the loop had declared, None for a learning
    rate, which the optimizer holds.
    """

    step: int
    name: str
    value: float
    declared: float | None


class Changes:
    """The changes of one run. Every process holds those to repeat; the main one writes."""

    def __init__(self) -> None:
        self._to_come: list[Change] = []

    def go_back(self, folder: Path, step: int) -> None:
        """Read the changes from a step on, which are to be repeated. Every process calls it."""
        lines = read_lines(folder / FILE) if collectives.rank() == 0 else []
        found = [change for change in map(_change, lines) if change is not None and change.step >= step]
        self._to_come = collectives.from_main(sorted(found, key=lambda change: change.step))

    def before(self, step: int) -> Iterator[Change]:
        """Yield those to repeat before a step, in their order; each is yielded once."""
        while self._to_come and self._to_come[0].step <= step:
            yield self._to_come.pop(0)

    def note(self, folder: Path, change: Change) -> None:
        """Record a new change, and delete the recorded ones of the same number at later steps."""
        if any(other.name == change.name for other in self._to_come):
            self.forget(folder, change.name, change.step + 1)
        if collectives.rank() == 0:
            append_line(folder / FILE, asdict(change))

    def forget(self, folder: Path, name: str, step: int) -> None:
        """Delete the recorded changes of a number from a step on, and invalid lines."""

        def stays(line: dict[str, Any]) -> bool:
            change = _change(line)
            return change is not None and (change.name != name or change.step < step)

        self._to_come = [change for change in self._to_come if change.name != name]
        if collectives.rank() == 0:
            keep_lines(folder / FILE, stays)


def _change(line: dict[str, Any]) -> Change | None:
    step: Any = line.get("step")
    name, value, declared = (line.get(key) for key in ("name", "value", "declared"))
    numbers = all(type(number) in (int, float) for number in (value, declared) if number is not None)
    if not is_step(step) or not isinstance(name, str) or value is None or not numbers:
        return None
    return Change(int(step), name, value, declared)
