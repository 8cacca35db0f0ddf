"""Curves of a run's metrics, in plotly."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlkit.metrics import describe

if TYPE_CHECKING:
    import pandas as pd


def plot_metrics(frame: "pd.DataFrame", names: Sequence[str]) -> Any:
    """A plotly figure with one line per metric over the steps.

    Raises:
        KeyError: a metric that was not logged; names those that were.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for name in names:
        if name not in frame:
            raise KeyError(f"run.plot: no metric {name!r} was logged; there are {sorted(frame.columns)}.")
        figure.add_scatter(x=frame["step"], y=frame[name], name=name, mode="lines")
    title = ", ".join(names)
    with contextlib.suppress(KeyError):
        if len(names) == 1:
            title = describe(names[0]).sentence
    return figure.update_layout(title=title, xaxis_title="step", height=360, margin={"t": 48, "b": 40})
