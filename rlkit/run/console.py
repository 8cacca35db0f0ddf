"""What a run prints: lines, and a progress bar that lines do not break."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rlkit.distributed import collectives
from rlkit.support.text import say


class Console:
    """Lines and the progress bar of one run."""

    def __init__(self) -> None:
        self._bar: Any = None

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._bar is None:
            say(text, flush=True)
        else:
            self._bar.write(text)

    def advance(self) -> None:
        """Advance the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    @contextlib.contextmanager
    def progress(self, name: str, step: int, max_steps: int, show: bool | None) -> Iterator[None]:
        """Show a progress bar, on the main process.

        None shows it in notebooks and terminals, not in log files, and only from the main thread: where a front end
        puts a widget that another thread displays is not defined.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if show is None:
            show = in_main_thread and ("ipykernel" in sys.modules or sys.stderr.isatty())
        if not show or collectives.rank():
            yield
            return
        import tqdm
        import tqdm.auto

        kind = tqdm.auto.tqdm if in_main_thread else tqdm.tqdm
        with kind(total=max_steps, initial=step, desc=name, unit="step", file=sys.stderr) as self._bar:
            try:
                yield
            finally:
                self._bar = None
