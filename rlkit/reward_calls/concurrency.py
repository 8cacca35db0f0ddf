"""The functions of one `score`: async ones and guarded ones side by side, while the others run here in turn."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from rlkit.reward_calls.async_calls import AsyncCalls
from rlkit.reward_calls.call import Job, Outcome
from rlkit.reward_calls.callers import Here, in_thread, tell_once
from rlkit.reward_calls.isolation import guarded, run, run_guarded


def is_async(function: Any) -> bool:
    """True for `async def`, a partial or bound method of one, and an object whose `__call__` is one.

    Example:
        >>> import asyncio, functools
        >>> is_async(functools.partial(asyncio.sleep, 0)), is_async(len)
        (True, False)
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def run_all(jobs: Sequence[Job]) -> list[Outcome]:
    """What came of each job, in their order. After an error or an interrupt nothing goes on behind the caller's back.

    Raises:
        RuntimeError: a function failed, and that is not tolerated.
        TypeError, ValueError: a function returned what is not one number per completion.
    """
    apart = {k: job for k, job in enumerate(jobs) if is_async(job.function)}
    callers = {k: guarded(job) for k, job in enumerate(jobs) if k not in apart and job.limits.any}
    if any(job.limits.memory is not None for job in apart.values()):
        tell_once("score: memory= does not limit async reward functions; they run in this process.")
    outcomes: dict[int, Outcome] = {}
    calls = AsyncCalls(apart)
    try:
        calls.start()
        running = {k: in_thread(lambda k=k: run_guarded(jobs[k], callers[k]))[0] for k in callers}
        for k, job in enumerate(jobs):
            if k not in apart and k not in callers:
                outcomes[k] = run(job, Here(job))
        for k, future in running.items():
            outcomes[k] = future.result()
        outcomes |= calls.outcomes()
    finally:
        calls.cancel()
        for caller in callers.values():
            caller.abandon()
    return [outcomes[k] for k in range(len(jobs))]
