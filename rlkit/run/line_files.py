"""Read the whole lines and files of a run that another process may be writing, or has left torn."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlkit.support.files import regular


class Lines:
    """A file of lines that another process may be writing: each read gives the lines that are new.

    Attributes:
        file: the file; it need not exist yet.
        fault: why it could not be read last time, else "".
    """

    TAIL = 256  # bytes before the offset that must be unchanged, else the file was replaced
    BLOCK = 4 * 2**20  # bytes that are parsed at a time, so that a long file is never in memory as objects

    def __init__(self, file: Path) -> None:
        self.file, self.fault = file, ""
        self._begin()

    def _begin(self) -> None:
        self._offset, self._tail, self._torn, self._broken = 0, b"", False, 0

    @property
    def notes(self) -> list[str]:
        """What was left out of the file."""
        broken = f"{self.file.name}: {self._broken} lines are not JSON and were left out."
        torn = f"{self.file.name}: the last line is not whole and was left out."
        return [broken] * (self._broken > 0) + [torn] * self._torn + [self.fault] * bool(self.fault)

    def read(self) -> Iterator[tuple[list[Any], bool]]:
        """Yield the JSON values of the new whole lines, block by block, and whether the file was replaced: a resumed
        run removes the lines after its checkpoint.
        """
        for lines, replaced in self.read_bytes():
            yield self._parse([line for line in lines if line.strip()]), replaced

    def read_bytes(self) -> Iterator[tuple[list[bytes], bool]]:
        """`read` without parsing the lines; empty lines are among them."""
        try:
            handle = open(self.file, "rb", opener=regular)
        except FileNotFoundError:
            self.fault = ""
            if self._offset:
                self._begin()
                yield [], True
            return
        except OSError as error:
            self.fault = f"{self.file.name} cannot be read: {error.strerror}."
            return
        self.fault = ""
        with handle:
            handle.seek(self._offset - len(self._tail))
            replaced = handle.read(len(self._tail)) != self._tail
            if replaced:
                self._begin()
                handle.seek(0)
            self._torn = False
            while not self._torn and (data := handle.read(self.BLOCK)):
                data += handle.readline() if len(data) == self.BLOCK else b""
                end = data.rfind(b"\n") + 1
                self._torn = end < len(data)
                self._offset += end
                self._tail = (self._tail + data[:end])[-self.TAIL :]
                yield data[:end].split(b"\n")[:-1], replaced
                replaced = False
            if replaced:
                yield [], True

    def _parse(self, lines: list[bytes]) -> list[Any]:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(b"[" + b",".join(lines) + b"]")
            if len(found) == len(lines):
                return found
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                self._broken += 1
        return found


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a whole JSON-lines file; torn, broken and other lines are left out."""
    return [line for lines, _ in Lines(file).read() for line in lines if isinstance(line, dict)]


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object that a JSON file holds; None if it is missing, torn, not an object or not a regular file."""
    try:
        with open(file, "rb", opener=regular) as handle:
            values = json.loads(handle.read())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def is_step(value: Any) -> bool:
    """Return whether a value can be a step: a whole number that float64 holds."""
    return type(value) in (int, float) and abs(value) < 2**53 and value == int(value)
