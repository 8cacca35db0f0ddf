"""The live view: readers of a run's folder. Training never calls into it."""

from rlkit.view.dashboard import Dashboard
from rlkit.view.terminal import show_completions

__all__ = ["Dashboard", "show_completions"]
