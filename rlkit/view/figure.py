"""A FigureWidget whose page can always be made anew, and that loses no update.

plotly (7.1) opens the channel to the browser with an empty figure and sends data and layout after it. Changes are told
to its JavaScript, five megabytes of it; what comes before that is loaded is lost, and a page that was late drew an
empty chart, with nothing to mend it. And what is kept for a page that is loaded later is the figure as it was
displayed, not as it is. So here the channel is opened when the figure is whole, the state of a new page is that of
now, and after each change the state is sent as well (`keep`): a page draws that when its JavaScript is there.

An update is a trait that is set and taken back at once. While a message of the browser is handled, in another thread,
traitlets gathers changes, and the two would cancel out: one lock keeps them apart.
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
        """Make it known to the browser, once it is whole."""
        if self._whole:
            super().open()

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """All traits for a page that begins with this figure, or those asked for."""
        if self._whole and (key is None or set(STATE) & set([key] if isinstance(key, str) else key)):
            self._trait_values["_widget_layout"] = deepcopy(self._layout_obj._props)
            self._trait_values["_widget_data"] = deepcopy(self._data)
        return dict(super().get_state(key, drop_defaults))

    def keep(self) -> None:
        """Send the figure as it is, for pages that have not drawn it yet; call it after a change."""
        self.send_state(STATE)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take what a browser sends."""
        with self._guard:
            super().set_state(sync_data)
