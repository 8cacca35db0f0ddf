"""A child process that answers lines: started, asked with a deadline, killed with all that it started.

Used for reward functions with limits (`worker`), math-verify (`rewards.math_accuracy`) and the code of completions
(`rewards.code_tests`). What the child runs, and how much memory it may use, is decided by its program.

A child leads a session of its own, so that a kill takes its children along and Ctrl-C does not reach it. It ends with
this process: at exit it is killed; after a crash its standard input ends. A program that may not read its input for
long calls `die_with_parent` or sets a timer of its own.
"""

import atexit
import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WATCH_SECONDS = 0.25  # between two calls of `watch`
END_SECONDS = 1.0  # for a child that has closed its output to end by itself, which gives its exit status


class TimedOut(Exception):
    """A limit ended a wait: that of time, of the size of a line, or `watch`."""


class Died(Exception):
    """The child ended by itself: out of memory, a crash in C code, os._exit."""


class Child:
    """A process that gets lines on its standard input and writes lines to its standard output.

    Args:
        command: program and arguments.
        options: of `subprocess.Popen` (cwd, env, stderr).
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "start_new_session": True}
        popen: Any = subprocess.Popen
        self._process = _starter().submit(popen, command, **options).result()
        os.set_blocking(self._process.stdin.fileno(), False)
        self.pid = self._process.pid
        self._owner = os.getpid()
        self._killed = False
        self._unread = b""
        _children.add(self)

    @property
    def alive(self) -> bool:
        """False once the process has ended, and in a fork of the process that started it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(
        self,
        message: bytes,
        seconds: float | None,
        *,
        limit: int | None = None,
        watch: Callable[[], bool] | None = None,
    ) -> bytes:
        """Send a line, if there is one, and wait for the next line of the answer. After an exception it is killed.

        Args:
            message: without a line end; empty sends nothing.
            seconds: for the answer; None waits without end.
            limit: bytes that the line may have.
            watch: called every `WATCH_SECONDS`; False ends the wait.

        Raises:
            TimedOut: a limit was passed.
            Died: the child ended, or was killed by another thread; the text says how.
        """
        try:
            return self._exchange(message + b"\n" if message else b"", seconds, limit, watch)
        except BaseException:  # after an interrupt too: a late answer would be taken for that of the next message
            self.kill()
            raise

    def _exchange(
        self, message: bytes, seconds: float | None, limit: int | None, watch: Callable[[], bool] | None
    ) -> bytes:
        start = looked = time.monotonic()
        pieces = [self._unread]
        size = len(self._unread)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if message:
                selector.register(self._process.stdin, selectors.EVENT_WRITE)
            while b"\n" not in pieces[-1]:
                now = time.monotonic()
                left = WATCH_SECONDS if seconds is None else start + seconds - now
                if left <= 0 or (limit is not None and size > limit):
                    raise TimedOut
                if watch is not None and now - looked >= WATCH_SECONDS:
                    looked = now
                    if not watch():
                        raise TimedOut
                for key, _ in selector.select(min(left, WATCH_SECONDS)):
                    if key.fileobj is self._process.stdin:
                        with contextlib.suppress(BrokenPipeError):
                            message = message[os.write(key.fd, message[: 1 << 16]) :]
                            if message:
                                continue
                        selector.unregister(key.fileobj)
                    else:
                        pieces.append(os.read(key.fd, 1 << 16))
                        size += len(pieces[-1])
                        if not pieces[-1]:
                            raise Died(self._cause())
                if self._killed:  # its output may be open still, in a process that left the session
                    raise Died(self._cause())
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return line

    def _cause(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()
        code = self._process.wait()
        if code >= 0:
            return f"its process ended with exit status {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its process was ended by {name}"

    def kill(self) -> None:
        """Kill the process and what it started. Any thread may call it; one that waits for an answer gets `Died`."""
        if self._killed or self._owner != os.getpid():
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already ended; macOS raises the latter
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close the pipes; not while another thread waits for an answer."""
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


_children: "weakref.WeakSet[Child]" = weakref.WeakSet()
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _starter() -> ThreadPoolExecutor:
    """The one thread that starts all children: PR_SET_PDEATHSIG ends a child with the *thread* that started it."""
    global _pool
    with _lock:
        _pool = _pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlkit-starter")
        return _pool


def _kill_all() -> None:
    for child in list(_children):
        child.kill()


def _forget() -> None:
    """In a forked child, which has neither the thread nor the children."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


atexit.register(_kill_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
