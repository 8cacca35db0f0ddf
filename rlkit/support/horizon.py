"""How long the loop around a step is: `run.steps` says it, `score` hands it to rewards as `trainer_state.max_steps`.

A leaf that both may know, so that a reward with a schedule works in a loop which never mentions it. Every thread has
its own: a loop in the background does not lend its length to what other cells score.
"""

import threading


class _Horizon(threading.local):
    max_steps: int | None = None


_horizon = _Horizon()


def max_steps() -> int | None:
    """Steps of the loop that runs in this thread, or None outside a loop.

    Example:
        >>> max_steps() is None
        True
    """
    return _horizon.max_steps


def set_max_steps(steps: int | None) -> None:
    """Say how long the loop is that begins in this thread; None when it has ended."""
    _horizon.max_steps = steps
