"""The charts of a run and their contents, shared by the live figure, the report and the static picture.

A chart appears with its first number, an unknown metric gets a chart of its own. rlkit/metrics.py describes metrics.
"""

import fnmatch
import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlkit.metrics import describe
from rlkit.run.reader import RunReader
from rlkit.view.distribution import HeatMap, Rewards
from rlkit.view.series import Series
from rlkit.view.signal_warning import Signal

MOST_OTHERS = 12  # charts for metrics of the user's own
MOST_HEAT_MAPS = 3
PHASES = "phases/"
LABELS = {"frac_reward_zero_std": "same reward", "frac_no_reward": "no reward"}


@dataclass(frozen=True)
class Plan:
    """A chart that may appear: its title, the metrics in it and their unit, a level to stay below, and whether the axis
    begins at 0.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    warn: float | None = None
    from_zero: bool = False


PLANS = (
    Plan("Reward", ("reward", "rewards/*/mean")),
    Plan("Reward distribution", ()),
    Plan("Groups without signal", ("frac_reward_zero_std", "frac_no_reward"), "share", warn=0.5, from_zero=True),
    Plan("KL to the reference", ("kl",), "nats"),
    Plan("Entropy", ("entropy",), "nats", from_zero=True),
    Plan("Gradient norm", ("grad_norm",), from_zero=True),
    Plan(
        "Completion length",
        tuple(f"completions/{name}_length" for name in ("mean", "min", "max")),
        "tokens",
        from_zero=True,
    ),
    Plan("Cut off by the length limit", ("completions/clipped_ratio",), "share", from_zero=True),
    Plan("Clipped ratios", ("clip_ratio/low_mean", "clip_ratio/high_mean"), "share", from_zero=True),
    Plan("Sampler gap", ("sampler_gap/mean", "sampler_gap/max"), "nats", from_zero=True),
    Plan("V* and implicit reward", ("v_star", "implicit_reward")),
    Plan("Time per phase", (), "s", from_zero=True),
)


@dataclass(frozen=True)
class Line:
    """One curve."""

    run: int  # 0 is the first
    name: str  # of the metric in the log
    label: str  # its short name
    steps: np.ndarray  # (M,)
    values: np.ndarray  # (M,), NaN where the curve is broken
    gap_steps: np.ndarray = field(default_factory=lambda: np.empty(0))  # where the value was not finite
    gaps: int = 0  # number of such values in all


@dataclass(frozen=True)
class Chart:
    """One chart: curves, or a heat map, or curves on top of each other. The unit is that of the vertical axis."""

    title: str
    about: str
    unit: str = ""
    lines: tuple[Line, ...] = ()
    heat: HeatMap | None = None
    run: int = 0  # whose heat map it is
    stacked: bool = False
    warn: float | None = None
    from_zero: bool = False


class History:
    """The data of the charts of one run, kept up to date by `update`."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self.series = Series()
        self.rewards = Rewards()
        self.signal = Signal()
        self.times: tuple[np.ndarray, dict[str, np.ndarray]] = (np.empty(0), {})

    def update(self) -> bool:
        """Take what the reader has. Returns True if more is left to read."""
        self.series.update(self.reader)
        self.signal.update(self.reader)
        self.times = mean_times(self.reader.timings)
        return self.rewards.update(self.reader)


def charts_of(histories: Sequence[History]) -> list[Chart]:
    """The charts that have something to show, in the order of `PLANS`, then those of unknown metrics."""
    charts = []
    for plan in PLANS:
        if plan.title == "Reward distribution":
            charts += _distributions(histories)
        elif plan.title == "Time per phase":
            charts.append(_times(histories))
        else:
            charts.append(_lines(plan, histories))
    names = list(dict.fromkeys(name for history in histories for name in history.series.curves))
    unknown = [name for name in names if not _is_known(name)]
    charts += [_lines(Plan(name, (name,)), histories) for name in unknown[:MOST_OTHERS]]
    return [chart for chart in charts if chart.lines or chart.heat]


@functools.lru_cache(maxsize=512)
def explain(name: str) -> str:
    """What a metric is: sentence, unit, healthy range.

    Example:
        >>> print(explain("frac_no_reward"))
        Share of completions for which every reward function abstained. In share; healthy: 0.
    """
    try:
        metric = describe(name)
    except KeyError:
        return "A number of your own: run.log(..., name=value) or a reward function's log_metric."
    return f"{metric.sentence} In {metric.unit}; healthy: {metric.healthy}."


@functools.lru_cache(maxsize=512)
def wrapped(text: str, width: int = 56) -> str:
    """Text broken for a hover box."""
    return "<br>".join(textwrap.wrap(text, width))


def mean_times(timings: Any, buckets: int = 100) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(M,) steps and (M,) mean seconds by phase, of a table with `step`, `step_time` and `phases/<name>`."""
    names = [name for name in timings.columns if name.startswith(PHASES)] if len(timings) else []
    if not len(timings) or (not names and "step_time" not in timings):
        return np.empty(0), {}
    edges = np.unique(np.linspace(0, len(timings), min(buckets, len(timings)) + 1).astype(int))

    def mean(name: str) -> np.ndarray:
        values = np.nan_to_num(np.asarray(timings[name], dtype=np.float64))
        return np.add.reduceat(values, edges[:-1]) / np.diff(edges)

    steps = np.asarray(timings["step"], dtype=np.float64)[edges[1:] - 1]
    phases = {name.removeprefix(PHASES): mean(name) for name in names}
    return steps, phases | ({"step_time": mean("step_time")} if "step_time" in timings else {})


def _lines(plan: Plan, histories: Sequence[History]) -> Chart:
    lines, about = [], {}
    for run, history in enumerate(histories):
        for pattern in plan.metrics:
            for name in history.series.curves:
                curve = history.series.curves[name]
                if not (name == pattern or fnmatch.fnmatchcase(name, pattern)) or curve.gaps == curve.count:
                    continue
                steps, values = curve.points()
                lines.append(Line(run, name, _label(name), steps, values, curve.gap_steps(), curve.gaps))
                about[_label(name)] = explain(name)
    if len({line.name for line in lines}) == 2 and plan.title == "Reward":  # a single part with weight 1 says it twice
        lines = [line for line in lines if line.name == "reward" or not _same_as_reward(line, lines)]
    text = " ".join(f"{label}: {sentence}" if len(about) > 1 else sentence for label, sentence in about.items())
    return Chart(plan.title, text, plan.unit, tuple(lines), warn=plan.warn, from_zero=plan.from_zero)


def _same_as_reward(line: Line, lines: Sequence[Line]) -> bool:
    reward = next(other for other in lines if other.name == "reward" and other.run == line.run)
    return np.array_equal(line.values, reward.values, equal_nan=True)


def _distributions(histories: Sequence[History]) -> list[Chart]:
    """One heat map for each of the first runs: they cannot be laid over each other."""
    about = (
        "How the completions' rewards are spread, over the steps whose rollouts are kept: the stronger the colour, "
        "the more completions."
    )
    title = "Reward distribution"
    if len(histories) == 1:
        return [Chart(title, about, heat=histories[0].rewards.heat_map())]
    return [
        Chart(f"{title}, run {run + 1}: {history.reader.name}", about, heat=history.rewards.heat_map(), run=run)
        for run, history in enumerate(histories[:MOST_HEAT_MAPS])
    ]


def _times(histories: Sequence[History]) -> Chart:
    title, about = "Time per phase", "Seconds per step, by what the step spent them on; means over neighbouring steps."
    if len(histories) == 1 and len(histories[0].times[1]) > 1:
        steps, phases = histories[0].times
        lines = [
            Line(0, f"phase {name}", name.removeprefix("compute_").removesuffix("_step"), steps, values)
            for name, values in phases.items()
            if name != "step_time"
        ]
        return Chart(title, about, "s", tuple(lines), stacked=True, from_zero=True)
    lines = [
        Line(run, "step_time", "step", history.times[0], history.times[1]["step_time"])
        for run, history in enumerate(histories)
        if "step_time" in history.times[1]
    ]
    return Chart("Time per step", explain("step_time"), "s", tuple(lines), from_zero=True)


def _label(name: str) -> str:
    """The short name in a chart.

    Example:
        >>> [_label(name) for name in ("reward", "rewards/exact/mean", "clip_ratio/low_mean", "completions/max_length")]
        ['reward', 'exact', 'low', 'max']
    """
    if name in LABELS:
        return LABELS[name]
    if name.startswith("rewards/"):
        return name.split("/", 1)[1].removesuffix("/mean")
    short = name.rsplit("/", 1)[-1] if _is_known(name) else name
    return short.removesuffix("_length").removesuffix("_mean") if "/" in name else short


def _is_known(name: str) -> bool:
    try:
        describe(name)
    except KeyError:
        return False
    return True
