"""The parts of the plotly figure of charts.py as plain dicts: traces, titles, axes, layout."""

from typing import Any

import numpy as np

from rlkit.run.svg import COLORS
from rlkit.support.text import as_plotly
from rlkit.view.panels import Chart, Line, explain, wrapped

GREY = "#777777"  # legible on white and on black; the live view replaces exactly this colour by the theme's
STROKES = ("——", "– –", "· · ·", "– ·")
ROW = 190  # pixels of a row of charts
MOST_TICKS = 5  # rewards that are named one by one
STEPS = {"title": {"text": "step", "font": {"size": 10, "color": GREY}, "standoff": 1}}
WAITING = "waiting"  # name of the annotation before the first step


def _is_lone(values: np.ndarray) -> bool:
    """True if some point has no neighbour to be joined to by a line."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return bool((known[1:-1] & ~known[:-2] & ~known[2:]).any())


def curve(line: Line, chart: Chart, color: str, dash: str, run: str) -> dict[str, Any]:
    """A curve; points without a neighbour get markers."""
    where = f"{run}, step %{{x}}" if run else "step %{x}"
    about = chart.about if chart.stacked else explain(line.name)
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if _is_lone(line.values) else "lines",
        "x": line.steps,
        "y": line.values,
        "name": as_plotly(line.label),
        "showlegend": False,
        "line": {"color": color, "width": 1.6, "dash": dash},
        "marker": {"color": color, "size": 4},
        "hovertemplate": f"<b>{as_plotly(line.label)} %{{y:.4g}}</b> · {where}<br>{wrapped(about)}<extra></extra>",
    }
    if chart.stacked:
        trace |= {"stackgroup": "phases", "line": {"color": color, "width": 0.6}}
    return trace


def gaps(line: Line, color: str, group: str) -> dict[str, Any]:
    """Crosses where a value is missing, as high as the curve was before."""
    known = np.isfinite(line.values)
    steps, values = line.steps[known], line.values[known]
    before = np.clip(np.searchsorted(steps, line.gap_steps, side="right") - 1, 0, None)
    heights = values[before] if len(values) else np.zeros(len(line.gap_steps))
    return {
        "type": "scatter",
        "mode": "markers",
        "x": line.gap_steps,
        "y": heights,
        "customdata": np.full(len(line.gap_steps), float(line.gaps)),
        "name": as_plotly(line.label),
        "legendgroup": group,
        "showlegend": False,
        "marker": {"symbol": "x-thin", "size": 7, "line": {"color": color, "width": 1.5}},
        "hovertemplate": f"<b>{as_plotly(line.label)}</b> is not finite at step %{{x}}<br>"
        "(%{customdata} such values in all)<extra></extra>",
    }


def heat(chart: Chart, color: str) -> dict[str, Any]:
    """A heat map of rewards."""
    assert chart.heat is not None
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return {
        "type": "heatmap",
        "x": chart.heat.steps,
        "y": chart.heat.rewards,
        "z": chart.heat.shares,
        "ygap": 2 if len(chart.heat.rewards) <= MOST_TICKS else 0,
        "showscale": False,
        "showlegend": False,
        "zmin": 0.0,
        "colorscale": [[0, f"rgba({red},{green},{blue},0.03)"], [1, color]],
        "hovertemplate": "<b>%{z:.0%}</b> of the completions: reward %{y:.3g} · step %{x}<br>"
        f"{wrapped(chart.about)}<extra></extra>",
    }


def title(chart: Chart, axis: str, many: bool, letters: int) -> dict[str, Any]:
    """The title with the names of the curves, told apart by colour, or by stroke where colours tell runs apart."""
    unit = f", {chart.unit}" if chart.unit else ""
    text = f"<b>{as_plotly(chart.title)}</b>{unit}"
    labels = list(dict.fromkeys(line.label for line in chart.lines))
    room = letters - len(chart.title) - len(unit)
    for place, label in enumerate(labels if len(labels) > 1 else []):
        room -= len(label) + (6 if many else 2)
        if room < 0:
            text += f"  +{len(labels) - place}"
            break
        if many:
            text += f"  {STROKES[place % len(STROKES)]} {as_plotly(label)}"
        else:
            text += f"  <span style='color:{COLORS[place % len(COLORS)]}'>{as_plotly(label)}</span>"
    position = {"xref": f"x{axis} domain", "yref": f"y{axis} domain", "x": 0, "y": 1.02}
    position |= {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return {
        "name": chart.title,
        "text": text,
        "hovertext": wrapped(chart.about, 70),
        "font": {"size": 11.5, "color": GREY},
    } | position


def level(warn: float, axis: str) -> dict[str, Any]:
    """A dotted horizontal line."""
    line = {"color": COLORS[1], "width": 1, "dash": "dot"}
    place = {"xref": f"x{axis} domain", "yref": f"y{axis}", "x0": 0, "x1": 1, "y0": warn, "y1": warn}
    return {"type": "line", "line": line} | place


def axis(anchor: str, domain: list[float]) -> dict[str, Any]:
    """What all axes have in common."""
    return {
        "anchor": anchor,
        "domain": domain,
        "gridcolor": "rgba(128,128,128,0.22)",
        "zeroline": False,
        "tickfont": {"size": 10, "color": GREY},
        "nticks": 5,
        "ticks": "",
        "exponentformat": "e",
        "ticklabelstandoff": 3,
    }


def y_axis(chart: Chart) -> dict[str, Any]:
    """What belongs to the vertical axis of a chart."""
    return ({"rangemode": "tozero"} if chart.from_zero else {}) | reward_ticks(chart)


def reward_ticks(chart: Chart) -> dict[str, Any]:
    """The axis of a heat map names the rewards if there are few different ones."""
    if chart.heat is None or len(chart.heat.rewards) > MOST_TICKS:
        return {} if chart.heat is None else {"tickmode": "auto", "tickvals": None}
    return {"tickmode": "array", "tickvals": chart.heat.rewards.tolist()}


def nothing_yet() -> dict[str, Any]:
    """The figure before the first step: one sentence, no axes."""
    hidden = {"visible": False}
    place = {"xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    said = {"name": WAITING, "text": "The charts come with the first step.", "font": {"size": 13, "color": GREY}}
    return {"xaxis": hidden, "yaxis": hidden, "height": 90, "annotations": [said | place]}


def frame(head: int) -> dict[str, Any]:
    """The layout of the whole figure."""
    return {
        "template": "none",
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY, "size": 11},
        "margin": {"l": 12, "r": 8, "t": head, "b": 2},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "yref": "paper", "font": {"color": GREY}},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"size": 12}},
        "uirevision": "keep",  # a zoom survives the next point
        "height": ROW,
    }
