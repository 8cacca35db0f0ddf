"""Curves of a run's metrics: a plotly figure that carries an SVG of the same curves.

A saved notebook, an HTML page made from it, or a code host cannot draw a plotly figure without its library; they show
the SVG.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlkit.metrics import describe
from rlkit.run.svg import COLORS, picture
from rlkit.support.text import UNTYPESET, as_plotly, visible

if TYPE_CHECKING:
    import pandas as pd

PLOTLY = "application/vnd.plotly.v1+json"


def plot_metrics(frame: "pd.DataFrame", names: Sequence[str]) -> Any:
    """A plotly figure with one line per metric over the steps.

    Raises:
        KeyError: a metric that was not logged; names those that were.
    """
    import plotly.graph_objects as go

    class Curves(go.Figure):
        """A figure that shows itself in plotly's form, as an SVG, and as text; the front end takes what it can draw."""

        _ipython_display_ = None  # plotly's own sends nothing but its own form

        def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {PLOTLY: json.loads(self.to_json()), "image/svg+xml": svg, "text/plain": f"<curves: {title}>"}

        def _repr_html_(self) -> str:
            return f'<div class="{UNTYPESET}">{svg}</div>'  # plotly's own fetches its library from the network

    for name in names:
        if name not in frame:
            raise KeyError(f"run.plot: no metric {name!r} was logged; there are {sorted(frame.columns)}.")
    title = ", ".join(map(visible, names))
    with contextlib.suppress(KeyError):
        if len(names) == 1:
            title = describe(names[0]).sentence
    steps = frame["step"].tolist()
    svg = picture(title, {name: (steps, frame[name].tolist()) for name in names})
    figure = Curves()
    for name, color in zip(names, COLORS * len(names), strict=False):
        figure.add_scatter(x=frame["step"], y=frame[name], name=as_plotly(name), mode="lines", line={"color": color})
    return figure.update_layout(
        title=as_plotly(title, len(title)), xaxis_title="step", height=360, margin={"t": 48, "b": 40}
    )
