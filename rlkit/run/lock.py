"""The lock of a run's folder: a file with the host and the process that works on it.

A lock whose process has ended on this machine is taken over. A lock of another host is not, since its process cannot be
seen from here. Where the file system has no flock, two processes that take over a dead one's lock at the same moment
may both succeed; a folder that has no lock is safe there too.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlkit.run.line_files import read_json


def lock(folder: Path) -> None:
    """Lock a folder for this process; of several processes that try at once, one succeeds.

    Raises:
        RuntimeError: another process that still runs works on it.
    """
    file, mine = folder / "lock", {"host": socket.gethostname(), "pid": os.getpid()}
    with one_at_a_time(folder):
        while not _create(file, json.dumps(mine) + "\n"):
            other = _owner(file)
            if other == mine:
                return
            if other is not None and (other["host"] != mine["host"] or lives(other["pid"])):
                raise RuntimeError(
                    f"Run: {folder} is in use by process {other['pid']} on {other['host']}. Wait for it, stop it, or "
                    f"choose another folder; if that process has ended, delete {file}."
                )
            file.unlink(missing_ok=True)


def unlock(folder: Path) -> None:
    """Remove the lock, if this process owns it."""
    file = folder / "lock"
    with contextlib.suppress(OSError, ValueError):
        if (read_json(file) or {}).get("pid") == os.getpid():
            file.unlink()


def lives(pid: int) -> bool:
    """Return whether a process of this machine runs. A zombie does not: some containers never reap them."""
    if pid <= 0:  # os.kill would signal a process group
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


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time in: two that find the lock of a dead process must not delete each other's."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # Windows, some network file systems
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _create(file: Path, text: str) -> bool:
    """Create the file; False if it exists."""
    try:
        with open(file, "xb", buffering=0) as new:
            new.write(text.encode())
    except FileExistsError:
        return False
    except OSError as error:  # a full disk; an empty lock would stay
        file.unlink(missing_ok=True)
        error.filename = str(file)
        raise error from None
    return True


def _owner(file: Path) -> dict[str, Any] | None:
    """Return who owns a lock. Without flock its text may come a moment after the file, so an unreadable one is read
    again for a second; then the answer is None.
    """
    for _ in range(20):
        found = read_json(file)
        if found is not None and isinstance(found.get("pid"), int) and isinstance(found.get("host"), str):
            return found
        if not file.exists():
            return None
        time.sleep(0.05)
    return None
