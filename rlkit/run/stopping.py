"""Signals that end a run between two steps.

Ctrl-C (the notebook's interrupt button) and, in scripts, SIGTERM and SIGUSR1 (how clusters announce a preemption) only
set a flag; `run.steps` looks at it when a step is done. A second Ctrl-C within a step stops at once.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

PREEMPTIONS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopFlag:
    """Remembers which signal came.

    Attributes:
        reason: None, "interrupted" or "preempted".
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.reason: str | None = None
        self._say = say

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the signals set the flag; afterwards the handlers of before are back. Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signal.SIGINT: signal.signal(signal.SIGINT, self._on_interrupt)}
        for number in PREEMPTIONS:
            # A kernel or a test runner that has its own idea of SIGTERM keeps it.
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, self._on_preemption)
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) in (self._on_interrupt, self._on_preemption):  # else another loop took over
                    signal.signal(number, handler)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = "interrupted"
        self._say("rlkit: stopping after this step; interrupt again to stop at once")

    def _on_preemption(self, number: int, frame: FrameType | None) -> None:
        self.reason = "preempted"
        self._say(f"rlkit: got {signal.Signals(number).name}, stopping after this step")
