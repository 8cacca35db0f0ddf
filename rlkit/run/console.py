"""What a run says while it goes: lines, and a progress bar that lines do not tear."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from rlkit import collectives


class Console:
    """Lines and the progress bar of one run."""

    def __init__(self) -> None:
        self._bar: Any = None

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def advance(self) -> None:
        """One step more on the bar."""
        if self._bar is not None:
            self._bar.update()

    @contextlib.contextmanager
    def progress(self, name: str, step: int, max_steps: int, show: bool | None) -> Iterator[None]:
        """A progress bar, on the main process; None shows it in notebooks and terminals, and not in log files."""
        if show is None:
            show = "ipykernel" in sys.modules or sys.stderr.isatty()
        if not show or collectives.rank():
            yield
            return
        from tqdm.auto import tqdm

        with tqdm(total=max_steps, initial=step, desc=name, unit="step", file=sys.stderr) as self._bar:
            try:
                yield
            finally:
                self._bar = None
