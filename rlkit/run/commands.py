"""Commands: lines appended to a file in the run's folder, which `run.steps` carries out between two steps.

    commands.jsonl   {"command": "set", "name": "beta", "value": 0.1, "by": "rlkit ctl", "time": 1764000000.0}

The view, other notebooks, browser tabs and `rlkit ctl runs/x stop` all use it. A file and not a socket: it works for a
job on another node of the cluster, and records who changed what. The main process reads it and the loop tells the
others. Lines from before the loop are ignored, so a resumed run does not repeat them.
"""

import json
import numbers
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rlkit.run.line_files import Lines, read_json
from rlkit.run.lock import lives, one_at_a_time
from rlkit.run.status import UNFINISHED
from rlkit.support.files import regular
from rlkit.support.scalars import scalar

Order = Literal["pause", "resume", "stop", "save", "set"]
ORDERS: tuple[str, ...] = get_args(Order)
FILE = "commands.jsonl"


@dataclass(frozen=True)
class Command:
    """One command; `name` and `value` belong to "set", `by` is who sent it."""

    order: str
    name: str | None = None
    value: float | None = None
    by: str = ""


def send(
    folder: str | os.PathLike[str], order: Order, *, name: str | None = None, value: float | None = None, by: str = ""
) -> int:
    """Send a command to a running loop, in this process or any other; it is carried out when the step is done.

    Args:
        folder: of the run.
        order: "pause": wait before the next step; "resume": go on; "stop": end the loop with everything saved, as the
            interrupt button does; "save": write a checkpoint; "set": change a number of `run.knobs`.
        name: of the number, for "set".
        value: its new value, for "set"; finite, and inside the number's bounds.
        by: who sends it; the run's log says so.

    Returns:
        The command's number. It has been carried out when `taken` in the run's state.json is as large.

    Raises:
        FileNotFoundError: no loop has begun in that folder.
        RuntimeError: the loop has ended, or its process has.
        ValueError: unknown order; unknown number, with the names that were declared; a value that it cannot take.
        TypeError: a value that is not a number, or name and value without "set".
    """
    path = Path(folder)
    state = read_json(path / "state.json")
    if state is None:
        raise FileNotFoundError(f"controls.send: no loop has begun in {path} (there is no state.json).")
    if order not in ORDERS:
        raise ValueError(f"controls.send: expected one of {', '.join(ORDERS)}, got {order!r}.")
    why = why_over(state)
    if why:
        raise RuntimeError(f"controls.send: nothing in {path} takes a command: {why}.")
    if order == "set":
        value = _checked(name, value, state)
    elif name is not None or value is not None:
        raise TypeError(f"controls.send: name and value belong to 'set', not to {order!r}.")
    line = {"command": order, "name": name, "value": value, "by": by, "time": time.time()}
    text = json.dumps({key: value for key, value in line.items() if value is not None}, allow_nan=False) + "\n"
    return _append(path / FILE, text.encode())


def _append(file: Path, line: bytes) -> int:
    """Append a line in one write, also beside other writers; returns its number, counted from 1."""
    handle = regular(str(file), os.O_RDWR | os.O_APPEND | os.O_CREAT)  # unbuffered: its position is the true one
    # One writer at a time: a line that crosses a page is half there for a moment.
    with open(handle, "r+b", buffering=0) as raw, one_at_a_time(file.parent):
        if raw.seek(0, os.SEEK_END):
            raw.seek(-1, os.SEEK_END)
            if raw.read(1) != b"\n":  # a killed writer left half a line
                line = b"\n" + line
        raw.write(line)
        end = raw.tell()
        raw.seek(0)
        return raw.read(end).count(b"\n")


def why_over(state: dict[str, Any]) -> str | None:
    """Return why no loop runs according to a state.json; None if one runs or pauses."""
    if state.get("status") not in UNFINISHED:
        return f"its loop has ended ({state.get('status')}) at step {state.get('step')}"
    pid = state.get("pid")
    if state.get("host") == socket.gethostname() and isinstance(pid, int) and not lives(pid):
        return f"its process {pid} no longer runs"
    return None


def _checked(name: str | None, value: float | None, state: dict[str, Any]) -> float:
    """Return the number of a "set", checked against state.json; the loop checks it again."""
    known = state.get("numbers")
    known = known if isinstance(known, dict) else {}
    if name not in known:
        what = f"declared are {', '.join(sorted(known))}" if known else "none is declared; see run.knobs"
        raise ValueError(f"controls.send: there is no number {name!r}: {what}.")
    bounds = state.get("bounds")
    limits = bounds.get(name) if isinstance(bounds, dict) else None
    return check_number("controls.send", str(name), value, type(known[name]), limits)


def check_number(where: str, name: str, value: Any, kind: type, bounds: Any = None) -> float:
    """Return a value as the type of a declared number, `int` or `float`; errors name the function `where`.

    Raises:
        TypeError: not a number.
        ValueError: not finite, not whole, or not within bounds (lowest, highest), either of which may be None.
    """
    value = scalar(value)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # a condition of its own, for mypy
    if not is_number:
        raise TypeError(f"{where}: {name} must be a number, got {value!r}.")
    if not abs(value) <= sys.float_info.max:  # NaN, infinite, an integer of hundreds of digits
        raise ValueError(f"{where}: {name} must be finite, got {str(value)[:40]}.")
    number: float = int(value) if kind is int else float(value)
    if kind is int and number != value:
        raise ValueError(f"{where}: {name} must be a whole number, got {value!r}.")
    low, high = bounds or (None, None)
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{where}: {name} must be between {low} and {high}, got {value!r}.")
    return number


class Inbox:
    """Reads the commands that are appended from now on, in the main process of a run.

    Attributes:
        taken: lines that were handled, those of earlier loops included.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = Lines(folder / FILE)
        self._has_history = True
        self._fault = ""
        self.taken = 0
        self._new_lines()

    def take(self) -> tuple[list[Command], list[str]]:
        """Return the commands since the last call, and notes on invalid lines and on a file that cannot be read."""
        commands, notes = [], []
        for line in self._new_lines():
            self.taken += 1
            try:
                commands += [parse(line)] if line.strip() else []
            except ValueError as error:
                notes.append(f"rlkit: line {self.taken} of {FILE} is skipped: {error}")
        if self._lines.fault and self._lines.fault != self._fault:
            notes.append(f"rlkit: {self._lines.fault}")
        self._fault = self._lines.fault
        return commands, notes

    def _new_lines(self) -> list[bytes]:
        new: list[bytes] = []
        for lines, replaced in self._lines.read_bytes():
            if replaced:  # it was emptied
                self.taken, new = 0, []
            new += lines
        if self._has_history:  # what stands there before the loop begins
            self._has_history = bool(self._lines.fault)
            self.taken += len(new)
            return []
        return new


def parse(line: bytes) -> Command:
    """Parse a line; ValueError if it is not a command.

    Example:
        >>> parse(b'{"command": "set", "name": "beta", "value": 0.1}').value
        0.1
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {line[:80]!r}") from error
    order = found.get("command") if isinstance(found, dict) else None
    if order not in ORDERS:
        raise ValueError(f"no command: {line[:80]!r}")
    name, value, by = found.get("name"), found.get("value"), found.get("by", "")
    if order == "set" and (not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"'set' needs a name and a number: {line[:80]!r}")
    sender = "".join(letter if letter.isprintable() else "?" for letter in str(by)[:80])  # it is printed
    return Command(order, name if order == "set" else None, value if order == "set" else None, sender)
