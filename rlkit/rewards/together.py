"""The functions of one `score`: async ones and guarded ones side by side, while the others run here in turn."""

import concurrent.futures
import functools
import inspect
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlkit.rewards.callers import Here, in_thread, tell_once
from rlkit.rewards.isolate import RETRY_BUDGET, guarded, run, run_all_async, run_guarded
from rlkit.rewards.job import Job, Outcome
from rlkit.rewards.loop import BackgroundLoop, shared_loop
from rlkit.rewards.worker import TimedOut

BLOCKED_SECONDS = 5.0  # beyond all timeouts: then an async function blocks the loop instead of awaiting


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
    loop = shared_loop() if apart else None
    awaited: Future[list[Outcome]] | None = None
    try:
        awaited = loop.submit(run_all_async([*apart.values()])) if loop else None
        running = {k: in_thread(lambda k=k: run_guarded(jobs[k], callers[k]))[0] for k in callers}
        for k, job in enumerate(jobs):
            if k not in apart and k not in callers:
                outcomes[k] = run(job, Here(job))
        for k, future in running.items():
            outcomes[k] = future.result()
        if loop and awaited:
            outcomes |= dict(zip(apart, _finish(loop, awaited, [*apart.values()]), strict=True))
    finally:
        if loop and awaited:
            loop.cancel(awaited)
        for caller in callers.values():
            caller.abandon()
    return [outcomes[k] for k in range(len(jobs))]


def _finish(loop: BackgroundLoop, awaited: "Future[list[Outcome]]", jobs: Sequence[Job]) -> list[Outcome]:
    """Wait for the async functions; not for ever, if each has a timeout and one of them blocks the loop."""
    times = [job.limits.timeout for job in jobs if job.limits.timeout is not None]
    seconds = (1 + RETRY_BUDGET) * max(times) + BLOCKED_SECONDS if len(times) == len(jobs) else None
    try:
        return loop.wait(awaited, seconds)
    except TimeoutError:
        tell_once(
            "score: an async reward function blocks the event loop (time.sleep, a plain HTTP call, a long computation) "
            "instead of awaiting; no async function got its rewards in time. Make it a plain def."
        )
    except concurrent.futures.CancelledError as error:
        names = ", ".join(job.name for job in jobs)
        raise RuntimeError(f"score: an async reward function ({names}) was cancelled from inside.") from error
    lost = [Outcome(job) for job in jobs]
    for outcome in lost:
        outcome.lose(list(range(len(outcome.values))), TimedOut())
    return lost
