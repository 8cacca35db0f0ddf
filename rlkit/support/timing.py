"""Wall time per phase of a step: `sample`, `score`, `compute_logps`, `loss_step`, and the rest.

Each function is marked with `@phase("sample")`; the run takes the sums at the end of a step. A phase inside another one
(`evaluate` samples and scores) belongs to the outer one, so that the parts add up to the step. Every thread has its own
clock: what another cell evaluates while a loop runs in the background is not the loop's time.

Wall time, without waiting for the GPU: a synchronisation at each border would slow the step. Queued work counts in the
phase that waits for its result; `loss_step` and `sample` wait for theirs themselves.
"""

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rlkit.support.process_state import clock

P = ParamSpec("P")
R = TypeVar("R")


def phase(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function: the wall time of its calls counts as `name`.

    Example:
        >>> @phase("nap")
        ... def nap():
        ...     time.sleep(0.001)
        >>> _ = take(), nap()
        >>> list(take())
        ['nap']
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            if clock.busy:
                return function(*args, **kwargs)
            clock.busy = True
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                clock.busy = False
                clock.seconds[name] = clock.seconds.get(name, 0.0) + time.perf_counter() - started

        return timed

    return mark


def take() -> dict[str, float]:
    """The seconds of each phase on this thread since the last call; the counts start again at 0."""
    found, clock.seconds = clock.seconds, {}
    return found


def with_rest(phases: dict[str, float], whole: float) -> dict[str, float]:
    """The phases and `other`, which together are the whole.

    Example:
        >>> with_rest({"sample": 1.5}, 2.0)
        {'sample': 1.5, 'other': 0.5}
    """
    return phases | {"other": max(0.0, whole - sum(phases.values()))}
