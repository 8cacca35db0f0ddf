"""A FigureWidget that loses no update and can be drawn by pages that load late.

plotly (7.1) opens the channel to the browser with an empty figure and sends data and layout after it. Changes that
arrive before its five megabytes of JavaScript are loaded are lost, which left empty charts, and a page that is loaded
later gets the figure as it was first displayed. So here the channel is opened when the figure is complete, a new page
gets the present state, and the state is sent after each change too (`keep`).

An update is a trait that is set and reset at once. While another thread handles a message of the browser, traitlets
collects changes, and the two would cancel out: a lock prevents this.
"""

import threading
from copy import deepcopy
from typing import Any

import plotly.graph_objects as go

STATE = ["_widget_layout", "_widget_data"]


class LiveFigure(go.FigureWidget):
    """A figure in a notebook.

    Args:
        figure: what it begins with.
        lock: held while a message of the browser is handled; hold it while you change the figure in another thread.
    """

    _config: Any  # of plotly's, without a type there

    def __init__(self, figure: go.Figure, lock: Any = None) -> None:
        self._guard = lock or threading.RLock()
        self._whole = False
        super().__init__(figure)
        self._config: Any = self._config | {"responsive": True, "displaylogo": False}  # as wide as the cell
        self._whole = True
        self.open()

    def open(self) -> None:
        """Open the channel to the browser, once the figure is complete."""
        if self._whole:
            super().open()

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return all traits, or those asked for, with the present data and layout."""
        if self._whole and (key is None or set(STATE) & set([key] if isinstance(key, str) else key)):
            self._trait_values["_widget_layout"] = deepcopy(self._layout_obj._props)
            self._trait_values["_widget_data"] = deepcopy(self._data)
        return dict(super().get_state(key, drop_defaults))

    def keep(self) -> None:
        """Send the present state, for pages that have not drawn it yet; call it after a change."""
        self.send_state(STATE)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Apply a message of the browser."""
        with self._guard:
            super().set_state(sync_data)
