"""The charts as one plotly figure with a grid of subplots; in a notebook a FigureWidget that is updated in place.

One figure and not one per chart: a FigureWidget sends plotly's five megabytes of JavaScript once per instance. All
new points of a refresh travel in one message, as float64 arrays, which go binary and unchecked; what did not change
is not sent. The figure belongs to the user: only data, positions and what belongs to a new chart are set here, so
that any restyling of fonts, colours or axes stays.

Everything plotly is behind `Charts.draw`; another library would replace this module only.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkit.run.svg import COLORS
from rlkit.support.text import as_plotly
from rlkit.view.panels import Chart, History, Line, charts_of, explain, wrapped

GREY = "#777777"  # legible on white and on black; the live view replaces exactly this colour by the theme's
DASHES = ("solid", "dash", "dot", "dashdot")
STROKES = ("——", "– –", "· · ·", "– ·")
COLUMNS, ROW, TOP, BOTTOM = 3, 190, 26, 36  # charts side by side; pixels
WIDTH = 1100  # of the figure, until a page says how wide it is
NARROWEST, LETTER, LABELS = 300, 6.3, 38  # pixels of a chart, of a letter above it, of the numbers beside it
MOST_TICKS = 5  # rewards that are named one by one
STEPS = {"title": {"text": "step", "font": {"size": 10, "color": GREY}, "standoff": 1}}
WAITING = "waiting"  # name of what is said before the first step


class Charts:
    """The figure of one or several runs.

    Args:
        histories: one per run.
        live: a FigureWidget, for a notebook; else a plain Figure.
        many: colours tell runs apart; by default if there are several. Runs that begin later may be added to
            `histories`.
        lock: held while the figure is changed, by `draw` or by a browser; one of its own by default.

    Attributes:
        figure: the plotly figure, yours to restyle.
    """

    def __init__(self, histories: Sequence[History], *, live: bool, many: bool | None = None, lock: Any = None) -> None:
        import plotly.graph_objects as go

        self.histories = list(histories)
        self._lock, self._live = lock or threading.RLock(), False
        self._many = len(self.histories) > 1 if many is None else many
        figure = go.Figure()
        figure.update_layout(_frame(30 if self._many else 2))
        figure.update_layout(_nothing_yet())
        self._width, self._columns = WIDTH, COLUMNS
        self._charts: dict[str, int] = {}  # title -> number of the subplot
        self._traces: dict[tuple[Any, ...], Any] = {}
        self._titles: dict[str, str] = {}
        self._ticks: dict[str, dict[str, Any]] = {}
        self._sent: dict[tuple[Any, ...], tuple[dict[str, np.ndarray], str]] = {}
        self.figure: Any = figure
        self.draw()
        if live:
            from rlkit.view.figure import LiveFigure

            self.figure, self._live = LiveFigure(self.figure, self._lock), True
            self._traces = dict(zip(self._traces, self.figure.data, strict=True))

    def draw(self) -> bool:
        """Bring the figure up to date with the histories. Returns whether anything was sent."""
        with self._lock:
            news = self._draw()
            if news and self._live:
                self.figure.keep()
            return news

    def fit(self, width: int) -> None:
        """Put as many charts side by side as a page of so many pixels has room for, one to three."""
        columns = min(COLUMNS, max(1, width // NARROWEST))
        with self._lock:
            if width < 1 or (columns, width) == (self._columns, self._width):
                return
            self._width, self._columns = width, columns
            charts = [chart for chart in charts_of(self.histories) if chart.title in self._charts]
            if charts:
                with self.figure.batch_update():
                    self._arrange(
                        [chart.title for chart in charts], {chart.title: chart for chart in charts}, self._named(charts)
                    )
            if charts and self._live:
                self.figure.keep()

    def _draw(self) -> bool:
        charts = charts_of(self.histories)
        new = [chart for chart in charts if chart.title not in self._charts]
        if new:
            self._charts = {title: self._charts.get(title, 0) for title in self._charts} | {
                chart.title: len(self._charts) + place + 1 for place, chart in enumerate(new)
            }
        wanted = [(key, trace) for chart in charts for key, trace in self._traces_of(chart)]
        changed = 0
        before = dict(self._titles)
        notes = self._named(charts)
        with self.figure.batch_update():
            if not new and self._titles != before:
                self.figure.layout.annotations = notes
            if new:
                self._arrange([chart.title for chart in charts], {chart.title: chart for chart in charts}, notes)
            for chart in charts:
                self._mark_rewards(chart)
            for key, trace in wanted:
                if key not in self._traces:
                    continue
                data, mode = _data(trace), trace.get("mode", "")
                if _equal(self._sent[key][0], data):
                    continue
                changed += 1
                target = self._traces[key]
                for name, values in data.items():
                    target[name] = values
                if mode != self._sent[key][1]:
                    target.mode = mode
                self._sent[key] = data, mode
        fresh = [(key, trace) for key, trace in wanted if key not in self._traces]
        if fresh:  # one message for all of them
            start = len(self.figure.data)
            self.figure.add_traces([trace for _, trace in fresh])
            for (key, trace), added in zip(fresh, self.figure.data[start:], strict=True):
                self._traces[key] = added
                self._sent[key] = _data(trace), trace.get("mode", "")
        return bool(changed or fresh)

    def _arrange(self, titles: Sequence[str], charts: dict[str, Chart], notes: list[dict[str, Any]]) -> None:
        """Positions of all subplots; titles and levels of the new ones."""
        rows = math.ceil(len(titles) / self._columns)
        layout = self.figure.layout
        layout.height = rows * ROW + layout.margin.t + layout.margin.b
        shapes = list(layout.shapes)  # in a batch they read as before: set once
        titled = {note.get("name") for note in notes}
        for place, title in enumerate(titles):
            number, chart = self._charts[title], charts[title]
            row, column = divmod(place, self._columns)
            axis = "" if number == 1 else str(number)
            width = 1 / self._columns
            top = 1 - (row * ROW + TOP) / (rows * ROW)
            bottom = 1 - ((row + 1) * ROW - BOTTOM) / (rows * ROW)
            across = [column * width + LABELS / self._width, (column + 1) * width - 0.008]
            if title in titled:
                layout[f"xaxis{axis}"].domain, layout[f"yaxis{axis}"].domain = across, [bottom, top]
                continue
            # Whole axes at once: a message that sets an axis and its domain apart is refused by plotly.js.
            layout[f"xaxis{axis}"] = _axis(f"y{axis}", across) | STEPS | ({"matches": "x"} if axis else {})
            layout[f"yaxis{axis}"] = _axis(f"x{axis}", [bottom, top]) | _y_axis(chart)
            self._ticks[title] = _reward_ticks(chart)
            notes.append(_title(chart, axis, self._many, self._letters))
            if chart.warn is not None:
                shapes.append(_level(chart.warn, axis))
        layout.annotations, layout.shapes = notes, shapes

    @property
    def _letters(self) -> int:
        """That fit above a chart."""
        return int(self._width / self._columns / LETTER)

    def _named(self, charts: Sequence[Chart]) -> list[dict[str, Any]]:
        """The titles in the figure; one names the curves below it, and is set anew where a curve came later."""
        texts = {chart.title: _title(chart, "", self._many, self._letters)["text"] for chart in charts}
        notes = [note.to_plotly_json() for note in self.figure.layout.annotations if note.name != WAITING]
        for note in notes:
            name = note.get("name")
            if name in self._titles and texts.get(name, self._titles[name]) != self._titles[name]:
                note["text"] = texts[name]
        self._titles |= texts
        return notes

    def _mark_rewards(self, chart: Chart) -> None:
        """Where there are few different rewards the axis of a heat map names exactly those."""
        ticks = _reward_ticks(chart)
        if ticks and ticks != self._ticks.get(chart.title):
            number = self._charts[chart.title]
            self.figure.layout[f"yaxis{number if number > 1 else ''}"].update(ticks)
            self._ticks[chart.title] = ticks

    def _traces_of(self, chart: Chart) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        number = self._charts[chart.title]
        axes = {"xaxis": f"x{number if number > 1 else ''}", "yaxis": f"y{number if number > 1 else ''}"}
        if chart.heat is not None:
            return [((chart.title, "heat"), _heat(chart, COLORS[chart.run % len(COLORS)]) | axes)]
        labels = list(dict.fromkeys(line.label for line in chart.lines))
        traces: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for line in chart.lines:
            place = labels.index(line.label)
            color = COLORS[(line.run if self._many else place) % len(COLORS)]
            dash = DASHES[(place if self._many else 0) % len(DASHES)]
            name = as_plotly(self.histories[line.run].reader.name)
            trace = _curve(line, chart, color, dash, name if self._many else "")
            if self._many and place:  # what is compared stands out
                trace |= {"line": {"color": color, "width": 1, "dash": dash}, "opacity": 0.6}
            if self._many:  # once per run: the first curve of the first chart stands in the legend for all of them
                first = self._charts[chart.title] == 1 and place == 0
                trace |= {"name": name, "legendgroup": str(line.run), "showlegend": first}
            traces.append(((chart.title, line.run, line.name), trace | axes))
            if line.gaps and not chart.stacked:
                traces.append(((chart.title, line.run, line.name, "gaps"), _gaps(line, color, str(line.run)) | axes))
        return traces


def _data(trace: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: trace[name] for name in ("x", "y", "z", "customdata") if name in trace}


def _equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(values, other[name], equal_nan=True) for name, values in one.items())


def _is_lone(values: np.ndarray) -> bool:
    """Whether a point has no neighbour to be joined to by a line."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return bool((known[1:-1] & ~known[:-2] & ~known[2:]).any())


def _curve(line: Line, chart: Chart, color: str, dash: str, run: str) -> dict[str, Any]:
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


def _gaps(line: Line, color: str, group: str) -> dict[str, Any]:
    """Crosses where a value is missing, as high as the curve was before."""
    known = np.isfinite(line.values)
    steps, values = line.steps[known], line.values[known]
    heights = (
        values[np.clip(np.searchsorted(steps, line.gap_steps, side="right") - 1, 0, None)] if len(values) else None
    )
    return {
        "type": "scatter",
        "mode": "markers",
        "x": line.gap_steps,
        "y": np.zeros(len(line.gap_steps)) if heights is None else heights,
        "customdata": np.full(len(line.gap_steps), float(line.gaps)),
        "name": as_plotly(line.label),
        "legendgroup": group,
        "showlegend": False,
        "marker": {"symbol": "x-thin", "size": 7, "line": {"color": color, "width": 1.5}},
        "hovertemplate": f"<b>{as_plotly(line.label)}</b> is no finite number at step %{{x}}<br>"
        "(%{customdata} such values in all)<extra></extra>",
    }


def _heat(chart: Chart, color: str) -> dict[str, Any]:
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


def _title(chart: Chart, axis: str, many: bool, letters: int) -> dict[str, Any]:
    """The title, and which curve is which: by colour, or by stroke where colours tell the runs apart."""
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
    return {
        "name": chart.title,
        "text": text,
        "hovertext": wrapped(chart.about, 70),
        "showarrow": False,
        "xref": f"x{axis} domain",
        "yref": f"y{axis} domain",
        "x": 0,
        "y": 1.02,
        "xanchor": "left",
        "yanchor": "bottom",
        "font": {"size": 11.5, "color": GREY},
    }


def _level(warn: float, axis: str) -> dict[str, Any]:
    line = {"color": COLORS[1], "width": 1, "dash": "dot"}
    return {
        "type": "line",
        "xref": f"x{axis} domain",
        "yref": f"y{axis}",
        "x0": 0,
        "x1": 1,
        "y0": warn,
        "y1": warn,
        "line": line,
    }


def _axis(anchor: str, domain: list[float]) -> dict[str, Any]:
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


def _y_axis(chart: Chart) -> dict[str, Any]:
    return ({"rangemode": "tozero"} if chart.from_zero else {}) | _reward_ticks(chart)


def _reward_ticks(chart: Chart) -> dict[str, Any]:
    if chart.heat is None or len(chart.heat.rewards) > MOST_TICKS:
        return {} if chart.heat is None else {"tickmode": "auto", "tickvals": None}
    return {"tickmode": "array", "tickvals": chart.heat.rewards.tolist()}


def _nothing_yet() -> dict[str, Any]:
    """What is seen before the first step: a word, and no axes."""
    hidden = {"visible": False}
    place = {"xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    said = {"name": WAITING, "text": "The charts come with the first step.", "font": {"size": 13, "color": GREY}}
    return {"xaxis": hidden, "yaxis": hidden, "height": 90, "annotations": [said | place]}


def _frame(head: int) -> dict[str, Any]:
    """What holds for the whole figure."""
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
