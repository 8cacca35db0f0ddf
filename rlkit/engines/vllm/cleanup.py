"""Files that a process leaves behind when it is killed: their names say whose they are; the next process cleans up.

    PREFIX + pid namespace + "-" + pid + "-" + random letters

The namespace is in the name because containers share `/dev/shm` (`--ipc=host`) or `/tmp` without sharing process ids: a
client would take the files of a living one next door for those of a dead one. Left out: systems without /proc, where
nothing is removed.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

NAMESPACE = Path("/proc/self/ns/pid")


def mine(prefix: str) -> str:
    """What the names of this process's files begin with."""
    return f"{all_in_namespace(prefix)}{os.getpid()}-"


def all_in_namespace(prefix: str) -> str:
    """What the names begin with that processes of this pid namespace give."""
    return f"{prefix}{os.stat(NAMESPACE).st_ino if NAMESPACE.exists() else 0}-"


def scratch_folder(prefix: str) -> "tempfile.TemporaryDirectory[str]":
    """A folder for this process in the temporary directory; those that killed processes have left there are removed."""
    remove_left(Path(tempfile.gettempdir()), prefix)
    return tempfile.TemporaryDirectory(prefix=mine(prefix), ignore_cleanup_errors=True)


def remove_left(folder: Path, prefix: str) -> None:
    """Delete the files and folders with this prefix whose process is gone; other users' stay, with no error."""
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
    """Delete the memory that an engine which these processes shared has left in /dev/shm when it was killed.

    vLLM for CPUs names it by the ranks alone under torchrun, so each later engine of as many processes would end with
    "create shm in SHMManager failed. errno: 17". An engine that lives has the memory and needs its name no more.
    """
    for file in folder.glob(f"-tp:*-[[]{'-'.join(map(str, ranks))}[]]-cpushm_*"):
        with contextlib.suppress(OSError):
            file.unlink()
