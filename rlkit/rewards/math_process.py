"""Asks the process in which math-verify runs, within a bound of seconds. One process, started when first needed.

Any thread may ask; questions go one at a time. What takes too long is ended by the kernel, at the worker's own timer; a
worker that does not even say so is killed, and the next question starts another one. At the end of the program nothing
is left.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 120.0  # to import sympy on a busy machine
GRACE_SECONDS = 10.0  # for the kernel's end of a question to be told; a worker that is silent longer is killed


class MathProcess:
    """A process that answers; see `ask`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = -1  # the process that started it: after a fork it is not ours
        self._unread = b""

    def ask(
        self, gold: str, answer: str | None, seconds: float, *, processor_seconds: float | None = None
    ) -> dict[str, Any]:
        """What math-verify says of an answer: "gold", "answer" and "correct", or an "error", which is "late" or not.

        Args:
            gold: the right answer.
            answer: text of the completion; None only parses the gold.
            seconds: wall time.
            processor_seconds: a further bound, that a busy machine does not make shorter; None is `seconds`.

        Raises:
            ImportError: math-verify is not installed.
            RuntimeError: the process cannot be started.
        """
        bounds = {"seconds": seconds, "processor_seconds": seconds if processor_seconds is None else processor_seconds}
        with self._lock:
            process = self._started()
            line = None
            try:
                assert process.stdin is not None
                process.stdin.write((json.dumps({"gold": gold, "answer": answer} | bounds) + "\n").encode())
                process.stdin.flush()
                line = self._line(seconds + GRACE_SECONDS)
            except BrokenPipeError:
                pass
            finally:
                if line is None:  # after an interrupt too: a late answer would be taken for that of the next question
                    self._kill()
            return {"error": "its process ended", "late": True} if line is None else json.loads(line)

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._kill()

    @property
    def pid(self) -> int | None:
        """Its process id, or None."""
        return None if self._process is None or self._owner != os.getpid() else self._process.pid

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._kill()  # what is left of one that has ended
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("rlkit.rewards.accuracy needs math-verify: pip install 'rlkit-llm[math]'.")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the notebook is not for it
        )
        self._owner, self._unread = os.getpid(), b""
        if self._line(START_SECONDS) != b"ready":
            self._kill()
            raise RuntimeError("rlkit.rewards.accuracy: the process for math-verify did not start.")
        return self._process

    def _line(self, seconds: float) -> bytes | None:
        """The next line of its output; None if it does not come in time."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:  # it has ended
                    return None
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


math_process = MathProcess()
atexit.register(math_process.close)
