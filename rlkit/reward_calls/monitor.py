"""Warn of a reward function that gives every completion the same reward for many steps."""

import logging
import math
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Monitor:
    """Reports, once for each, a reward function that was constant over many steps in a row.

    It reads `rewards/NAME/mean` and `rewards/NAME/std` only, which are the same on
    every process. A step in which the function abstained everywhere is not counted.

    Args:
        patience: steps in a row, at least 2.

    Raises:
        ValueError: patience below 2.

    Example:
        >>> monitor = Monitor(patience=2)
        >>> steps = [{"rewards/f/mean": 1.0, "rewards/f/std": 0.0}] * 3
        >>> [monitor.update(step) for step in steps]
        [[], ["reward function 'f' gave 1 to every completion of the last 2 steps"], []]
    """

    def __init__(self, patience: int = 20) -> None:
        if patience < 2:
            raise ValueError(f"Monitor: patience must be at least 2 steps, got {patience}.")
        self.patience = patience
        self._constant: dict[str, tuple[float, int]] = {}
        self._told: set[str] = set()

    def update(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Add one step's metrics; returns the new findings, which are also logged as warnings."""
        news = []
        for key, spread in metrics.items():
            if not (key.startswith("rewards/") and key.endswith("/std")):
                continue
            name = key.removeprefix("rewards/").removesuffix("/std")
            mean = metrics.get(f"rewards/{name}/mean")
            if spread is None or mean is None or math.isnan(spread):
                continue
            before, count = self._constant.get(name, (mean, 0))
            same = spread == 0 and math.isclose(mean, before, rel_tol=1e-6)
            self._constant[name] = (mean, count + 1 if same else int(spread == 0))
            if self._constant[name][1] >= self.patience and name not in self._told:
                self._told.add(name)
                news.append(
                    f"reward function {name!r} gave {mean:g} to every completion of the last {self.patience} steps"
                )
        for text in news:
            logger.warning("%s; it gives no signal. Is it still needed?", text)
        return news
