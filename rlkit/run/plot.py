"""Curves of a run's metrics: plotly where it can be drawn, and a plain picture everywhere else.

A saved notebook, an HTML page made from it, or a code host show no plotly figure without its library (known_faults
B66), so the figure carries an SVG of the same curves beside its data.
"""

import contextlib
import html
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlkit.metrics import describe

if TYPE_CHECKING:
    import pandas as pd

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: safe for colour blindness
PLOTLY = "application/vnd.plotly.v1+json"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 700, 320, 60, 36, 40


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
            return svg  # plotly's own fetches its library from the network

    for name in names:
        if name not in frame:
            raise KeyError(f"run.plot: no metric {name!r} was logged; there are {sorted(frame.columns)}.")
    title = ", ".join(names)
    with contextlib.suppress(KeyError):
        if len(names) == 1:
            title = describe(names[0]).sentence
    svg = curves_as_svg(frame["step"].tolist(), {name: frame[name].tolist() for name in names}, title)
    figure = Curves()
    for name, color in zip(names, COLORS * len(names), strict=False):
        figure.add_scatter(x=frame["step"], y=frame[name], name=name, mode="lines", line={"color": color})
    return figure.update_layout(title=title, xaxis_title="step", height=360, margin={"t": 48, "b": 40})


def curves_as_svg(steps: Sequence[float], curves: dict[str, list[float | None]], title: str) -> str:
    """The curves as one SVG picture; a gap where a value is missing."""
    known = [v for values in curves.values() for v in values if v is not None and math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high == low:
        low, high = low - 0.5, high + 0.5
    first, last = (min(steps), max(steps)) if steps else (0, 1)

    def x(step: float) -> float:
        return LEFT + (step - first) / max(1, last - first) * (WIDTH - LEFT - 20)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{html.escape(title)}</text>',
    ]
    for value in (low, (low + high) / 2, high):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 20}" text-anchor="{anchor}">{step:g}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for place, (name, values) in enumerate(curves.items()):
        color, path, pen = COLORS[place % len(COLORS)], [], "M"
        for step, point in zip(steps, values, strict=True):
            if point is None or not math.isfinite(point):
                pen = "M"
                continue
            path.append(f"{pen}{x(step):.1f} {y(point):.1f}")
            pen = "L"
        parts.append(f'<path d="{" ".join(path)}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        if len(curves) > 1:
            parts.append(f'<text x="{LEFT + 8 + 190 * place}" y="{TOP + 4}" fill="{color}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])
