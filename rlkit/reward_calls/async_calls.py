"""The async functions of one `score`, awaited together; one that blocks the event loop hurts only itself.

All run on the shared loop, since judges may share a client, and a client belongs to its loop. While a function blocks
it (time.sleep, a plain HTTP call, a long computation) the others' clocks stand, see `isolate`. If it does so for longer
than its own timeout, its rewards are lost and a warning names it. If the loop is not free again a moment later, the
others are asked once more, on a loop that takes its place. From then on the function has a loop of its own.

Left out: a loop for each function from the start, which a shared client would not survive.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlkit.reward_calls import event_loop as loops
from rlkit.reward_calls.call import Job, Outcome
from rlkit.reward_calls.callers import MOST_HUNG, tell_once
from rlkit.reward_calls.event_loop import BackgroundLoop
from rlkit.reward_calls.isolation import run_async
from rlkit.reward_calls.worker import TimedOut

WATCH_SECONDS = 0.05  # between two looks at the loop

_own: "weakref.WeakKeyDictionary[Any, BackgroundLoop | None]" = weakref.WeakKeyDictionary()  # of functions that blocked
_hung: list[BackgroundLoop] = []


class AsyncCalls:
    """The async functions of one `score`. Whoever calls `start` calls `cancel` in the end.

    Args:
        jobs: by their places among the reward functions.
    """

    def __init__(self, jobs: Mapping[int, Job]) -> None:
        self._jobs = dict(jobs)
        self._calls: dict[int, tuple[BackgroundLoop, Future[Outcome]]] = {}
        self._tasks: dict[BackgroundLoop, list[asyncio.Task[Any]]] = {}
        self._outcomes: dict[int, Outcome] = {}

    def start(self) -> None:
        """They run from now on."""
        for place in self._jobs:
            self._start(place)

    def outcomes(self) -> dict[int, Outcome]:
        """Wait for all of them.

        Raises:
            RuntimeError: one failed, and that is not tolerated.
        """
        while self._calls:
            futures = [future for _, future in self._calls.values()]
            done = concurrent.futures.wait(futures, WATCH_SECONDS, concurrent.futures.FIRST_COMPLETED).done
            for place in [place for place, (_, future) in self._calls.items() if future in done]:
                self._outcomes[place] = self._result(place)
            for loop in self._in_use() if not done else ():
                self._look_at(loop)
        return self._outcomes

    def cancel(self) -> None:
        """End what still runs, and give it a moment to tidy up."""
        for _, future in self._calls.values():
            future.cancel()
        for loop in self._in_use():
            if loop.answers():
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    loop.submit(_ended(self._tasks.get(loop, ()))).result(2 * loops.PATIENCE_SECONDS)
        self._calls.clear()

    def _in_use(self) -> list[BackgroundLoop]:
        return list(dict.fromkeys(loop for loop, _ in self._calls.values()))

    def _start(self, place: int) -> None:
        job = self._jobs[place]
        loop = _loop_for(job)
        context = contextvars.copy_context()  # the tasks that the function starts inherit it
        context.run(loops.OWNER.set, job)
        self._calls[place] = loop, context.run(loop.submit, self._noted(loop, job))

    async def _noted(self, loop: BackgroundLoop, job: Job) -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.setdefault(loop, []).append(task)
        return await run_async(job)

    def _result(self, place: int) -> Outcome:
        _, future = self._calls.pop(place)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            name = self._jobs[place].name
            raise RuntimeError(f"score: the async reward function {name!r} was cancelled from inside.") from error

    def _look_at(self, loop: BackgroundLoop) -> None:
        """Lose the function that blocks a loop for too long, and in the end leave the loop to it."""
        holder, seconds = loop.held()
        if not seconds:
            return
        here = [place for place, (one, _) in self._calls.items() if one is loop]
        if not isinstance(holder, Job):  # a callback, of nobody that is known
            for place in here:
                if seconds > (self._jobs[place].limits.timeout or float("inf")) + loops.PATIENCE_SECONDS:
                    self._lose(place)
            return
        ours = any(job is holder for job in self._jobs.values())
        # Without a timeout it may take as long as it likes, unless it is left over from another call.
        timeout = holder.limits.timeout or (float("inf") if ours else loops.PATIENCE_SECONDS)
        if seconds <= timeout:
            return
        anchor = _anchor(holder.function)
        if anchor is not None:
            _own.setdefault(anchor, None)
        for place in here:
            if self._jobs[place] is holder:
                tell_once(
                    f"score: async reward function {holder.name!r} blocks the event loop (time.sleep, a plain HTTP "
                    f"call, a long computation) instead of awaiting, for longer than its timeout of {timeout} s. It "
                    "has a loop of its own from now on; make it a plain def, or let it await."
                )
                self._lose(place)
        if seconds > timeout + loops.PATIENCE_SECONDS:
            loops.leave(loop)
            if anchor is not None:
                _own[anchor] = loop
            self._move([place for place in here if place in self._calls], holder)

    def _move(self, places: Sequence[int], holder: Job) -> None:
        """Ask these functions once more, on another loop."""
        names = ", ".join(repr(self._jobs[place].name) for place in places)
        tell_once(f"score: {holder.name!r} still blocks the event loop; asking {names} again, on another loop.")
        for place in places:
            self._calls.pop(place)[1].cancel()
            self._start(place)

    def _lose(self, place: int) -> None:
        self._calls.pop(place)[1].cancel()
        outcome = self._outcomes[place] = Outcome(self._jobs[place])
        outcome.lose(list(range(len(outcome.values))), TimedOut())


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait for cancelled tasks: what they tidy up is done when an error is seen."""
    if tasks := list(tasks):
        await asyncio.wait(tasks, timeout=loops.PATIENCE_SECONDS)


def _anchor(function: Any) -> Any:
    """What stands for a function from step to step; None if nothing can."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)  # a bound method is made anew at each access
    try:
        weakref.ref(function)
        hash(function)
    except TypeError:
        return None
    return function


def _loop_for(job: Job) -> BackgroundLoop:
    """The shared loop, or its own for a function that has blocked it before.

    Raises:
        RuntimeError: too many earlier calls have never ended.
    """
    anchor = _anchor(job.function)
    if anchor is None or anchor not in _own:
        return loops.shared_loop()
    loop = _own[anchor]
    if loop is not None and not loop.answers():
        _hung[:] = [one for one in (*_hung, loop) if not one.answers()]
        loop = None
        if len(_hung) >= MOST_HUNG:
            raise RuntimeError(
                f"score: {len(_hung)} calls of async reward functions block their event loops and still run, the last "
                f"one of {job.name!r}. Threads cannot be stopped; make it a plain def that can be pickled, so that it "
                "runs in a process that can, or mend it."
            )
    loop = _own[anchor] = loop or BackgroundLoop()
    return loop


def _close() -> None:
    for loop in _own.values():
        if loop is not None:
            loop.close()


atexit.register(_close)
