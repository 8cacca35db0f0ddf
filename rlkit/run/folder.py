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
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlkit.run.line_files import is_step, read_json, read_lines
from rlkit.support.files import regular, written_whole

PACKAGES = ("rlkit-llm", "torch", "transformers", "trl", "datasets", "numpy")


def fresh_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder of a new run. One that holds anything is never written into: a number is added to the name.

    The number is above all others, also where one is free below: of a name's folders the last one is the newest.
    """
    wanted = Path(path).absolute()
    known = _numbered(wanted).items()
    taken = [number for number, folder in known if not folder.is_dir() or any(folder.iterdir())]
    folder = wanted.with_name(f"{wanted.name}-{max(taken) + 1}") if taken else wanted
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def claimed_folder(path: str | os.PathLike[str]) -> Path:
    """`fresh_folder`, locked for this process; of several that start at once, each gets one of its own."""
    while True:
        folder = fresh_folder(path)
        with contextlib.suppress(RuntimeError):  # another one was faster, so the folder is not empty now
            lock(folder)
            names = {file.name for file in folder.iterdir()} - {"lock"}
            if all(name.startswith("lock.") for name in names):  # of others that try at this moment
                return folder
            unlock(folder)  # another one was faster, and has ended already


def numbered_folders(path: Path) -> list[Path]:
    """The folder and those that `fresh_folder` made beside it because it was not empty, the last one first."""
    found = _numbered(path)
    return [found[number] for number in sorted(found, reverse=True)]


def _numbered(path: Path) -> dict[int, Path]:
    found = {1: path} if path.exists() else {}
    for other in path.parent.glob(f"{glob.escape(path.name)}-*"):
        number = other.name.removeprefix(f"{path.name}-")
        if number.isdecimal() and int(number) > 1:
            found[int(number)] = other
    return found


def lock(folder: Path) -> None:
    """Claim a folder for this process; of several that try at once, one succeeds.

    Raises:
        RuntimeError: another process that still lives works on it.
    """
    file, mine = folder / "lock", {"host": socket.gethostname(), "pid": os.getpid()}
    with _alone(folder):
        while not _create(file, json.dumps(mine) + "\n"):
            other = _owner(file)
            if other == mine:
                return
            if other is not None and (other["host"] != mine["host"] or lives(other["pid"])):
                raise RuntimeError(
                    f"Run: {folder} is in use by process {other['pid']} on {other['host']}. Wait for it, stop it, or "
                    f"choose another folder; if that process is gone, delete {file}."
                )
            file.unlink(missing_ok=True)  # its process is gone


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, so that of two which find a dead one's lock the slower does not delete the faster's.

    A lock of the kernel, which ends with its process. Where there is none (Windows, some network file systems) two
    processes may both take over a dead one's lock at the same moment; a folder without a lock is safe there too.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _create(file: Path, text: str) -> bool:
    """Make the file with all of its text at once, so that nobody finds an empty one; False if there is one."""
    whole = file.with_name(f"{file.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")
    try:
        whole.write_text(text, encoding="utf-8")
        os.link(whole, file)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with open(file, "xb", buffering=0) as new:
                new.write(text.encode())
        except FileExistsError:
            return False
        except OSError as error:  # a full disk; an empty lock would stay
            file.unlink(missing_ok=True)
            error.filename = str(file)
            raise error from None
    finally:
        whole.unlink(missing_ok=True)
    return True


def _owner(file: Path) -> dict[str, Any] | None:
    """Who a lock belongs to; None if it says nothing, also not after the moment that writing it may take (`_create`
    without links).
    """
    for _ in range(20):
        found = read_json(file)
        if found is not None and isinstance(found.get("pid"), int) and isinstance(found.get("host"), str):
            return found
        if not file.exists():
            return None
        time.sleep(0.05)
    return None


def unlock(folder: Path) -> None:
    """Give the folder back, if it is ours."""
    file = folder / "lock"
    with contextlib.suppress(OSError, ValueError):
        if (read_json(file) or {}).get("pid") == os.getpid():
            file.unlink()


def lives(pid: int) -> bool:
    """True if there is such a process on this machine, and it has not ended: a container may never bury its dead."""
    if pid <= 0:  # to os.kill a group of processes
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # where there is no /proc
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return True


def cut_lines(file: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps of a JSON-lines file; what is no line of a step goes."""
    keep_lines(file, lambda line: is_step(line.get("step")) and line["step"] < steps)


def keep_lines(file: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep some of the lines of a JSON-lines file, which is replaced whole or not at all; what is no object goes."""
    kept = [line for line in read_lines(file) if wanted(line)]
    with written_whole(file) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def gone(folder: Path) -> FileNotFoundError:
    """The error for a run's folder that is no longer there: what is lost, what is not, and how to go on."""
    return FileNotFoundError(
        f"Run: the folder {folder} is gone; it was deleted or moved while the run went. Its log, rollouts and "
        "checkpoints are lost, unless it was moved: then move it back and run the loop again, which goes on where it "
        "stopped. Policy and optimizer are in memory as the last update left them: policy.save_pretrained(...) keeps "
        "the weights, and the same loop with a new rl.Run(...) trains them on."
    )


def need_folder(folder: Path) -> None:
    """Refuse to write into a folder of a run that is gone: made anew it would look like a run without a past.

    Raises:
        FileNotFoundError: it is gone.
    """
    if not folder.is_dir():
        raise gone(folder)


def append_line(file: Path, values: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, in one write and whole or not at all.

    Raises:
        OSError: it cannot be written (a full disk); what was written of it is taken back, and the error names the
            file. FileNotFoundError: its folder is gone.
    """
    need_folder(file.parent)
    line = (json.dumps(values, allow_nan=False) + "\n").encode()
    with open(file, "ab", buffering=0, opener=regular) as handle:
        end = handle.tell()
        try:
            written = handle.write(line)
            if written != len(line):
                handle.write(line[written:])  # it did not fit, and now the system says why
        except OSError as error:
            handle.truncate(end)
            error.filename = str(file)
            raise


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all; values that JSON does not know are written as text."""
    need_folder(file.parent)
    with written_whole(file) as partial:
        partial.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
