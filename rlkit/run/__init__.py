"""Run: the folder of a run, and the loop's `steps` and `log`."""

from rlkit.run.run import Run

__all__ = ["Run"]
