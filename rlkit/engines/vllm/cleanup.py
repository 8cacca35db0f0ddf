"""Files that a killed process leaves behind: their names tell the owner, and the next process removes them.

    PREFIX + pid namespace + "-" + pid + "-" + random letters

The namespace is in the name because containers share `/dev/shm` (`--ipc=host`) or `/tmp` but not process ids: a client
would take another container's live files for those of a dead process. Without /proc nothing is removed.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

NAMESPACE = Path("/proc/self/ns/pid")


def mine(prefix: str) -> str:
    """Prefix of the names of this process's files."""
    return f"{all_in_namespace(prefix)}{os.getpid()}-"


def all_in_namespace(prefix: str) -> str:
    """Prefix of the names of all processes in this pid namespace."""
    return f"{prefix}{os.stat(NAMESPACE).st_ino if NAMESPACE.exists() else 0}-"


def scratch_folder(prefix: str) -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder of this process; removes the ones of killed processes."""
    remove_left(Path(tempfile.gettempdir()), prefix)
    return tempfile.TemporaryDirectory(prefix=mine(prefix), ignore_cleanup_errors=True)


def remove_left(folder: Path, prefix: str) -> None:
    """Delete the files and folders with this prefix whose process is gone; those of other users stay."""
    start = all_in_namespace(prefix)
    for entry in folder.glob(f"{start}*-*"):
        number = entry.name.removeprefix(start).split("-")[0]
        if not NAMESPACE.exists() or not number.isdecimal() or Path("/proc", number).exists():
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                entry.unlink()


def remove_left_by_vllm(folder: Path, ranks: Iterable[int]) -> None:
    """Delete the shared memory of a killed engine of these ranks from /dev/shm.

    Under torchrun vLLM for CPUs names it by the ranks alone, so every later engine of the same ranks would fail with
    "create shm in SHMManager failed. errno: 17". A live engine has it mapped and does not need the name.
    """
    for file in folder.glob(f"-tp:*-[[]{'-'.join(map(str, ranks))}[]]-cpushm_*"):
        with contextlib.suppress(OSError):
            file.unlink()
