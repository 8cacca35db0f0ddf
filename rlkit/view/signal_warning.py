"""A warning if more than half of the groups had no signal over ten steps.

If all completions of a prompt got the same reward, every leave-one-out advantage is 0; with two generations and binary
rewards most groups are like that. One such batch may be chance, a mean above one half over ten steps is not. The
warning follows from the log alone and is given once.
"""

import numpy as np

from rlkit.run.reader import RunReader

METRIC = "frac_reward_zero_std"
SHARE, STEPS = 0.5, 10  # of the groups, as a mean over this number of logged steps


class Signal:
    """The warning of one run; `said` is its text, or ""."""

    def __init__(self) -> None:
        self.said = ""
        self._seen = 0

    def update(self, reader: RunReader) -> None:
        """Read what is new; a log that was cut is read from its start."""
        steps, values = reader.series(METRIC) if METRIC in reader.names else (np.empty(0), np.empty(0))
        if len(steps) < self._seen:
            self.said, self._seen = "", 0
        start = max(0, self._seen - STEPS)
        if not self.said and (found := first_without_signal(steps[start:], values[start:])) is not None:
            self.said = (
                f"Since step {found:.0f} more than half of the groups had no signal ({METRIC} above {SHARE:g} over "
                f"{STEPS} steps): all completions of the prompt got the same reward, and the advantages are 0. "
                "Prompts that are neither too easy nor too hard, or more generations, teach more."
            )
        self._seen = len(steps)


def first_without_signal(steps: np.ndarray, shares: np.ndarray) -> float | None:
    """Return the first of the first `STEPS` steps whose mean share is above `SHARE`; None if there are none. A share
    that is NaN is left out.

    Example:
        >>> first_without_signal(np.arange(12), np.array([0.0] * 2 + [0.6] * 10))
        1.0
    """
    known = np.isfinite(shares)
    steps, shares = steps[known], shares[known]
    if len(shares) < STEPS:
        return None
    means = np.lib.stride_tricks.sliding_window_view(shares, STEPS).mean(1)
    above = np.flatnonzero(means > SHARE)
    return float(steps[above[0]]) if len(above) else None
