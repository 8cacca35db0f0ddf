"""Run: the folder of a run, and the loop's `steps` and `log`. RunReader: the same folder, for reading."""

from rlkit.run.reader import RunReader
from rlkit.run.run import Run

__all__ = ["Run", "RunReader"]
