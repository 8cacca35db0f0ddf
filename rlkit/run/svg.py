"""Charts as SVG, for places that cannot draw plotly's: saved notebooks, pages made from them, code hosts.

Not by plotly, which needs a browser and three seconds per picture, nor by matplotlib, which needs 36 times as long
(docs/decisions.md). Text is escaped; values that are not finite are gaps.
"""

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkit.support.text import visible

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: safe for colour blindness
MOST_ROWS = 5  # of a heat map that are named one by one
Points = tuple[Sequence[float], Sequence[float | None]]


@dataclass(frozen=True)
class Cells:
    """A heat map: (S,) positions along, (R,) positions up, and (R,S) shares from 0 to 1."""

    along: Sequence[float]
    up: Sequence[float]
    shares: Sequence[Sequence[float]]
    color: str = COLORS[0]


def picture(
    title: str,
    curves: Mapping[str, Points],
    *,
    size: tuple[int, int] = (700, 320),
    colors: Sequence[str] = COLORS,
    cells: Cells | None = None,
    level: float | None = None,
    floor: float | None = None,
    stacked: bool = False,
) -> str:
    """Return one chart as an SVG element, `size` pixels wide and high.

    `curves` are steps and values by name; `stacked` draws them as areas, which share their steps. `cells` is a heat map
    instead of curves, `level` the height of a dotted line, `floor` a value that the axis must include.
    """
    lines = {name: _finite(points) for name, points in curves.items()}
    if stacked:
        lines = _on_top(lines)
    steps = [step for line in lines.values() for step, _ in line]
    heights = [value for line in lines.values() for _, value in line if not math.isnan(value)]
    if cells is not None:
        steps, heights = list(cells.along), [min(cells.up) - _half(cells.up), max(cells.up) + _half(cells.up)]
    heights += [value for value in (floor, level if heights else None) if value is not None]
    if floor is not None and max(heights) <= floor:
        heights.append(floor + 1)  # all values equal the floor
    plot = _Plot(size, steps, heights, None if cells is None else cells.up)
    parts = [plot.frame(title)]
    if cells is not None:
        parts += plot.cells(cells)
    if level is not None:
        parts.append(plot.level(level))
    painted = list(zip(lines.items(), itertools.cycle(colors), strict=False))
    for (_, line), color in reversed(painted) if stacked else painted:
        parts.append(plot.area(line, color) if stacked else plot.curve(line, color))
    if len(lines) > 1:
        spans = [f'<tspan fill="{color}" dx="8">{_text(name)}</tspan>' for (name, _), color in painted]
        parts.append(f'<text x="0" y="32">{"".join(spans)}</text>')
    return "".join([*parts, "</svg>"])


class _Plot:
    """Data to pixels, and the shapes."""

    left, right, top, bottom = 54, 12, 42, 24

    def __init__(
        self,
        size: tuple[int, int],
        steps: Sequence[float],
        heights: Sequence[float],
        rows: Sequence[float] | None = None,
    ) -> None:
        self.width, self.height = size
        self.first, self.last = (min(steps), max(steps)) if steps else (0.0, 1.0)
        self.low, self.high = (min(heights), max(heights)) if heights else (0.0, 1.0)
        if self.high == self.low:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        if self.high == self.low:  # beyond 2**53 adding a half changes nothing
            self.low, self.high = sorted((self.low / 2, self.high))
        self.marks = list(rows) if rows is not None and len(rows) <= MOST_ROWS else ticks(self.low, self.high)
        if rows is None:
            self.low, self.high = min(self.low, self.marks[0]), max(self.high, self.marks[-1])

    def x(self, step: float) -> float:
        share = (step - self.first) / ((self.last - self.first) or 1)
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        part = 1.0 if math.isfinite(self.high - self.low) else 0.25  # the difference of huge numbers overflows
        share = (value * part - self.low * part) / (self.high * part - self.low * part)
        return self.height - self.bottom - share * (self.height - self.bottom - self.top)

    def frame(self, title: str) -> str:
        """Return the opening tag, background, title and axes."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{_text(title)}" font-family="sans-serif" '
            'font-size="11" fill="#444">',
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>',
            f'<text x="6" y="16" font-size="13" font-weight="bold">{_text(title)}</text>',
        ]
        for value, said in zip(self.marks, labels(self.marks), strict=True):
            y = self.y(value)
            parts.append(
                f'<line x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            )
            parts.append(f'<text x="{self.left - 5}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
        for step, anchor in ((self.first, "start"), (self.last, "end")):
            parts.append(f'<text x="{self.x(step):.1f}" y="{self.height - 9}" text-anchor="{anchor}">{step:g}</text>')
        parts.append(f'<text x="{(self.width + self.left) / 2}" y="{self.height - 9}" text-anchor="middle">step</text>')
        return "".join(parts)

    def curve(self, line: Sequence[tuple[float, float]], color: str) -> str:
        path, pen, dots = [], "M", []
        for place, (step, value) in enumerate(line):
            if math.isnan(value):
                pen = "M"
                continue
            path.append(f"{pen}{self.x(step):.1f} {self.y(value):.1f}")
            after = line[place + 1][1] if place + 1 < len(line) else math.nan
            if pen == "M" and math.isnan(after):  # a point without a neighbour
                dots.append(f'<circle cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="1.8" fill="{color}"/>')
            pen = "L"
        return f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.6"/>' + "".join(dots)

    def area(self, line: Sequence[tuple[float, float]], color: str) -> str:
        """Return the area below a line; drawn from the topmost line to the lowest."""
        path = "L".join(f"{self.x(step):.1f} {self.y(value):.1f}" for step, value in line)
        floor = f"{self.y(self.low):.1f}"
        return f'<path d="M{self.x(line[0][0]):.1f} {floor}L{path}V{floor}Z" fill="{color}"/>' if line else ""

    def level(self, value: float) -> str:
        y = self.y(value)
        return f'<path d="M{self.left} {y:.1f}H{self.width - self.right}" stroke="{COLORS[1]}" stroke-dasharray="2 3"/>'

    def cells(self, cells: Cells) -> list[str]:
        edges = [self.x(step) for step in cells.along]
        ends = [*edges[1:], self.width - self.right]
        tall, most = _half(cells.up), max(max(row) for row in cells.shares) or 1
        parts = []
        for up, row in zip(cells.up, cells.shares, strict=True):
            top, low = self.y(up + tall), self.y(up - tall)
            for start, end, share in zip(edges, ends, row, strict=True):
                if share > 0:
                    parts.append(
                        f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(1.0, end - start):.1f}" '
                        f'height="{low - top:.1f}" fill="{cells.color}" fill-opacity="{share / most:.2f}"/>'
                    )
        return parts


def _text(text: str) -> str:
    """Escape text; control characters, which XML cannot hold, are shown as signs."""
    return html.escape(visible(text))


def ticks(low: float, high: float) -> list[float]:
    """Return three to five round numbers that span `low` to `high`; low < high.

    Example:
        >>> ticks(0.25, 0.875), ticks(0, 8.44)
        ([0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 5.0, 10.0])
    """
    if max(abs(low), abs(high)) > 1e300 or high - low < max(1e-300, 1e-12 * max(abs(low), abs(high))):
        return [low, low / 2 + high / 2, high]  # no round floats near these
    size = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 3.2)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) if abs(step) > 1e-9 else place * step for place in range(first, last + 1)]


def labels(marks: Sequence[float]) -> list[str]:
    """Return numbers as short texts.

    Example:
        >>> labels([0.0, 0.5, 1.0]), labels([0.0, 2e-06]), labels([0.0, 20000.0])
        (['0', '0.5', '1'], ['0', '2e-6'], ['0', '2e4'])
    """
    if 1e-3 <= max(map(abs, marks)) < 1e4 or not any(marks):
        return [f"{mark:.4g}" for mark in marks]
    texts = [f"{mark:.1e}" if mark else "0" for mark in marks]
    return [text.replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e") for text in texts]


def _finite(points: Points) -> list[tuple[float, float]]:
    pairs = zip(*points, strict=True)
    return [(float(step), float(v) if v is not None and math.isfinite(v) else math.nan) for step, v in pairs]


def _on_top(lines: dict[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    """Add to each line those before it."""
    below: list[float] = []
    result = {}
    for name, line in lines.items():
        below = [value + under for (_, value), under in zip(line, below or [0.0] * len(line), strict=True)]
        result[name] = [(step, value) for (step, _), value in zip(line, below, strict=True)]
    return result


def _half(positions: Sequence[float]) -> float:
    """Return half the smallest distance between neighbours, the half height of a cell."""
    return min((after - before for before, after in itertools.pairwise(positions)), default=1.0) / 2
