"""A word about groups that teach nothing: more than half of them without signal for a while.

Where all completions of a prompt got the same reward, every leave-one-out advantage is 0 (known_faults B44: two
generations with binary rewards leave most groups so). One batch of such groups is chance; ten steps in a row that are
above one half on average are worth a sentence. It follows from the log alone: the same run says the same, and once.
"""

import numpy as np

from rlkit.run.reader import RunReader

METRIC = "frac_reward_zero_std"
SHARE, STEPS = 0.5, 10  # of the groups, on the average of so many logged steps


class Signal:
    """Looks through the log of one run, each line once.

    Attributes:
        said: the sentence; "" until there is a reason for it.
    """

    def __init__(self) -> None:
        self.said = ""
        self._seen = 0

    def update(self, reader: RunReader) -> None:
        """Take what the reader has since the last call; a log that was cut is looked at anew."""
        steps, values = reader.series(METRIC) if METRIC in reader.names else (np.empty(0), np.empty(0))
        if len(steps) < self._seen:
            self.said, self._seen = "", 0
        if not self.said:
            start = max(0, self._seen - STEPS)
            found = first_without_signal(steps[start:], values[start:])
            if found is not None:
                self.said = (
                    f"Since step {found:.0f} more than half of the groups had no signal ({METRIC} above {SHARE:g} over "
                    f"{STEPS} steps): all completions of the prompt got the same reward, and the advantages are 0. "
                    "Prompts that are neither too easy nor too hard, or more generations, teach more."
                )
        self._seen = len(steps)


def first_without_signal(steps: np.ndarray, shares: np.ndarray) -> float | None:
    """The step where the mean of `STEPS` values first was above `SHARE`: the first of these; None if it never was.

    Args:
        steps: (N,).
        shares: (N,) of groups with the same reward in all rows; NaN is left out.

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
