"""The panel: completions, groups, token lens and controls of one or several runs, as one widget.

The panel keeps only what the page shows: every question of the browser is answered from the run folders
(`panel_data.answer`). Commands are lines appended to a file there (`rlkit.run.commands.send`), taken by `run.steps`
between two steps. Questions and commands are custom messages, not synced traits: a synced slider sticks while a cell
runs. A page that is loaded late gets its data from `snapshot`, a trait whose value is computed when it is read. What
`refresh` pushes during a run is small: the state of the runs and the newest completions, so that the table grows even
where a running cell keeps the kernel from answering.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import anywidget
import traitlets

from rlkit.run import commands
from rlkit.run.reader import RunReader
from rlkit.view import panel_data
from rlkit.view.export_button import export_notebook
from rlkit.view.javascript import script, style
from rlkit.view.rollout_frame import pick

PUSHED_ROWS = 64
"""Completions that a refresh pushes; the browser asks for more where there are more."""


class Panel(anywidget.AnyWidget):
    """Completions browser of run folders.

    Args:
        readers: the runs (`rlkit.run.reader.RunReader`), the first one shown first.
        controls: show pause, stop, save and the declared numbers of runs that are live.
        fit: is told how many pixels wide the page shows the panel, now and when that changes.
        lock: held while readers are read; hold it while you refresh them in another thread. One of its own by default.
    """

    # As texts: of paths anywidget keeps a watcher on the class, which keeps every panel alive (anywidget issue 929).
    _esm = script()
    _css = style()
    snapshot = traitlets.Int(0).tag(sync=True, to_json=lambda _, panel: panel.snapshot_now())

    def __init__(
        self,
        readers: Sequence[RunReader],
        *,
        controls: bool = True,
        fit: Callable[[int], object] | None = None,
        lock: Any = None,
    ) -> None:
        self.readers = list(readers)
        self.controls = controls
        self.lock = lock or threading.RLock()
        self._fit = fit
        self._remembered: dict[str, Any] = {}
        self._pushed: Any = None
        super().__init__()
        self.on_msg(self._receive)

    def snapshot_now(self) -> dict[str, Any]:
        """All that a page needs which is loaded now: the runs, the newest completions, the reader's place."""
        with self.lock:
            return {
                "controls": self.controls,
                "overview": self._try({"kind": "overview"}),
                "table": self._try({"kind": "table", "limit": PUSHED_ROWS}) if self.readers else None,
                "remembered": self._remembered,
            }

    def refresh(self) -> None:
        """Tell the browser what is new; call it after the readers were refreshed. Sends nothing where nothing is."""
        with self.lock:
            overview = self._try({"kind": "overview"})
            if overview == self._pushed:
                return
            newest = _newest(overview)
            table = None
            if newest is not None and newest != _newest(self._pushed):
                table = self._try({"kind": "table", "limit": PUSHED_ROWS})
            self._pushed = overview
        self.send({"kind": "changed", "overview": overview, "table": table})

    def close(self) -> None:
        """Take the panel off the page and out of the kernel."""
        self.on_msg(self._receive, remove=True)
        self.readers = []
        layout = self.layout  # a widget of its own, which ipywidgets leaves behind
        super().close()
        layout.close()

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of the browser; an error becomes {"error": text}."""
        if request.get("kind") == "command":
            return self._guarded(lambda: self._command(request))
        if request.get("kind") == "export":
            return self._guarded(lambda: export_notebook(request.get("path") or None))
        with self.lock:
            return self._try(request)

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict):
            return
        if content.get("kind") == "remember" and isinstance(content.get("state"), dict):
            self._remembered = content["state"]
        elif content.get("kind") == "width" and isinstance(content.get("width"), int) and self._fit is not None:
            self._fit(content["width"])
        elif content.get("kind") == "request" and isinstance(content.get("request"), dict):
            self.send({"kind": "answer", "id": content.get("id"), "answer": self.respond(content["request"])})

    def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        _, reader = pick(self.readers, request)
        command: Any = request.get("command")
        name, value = (request.get("name"), request.get("value")) if command == "set" else (None, None)
        number = commands.send(reader.path, command, name=name, value=value, by="the view")
        return {"kind": "command", "command": command, "number": number}

    def _try(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._guarded(lambda: panel_data.answer(self.readers, request))

    def _guarded(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return work()
        except Exception as error:  # whatever it is, the person at the panel reads it, and nothing else stops
            return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _newest(overview: Any) -> int | None:
    runs = overview.get("runs") if isinstance(overview, dict) else None
    return runs[0]["steps"][-1] if runs and runs[0]["steps"] else None
