"""The state of a run as plain HTML, for saved notebooks without a kernel and for pages without widgets.

Charts are images (`<img src="data:image/svg+xml;base64,...">`): JupyterLab strips a bare `<svg>` from a notebook that
it does not trust, and code hosts strip it always. The classes mathjax_ignore (JupyterLab) and tex2jax_ignore
(nbconvert) keep a "$" in a completion from being typeset.

Beside a live view the same HTML is in the cell's output; its style rules hide it while the live view is on the page. So
nothing has to be replaced when a run or a kernel ends.
"""

import base64
import html
import math
from collections.abc import Sequence

from rlkit.run.svg import COLORS, Cells, picture
from rlkit.support.text import UNTYPESET, as_html, table_html, visible
from rlkit.view.panels import Chart, History, charts_of

ROWS, CELL = 8, 160  # completions in the table, characters of a text
SHOWN = ("prompt", "completion", "reward", "advantage", "length", "truncated")
HEAT_COLUMNS = 60
SIZE = (340, 180)


def as_page(histories: Sequence[History], *, name: str = "", note: str = "") -> str:
    """Headline, charts and newest completions as HTML that is safe to show.

    Args:
        histories: the runs.
        name: of the live view that this one stands in for; "" for none.
        note: plain text below.
    """
    many = len(histories) > 1
    images = "".join(_image(chart, histories) for chart in charts_of(histories))
    tables = "".join(_table(history, many) for history in histories[:2])
    lines = "<br>".join(as_html(line) for line in [*map(headline, histories), *advice(histories)])
    style = f"<style>{_rules(name)}</style>" if name else ""
    return (
        f'<div class="rlkit-static {name and name + "-static"} {UNTYPESET}">{style}'
        f"<p>{lines or 'rlkit: the run has not begun.'}</p><div>{images}</div>{tables}"
        f"{note and f'<p><small>{as_html(note)}</small></p>'}</div>"
    )


def headline(history: History) -> str:
    """One line of text: name, step, status, reward and KL of a run."""
    reader = history.reader
    state = reader.state
    parts = [f"Run {visible(reader.name)}"]
    if "step" in state:
        parts.append(
            visible(f"step {state['step']}") + (visible(f" of {state['max_steps']}") if state.get("max_steps") else "")
        )
    if status := state.get("status"):
        parts.append(visible(str(status)))
    for name in ("reward", "kl"):
        curve = history.series.curves.get(name)
        if curve is not None and curve.last is not None:
            value = curve.last[1]
            parts.append(f"{name} {value:.3f}" if math.isfinite(value) else f"{name} -")
    return " · ".join(parts)


def advice(histories: Sequence[History]) -> list[str]:
    """The warnings of each run."""
    many = len(histories) > 1
    said = [(history.reader.name, history.signal.said) for history in histories]
    return [f"{visible(name)}: {text}" if many else text for name, text in said if text]


def as_text(histories: Sequence[History]) -> str:
    """The headlines, for places that show text only."""
    return "\n".join(headline(history) for history in histories) or "rlkit: the run has not begun."


def _rules(name: str) -> str:
    """Style rules: hide this page beside the live view, and give its charts' text the theme's colour."""
    # What follows is JupyterLab's panel for the live view: "Loading widget..." before it, or an error in its place.
    widget = ".jp-OutputArea-child:has(> .jp-OutputArea-output:is(.lm-Panel, .jupyter-widgets))"
    grey = 'text[style*="fill: rgb(119, 119, 119)"]'
    theme = "var(--jp-ui-font-color1, var(--vscode-foreground, rgb(119, 119, 119)))"
    return (
        f"body:has(.{name}-live) .{name}-static {{ display: none; }}"
        f".jp-OutputArea-child:has(.{name}-static) + {widget}:not(:has(.{name}-live)) {{ display: none; }}"
        f".{name}-live {grey} {{ fill: {theme} !important; }}"
        f'body[data-jp-theme-light="false"] .{name}-live :is(.scatterlayer, .infolayer) {{ filter: brightness(1.4); }}'
    )


def _image(chart: Chart, histories: Sequence[History]) -> str:
    svg = chart_as_svg(chart, [history.reader.name for history in histories])
    source = base64.b64encode(svg.encode()).decode()
    return (
        f'<img width="{SIZE[0]}" height="{SIZE[1]}" alt="{html.escape(visible(_spoken(chart)))}" '
        f'src="data:image/svg+xml;base64,{source}">'
    )


def _spoken(chart: Chart) -> str:
    """A chart for a reader who cannot see it: the last values."""
    ends = [(line, [value for value in line.values if math.isfinite(value)]) for line in chart.lines]
    said = ", ".join(f"{line.label} {values[-1]:.4g}" for line, values in ends if values)
    return f"{chart.title}: {said}" if said else chart.title


def chart_as_svg(chart: Chart, runs: Sequence[str]) -> str:
    """One chart as an SVG picture; with several runs their curves are told apart by colour."""
    many = len(runs) > 1
    title = chart.title + f", {chart.unit}" * bool(chart.unit)
    floor = 0.0 if chart.from_zero else None
    if chart.heat is not None:
        keep = slice(None, None, math.ceil(len(chart.heat.steps) / HEAT_COLUMNS))
        shares = chart.heat.shares[:, keep].tolist()
        color = COLORS[chart.run % len(COLORS)]
        cells = Cells(chart.heat.steps[keep].tolist(), chart.heat.rewards.tolist(), shares, color)
        return picture(title, {}, size=SIZE, cells=cells)
    lines = chart.lines
    if many:  # one curve a run: the first of the chart
        lines = tuple(line for line in lines if line.label == lines[0].label)
    curves = {
        (visible(runs[line.run], 24) + " " * line.run if many else line.label): (
            line.steps.tolist(),
            line.values.tolist(),
        )
        for line in lines
    }
    colors = [COLORS[line.run % len(COLORS)] for line in lines] if many else COLORS
    return picture(title, curves, size=SIZE, colors=colors, level=chart.warn, floor=floor, stacked=chart.stacked)


def _table(history: History, many: bool) -> str:
    """The newest completions: the best and the worst."""
    reader = history.reader
    steps = reader.rollout_steps
    frame = reader.rollouts(steps[-1], columns=SHOWN) if steps else None
    if frame is None or not len(frame) or "completion" not in frame:
        return ""
    total = len(frame)
    if "reward" in frame:
        frame = frame.sort_values("reward", ascending=False, kind="stable")
    if total > ROWS:
        frame = frame.iloc[[*range(ROWS // 2), *range(-ROWS // 2, 0)]]
    which = f", the {ROWS // 2} best and the {ROWS // 2} worst of {total}" if total > ROWS else ""
    heading = f"Completions of step {steps[-1]}{which}" + (f" ({reader.name})" if many else "")
    shown = frame[[name for name in SHOWN if name in frame]]
    return table_html(heading, shown.rename(columns={"truncated": "cut off"}), CELL)
