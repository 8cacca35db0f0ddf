"""Metrics as curves of at most about three hundred points, updated at the cost of the new points.

Browsers are slow with a hundred thousand points per curve, so long curves are thinned. Each bucket keeps its lowest and
its highest point, so a spike of one step stays visible. When there are too many buckets, neighbours are merged, at a
constant cost per point over the whole run. Values that are not finite (null in the log) are gaps, and counted.

Left out: averages over a window, which hide jumps.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlkit.run.reader import RunReader

BUCKETS = 150  # two points each; a chart is some 300 pixels wide


@dataclass
class Curve:
    """One metric of one run in bounded space.

    Attributes:
        count: values so far.
        gaps: how many of them are not finite.

    Example:
        >>> curve = Curve(buckets=2)
        >>> curve.extend(range(8), [0, 0, 0, 9, 0, 0, float("nan"), 1])
        >>> [[float(x) for x in part] for part in curve.points()]
        [[0.0, 3.0, 4.0, 7.0], [0.0, 9.0, 0.0, 1.0]]
        >>> curve.gaps, [float(step) for step in curve.gap_steps()]
        (1, [6.0])
    """

    buckets: int = BUCKETS
    count: int = 0
    gaps: int = 0
    last: tuple[float, float] | None = None
    _width: int = 1
    _done: np.ndarray = field(default_factory=lambda: np.empty((0, 8)))
    _tail: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))

    def extend(self, steps: Any, values: Any) -> None:
        """Add (N,) values at (N,) steps; steps may go backwards, values may be NaN or infinite."""
        steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
        if not len(steps):
            return
        place = np.arange(self.count, self.count + len(steps), dtype=np.float64)
        self.count += len(steps)
        self.gaps += int((~np.isfinite(values)).sum())
        self.last = (float(steps[-1]), float(values[-1]))
        self._tail = np.concatenate([self._tail, np.stack([place, steps, values], axis=1)])
        full = len(self._tail) // self._width
        if full:
            rows = self._tail[: full * self._width].reshape(full, self._width, 3)
            self._done = np.concatenate([self._done, _reduce(rows)])
            self._tail = self._tail[full * self._width :]
        while len(self._done) > self.buckets:
            self._done = _merge(self._done)
            self._width *= 2

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """(M,) steps and (M,) values to draw, M at most 2 · buckets + 3; NaN where the line is broken."""
        rows = self._all()
        if not len(rows):
            return np.empty(0), np.empty(0)
        points = np.concatenate([rows[:, 0:3], rows[:, 3:6]])  # (place, step, value) of the lowest and of the highest
        if self.last is not None:
            points = np.concatenate([points, [[self.count - 1, *self.last]]])
        _, first = np.unique(points[:, 0], return_index=True)
        values = points[first, 2]
        return points[first, 1], np.where(np.isfinite(values), values, np.nan)

    def gap_steps(self) -> np.ndarray:
        """The (at most 200) steps where values that are not finite were first seen, one per bucket."""
        rows = self._all()
        steps = rows[rows[:, 6] > 0, 7]
        return steps if len(steps) <= 200 else steps[np.linspace(0, len(steps) - 1, 200).astype(int)]

    def _all(self) -> np.ndarray:
        return np.concatenate([self._done, _reduce(self._tail[None])]) if len(self._tail) else self._done


def _reduce(rows: np.ndarray) -> np.ndarray:
    """Reduce (N,W,3) points (place, step, value) to (N,8): lowest, highest, number of gaps, first gap's step."""
    finite = np.isfinite(rows[..., 2])
    every = np.arange(len(rows))
    low = rows[every, np.where(finite, rows[..., 2], np.inf).argmin(1)]
    high = rows[every, np.where(finite, rows[..., 2], -np.inf).argmax(1)]
    gap = np.where(finite.all(1), np.nan, rows[every, (~finite).argmax(1), 1])
    return np.concatenate([low, high, (~finite).sum(1)[:, None], gap[:, None]], axis=1)


def _merge(done: np.ndarray) -> np.ndarray:
    """Merge neighbouring buckets; an odd last one stays."""
    pairs = done[: len(done) // 2 * 2].reshape(-1, 2, 8)
    points = pairs[..., :6].reshape(-1, 4, 3)
    merged = _reduce(points)
    merged[:, 6] = pairs[..., 6].sum(1)
    merged[:, 7] = np.where(pairs[:, 0, 6] > 0, pairs[:, 0, 7], pairs[:, 1, 7])
    return np.concatenate([merged, done[len(pairs) * 2 :]])


class Series:
    """The curves of one run, by name of the metric."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}

    def update(self, reader: RunReader) -> None:
        """Read what is new. A log that was cut or rewritten (a resumed run) is read from its start."""
        for name in reader.names:
            steps, values = reader.series(name)
            curve = self.curves.get(name)
            if curve is None or not _continues(curve, steps, values):
                curve = self.curves[name] = Curve()
            curve.extend(steps[curve.count :], values[curve.count :])


def _continues(curve: Curve, steps: np.ndarray, values: np.ndarray) -> bool:
    if curve.count > len(steps):
        return False
    now = (float(steps[curve.count - 1]), float(values[curve.count - 1])) if curve.count else None
    return curve.last is None or np.array_equal(np.array(now), np.array(curve.last), equal_nan=True)
