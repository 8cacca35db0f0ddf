"""The files of a run: append-only and readable while they are written.

config.json     parameters, versions, git commit, notebook or script
metrics.jsonl   one JSON object per step; repeats bit for bit with the same seed on a CPU
timings.jsonl   wall times, which never repeat, kept apart
state.json      where the run stands: last step, position in the data, why it ended
rollouts/       the completions of the steps, in Parquet (rlkit/run/rollouts.py)
"""

import contextlib
import glob
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("rlkit-llm", "torch", "transformers", "trl", "datasets", "numpy")


def fresh_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder of a new run. One that holds anything is never written into: a number is added to the name."""
    wanted = Path(path)
    folder, number = wanted, 1
    while folder.exists() and any(folder.iterdir()):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def numbered_folders(path: Path) -> list[Path]:
    """The folder and those that `fresh_folder` made beside it because it was not empty, the last one first."""
    found = {1: path} if path.exists() else {}
    for other in path.parent.glob(f"{glob.escape(path.name)}-*"):
        number = other.name.removeprefix(f"{path.name}-")
        if number.isdecimal() and int(number) > 1:
            found[int(number)] = other
    return [found[number] for number in sorted(found, reverse=True)]


def lock(folder: Path) -> None:
    """Claim a folder for this process.

    Raises:
        RuntimeError: another process that still lives works on it.
    """
    file, mine = folder / "lock", {"host": socket.gethostname(), "pid": os.getpid()}
    with contextlib.suppress(FileNotFoundError, ValueError):
        other = json.loads(file.read_text(encoding="utf-8"))
        if other != mine and (other["host"] != mine["host"] or _lives(other["pid"])):
            raise RuntimeError(
                f"Run: {folder} is in use by process {other['pid']} on {other['host']}. Wait for it, stop it, or "
                f"choose another folder; if that process is gone, delete {file}."
            )
    write_json(file, mine)


def unlock(folder: Path) -> None:
    """Give the folder back, if it is ours."""
    file = folder / "lock"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(file.read_text(encoding="utf-8"))["pid"] == os.getpid():
            file.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def cut_lines(file: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps of a JSON-lines file."""
    kept = [line for line in read_lines(file) if line["step"] < steps]
    partial = file.with_name(file.name + ".partial")
    partial.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in kept), encoding="utf-8")
    os.replace(partial, file)


def append_line(file: Path, values: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, in one write."""
    with open(file, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(values, allow_nan=False) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a torn last line, which a crash may leave, is left out."""
    if not file.exists():
        return []
    records = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines) - 1:  # no line end after it: the write was cut off
                break
            raise ValueError(f"{file}: line {number + 1} is not JSON: {error}") from error
    return records


class Lines:
    """A JSON-lines file that another process may be writing: each `read` gives the lines that are new.

    Attributes:
        file: the file; it need not exist yet.
    """

    TAIL = 256  # bytes before the offset that must still be there, else the file is another one
    BLOCK = 4 * 2**20  # bytes that are parsed at a time, so that a long file is never in memory as objects

    def __init__(self, file: Path) -> None:
        self.file = file
        self._begin()

    def _begin(self) -> None:
        self._offset, self._tail, self._torn, self._broken = 0, b"", False, 0

    @property
    def notes(self) -> list[str]:
        """What was left out of the file."""
        broken = f"{self.file.name}: {self._broken} lines are not JSON and were left out."
        torn = f"{self.file.name}: the last line is not whole and was left out."
        return [broken] * (self._broken > 0) + [torn] * self._torn

    def read(self) -> Iterator[tuple[list[Any], bool]]:
        """Yield the objects of the new whole lines, block by block, and whether they begin anew: a resumed run replaces
        the file by one without the lines after its checkpoint.
        """
        try:
            handle = open(self.file, "rb")
        except FileNotFoundError:
            if self._offset:
                self._begin()
                yield [], True
            return
        with handle:
            handle.seek(self._offset - len(self._tail))
            anew = handle.read(len(self._tail)) != self._tail
            if anew:
                self._begin()
                handle.seek(0)
            self._torn = False
            while not self._torn and (data := handle.read(self.BLOCK)):
                data += handle.readline() if len(data) == self.BLOCK else b""
                yield self._parse(data), anew
                anew = False
            if anew:
                yield [], True

    def _parse(self, data: bytes) -> list[Any]:
        end = data.rfind(b"\n") + 1
        self._torn = end < len(data)
        self._offset += end
        self._tail = (self._tail + data[:end])[-self.TAIL :]
        lines = [line for line in data[:end].split(b"\n") if line.strip()]
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


def read_json(file: Path) -> dict[str, Any] | None:
    """What a JSON file holds; None if it is missing, torn or no object."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all; values that JSON does not know are written as text."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(partial, file)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
