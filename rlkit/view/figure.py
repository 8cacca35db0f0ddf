"""A FigureWidget whose page can always be made anew, and that loses no update.

plotly (7.1) opens the channel to the browser with an empty figure and sends data and layout after it; a page that draws
in between shows an empty chart for ever, because later changes of those two are not looked at. And what it keeps for a
page that is loaded later is the figure as it was displayed, not as it is. So here the channel is opened when the figure
is whole, and the state of a new page is that of now.

An update is a trait that is set and taken back at once. While a message of the browser is handled, in another thread,
traitlets gathers changes, and the two would cancel out: one lock keeps them apart.
"""

import threading
from copy import deepcopy
from typing import Any

import plotly.graph_objects as go


class LiveFigure(go.FigureWidget):
    """A figure in a notebook.

    Args:
        figure: what it begins with.
        lock: held while a message of the browser is handled; hold it while you change the figure in another thread.
    """

    def __init__(self, figure: go.Figure, lock: Any = None) -> None:
        self._guard = lock or threading.RLock()
        self._whole = False
        super().__init__(figure)
        self._config = self._config | {"responsive": True, "displaylogo": False}  # as wide as the cell
        self._whole = True
        self.open()

    def open(self) -> None:
        """Make it known to the browser, once it is whole."""
        if self._whole:
            super().open()

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """All traits for a page that begins with this figure, or those asked for."""
        if key is None and self._whole:
            self._trait_values["_widget_layout"] = deepcopy(self._layout_obj._props)
            self._trait_values["_widget_data"] = deepcopy(self._data)
        return dict(super().get_state(key, drop_defaults))

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take what a browser sends."""
        with self._guard:
            super().set_state(sync_data)
