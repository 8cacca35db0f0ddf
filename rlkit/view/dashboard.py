"""Dashboard: the live view of run folders in a notebook, a static picture or text elsewhere.

It only reads the folders, in a daemon thread, so it serves a run in this kernel, in another process and of last week
alike. A fault of it cannot reach the loop: it is noted, and the next refresh tries again. The interval of refreshes
depends on their cost (rlkit/view/budget.py); what a refresh sends does not grow with the run (rlkit/view/series.py).

A cell shows the live view, and beside it a static picture that a saved notebook keeps (rlkit/view/static.py). The
picture is renewed every ten seconds, and after each cell.

Left out: pushing from the loop. Polling four files twice a second costs less than any protocol between the two.
"""

import contextlib
import contextvars
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlkit.run.reader import RunReader
from rlkit.support.notebook import shell
from rlkit.support.text import UNTYPESET, as_html, fits, say
from rlkit.view.budget import PAUSE, Budget
from rlkit.view.frontend import FrontEnd, front_end, missing
from rlkit.view.panels import History
from rlkit.view.static import advice, as_page, as_text

PICTURE_PAUSE = 10.0  # seconds between two static pictures while a live view stands beside them
_OPEN: dict[tuple[str, ...], "Dashboard"] = {}


@runtime_checkable
class RunFolder(Protocol):
    """A run that is being written by this process: what the view needs of `rl.Run`."""

    @property
    def folder(self) -> Path | None:
        """The run's folder, None while it is not chosen."""
        ...

    @property
    def wanted(self) -> Path:
        """The folder that was asked for."""
        ...


class Dashboard:
    """Charts, completions and controls of one or several runs, live.

    In a notebook it shows itself as the last line of a cell, or with `show`. A second dashboard of the same folders
    closes the first. Without a notebook, `print` says where the runs stand; `rlkit view` shows them in a browser.

    Args:
        *runs: folders of runs, `Run` objects, or what `Run.open` returned; several are drawn over each other.
        controls: show the buttons for runs that are going on.
        live: widgets or not; None shows them where the front end is known to draw them.

    Attributes:
        fig: the plotly figure of all charts, yours to restyle; None where there is no live view.
        panel: the widget with completions, token lens and controls; None likewise.
        notes: what the numbers say of the run, what could not be read, and faults of the view, a sentence each.

    Raises:
        ValueError: no run given.
        FileNotFoundError: a folder that is not a run's.

    Example:
        >>> Dashboard()
        Traceback (most recent call last):
        ...
        ValueError: Dashboard: expected at least one run, e.g. rl.Dashboard("runs/rloo-first"), got none.
    """

    def __init__(
        self, *runs: str | os.PathLike[str] | RunFolder | RunReader, controls: bool = True, live: bool | None = None
    ) -> None:
        if not runs:
            raise ValueError('Dashboard: expected at least one run, e.g. rl.Dashboard("runs/rloo-first"), got none.')
        self._waiting: list[RunFolder | None] = []
        self._histories: list[History | None] = []
        for run in runs:
            if isinstance(run, str | os.PathLike | RunReader):
                self._waiting.append(None)
                self._histories.append(History(run if isinstance(run, RunReader) else RunReader(run)))
            else:
                self._waiting.append(run)
                self._histories.append(None)
        self._key = tuple(_name_of(run) for run in runs)
        self._front: FrontEnd = front_end() if live is None else "live" if live and not missing() else "static"
        self._lock = Budget()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown: list[Any] = []  # handles of the static pictures
        self._shown_in: Any = None
        self._name = f"rlkit-{uuid.uuid4().hex[:12]}"
        self._faults: dict[str, str] = {}
        self._more = self._stale = True
        self._pictured = 0.0
        self._charts: Any = None
        self._box: Any = None
        self.fig: Any = None
        self.panel: Any = None
        if self._key in _OPEN:
            _OPEN[self._key].close()
        _OPEN[self._key] = self
        self._guarded(self._take)
        if self._front == "live":
            self._build(controls)

    def _build(self, controls: bool) -> None:
        import ipywidgets

        from rlkit.view.charts import Charts
        from rlkit.view.panel import Panel

        self._charts = Charts(self._known, live=True, many=len(self._histories) > 1, lock=self._lock)
        self.fig = self._charts.figure
        self.panel = Panel(
            [history.reader for history in self._known], controls=controls, fit=self._fit, lock=self._lock
        )
        self._said = ipywidgets.HTML()
        self._box = ipywidgets.VBox([self.fig, self.panel, self._said])
        for name in (f"{self._name}-live", *UNTYPESET.split()):
            self._box.add_class(name)
        self._say()

    def _fit(self, width: int) -> None:
        with self._lock:
            if self._charts is not None:
                self._guarded(lambda: self._charts.fit(width))

    @property
    def _known(self) -> list[History]:
        return [history for history in self._histories if history is not None]

    @property
    def notes(self) -> list[str]:
        """Faults of the view, what of the folders could not be read, and groups that have no signal."""
        read = [note for history in self._known for note in history.reader.notes]
        return [*self._faults.values(), *read, *advice(self._known)]

    def refresh(self) -> bool:
        """Read the folders now, and draw what is new. Returns whether there was anything. Raises nothing."""
        with self._lock:
            if self._closed.is_set():
                return False
            news = bool(self._guarded(self._take))
            if news:
                self._stale = True
                self._guarded(self._draw)
            return news

    def _take(self) -> bool:
        """Read what is new."""
        news = self._more
        for place, run in enumerate(self._waiting):
            if run is not None and run.folder is not None:
                self._histories[place], self._waiting[place] = History(RunReader(run.folder)), None
                news = True
        for history in self._known:
            news |= history.reader.refresh()
        self._more = False
        if news:
            for history in self._known:
                self._more |= history.update()
        return news

    def _draw(self) -> None:
        if self._charts is None:
            return
        self._charts.histories = self._known
        self._charts.draw()
        self.panel.readers = [history.reader for history in self._known]
        self.panel.refresh()
        self._say()

    def _say(self) -> None:
        said = [*advice(self._known), *list(self._faults.values())[-1:]]
        lines = "<br>".join(as_html(line, 400) for line in said)
        style = 'role="status" style="display:block;line-height:1.45"'
        text = f'<small class="{UNTYPESET}" {style}>{lines}</small>' if said else ""
        if text != self._said.value:
            self._said.value = text

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`. A fault is noted once, shown in the view, and never reaches the loop."""
        try:
            return work()
        except Exception as error:  # of any kind: a fault of the view must not stop the run
            text = f"The view had a fault: {type(error).__name__}: {error}"[:500]
            if self._faults.setdefault(type(error).__name__, text) is text and self._box is not None:
                with contextlib.suppress(Exception):
                    self._say()
            return None

    def show(self) -> None:
        """Show it below this cell, and keep it up to date."""
        if self._front == "text":
            self._guarded(self._take)
            say(self)
            return
        from IPython.display import display

        if self._closed.is_set():
            return
        self.refresh()
        self._shown.append(display(self._bundle(), raw=True, display_id=f"{self._name}-{len(self._shown)}"))
        self._shown_in = getattr(shell(), "execution_count", None)
        if self._box is not None:
            view = self._box._repr_mimebundle_()
            view["text/plain"] = "The live view ended with its kernel; its last picture stands above."
            display(view, raw=True)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        context = contextvars.copy_context()  # some kernels find the cell of an output there
        self._thread = threading.Thread(target=context.run, args=(self._watch,), name="rlkit-view", daemon=True)
        self._thread.start()
        if shell() is not None:
            shell().events.register("post_run_cell", self._after_cell)

    def _watch(self) -> None:
        opened = False  # a run's first numbers are shown at once, whatever the cell before has cost
        while not self._closed.wait(self._lock.pause() if opened else PAUSE):
            if opened and self._lock.owes:
                continue
            with self._lock:
                news = self.refresh()
                if self._stale and time.monotonic() - self._pictured > PICTURE_PAUSE:
                    self._guarded(self._renew_picture)
            if news and not opened:
                opened = True
                self._lock.waive()

    def _after_cell(self, result: Any = None) -> None:
        """Renew the picture after a cell, so that a saved notebook shows the present state."""
        with self._lock:
            self.refresh()
            if self._stale and not self._closed.is_set():
                self._guarded(self._renew_picture)

    def _renew_picture(self) -> None:
        bundle = self._bundle()
        for handle in self._shown:
            handle.update(bundle, raw=True)
        self._stale, self._pictured = False, time.monotonic()

    def _bundle(self) -> dict[str, str]:
        """The static picture, as a page and as text."""
        hint = f"A picture of the run. Live again: rl.Dashboard({', '.join(repr(path) for path in self._key)})"
        if absent := missing():
            hint = f"For the live view: pip install {' '.join(absent)}"
        page = as_page(self._known, name=self._name, note=hint)
        return {"text/html": page, "text/plain": as_text(self._known)}

    def close(self) -> None:
        """Stop the thread and close the widgets; the picture stays."""
        with self._lock:
            if self._closed.is_set():
                return
            self._guarded(self._take)
            self._guarded(self._renew_picture)
            self._closed.set()
            if shell() is not None and self._thread is not None:
                with contextlib.suppress(ValueError):
                    shell().events.unregister("post_run_cell", self._after_cell)
            if _OPEN.get(self._key) is self:
                del _OPEN[self._key]
            if self._box is not None:
                for widget in (self._box, self.panel, self._said, self.fig):
                    _close_whole(widget)
            self._charts = self._box = self.panel = None

    def _ipython_display_(self) -> None:
        """As the last line of a cell; not a second time in the cell that showed it."""
        if self._front == "text":
            say(self)
        elif not self._shown or self._shown_in != getattr(shell(), "execution_count", None):
            self.show()

    def __repr__(self) -> str:
        return fits(as_text(self._known))


def _close_whole(widget: Any) -> None:
    """Close a widget with its layout and style, which ipywidgets would keep."""
    for part in list(widget._trait_values.values()):
        if hasattr(part, "close") and hasattr(part, "comm"):
            part.close()
    widget.close()


def _name_of(run: str | os.PathLike[str] | RunFolder | RunReader) -> str:
    """The folder as it was asked for: a run that a cell creates again replaces the view of the one before."""
    if isinstance(run, str | os.PathLike):
        return os.fspath(run)
    return str(run.path if isinstance(run, RunReader) else run.wanted)


def dashboard_of(run: RunFolder, say: Callable[[str], None]) -> Dashboard | None:
    """Show a run in a notebook; None where there is no notebook, or if the view failed, which must not stop the run.

    `say` prints a line.
    """
    if front_end() == "text":
        return None
    try:
        view = Dashboard(run)
        view.show()
    except Exception as error:
        say(f"rlkit: no live view: {type(error).__name__}: {error}")
        return None
    return view
