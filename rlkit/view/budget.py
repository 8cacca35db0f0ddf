"""Budget: limits the view to 1 % of the loop's time, whatever a refresh costs.

All work of the view is done under one lock, and the CPU time of the thread that holds it is charged: refreshes, the
picture after a cell, answers to the browser. Before the next refresh the loop must have run a hundred times as long as
was charged, so an expensive refresh (many runs, long logs, a slow disk) makes refreshes rare, not the loop slow. Not
charged: sending, in a thread of the kernel, a tenth of the rest (tests/view/test_budget.py keeps all below 2 %).

The loop's time is wall time minus the time in which its thread waited for a core: with a third of a core, a limit by
wall time would be 3 %. Linux counts this wait; elsewhere wall time counts. At least a twentieth of the wall time
counts, so that a starved loop is still shown.

Left out: a share that can be set; `dash.refresh()` shows the newest numbers.
"""

import threading
import time
from pathlib import Path
from types import TracebackType

from rlkit.support import process_state

SHARE = 0.01  # of the loop's time
LEAST = 0.05  # share of the wall time that always counts as the loop's
PAUSE = 0.5  # seconds between two refreshes, at least


class Budget:
    """A reentrant lock that accounts for the CPU time spent under it.

    Attributes:
        spent: CPU seconds that were charged.

    Example:
        >>> budget = Budget()
        >>> with budget, budget:
        ...     _ = sum(range(1000))
        >>> budget.spent > 0 and budget.owes and budget.pause() >= PAUSE
        True
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self._lock = threading.RLock()
        self._depth = 0
        self._began = 0.0
        self._clocks: tuple[float, int | None, float] = (time.monotonic(), None, 0.0)
        self._worked = self._due = 0.0

    def __enter__(self) -> "Budget":
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._began = time.thread_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._charge(time.thread_time() - self._began)
        self._lock.release()

    def _charge(self, seconds: float) -> None:
        self._read_clocks()
        self.spent += seconds
        self._due = max(self._due, self._worked) + seconds / SHARE  # a long rest does not accumulate credit

    def _read_clocks(self) -> None:
        before, thread_before, waited_before = self._clocks
        thread = next(iter(process_state.stepping), None)
        self._clocks = time.monotonic(), thread, seconds_without_a_core(thread)
        passed = self._clocks[0] - before
        waited = self._clocks[2] - waited_before if thread == thread_before else 0.0
        self._worked += max(LEAST * passed, passed - waited)

    @property
    def owes(self) -> bool:
        """Whether the loop has not yet run long enough for what was charged."""
        with self._lock:
            self._read_clocks()
            return self._due > self._worked

    def pause(self) -> float:
        """Return the seconds to wait before reading `owes` again."""
        with self._lock:
            self._read_clocks()
            return max(PAUSE, self._due - self._worked)

    def waive(self) -> None:
        """Cancel the debt: the first refresh imports libraries and builds the charts, once."""
        with self._lock:
            self._due = self._worked


def seconds_without_a_core(thread: int | None) -> float:
    """Return how long a thread of this process, given by its native id, was runnable without a core; 0 if unknown."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not Linux, or the thread has ended
        return 0.0
