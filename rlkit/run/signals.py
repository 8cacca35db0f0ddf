"""Signals that end a run between two steps.

Ctrl-C (the notebook's interrupt button) and, in scripts, SIGTERM and SIGUSR1 (by which clusters announce a preemption)
set a flag; `run.steps` reads it when a step is done. A second Ctrl-C within a step stops at once.

A handler may interrupt a print, in which another print would fail. So a thread prints the handlers' messages
(queue.SimpleQueue can be filled from a handler).
"""

import contextlib
import contextvars
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rlkit.run.status import SignalReason

PREEMPTIONS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
SECOND_SECONDS = 3.0  # a cluster and a launcher may both pass on one signal
_early: list[float] = []  # when preemptions came before the first step


class StopFlag:
    """The received signal as a reason to stop; None if none was received. `say` prints a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.reason: SignalReason | None = None
        self._say = say
        self._words: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; the earlier handlers are restored. Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with self._printing():
            before = {signal.SIGINT: signal.signal(signal.SIGINT, self._on_interrupt)}
            for number in PREEMPTIONS:
                # A kernel or a test runner that has its own handler keeps it.
                if signal.getsignal(number) in (signal.SIG_DFL, _remember):
                    signal.signal(number, self._on_preemption)
                    before[number] = signal.SIG_DFL
            if _early:
                self.reason = "preempted"
                _early.clear()
            try:
                yield
            finally:
                for number, handler in before.items():
                    if signal.getsignal(number) in (self._on_interrupt, self._on_preemption):  # else another took over
                        signal.signal(number, handler)

    @contextlib.contextmanager
    def _printing(self) -> Iterator[None]:
        said = threading.Event()

        def talk() -> None:
            for text in iter(self._words.get, None):
                self._say(text)
            said.set()

        # With this cell's context: a kernel finds the cell of an output there.
        threading.Thread(target=contextvars.copy_context().run, args=(talk,), name="rlkit-talk", daemon=True).start()
        try:
            yield
        finally:
            self._words.put(None)
            said.wait(timeout=5)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = "interrupted"
        self._words.put("rlkit: stopping after this step; interrupt again to stop at once")

    def _on_preemption(self, number: int, frame: FrameType | None) -> None:
        self.reason = "preempted"
        self._words.put(f"rlkit: got {signal.Signals(number).name}, stopping after this step")


def expect_preemption() -> None:
    """Hold a first SIGTERM or SIGUSR1 back until the first `run.steps`, which saves; a second one ends at once.

    For scripts: loading a model takes minutes, and a job that dies there is not requeued.
    """
    if threading.current_thread() is threading.main_thread():
        for number in PREEMPTIONS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _remember)


def _remember(number: int, frame: FrameType | None) -> None:
    if _early and time.monotonic() - _early[0] > SECOND_SECONDS:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if _early:
        return
    _early.append(time.monotonic())
    with contextlib.suppress(OSError):
        name = signal.Signals(number).name
        os.write(2, f"rlkit: got {name}, stopping before the first step; once more to end at once\n".encode())
