"""The files of a run: append-only and readable while they are written.

config.json     parameters, versions, git commit, notebook or script
metrics.jsonl   one JSON object per step; repeats bit for bit with the same seed on a CPU
timings.jsonl   wall times, which never repeat, kept apart
state.json      where the run stands: step, position in the data, declared numbers, whether it runs, why it ended
commands.jsonl  what the loop was told to do while it ran
changes.jsonl   which numbers that changed, and from which step on
evaluations/    what `run.log_evaluation` was given; its numbers are in evaluations.jsonl (rlkit/run/evaluations.py)
rollouts/       the completions of the steps, in Parquet (rlkit/run/rollouts.py)
"""

import contextlib
import glob
import json
import os
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlkit.run.line_files import is_step, read_lines
from rlkit.run.lock import lock, unlock
from rlkit.support.files import regular, written_whole

PACKAGES = ("rlkit-llm", "torch", "transformers", "trl", "datasets", "numpy")


def fresh_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder of a new run. If it exists and is not empty, a number is added to the name.

    The number is above all others, even if a lower one is free, so that the last folder is the newest.
    """
    wanted = Path(path).absolute()
    known = _numbered(wanted).items()
    taken = [number for number, folder in known if not folder.is_dir() or any(folder.iterdir())]
    folder = wanted.with_name(f"{wanted.name}-{max(taken) + 1}") if taken else wanted
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def claimed_folder(path: str | os.PathLike[str]) -> Path:
    """Make a new run's folder and lock it; of several processes that start at once, each gets its own."""
    while True:
        folder = fresh_folder(path)
        with contextlib.suppress(RuntimeError):  # another process was faster, so the folder is not empty now
            lock(folder)
            if all(file.name == "lock" for file in folder.iterdir()):
                return folder
            unlock(folder)  # another process was faster, and has ended already


def numbered_folders(path: Path) -> list[Path]:
    """Return the folder and the numbered ones that `fresh_folder` made beside it, the last one first."""
    found = _numbered(path)
    return [found[number] for number in sorted(found, reverse=True)]


def _numbered(path: Path) -> dict[int, Path]:
    found = {1: path} if path.exists() else {}
    for other in path.parent.glob(f"{glob.escape(path.name)}-*"):
        number = other.name.removeprefix(f"{path.name}-")
        if number.isdecimal() and int(number) > 1:
            found[int(number)] = other
    return found


def cut_lines(file: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps of a JSON-lines file; lines without a step are dropped."""
    keep_lines(file, lambda line: is_step(line.get("step")) and line["step"] < steps)


def keep_lines(file: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep some lines of a JSON-lines file, atomically. Lines that are not JSON objects are dropped."""
    kept = [line for line in read_lines(file) if wanted(line)]
    with written_whole(file) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def gone(folder: Path) -> FileNotFoundError:
    """Return the error for a run's folder that no longer exists: what is lost, what is kept, and how to continue."""
    return FileNotFoundError(
        f"Run: the folder {folder} is gone; it was deleted or moved during the run. Its log, rollouts and "
        "checkpoints are lost, unless it was moved: then move it back and run the loop again, which goes on where it "
        "stopped. Policy and optimizer are in memory as the last update left them: policy.save_pretrained(...) keeps "
        "the weights, and the same loop with a new rl.Run(...) trains them on."
    )


def need_folder(folder: Path) -> None:
    """Raise FileNotFoundError if a run's folder is gone: a new one would look like a run without steps."""
    if not folder.is_dir():
        raise gone(folder)


def append_line(file: Path, values: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, in one write.

    Raises:
        OSError: it cannot be written (a full disk); a partial line is removed, and the error names the file.
        FileNotFoundError: its folder is gone.
    """
    need_folder(file.parent)
    line = (json.dumps(values, allow_nan=False) + "\n").encode()
    with open(file, "ab", buffering=0, opener=regular) as handle:
        end = handle.tell()
        try:
            written = handle.write(line)
            if written != len(line):
                handle.write(line[written:])  # it did not fit; this raises the reason
        except OSError as error:
            handle.truncate(end)
            error.filename = str(file)
            raise


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; values that JSON cannot hold are written as text."""
    need_folder(file.parent)
    with written_whole(file) as partial:
        partial.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
