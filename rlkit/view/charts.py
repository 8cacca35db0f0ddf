"""The charts as one plotly figure with a grid of subplots; in a notebook a FigureWidget that is updated in place.

One figure and not one per chart: each FigureWidget sends plotly's five megabytes of JavaScript. A refresh sends one
message with what changed, as float64 arrays, which are sent as binary data. Only data, positions and new charts are
set here, so the user's restyling of fonts, colours or axes stays.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkit.run.svg import COLORS
from rlkit.support.text import as_plotly
from rlkit.view import plotly_parts as parts
from rlkit.view.panels import Chart, History, charts_of
from rlkit.view.plotly_parts import ROW, STEPS, WAITING

DASHES = ("solid", "dash", "dot", "dashdot")
COLUMNS, TOP, BOTTOM = 3, 26, 36  # charts side by side; pixels above and below one
WIDTH = 1100  # of the figure, until a page reports its width
NARROWEST, LETTER, LABELS = 300, 6.3, 38  # pixels of a chart, of a letter above it, of the numbers beside it


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
        figure.update_layout(parts.frame(30 if self._many else 2))
        figure.update_layout(parts.nothing_yet())
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
        """Choose one to three columns to fit `width` pixels."""
        columns = min(COLUMNS, max(1, width // NARROWEST))
        with self._lock:
            if width < 1 or (columns, width) == (self._columns, self._width):
                return
            self._width, self._columns = width, columns
            charts = [chart for chart in charts_of(self.histories) if chart.title in self._charts]
            if charts:
                with self.figure.batch_update():
                    self._arrange(charts, self._named(charts))
            if charts and self._live:
                self.figure.keep()

    def _draw(self) -> bool:
        charts = charts_of(self.histories)
        new = [chart for chart in charts if chart.title not in self._charts]
        for chart in new:
            self._charts[chart.title] = len(self._charts) + 1
        wanted = [(key, trace) for chart in charts for key, trace in self._traces_of(chart)]
        changed = 0
        before = dict(self._titles)
        notes = self._named(charts)
        with self.figure.batch_update():
            if not new and self._titles != before:
                self.figure.layout.annotations = notes
            if new:
                self._arrange(charts, notes)
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

    def _arrange(self, charts: Sequence[Chart], notes: list[dict[str, Any]]) -> None:
        """Set the positions of all subplots, and titles and levels of the new ones."""
        rows = math.ceil(len(charts) / self._columns)
        layout = self.figure.layout
        layout.height = rows * ROW + layout.margin.t + layout.margin.b
        shapes = list(layout.shapes)  # in a batch they read as before: set once
        titled = {note.get("name") for note in notes}
        for place, chart in enumerate(charts):
            number = self._charts[chart.title]
            row, column = divmod(place, self._columns)
            axis = "" if number == 1 else str(number)
            width = 1 / self._columns
            top = 1 - (row * ROW + TOP) / (rows * ROW)
            bottom = 1 - ((row + 1) * ROW - BOTTOM) / (rows * ROW)
            across = [column * width + LABELS / self._width, (column + 1) * width - 0.008]
            if chart.title in titled:
                layout[f"xaxis{axis}"].domain, layout[f"yaxis{axis}"].domain = across, [bottom, top]
                continue
            # Whole axes at once: a message that sets an axis and its domain apart is refused by plotly.js.
            layout[f"xaxis{axis}"] = parts.axis(f"y{axis}", across) | STEPS | ({"matches": "x"} if axis else {})
            layout[f"yaxis{axis}"] = parts.axis(f"x{axis}", [bottom, top]) | parts.y_axis(chart)
            self._ticks[chart.title] = parts.reward_ticks(chart)
            notes.append(parts.title(chart, axis, self._many, self._letters))
            if chart.warn is not None:
                shapes.append(parts.level(chart.warn, axis))
        layout.annotations, layout.shapes = notes, shapes

    @property
    def _letters(self) -> int:
        """The number of letters that fit above a chart."""
        return int(self._width / self._columns / LETTER)

    def _named(self, charts: Sequence[Chart]) -> list[dict[str, Any]]:
        """The titles in the figure; each names the curves below it, and is updated when a curve is added."""
        texts = {chart.title: parts.title(chart, "", self._many, self._letters)["text"] for chart in charts}
        notes = [note.to_plotly_json() for note in self.figure.layout.annotations if note.name != WAITING]
        for note in notes:
            name = note.get("name")
            if name in self._titles and texts.get(name, self._titles[name]) != self._titles[name]:
                note["text"] = texts[name]
        self._titles |= texts
        return notes

    def _mark_rewards(self, chart: Chart) -> None:
        ticks = parts.reward_ticks(chart)
        if ticks and ticks != self._ticks.get(chart.title):
            number = self._charts[chart.title]
            self.figure.layout[f"yaxis{number if number > 1 else ''}"].update(ticks)
            self._ticks[chart.title] = ticks

    def _traces_of(self, chart: Chart) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        number = self._charts[chart.title]
        axes = {"xaxis": f"x{number if number > 1 else ''}", "yaxis": f"y{number if number > 1 else ''}"}
        if chart.heat is not None:
            return [((chart.title, "heat"), parts.heat(chart, COLORS[chart.run % len(COLORS)]) | axes)]
        labels = list(dict.fromkeys(line.label for line in chart.lines))
        traces: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        for line in chart.lines:
            place = labels.index(line.label)
            color = COLORS[(line.run if self._many else place) % len(COLORS)]
            dash = DASHES[(place if self._many else 0) % len(DASHES)]
            name = as_plotly(self.histories[line.run].reader.name)
            trace = parts.curve(line, chart, color, dash, name if self._many else "")
            if self._many and place:  # what is compared stands out
                trace |= {"line": {"color": color, "width": 1, "dash": dash}, "opacity": 0.6}
            if self._many:  # once per run: the first curve of the first chart stands in the legend for all of them
                first = self._charts[chart.title] == 1 and place == 0
                trace |= {"name": name, "legendgroup": str(line.run), "showlegend": first}
            traces.append(((chart.title, line.run, line.name), trace | axes))
            if line.gaps and not chart.stacked:
                traces.append(
                    ((chart.title, line.run, line.name, "gaps"), parts.gaps(line, color, str(line.run)) | axes)
                )
        return traces


def _data(trace: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: trace[name] for name in ("x", "y", "z", "customdata") if name in trace}


def _equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(values, other[name], equal_nan=True) for name, values in one.items())
