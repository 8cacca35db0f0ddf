"""One event loop in a thread of its own, on which every async reward function of the process runs.

A client such as an HTTP session belongs to the loop on which it was made, so the loop stays for the life of the
process: the first step's session serves the last. It is not the caller's loop, so it works in a script, in a thread and
inside Jupyter's running loop alike, without patching asyncio. Left out: a choice of loop
implementation.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_SECONDS = 2.0  # for cancelled tasks to end; a loop that does not answer by then is left behind
LOOK_SECONDS = 0.2  # two looks at a loop that are further apart count as so many

# Whose task it is; the tasks that it starts inherit it.
OWNER: ContextVar[Any] = ContextVar("OWNER", default=None)


class BackgroundLoop:
    """A running event loop and its thread.

    Example:
        >>> import asyncio
        >>> loop = BackgroundLoop()
        >>> loop.wait(loop.submit(asyncio.sleep(0, "done")))
        'done'
        >>> loop.close()
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._task)
        self._owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._turned = threading.Event()  # set by the loop
        self._turned.set()
        self._looked = self._held = 0.0
        self.thread = threading.Thread(target=self._run, name="rlkit-rewards", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return  # it was stopped
            except (SystemExit, KeyboardInterrupt) as error:  # of a task that a function started: the loop goes on
                logger.warning("score: %s in a task of an async reward function.", type(error).__name__)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> Any:
        """The task factory of asyncio, whose settings differ between versions of Python."""
        task: Any = asyncio.Task(work, loop=loop, **settings)
        self._owners[task] = OWNER.get()
        return task

    def held(self) -> tuple[Any, float]:
        """Whose task has kept the loop from turning (None: unknown), and for how many seconds; 0.0 if it turns.

        Counted from look to look: a caller that was itself stopped (a plain function held Python's lock) blames nobody.
        """
        now = time.monotonic()
        if self._turned.is_set():
            self._turned.clear()
            self._held, self._looked = 0.0, now
            with contextlib.suppress(RuntimeError):  # closed at this moment
                self.loop.call_soon_threadsafe(self._turned.set)
            return None, 0.0
        self._held, self._looked = self._held + min(now - self._looked, LOOK_SECONDS), now
        task = asyncio.current_task(self.loop)
        return None if task is None else self._owners.get(task), self._held

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine on the loop.

        Raises:
            RuntimeError: called on the loop's own thread, which would then wait for itself.
        """
        if threading.current_thread() is self.thread:
            work.close()
            raise RuntimeError(
                "score: an async reward function called rl.score with an async reward function; both would wait for "
                "one event loop. Await the inner function instead."
            )
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, future: "Future[T]", seconds: float | None = None) -> T:
        """What the coroutine returns. Whatever ends the waiting, an interrupt too, cancels the coroutine.

        Raises:
            TimeoutError: not done within `seconds`.
        """
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError as error:  # another class than TimeoutError before Python 3.11
            self.cancel(future)
            raise TimeoutError(str(error)) from error
        except BaseException:
            self.cancel(future)
            raise

    def cancel(self, future: "Future[Any]") -> None:
        """Cancel a coroutine and give it a moment to tidy up."""
        if not future.done():
            future.cancel()
            self.answers()

    def answers(self) -> bool:
        """False if the loop is dead, or blocked by code that does not await."""
        if not self.thread.is_alive():
            return False
        turn = threading.Event()  # a task that was cancelled before has had its turn when this is set
        with contextlib.suppress(RuntimeError):  # closed at this moment
            self.loop.call_soon_threadsafe(lambda: self.loop.call_soon(lambda: self.loop.call_soon(turn.set)))
        return turn.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """Cancel what is left, stop and close the loop. One that is blocked stays behind in its daemon thread."""
        if not self.loop.is_closed() and self.answers():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result(2 * PATIENCE_SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(PATIENCE_SECONDS)
        if not self.thread.is_alive() and not self.loop.is_closed():
            self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=PATIENCE_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()


_lock = threading.Lock()
_current: BackgroundLoop | None = None


def shared_loop() -> BackgroundLoop:
    """The loop of this process, started at the first call; a new one where the old one is blocked or dead."""
    global _current
    with _lock:
        if _current is not None and threading.current_thread() is not _current.thread and not _current.answers():
            logger.warning(
                "score: the event loop of the async reward functions does not answer: a function blocks it "
                "(time.sleep, a plain HTTP call) instead of awaiting. A new loop takes its place."
            )
            _current = None
        if _current is None:
            _current = BackgroundLoop()
        return _current


def leave(loop: BackgroundLoop) -> None:
    """Let the next call have another shared loop: this one is blocked."""
    global _current
    with _lock:
        if _current is loop:
            _current = None


def _close() -> None:
    if _current is not None:
        _current.close()


def _forget() -> None:
    """In a forked child: the parent's thread is not there."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
