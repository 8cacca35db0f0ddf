"""Calls on all rows, then row by row: one bad completion must not cost the others their rewards.

A function is called once on all rows. Where that call fails or runs out of time, the rows are tried again one by one
(group by group for a function that asks for `group_ids`): the one that raises or hangs is found and lost, the others
keep what they get. The time of it is bounded: one row may take a quarter of the timeout (the first one in a new
process, which has to import what the function needs, all of it), and all of them together twice the timeout. So a
completion that hangs costs about one and a quarter of the timeout, and no call takes more than three, beside the
starts of new processes.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from rlkit.reward_calls.arguments import RewardLog
from rlkit.reward_calls.call import Failed, Job, Outcome
from rlkit.reward_calls.callers import Here, InThread, InWorker, awaited, tell_once
from rlkit.reward_calls.child import TimedOut
from rlkit.reward_calls.worker import CannotSend

RETRY_BUDGET = 2.0  # of the timeout, for all rows together
RETRY_SHARE = 0.25  # of the timeout, for one row
SLICES = 8  # of an async function's timeout; see `_within`

Caller = Here | InThread | InWorker


def run(job: Job, caller: Caller) -> Outcome:
    """Call a plain function on all rows, and on each by itself where that fails."""
    outcome = Outcome(job)
    rows = list(range(len(job.offer)))
    why: Failed | TimedOut
    try:
        outcome.put(rows, *caller(rows, job.limits.timeout))
        return outcome
    except (Failed, TimedOut) as error:
        why = error
    units = job.offer.units(job.accepted.by_group)
    if len(units) == 1 or (isinstance(why, TimedOut) and not caller.killable):
        outcome.lose(rows, why)
        return outcome
    _one_by_one(job, caller, units, why, outcome)
    return outcome


def _one_by_one(job: Job, caller: Caller, units: list[list[int]], first: Failed | TimedOut, outcome: Outcome) -> None:
    timeout = job.limits.timeout
    left = RETRY_BUDGET * timeout if timeout is not None else None
    strict = job.limits.on_error == "raise"
    for place, rows in enumerate(units):
        if left is not None and left <= 0:
            outcome.lose([row for unit in units[place:] for row in unit], TimedOut())
            break
        caller.prepare()  # a new process after a kill: its start is not the function's time
        start, seconds = time.monotonic(), None
        if timeout is not None and left is not None:
            share = timeout if caller.fresh else timeout * max(RETRY_SHARE, 1 / len(units))
            seconds = min(share, left)
        try:
            outcome.put(rows, *caller(rows, seconds))
        except TimedOut as error:
            outcome.lose(rows, error)
            if not caller.killable:
                outcome.lose([row for unit in units[place + 1 :] for row in unit], error)
                break
        except Failed as error:
            if strict:  # the error of the whole call, if there was one, and the row on which it comes
                known = job.error(first if isinstance(first, Failed) else error, rows[0])
                raise known from known.__cause__
            outcome.lose(rows, error)
        finally:
            left = None if left is None else left - (time.monotonic() - start)
    if strict and isinstance(first, Failed):
        raise job.error(first)  # no completion fails alone


def guarded(job: Job) -> InWorker | InThread:
    """The caller for a function with limits: a subprocess, or a thread where it cannot be brought there."""
    try:
        return InWorker(job)
    except CannotSend as error:
        return _thread_instead(job, error)


def run_guarded(job: Job, caller: InWorker | InThread) -> Outcome:
    """`run` with that caller, which is closed at the end; in a thread if its arguments cannot be pickled."""
    try:
        return run(job, caller)
    except CannotSend as error:
        return run(job, _thread_instead(job, error))
    finally:
        caller.close()


def _thread_instead(job: Job, error: CannotSend) -> InThread:
    what = "its time is bounded, but it cannot be stopped: a call that hangs goes on in its thread"
    if job.limits.memory is not None:
        what += ", and its memory is not limited"
    tell_once(f"score: reward function {job.name!r} runs in a thread, since {error}; {what}.")
    return InThread(job)


async def run_async(job: Job) -> Outcome:
    """Await an async function on all rows; where that fails and may, on each row by itself, all at once."""
    outcome = Outcome(job)
    rows = list(range(len(job.offer)))
    why: Failed | TimedOut
    try:
        outcome.put(rows, *await _await(job, rows))
        return outcome
    except (Failed, TimedOut) as error:
        why = error
    units = job.offer.units(job.accepted.by_group)
    if len(units) == 1 or (isinstance(why, Failed) and job.limits.on_error == "raise"):
        outcome.lose(rows, why)  # not asked again to find the row: a judge's calls are slow and paid for
        return outcome
    replies = await asyncio.gather(*(_await(job, unit) for unit in units), return_exceptions=True)
    for unit, reply in zip(units, replies, strict=True):
        if isinstance(reply, (Failed, TimedOut)):
            outcome.lose(unit, reply)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            outcome.put(unit, *reply)
    return outcome


async def _await(job: Job, rows: Sequence[int]) -> tuple[Any, RewardLog]:
    log = RewardLog(len(rows))
    positional, named = job.arguments(rows, log)
    try:
        return await _within(awaited(job.function(*positional, **named)), job.limits.timeout), log
    except (Failed, TimedOut):
        raise
    except Exception as error:
        raise Failed.of(error) from error


async def _within(work: Coroutine[Any, Any, Any], seconds: float | None) -> Any:
    """The result within the time; asyncio.wait_for would wait for a task that does not let itself be cancelled.

    The clock stands while another function blocks the loop: of a slice that took long, at most twice its length counts.
    A function that itself blocks in pieces is stopped after four of them; `concurrency` sees those that are too long.
    """
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    left = seconds
    try:
        while left > 0 and not task.done():
            begun, share = time.monotonic(), min(left, seconds / SLICES)
            await asyncio.wait({task}, timeout=share)
            left -= min(time.monotonic() - begun, 2 * seconds / SLICES)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(
                lambda late: late.cancelled() or late.exception()
            )  # else asyncio warns that it was not read
    if not task.done():
        raise TimedOut
    return task.result()
