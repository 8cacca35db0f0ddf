"""The distribution of rewards over the steps whose rollouts were kept.

A mean does not show whether all completions are half right or half of them are right. One column per step, at most two
hundred; only the column `reward` of a rollout is read, once, and a call reads a bounded number of files.
"""

from dataclasses import dataclass

import numpy as np

from rlkit.run.reader import RunReader

COLUMNS, READS, SAMPLES, BINS = 200, 200, 256, 20


@dataclass(frozen=True)
class HeatMap:
    """(R,S) shares of the completions by reward and step, each column sums to 1; (S,) steps; (R,) rewards, or centres
    of bins.
    """

    steps: np.ndarray
    rewards: np.ndarray
    shares: np.ndarray


class Rewards:
    """The rewards of the kept steps of one run."""

    def __init__(self) -> None:
        self._found: dict[int, np.ndarray] = {}

    def update(self, reader: RunReader) -> bool:
        """Read new steps. Returns True if there are more to read."""
        steps = np.array(sorted({*reader.rollout_steps, *self._found}))
        chosen = steps if len(steps) <= COLUMNS else steps[np.linspace(0, len(steps) - 1, COLUMNS).round().astype(int)]
        wanted = [int(step) for step in chosen[::-1]]  # the newest first
        missing = [step for step in wanted if step not in self._found]
        for step in missing[:READS]:
            frame = reader.rollouts(step, columns=["reward"])
            values = np.asarray(frame["reward"], dtype=np.float64) if "reward" in frame else np.empty(0)
            values = np.sort(values[np.isfinite(values)])
            if len(values) > SAMPLES:
                values = np.asarray(np.quantile(values, np.linspace(0, 1, SAMPLES)), dtype=np.float64)
            self._found[step] = values
        if len(self._found) > 2 * COLUMNS:
            self._found = {step: self._found[step] for step in wanted if step in self._found}
        return len(missing) > READS

    def heat_map(self) -> HeatMap | None:
        """Return one row per reward if there are few different ones, else twenty bins; None without data.

        Example:
            >>> found = Rewards()
            >>> found._found = {0: np.array([0.0, 0.0, 0.0, 1.0]), 5: np.array([0.0, 1.0])}
            >>> found.heat_map().shares.tolist()
            [[0.75, 0.5], [0.25, 0.5]]
        """
        columns = {step: values for step, values in sorted(self._found.items()) if len(values)}
        if not columns:
            return None
        every = np.concatenate(list(columns.values()))
        rewards = np.unique(every.round(6))
        if len(rewards) <= 12:
            edges = np.concatenate([[-np.inf], (rewards[1:] + rewards[:-1]) / 2, [np.inf]])
        else:
            edges = np.linspace(every.min(), every.max(), BINS + 1)
            rewards = (edges[1:] + edges[:-1]) / 2
        shares = np.stack([np.histogram(values, edges)[0] / len(values) for values in columns.values()], axis=1)
        return HeatMap(np.array(list(columns), dtype=np.float64), rewards, shares)
