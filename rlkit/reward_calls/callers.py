"""The ways to call a plain reward function: here, in a process that can be killed, or in a thread that cannot.

A caller takes row numbers and seconds and gives (what the function returned, what it logged), or raises `Failed` or
`TimedOut`.
"""

import inspect
import logging
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # another class than TimeoutError before Python 3.11
from types import SimpleNamespace
from typing import Any

from rlkit.reward_calls import worker as workers
from rlkit.reward_calls.arguments import RewardLog, StepState
from rlkit.reward_calls.call import LOGS, Failed, Job
from rlkit.reward_calls.child import Died, TimedOut
from rlkit.reward_calls.event_loop import shared_loop
from rlkit.reward_calls.worker import CannotSend

logger = logging.getLogger(__name__)

MOST_HUNG = 8
_hung: list[threading.Thread] = []
_told: set[str] = set()


def call_here(job: Job, rows: Sequence[int]) -> tuple[Any, RewardLog]:
    """Call the function in this thread. One that turns out to give an awaitable is awaited on the shared loop."""
    log = RewardLog(len(rows))
    positional, named = job.arguments(rows, log)
    try:
        returned = job.function(*positional, **named)
        if inspect.isawaitable(returned):
            future = shared_loop().submit(awaited(returned))
            try:
                returned = future.result()
            finally:
                future.cancel()  # after an interrupt; nothing otherwise
    except (Failed, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() or a cancelled task must not end the run
        raise Failed.of(error) from error
    return returned, log


async def awaited(value: Any) -> Any:
    """The result of an awaitable. sys.exit() in it becomes `Failed`, since asyncio would end the loop."""
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:
        raise Failed.of(error) from error


class Here:
    """Calls in this thread, without limits."""

    killable = False
    fresh = False

    def __init__(self, job: Job) -> None:
        self.job = job

    def prepare(self) -> None:
        """Do nothing; so do the next two."""

    def abandon(self) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102

    def __call__(self, rows: Sequence[int], seconds: float | None) -> tuple[Any, RewardLog]:
        """Call the function on some of the rows."""
        return call_here(self.job, rows)


class InThread(Here):
    """Calls in a daemon thread of its own: the caller goes on when the time is over, the function cannot be stopped."""

    def __call__(self, rows: Sequence[int], seconds: float | None) -> tuple[Any, RewardLog]:
        """Call the function on some of the rows; a RuntimeError if too many earlier calls have never ended."""
        _hung[:] = [thread for thread in _hung if thread.is_alive()]
        if len(_hung) >= MOST_HUNG:
            raise RuntimeError(
                f"score: {len(_hung)} calls of reward functions ran out of time and still run, the last one of "
                f"{self.job.name!r}. Threads cannot be stopped; make the function picklable, so that it runs in a "
                "process that can, or mend it."
            )
        future, thread = in_thread(lambda: call_here(self.job, rows))
        try:
            return future.result(seconds)
        except FutureTimeout as error:
            if future.done():  # it ended just after the time (its own TimeoutError would be Failed)
                return future.result()
            _hung.append(thread)
            raise TimedOut from error


class InWorker:
    """Calls in a subprocess, which is killed when the time is over and replaced for the next call."""

    killable = True

    def __init__(self, job: Job) -> None:
        self.job = job
        self._function = workers.pickled(job.function)
        self._worker: workers.Worker | None = None
        self._abandoned = False

    @property
    def fresh(self) -> bool:
        """True if the next call is the first of its process, which may have to import what the function needs."""
        return self._worker is None or self._worker.fresh

    def __call__(self, rows: Sequence[int], seconds: float | None) -> tuple[Any, RewardLog]:
        """Call the function on some of the rows."""
        message = self._message(rows)
        worker = self.prepare()
        try:
            kind, *rest = worker.call(message, seconds)
        except Died as error:
            raise Failed("ProcessDied", str(error)) from error
        if kind == "raised":
            if rest[0] == "MemoryError":
                worker.kill()  # its state may be broken
            raise Failed(*rest)
        if kind == "odd":
            raise TypeError(
                f"score: reward function {self.job.name!r} must return {len(rows)} rewards, one number or None per "
                f"completion; got {rest[0]}: {rest[1]!r}."
            )
        returned, logged = rest
        log = RewardLog(len(rows))
        for word, name, value in logged:
            try:
                (log.extra if word == "log_extra" else log.metric)(name, value)
            except (ValueError, TypeError) as error:
                raise Failed.of(error) from error
        return returned, log

    def _message(self, rows: Sequence[int]) -> bytes:
        positional, named = self.job.arguments(rows, None)
        state = named.get("trainer_state")
        if isinstance(state, StepState):  # without rlkit, which would bring torch
            named["trainer_state"] = SimpleNamespace(**vars(state), step=state.step)
        logs = [name for name in LOGS if name in self.job.accepted.named]
        try:
            return pickle.dumps((positional, named, logs))
        except Exception as error:  # of a column or the user's state
            raise CannotSend(f"its arguments cannot be pickled ({type(error).__name__}: {error})") from error

    def prepare(self) -> workers.Worker:
        """Start a process, if there is none, and bring the function in."""
        if self._worker is not None and not self._worker.alive:
            self.close()
        if self._worker is None and not self._abandoned:
            self._worker = workers.borrow(workers.digest_of(self._function, self.job.limits.memory))
            self._load(self._worker)
        # `abandon` may come at each of these steps, when there is no process to kill yet.
        if self._abandoned or self._worker is None:
            if self._worker is not None:
                self._worker.kill()
            raise TimedOut
        return self._worker

    def _load(self, worker: workers.Worker) -> None:
        if self._abandoned:
            return
        try:
            if not worker.load(self._function, self.job.limits.memory):
                tell_once(f"score: the memory of {self.job.name!r} cannot be limited on this system.")
        except Died as error:
            if not self._abandoned:  # else its end was ours
                raise CannotSend(f"importing it ended the process: {error}") from error

    def abandon(self) -> None:
        """End a call that runs in another thread, and refuse further ones."""
        self._abandoned = True
        if self._worker is not None:
            self._worker.kill()

    def close(self) -> None:
        """Return the process to the pool."""
        if self._worker is not None:
            workers.give_back(self._worker)
            self._worker = None


def in_thread(work: Any) -> tuple["Future[Any]", threading.Thread]:
    """Run `work()` in a daemon thread; Python would join an executor's threads at exit, even if they hang."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised in the waiting thread
            future.set_exception(error)

    thread = threading.Thread(target=run, name="rlkit-reward", daemon=True)
    thread.start()
    return future, thread


def tell_once(text: str) -> None:
    """A warning that comes once per process."""
    if text not in _told:
        _told.add(text)
        logger.warning("%s", text)
