"""One event loop in a thread of its own, on which every async reward function of the process runs.

A client such as an HTTP session belongs to the loop on which it was made, so the loop stays for the life of the
process: the first step's session serves the last. It is not the caller's loop, so it works in a script, in a thread and
inside Jupyter's running loop alike, without patching asyncio.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_SECONDS = 2.0  # for cancelled tasks to end, and for a loop to turn
STANDARD_LIBRARY = os.path.dirname(os.__file__)
LOOK_SECONDS = 0.2  # between two calls of `blocked`; a longer pause counts as this


class BackgroundLoop:
    """A running event loop and its thread.

    Example:
        >>> import asyncio
        >>> loop = BackgroundLoop()
        >>> loop.submit(asyncio.sleep(0, "done")).result()
        'done'
        >>> loop.close()
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._turned = threading.Event()  # set by the loop
        self._looked = self._blocked = 0.0
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

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine on the loop. From its own thread that is an error: it would wait for itself."""
        if threading.current_thread() is self.thread:
            work.close()
            raise RuntimeError(
                "score: an async reward function called rl.score with an async reward function; both would wait for "
                "one event loop. Await the inner function instead."
            )
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def answers(self) -> bool:
        """False if the loop is dead, or blocked by code that does not await."""
        if not self.thread.is_alive():
            return False
        turn = threading.Event()
        with contextlib.suppress(RuntimeError):  # closed at this moment
            self.loop.call_soon_threadsafe(turn.set)
        return turn.wait(PATIENCE_SECONDS)

    def watch(self) -> None:
        """Begin to count for `blocked`."""
        self._blocked, self._looked = 0.0, time.monotonic()
        self._turned.clear()
        with contextlib.suppress(RuntimeError):  # closed at this moment
            self.loop.call_soon_threadsafe(self._turned.set)

    def blocked(self) -> float:
        """Seconds for which the loop has not turned, counted from call to call, at most `LOOK_SECONDS` for each: the
        caller may have been stopped itself, by a plain function that held Python's lock.
        """
        if self._turned.is_set():
            self.watch()
        else:
            now = time.monotonic()
            self._blocked, self._looked = self._blocked + min(now - self._looked, LOOK_SECONDS), now
        return self._blocked

    def where(self) -> str:
        """The line at which the thread of the loop is now, the standard library's aside: that which blocks it."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        lines = traceback.extract_stack(frame) if frame else []
        own = (STANDARD_LIBRARY, __file__)
        at = [line for line in lines if not line.filename.startswith(own) or "site-packages" in line.filename]
        return f"{at[-1].name} ({at[-1].filename}:{at[-1].lineno})" if at else "an unknown place"

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
    await end(asyncio.all_tasks() - {asyncio.current_task()})
    await asyncio.get_running_loop().shutdown_asyncgens()


async def end(tasks: "set[asyncio.Task[Any]]") -> None:
    """Cancel tasks and give them a moment to tidy up."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)


_lock = threading.Lock()
_current: BackgroundLoop | None = None


def shared_loop() -> BackgroundLoop:
    """The loop of this process, started at the first call; a new one where the old one is blocked or dead."""
    global _current
    with _lock:
        if _current is not None and threading.current_thread() is not _current.thread and not _current.answers():
            logger.warning(
                "score: the event loop of the async reward functions does not answer: it is blocked in %s, which does "
                "not await. A new loop takes its place.",
                _current.where(),
            )
            _current = None
        if _current is None:
            _current = BackgroundLoop()
        return _current


def abandon(loop: BackgroundLoop) -> None:
    """Give the next call another shared loop: this one is blocked."""
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
