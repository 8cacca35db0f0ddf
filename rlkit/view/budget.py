"""Budget: limits the view to 0.5 % of the wall time, whatever a refresh costs.

All work of the view is done under one lock, and the CPU time of the thread that holds it is charged: refreshes, the
picture after a cell, answers to the browser. Before the next refresh 200 times the charged time must pass, so an
expensive refresh (many runs, long logs, a slow disk) makes refreshes rare, not the loop slow. Not charged: sending, in
a thread of the kernel, a tenth of the rest. tests/view/test_budget.py keeps all below 2 % of the loop's CPU time.

Left out: a share that can be set; `dash.refresh()` shows the newest numbers.
"""

import threading
import time
from types import TracebackType

SHARE = 0.005  # of the wall time; 2 % of what a loop uses that gets a third of a core, with what sending costs
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
        self._began = self._due = 0.0

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
            seconds = time.thread_time() - self._began
            self.spent += seconds
            self._due = max(self._due, time.monotonic()) + seconds / SHARE  # a long rest does not accumulate credit
        self._lock.release()

    @property
    def owes(self) -> bool:
        """Whether less time has passed than was charged for."""
        return self._due > time.monotonic()

    def pause(self) -> float:
        """Return the seconds to wait before reading `owes` again."""
        return max(PAUSE, self._due - time.monotonic())

    def waive(self) -> None:
        """Cancel the debt: the first refresh imports libraries and builds the charts, once."""
        self._due = 0.0
