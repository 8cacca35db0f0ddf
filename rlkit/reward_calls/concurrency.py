"""All functions of one `score`: async ones together on the shared loop, limited ones beside them, the others in turn.

A function that blocks the loop (time.sleep, a plain HTTP call, a long computation) stops all the others, and their
clocks, see `isolation`. If the loop stands for two seconds longer than the shortest timeout, it is abandoned: whatever
is not done has run out of time, and the next call gets another loop. Without a timeout it is waited for, as a plain
function is.
"""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlkit.reward_calls import event_loop as loops
from rlkit.reward_calls.arguments import unwrapped
from rlkit.reward_calls.call import Failed, Job, Outcome
from rlkit.reward_calls.callers import MOST_HUNG, Here, in_thread, tell_once
from rlkit.reward_calls.child import TimedOut
from rlkit.reward_calls.event_loop import BackgroundLoop
from rlkit.reward_calls.isolation import guarded, run, run_async, run_guarded

_abandoned: list[BackgroundLoop] = []


class AsyncCalls:
    """The async functions of one `score`, by their places among the reward functions. After `start`, call `cancel`."""

    def __init__(self, jobs: Mapping[int, Job]) -> None:
        self._jobs = dict(jobs)
        self._outcomes: dict[int, Outcome] = {}
        self._loop: BackgroundLoop | None = None
        self._future: Future[None] | None = None
        self._ending = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Start them on the loop; a RuntimeError if too many earlier calls still block their loops."""
        if not self._jobs:
            return
        if len(_abandoned) >= MOST_HUNG:
            _abandoned[:] = [loop for loop in _abandoned if not loop.answers()]
        if len(_abandoned) >= MOST_HUNG:
            raise RuntimeError(
                f"score: {len(_abandoned)} calls of async reward functions block their event loops and still run, the "
                f"last one in {_abandoned[-1].where()}. Threads cannot be stopped; make the function a plain def that "
                "can be pickled, so that it runs in a process that can, or let it await."
            )
        self._loop = loops.shared_loop()
        self._future = self._loop.submit(self._all())
        self._loop.watch()

    async def _all(self) -> None:
        tasks = {asyncio.ensure_future(self._one(place)) for place in self._jobs}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for task in done if (error := task.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            self._ending = True
            await loops.end({task for task in tasks if not task.done()})
            self._ended.set()

    async def _one(self, place: int) -> None:
        try:
            self._outcomes[place] = await run_async(self._jobs[place])
        except asyncio.CancelledError as error:
            if self._ending:
                raise
            name = self._jobs[place].name
            raise RuntimeError(f"score: the async reward function {name!r} was cancelled from inside.") from error

    def outcomes(self) -> dict[int, Outcome]:
        """Wait for all; a RuntimeError if one fails and `on_error="raise"`."""
        if self._future is None or self._loop is None:
            return {}
        shortest = min((job.limits.timeout or float("inf") for job in self._jobs.values()), default=float("inf"))
        while not concurrent.futures.wait([self._future], loops.LOOK_SECONDS).done:
            if self._loop.blocked() > shortest + loops.PATIENCE_SECONDS:
                self._give_up(self._loop)
                return self._outcomes
        self._future.result()
        return self._outcomes

    def _give_up(self, loop: BackgroundLoop) -> None:
        """Abandon a blocked loop; what is not done is lost."""
        loops.abandon(loop)
        _abandoned.append(loop)
        text = (
            f"the event loop of the async reward functions is blocked in {loop.where()}. Let it await instead of "
            "time.sleep, a plain HTTP call or a long computation, or make the function a plain def"
        )
        tell_once(f"score: {text}.")
        for place, job in self._jobs.items():
            if place not in self._outcomes:
                lost = Outcome(job)
                why = Failed("BlockedLoop", text) if job.limits.timeout is None else TimedOut()
                lost.lose(range(len(lost.values)), why)
                self._outcomes[place] = lost

    def cancel(self) -> None:
        """End what still runs, and give it a moment to tidy up."""
        if self._future is not None and self._loop is not None and not self._future.done():
            self._future.cancel()
            if self._loop.answers():
                self._ended.wait(2 * loops.PATIENCE_SECONDS)


def is_async(function: Any) -> bool:
    """True for `async def`, a partial or bound method of one, and an object whose `__call__` is one.

    Example:
        >>> import asyncio, functools
        >>> is_async(functools.partial(asyncio.sleep, 0)), is_async(len)
        (True, False)
    """
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def run_all(jobs: Sequence[Job]) -> list[Outcome]:
    """The outcome of each job, in their order. After an error or an interrupt no call goes on."""
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
