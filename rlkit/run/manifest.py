"""Which checkpoints are whole: run.json holds size and SHA-256 of every other file, and a checksum of itself.

Checksums find damage (a torn copy, flipped bits, a file of another checkpoint), not malice: whoever changes a file can
change its checksum. storage.py guards against malicious files.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlkit.distributed import collectives
from rlkit.run.folder import numbered_folders
from rlkit.run.line_files import read_json
from rlkit.support.files import regular

T = TypeVar("T")
FILE = "run.json"
BLOCK = 1 << 20
NEEDED: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "logged_step": (int, type(None)),
    "tokens": (int,),
    "reward_calls": (int,),
    "version": (int,),
    "processes": (int,),
    "optimizer_has_state": (bool,),
    "numbers": (dict, type(None)),
    "files": (dict,),
}
_NAME = re.compile(r"step-\d+", re.ASCII)
_OWNER = re.compile(r"(?:__|rng-|zero_pp_rank_)(\d+)", re.ASCII)


def together(work: Callable[[], T]) -> list[T]:
    """Call a function on every process; each gets all results, and an error on one process is raised on all."""
    result: Any = None
    fault: Exception | None = None
    try:
        result = work()
    except Exception as error:
        fault = error
    if not collectives.is_many():
        if fault is not None:
            raise fault
        return [result]
    # Some exceptions cannot be pickled, so the others get its text.
    told = fault and (isinstance(fault, FileNotFoundError), f"{type(fault).__name__}: {fault}")
    answers = collectives.gather((result, told))
    if fault is not None:
        raise fault
    for number, (_, other) in enumerate(answers):
        if other:
            raise (FileNotFoundError if other[0] else RuntimeError)(f"on rank {number}: {other[1]}")
    return [value for value, _ in answers]


def checksums(folder: Path) -> dict[str, list[Any]]:
    """Return [size, SHA-256] of every file of a checkpoint; every process calls it and hashes what it wrote."""

    def names() -> list[str]:
        files = folder.rglob("*") if collectives.rank() == 0 else ()
        return sorted(file.relative_to(folder).as_posix() for file in files if file.is_file())

    found = together(names)[0]
    parts = together(lambda: {n: _checksum(folder / n) for n in found if _owner(n) == collectives.rank()})
    return {name: sums for part in parts for name, sums in part.items()}


def sealed(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of run.json with a checksum of them."""
    plain = json.loads(json.dumps(counters, default=str))
    return plain | {"sha256": _digest(plain)}


def read_counters(checkpoint: Path) -> dict[str, Any]:
    """Read run.json; FileNotFoundError if it is missing (the checkpoint is not whole), RuntimeError if damaged."""
    file = checkpoint / FILE
    if not file.exists():
        raise FileNotFoundError(f"run.resume: {checkpoint} is not a whole checkpoint ({FILE} is missing).")
    counters = read_json(file)
    if counters is None:
        raise damaged(checkpoint, f"{FILE} cannot be read as JSON")
    if counters.pop("sha256", None) != _digest(counters):
        raise damaged(checkpoint, f"the contents of {FILE} differ from their checksum")
    for name, kinds in NEEDED.items():
        value = counters.get(name, ...)
        if type(value) not in kinds or (type(value) is int and not 0 <= value < 2**53):
            raise damaged(checkpoint, f"{FILE} has {name}={value!r:.80}")
    for name, sums in counters["files"].items():
        if not isinstance(sums, list) or len(sums) != 2:
            raise damaged(checkpoint, f"{FILE} has no size and checksum of {name!r:.80}")
    return counters


def verify(checkpoint: Path, counters: Mapping[str, Any]) -> None:
    """Compare the files of a checkpoint with its checksums; every process calls it and reads its share.

    Raises FileNotFoundError for a missing file and RuntimeError for a damaged one, with its name.
    """

    def check() -> None:
        mine = list(counters["files"].items())[collectives.rank() :: collectives.size()]
        for name, (size, _) in mine:  # sizes first, which cost nothing
            try:
                found = (checkpoint / name).stat().st_size
            except (OSError, ValueError) as error:  # a forged name may be no name of a file
                missing = f"run.resume: {checkpoint} is not a whole checkpoint ({name} is missing)."
                raise FileNotFoundError(missing) from error
            if found != size:
                raise damaged(checkpoint, f"{name} has {found} bytes, {size} were saved")
        for name, sums in mine:
            try:
                found = _checksum(checkpoint / name)
            except OSError as error:
                raise damaged(checkpoint, f"{name} cannot be read ({error.strerror})") from error
            if found != sums:
                raise damaged(checkpoint, f"the contents of {name} differ from their checksum")

    together(check)


def damaged(checkpoint: Path, what: str) -> RuntimeError:
    """Return the error for a damaged checkpoint."""
    return RuntimeError(f"run.resume: {checkpoint} is damaged: {what}.")


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints of a `ckpt` folder in the order in which to try them, whole or not.

    The one in `latest` first. Later ones may be left from before a resume, so they come last.
    """
    found = {path.name.removesuffix(".partial").removesuffix(".old") for path in folder.glob("step-*") if _begun(path)}
    numbers = {name: int(name.removeprefix("step-")) for name in found if _NAME.fullmatch(name)}
    latest = pointed(folder, "latest")
    last = max(numbers.values(), default=0)
    if latest is not None:
        last = numbers[latest] = int(latest.removeprefix("step-"))
    return [folder / name for name in sorted(numbers, key=lambda name: (numbers[name] > last, -numbers[name]))]


def newest(folder: Path) -> Path | None:
    """Return the first of `candidates`, or None."""
    return next(iter(candidates(folder)), None)


def newest_of(wanted: Path) -> Path | None:
    """Return the newest checkpoint of a run's folder, or of the last numbered one that has any; whole or not.

    A run that died before its first checkpoint left a folder without one.
    """
    known = (newest(folder / "ckpt") for folder in numbered_folders(wanted))
    return next((path for path in known if path is not None), None)


def pointed(folder: Path, name: str) -> str | None:
    """Return the checkpoint that `latest` or `best` names; None if the file is missing or invalid."""
    try:
        with open(folder / name, encoding="utf-8", opener=regular) as file:
            text = file.read(100).strip()
    except (OSError, ValueError):
        return None
    return text if _NAME.fullmatch(text) else None


def mend(found: Path) -> None:
    """Rename a checkpoint that a killed save left under another name: the new one, else the replaced one.

    Only the main process of the run that holds the folder's lock calls it.
    """
    for other in (found.with_name(f"{found.name}.partial"), found.with_name(f"{found.name}.old.partial")):
        if not found.exists() and (other / FILE).exists():
            os.replace(other, found)


def _begun(path: Path) -> bool:
    return path.is_dir() and (path.suffix != ".partial" or (path / FILE).exists())


def _owner(name: str) -> int:
    """Return the rank that wrote a file; 0 if the name does not say."""
    found = _OWNER.match(name.rpartition("/")[2])
    number = int(found[1]) if found else 0
    return number if number < collectives.size() else 0


def _checksum(file: Path) -> list[Any]:
    found, size = hashlib.sha256(), 0
    with open(file, "rb", opener=regular) as handle:
        while block := handle.read(BLOCK):
            found.update(block)
            size += len(block)
    return [size, found.hexdigest()]


def _digest(counters: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(counters, sort_keys=True).encode()).hexdigest()
