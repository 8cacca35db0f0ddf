"""Processes that are kept from step to step, for reward functions that may hang or eat memory.

No thread can be stopped from outside, and a regular expression that backtracks holds Python's lock, so only the end of
a process is a hard bound. A worker is a fresh interpreter (never a fork: threads and CUDA do not survive one; never
multiprocessing's spawn: it runs an unguarded training script again), keeps its function between calls, and is replaced
after a kill. `dill`, which `datasets` brings, sends functions that live in a notebook or in the script itself.

Linux and macOS; elsewhere, and for what cannot be pickled, `rlkit.reward_calls.callers` uses threads and says so.
"""

import base64
import hashlib
import importlib
import io
import os
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkit.reward_calls.child import Child, TimedOut

PROGRAM = Path(__file__).with_name("worker_main.py")
START_SECONDS = 120.0  # for the imports of a function's module, on a busy machine; not part of any timeout
LARGEST = 64 * 2**20  # bytes of a pickled function; one that holds a model stays in this process


class CannotSend(Exception):
    """A function cannot be sent to another process; the message gives the reason."""


class Worker(Child):
    """A child that loads a function and calls it."""

    def __init__(self) -> None:
        # sys.path comes first: what the worker imports must not be shadowed by files beside the program.
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_path({str(PROGRAM)!r}, None, '__main__')"
        )
        super().__init__([sys.executable, "-c", start, str(os.getpid())])
        self.digest: str | None = None
        self.fresh = True  # not called yet: what the function imports when it is called is still to come

    def load(self, function: bytes, memory: int | None) -> bool:
        """Bring a pickled function in, unless it is there; False if memory cannot be limited on this system."""
        digest = digest_of(function, memory)
        if digest == self.digest:
            return True
        try:
            answer = self._request(("load", function, memory), START_SECONDS)
        except TimedOut as error:
            raise CannotSend(f"importing it took more than {START_SECONDS:.0f} s") from error
        if answer[0] == "raised":
            raise CannotSend(f"{answer[1]}: {answer[2]}")
        self.digest, self.fresh = digest, True
        return bool(answer[1])

    def call(self, arguments: bytes, seconds: float | None) -> tuple[Any, ...]:
        """Call the loaded function.

        Returns ("returned", value, logged), ("raised", type, text, traceback), or ("odd", type, text) for a value that
        cannot be pickled.
        """
        answer = self._request(("call", arguments), seconds)
        self.fresh = False
        return answer

    def _request(self, message: tuple[Any, ...], seconds: float | None) -> tuple[Any, ...]:
        return pickle.loads(base64.b64decode(self.ask(base64.b64encode(pickle.dumps(message)), seconds)))


def pickled(function: Any) -> bytes:
    """A function as bytes, with the globals that it uses if it lives in a notebook or script."""
    if os.name != "posix" or not sys.executable:
        raise CannotSend(f"there are no such subprocesses on {sys.platform}")
    import dill

    class Pickler(dill.Pickler):
        """dill sends a module that is not in site-packages (an editable install, a file beside the notebook) with all
        that is in it, where something never can be pickled; by its name it is imported there.
        """

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, ModuleType) and value.__name__ != "__main__":
                return importlib.import_module, (value.__name__,)
            return NotImplemented

    buffer = io.BytesIO()
    try:
        Pickler(buffer, recurse=True).dump(function)
    except Exception as error:  # dill raises whatever the objects raise
        raise CannotSend(f"it cannot be pickled ({type(error).__name__}: {str(error)[:200]})") from error
    if buffer.tell() > LARGEST:
        raise CannotSend(f"with what it refers to it is {buffer.tell() >> 20} MiB large, over {LARGEST >> 20}")
    return buffer.getvalue()


def digest_of(function: bytes, memory: int | None) -> str:
    """What a worker has loaded, to compare."""
    return hashlib.sha256(function + repr(memory).encode()).hexdigest()


_lock = threading.Lock()
_idle: list[Worker] = []  # kept for the next step


def borrow(digest: str) -> Worker:
    """A worker, if possible one that has the function already; `give_back` it."""
    with _lock:
        for worker in [worker for worker in _idle if not worker.alive]:  # ended, or of the process that forked this one
            _idle.remove(worker)
            worker.close()
        if _idle:  # with another function too: loading costs less than starting a process
            known = max(_idle, key=lambda worker: worker.digest == digest)
            _idle.remove(known)
            return known
    return Worker()


def give_back(worker: Worker) -> None:
    """Keep a worker for the next call, or close it if it has ended."""
    if worker.alive:
        with _lock:
            _idle.append(worker)
    else:
        worker.close()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
