"""The live view: readers of a run's folder. Training never calls into it."""

from rlkit.view.dashboard import Dashboard

__all__ = ["Dashboard"]
