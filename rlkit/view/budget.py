"""What the view may cost the loop beside it: one hundredth, whatever a look at the folder costs.

All of the view's work is done under one lock, and whoever holds it is charged the CPU time of his thread: the looks of
the view's own thread, the picture after a cell, the answers to the browser. Before the next look the loop must have
worked a hundred times as long as was charged. So a dear look (many runs, long logs, a slow disk) makes the looks rare
and not the loop slow. What is not charged is sending, in a thread of the kernel: a tenth of the rest
(docs/decisions.md has the measured share; tests/view/test_budget.py keeps it below one fiftieth).

The loop's time is that of the clock on the wall, without the time in which its thread waited for a core: on a machine
with other work, where the loop gets a third of a core, a view that went by the wall would take three hundredths of it.
Linux says how long a thread waited; elsewhere the wall's time counts. A twentieth of the wall's time counts in any
case: a loop that gets less of a core than that hardly goes on, and somebody wants to see why.

Left out: a share that one can set. Who wants fresher numbers asks for them: `dash.refresh()`.
"""

import threading
import time
from pathlib import Path
from types import TracebackType

from rlkit.support import process_state

SHARE = 0.01  # of the loop's time
LEAST = 0.05  # of the wall's time counts as the loop's in any case
PAUSE = 0.5  # seconds between two looks, at least


class Budget:
    """A lock that may be taken again by its holder, and an account of what was done under it.

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
        self._look_at_clocks()
        self.spent += seconds
        self._due = max(self._due, self._worked) + seconds / SHARE  # a long rest buys no hurry afterwards

    def _look_at_clocks(self) -> None:
        before, thread_before, waited_before = self._clocks
        thread = next(iter(process_state.stepping), None)
        self._clocks = time.monotonic(), thread, seconds_without_a_core(thread)
        passed = self._clocks[0] - before
        waited = self._clocks[2] - waited_before if thread == thread_before else 0.0
        self._worked += max(LEAST * passed, passed - waited)

    @property
    def owes(self) -> bool:
        """Whether the loop has not yet worked long enough for what was charged."""
        with self._lock:
            self._look_at_clocks()
            return self._due > self._worked

    def pause(self) -> float:
        """Seconds to wait before it is worth while to ask `owes` again."""
        with self._lock:
            self._look_at_clocks()
            return max(PAUSE, self._due - self._worked)

    def waive(self) -> None:
        """Forget what is owed: the first look builds the charts and imports what draws them, once."""
        with self._lock:
            self._due = self._worked


def seconds_without_a_core(thread: int | None) -> float:
    """How long a thread of this process could have worked and did not, as others had the cores; 0 where nobody says.

    Args:
        thread: its native id, or None for no thread.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not Linux, or the thread has ended
        return 0.0
