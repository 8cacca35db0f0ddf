"""A process that can be killed, for reward functions that may hang or eat memory.

No thread can be stopped from outside, and a regular expression that backtracks holds Python's lock, so only the end of
a process is a hard bound. A worker is a fresh interpreter (never a fork: threads and CUDA do not survive one; never
multiprocessing's spawn: it runs an unguarded training script again), keeps its function between calls, and is replaced
after a kill. `dill`, which `datasets` brings, sends functions that live in a notebook or in the script itself.

Linux and macOS; elsewhere, and for what cannot be pickled, `rlkit.reward_calls.callers` uses threads and says so.
"""

import atexit
import contextlib
import hashlib
import importlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAM = Path(__file__).with_name("worker_main.py")
START_SECONDS = 120.0  # for the imports of a function's module, on a busy machine; not part of any timeout
END_SECONDS = 1.0  # for a process that has let go of the connection to end by itself
LARGEST = 64 * 2**20  # bytes of a pickled function; one that holds a model stays in this process


class TimedOut(Exception):
    """The time limit ended a call."""


class Died(Exception):
    """The worker ended by itself: out of memory, a crash in C code, os._exit."""


class CannotSend(Exception):
    """A function that cannot be brought into another process; the text says why."""


class Worker:
    """One process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        # sys.path comes first: what the worker imports must not be shadowed by files beside the program.
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_path({str(PROGRAM)!r}, None, '__main__')"
        )
        command = [sys.executable, "-c", start, str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is ours alone, and a kill takes the function's own children along
            )
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.digest: str | None = None
        self.fresh = True  # not called yet: what the function imports when it is called is still to come

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def load(self, function: bytes, memory: int | None) -> bool:
        """Bring a pickled function in, unless it is there; False if memory cannot be limited on this system.

        Raises:
            CannotSend: it cannot be unpickled there.
        """
        digest = digest_of(function, memory)
        if digest == self.digest:
            return True
        try:
            answer = self._exchange(("load", function, memory), START_SECONDS)
        except TimedOut as error:
            raise CannotSend(f"importing it took more than {START_SECONDS:.0f} s") from error
        if answer[0] == "raised":
            raise CannotSend(f"{answer[1]}: {answer[2]}")
        self.digest, self.fresh = digest, True
        return bool(answer[1])

    def call(self, arguments: bytes, seconds: float | None) -> tuple[Any, ...]:
        """Call the loaded function.

        Returns:
            ("returned", value, logged), ("raised", type, text, traceback) or ("odd", type, text) for a value that
            cannot be pickled.

        Raises:
            TimedOut: no answer within `seconds`; the process is gone.
            Died: it ended by itself.
        """
        answer = self._exchange(("call", arguments), seconds)
        self.fresh = False
        return answer

    def _exchange(self, message: tuple[Any, ...], seconds: float | None) -> tuple[Any, ...]:
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds, end) if seconds is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            self._connection.send_bytes(pickle.dumps(message))
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            if not late.is_set():  # it is ending; as what, it can still say itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
            self.kill()
            if late.is_set():
                raise TimedOut from error
            raise Died(_cause(self._process.wait())) from error
        finally:
            if timer is not None:
                timer.cancel()

    def kill(self) -> None:
        """End the process and all that it started, at once. Whoever waits for its answer is told."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already; macOS says so otherwise
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def close(self) -> None:
        """Kill the process and let go of the connection; not while another thread waits for an answer."""
        self.kill()
        self._connection.close()
        self._socket.close()


def _cause(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was ended by {name}"


def pickled(function: Any) -> bytes:
    """A function as bytes, with the globals that it uses if it lives in a notebook or script.

    Raises:
        CannotSend: it holds what cannot be pickled, or too much.
    """
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


class _Pool:
    """Workers that wait for the next step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Worker] = []
        self.busy: list[Worker] = []
        # Linux ends a child with the *thread* that started it, so this one thread starts them all and stays.
        self.starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlkit-starter")


_pool = _Pool()


def borrow(digest: str) -> Worker:
    """A worker, if possible one that has the function already; `give_back` it."""
    with _pool.lock:
        for worker in [worker for worker in _pool.idle if not worker.alive]:
            _pool.idle.remove(worker)
            worker.close()
        place = next((i for i, worker in enumerate(_pool.idle) if worker.digest == digest), None)
        if place is None and _pool.idle:
            place = 0  # loading another function costs less than starting a process
        if place is not None:
            worker = _pool.idle.pop(place)
            _pool.busy.append(worker)
            return worker
    worker = _pool.starter.submit(Worker).result()
    with _pool.lock:
        _pool.busy.append(worker)
    return worker


def give_back(worker: Worker) -> None:
    """Keep a worker for the next call, or close it if it has ended."""
    with _pool.lock:
        _pool.busy.remove(worker)
        if worker.alive:
            _pool.idle.append(worker)
            return
    worker.close()


def worker_pids() -> list[int]:
    """The processes that are kept for reward functions now."""
    with _pool.lock:
        return [worker.pid for worker in (*_pool.idle, *_pool.busy) if worker.alive]


def close_workers() -> None:
    """End every worker; the next call that needs one starts it."""
    with _pool.lock:
        idle, _pool.idle = _pool.idle, []
        for worker in _pool.busy:
            worker.kill()
    for worker in idle:
        worker.close()


def _forget() -> None:
    """In a forked child: the workers are the parent's."""
    global _pool
    _pool = _Pool()


atexit.register(close_workers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
