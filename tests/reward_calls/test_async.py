"""Async rewards: together, on one loop that outlives the step, wherever `score` is called from."""

import asyncio
import re
import subprocess
import sys
import threading

import pytest
import torch
from builders import make_rollout
from waiting import LONG, interrupt_when, main_thread_is_in, until

import rlkit as rl
from rlkit.reward_calls import callers, concurrency
from rlkit.reward_calls import event_loop as loops

ROLLOUT = make_rollout((3, 1, 2, 3), completions=("3", "4", "3", ""))


async def ones(completions):
    await asyncio.sleep(0)
    return [1.0] * len(completions)


def test_all_of_them_are_on_their_way_at_once():
    """Each ends only when all have begun, a plain function among them; in turn the first would wait for ever."""
    begun = set()

    def waiting(name):
        async def wait(completions):
            begun.add(name)
            await asyncio.to_thread(until, lambda: len(begun) == 7, "the others")
            return [1.0] * len(completions)

        wait.__name__ = name
        return wait

    def plain(completions):
        begun.add("plain")
        until(lambda: len(begun) == 7, "the others")
        return [1.0] * len(completions)

    scores = rl.score(ROLLOUT, [*(waiting(f"n{k}") for k in range(6)), plain])
    assert scores.parts.tolist() == [[1.0] * 7] * len(ROLLOUT)


def test_results_stand_in_the_order_of_the_functions():
    """The first ends last."""

    def function(k):
        async def reward(completions):
            await asyncio.sleep(0.05 * (3 - k))
            return [float(k)] * len(completions)

        return reward

    assert rl.score(ROLLOUT, [function(k) for k in range(3)]).parts[0].tolist() == [0.0, 1.0, 2.0]


def test_a_client_that_belongs_to_a_loop_serves_every_step():
    """What a step has made, a lock or a session, the next step can use: from here, a thread and a running loop."""
    seen = []

    async def reward(completions):
        seen.append((asyncio.get_running_loop(), threading.get_ident()))
        return [1.0] * len(completions)

    async def inside_a_running_loop():
        return rl.score(ROLLOUT, reward)  # as a cell of a notebook does

    rl.score(ROLLOUT, reward)
    rl.score(ROLLOUT, reward)
    thread = threading.Thread(target=rl.score, args=(ROLLOUT, reward))
    thread.start()
    thread.join()
    for _ in range(2):
        scores = asyncio.run(inside_a_running_loop())
        assert scores.reward.tolist() == [1.0] * 4
    assert len(seen) == 5 and len(set(seen)) == 1
    assert seen[0][1] != threading.get_ident()


def test_one_failure_cancels_the_others_and_names_its_function():
    cancelled = []

    async def patient(completions):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append("patient")
            raise

    async def broken(completions):
        await asyncio.sleep(0.01)
        raise KeyError("no judge")

    with pytest.raises(RuntimeError, match=r"reward function 'broken' failed with KeyError: 'no judge'") as caught:
        rl.score(ROLLOUT, [patient, broken])
    assert isinstance(caught.value.__cause__, KeyError)
    assert cancelled == ["patient"]
    assert rl.score(ROLLOUT, ones).reward.tolist() == [1.0] * 4


def test_a_plain_function_that_fails_cancels_them_too():
    begun, cancelled = threading.Event(), []

    async def patient(completions):
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            cancelled.append("patient")

    def broken(completions):
        assert begun.wait(LONG)
        raise ValueError("no")

    with pytest.raises(RuntimeError, match="'broken' failed with ValueError: no"):
        rl.score(ROLLOUT, [patient, broken])
    assert cancelled == ["patient"]


def test_an_interrupt_cancels_them_and_leaves_the_loop_usable(sigint_guard):
    """As the notebook's stop button: KeyboardInterrupt in the main thread while it waits."""
    import signal

    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = []

    async def patient(completions):
        state.append(asyncio.get_running_loop())
        interrupt_when(lambda: main_thread_is_in("score", "wait"))
        try:
            await asyncio.sleep(3600)
        finally:
            state.append("cancelled")

    with pytest.raises(KeyboardInterrupt):
        rl.score(ROLLOUT, patient)
    assert state[1] == "cancelled"

    async def after(completions):
        state.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    rl.score(ROLLOUT, after)
    assert state[2] is state[0]


def test_wrong_returns_of_async_functions_are_named():
    """An async function that forgets to return, or returns one number."""

    async def forgot(completions):
        await asyncio.sleep(0)

    async def one(completions):
        return [1.0]

    with pytest.raises(TypeError, match=r"reward function 'forgot' must return 4 rewards.*got NoneType"):
        rl.score(ROLLOUT, forgot)
    with pytest.raises(ValueError, match=r"reward function 'one' must return 4 rewards.*got 1"):
        rl.score(ROLLOUT, one)


def test_a_timeout_loses_the_completion_that_hangs_and_no_other():
    """Also where the function does not let itself be cancelled at once."""

    async def judge(completions):
        async def ask(text):
            if text == "4":
                await asyncio.shield(asyncio.sleep(3600))
            return float(len(text))

        return list(await asyncio.gather(*(ask(text) for text in completions)))

    scores = rl.score(ROLLOUT, judge, timeout=2.0, on_timeout=-1.0)
    assert scores.reward.tolist() == [1.0, -1.0, 1.0, 0.0]
    assert scores.metrics == {"rewards/judge/timeouts": 0.25}
    assert scores.extra["failures/judge"] == (None, "no reward within 2.0 s", None, None)


def test_errors_can_be_tolerated_row_by_row():
    async def picky(completions):
        return [1 / len(text) for text in completions]

    scores = rl.score(ROLLOUT, picky, on_error="none")
    torch.testing.assert_close(scores.reward, torch.tensor([1.0, 1.0, 1.0, float("nan")]), equal_nan=True)
    assert scores.metrics == {"rewards/picky/errors": 0.25}


def blocking(release, how_long=60):
    """An async function that blocks its loop, in a task of its own, until it is released or has had its time."""

    async def blocking(completions):
        async def one(text):
            release.wait(how_long)
            return 1.0

        return list(await asyncio.gather(*(one(text) for text in completions[:1]))) * len(completions)

    return blocking


@pytest.fixture
def release(monkeypatch):
    monkeypatch.setattr(loops, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(callers, "_told", set())
    event = threading.Event()
    yield event
    event.set()


def test_a_function_that_blocks_the_loop_runs_out_of_time_and_the_loop_is_abandoned(caplog, release):
    """The step ends, what was done stays, a warning names the line, and the next step has another loop."""
    before = loops.shared_loop()
    functions = [ones, blocking(release)]
    scores = in_time(lambda: rl.score(ROLLOUT, functions, timeout={"blocking": 0.2}))
    assert scores.parts.isnan().tolist() == [[False, True]] * 4
    assert scores.metrics == {"rewards/blocking/timeouts": 1.0}
    assert re.search(r"is blocked in one \(.*test_async.py:\d+\)", caplog.text)
    assert rl.score(ROLLOUT, ones).reward.tolist() == [1.0] * 4
    assert loops.shared_loop() is not before


def test_a_sibling_without_a_timeout_fails_with_the_line_that_blocks(release):
    """Its answer stays on the abandoned loop; to wait for it would be to wait for ever."""

    async def judge(completions):
        await asyncio.sleep(3600)

    functions = [judge, blocking(release)]
    with pytest.raises(RuntimeError, match=r"'judge' failed with BlockedLoop: the event loop .* is blocked in "):
        rl.score(ROLLOUT, functions, timeout={"blocking": 0.2})
    scores = in_time(lambda: rl.score(ROLLOUT, functions, timeout={"blocking": 0.2}, on_error="none"))
    assert bool(scores.parts.isnan().all()) and scores.extra["failures/judge"][0].startswith("BlockedLoop")


def test_a_loop_that_an_earlier_call_blocks_is_left(caplog, release):
    """A task that a function has left behind blocks it between two steps."""

    async def leaves_a_task(completions):
        async def later():
            release.wait(60)

        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(later()))
        return [1.0] * len(completions)

    assert rl.score(ROLLOUT, leaves_a_task).reward.tolist() == [1.0] * 4
    until(lambda: not loops.shared_loop().answers() or "does not answer" in caplog.text, "the block")
    assert in_time(lambda: rl.score(ROLLOUT, ones)).reward.tolist() == [1.0] * 4
    assert "does not answer" in caplog.text


def test_loops_that_stay_blocked_do_not_add_up(release, monkeypatch):
    """After as many of them as threads that hang, the run is told to stop."""
    monkeypatch.setattr(concurrency, "MOST_HUNG", 2)
    monkeypatch.setattr(concurrency, "_abandoned", [])
    with pytest.raises(RuntimeError, match=r"2 calls of async reward functions block their event loops and still run"):
        for _ in range(3):
            rl.score(ROLLOUT, blocking(release), timeout=0.05)


def test_while_a_function_blocks_the_clocks_of_the_others_stand(monkeypatch, release):
    """It blocks for longer than their timeout: they lose nothing."""
    monkeypatch.setattr(loops, "PATIENCE_SECONDS", LONG)

    async def judge(completions):
        await asyncio.sleep(0.05)  # the loop is blocked when this is over
        await asyncio.sleep(0.05)
        return [2.0] * len(completions)

    scores = in_time(lambda: rl.score(ROLLOUT, [judge, blocking(release, how_long=3.0)], timeout={"judge": 2.0}))
    assert scores.parts.tolist() == [[2.0, 1.0]] * 4


def test_a_function_that_blocks_in_pieces_is_stopped_too(release):
    """No piece is as long as its timeout; all of them are ten times as long."""
    pieces = []

    async def crumbs(completions):
        for _ in range(40):
            pieces.append(len(pieces))
            release.wait(0.1)
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    scores = rl.score(make_rollout((1,)), crumbs, timeout=0.4)
    assert bool(scores.reward.isnan().all()) and len(pieces) < 20


def test_an_async_function_that_scores_with_an_async_function_is_told():
    """It would wait for the loop on which it runs."""

    async def inner(completions):
        return rl.score(ROLLOUT, ones).reward.tolist()

    with pytest.raises(RuntimeError, match=r"'inner' failed with RuntimeError: .*both would wait for one event loop"):
        rl.score(ROLLOUT, inner)


@pytest.mark.slow
def test_the_loop_is_closed_at_exit():
    """A script ends at once and cleanly, also with work left on the loop: no warning in Python's development mode."""
    code = """
import asyncio, warnings
import torch
import rlkit as rl
from rlkit.reward_calls.event_loop import shared_loop
async def left():
    try:
        await asyncio.sleep(3600)
    finally:
        print("tidied", flush=True)
loop = shared_loop()
loop.submit(left())
loop.submit(asyncio.sleep(0)).result()
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0 and done.stdout == "tidied\n", done.stderr
    for word in ("ResourceWarning", "never awaited", "was destroyed", "Traceback"):
        assert word not in done.stderr


async def leaves(completions):
    sys.exit("bye")


def leaves_in_a_task(completions):
    async def reward():
        await asyncio.gather(leaves(completions))

    return reward()


@pytest.mark.parametrize("reward", [leaves, leaves_in_a_task, lambda completions: sys.exit("bye")])
def test_sys_exit_is_a_failure_of_its_function_and_ends_neither_loop_nor_run(reward):
    """asyncio ends a loop for SystemExit: `score` waited for ever, and so did every other async function."""
    scores = in_time(lambda: rl.score(ROLLOUT, [reward, ones], on_error="none"))
    assert scores.parts.isnan().tolist() == [[True, False]] * len(ROLLOUT)
    with pytest.raises(RuntimeError, match="failed with SystemExit: bye"):
        rl.score(ROLLOUT, reward)
    before = loops.shared_loop()
    assert rl.score(ROLLOUT, ones).reward.tolist() == [1.0] * len(ROLLOUT) and loops.shared_loop() is before


def in_time(work, patience=LONG):
    """The result of work in a thread; a hang is a failure, not the end of the tests."""
    box = []
    thread = threading.Thread(target=lambda: box.append(work()), daemon=True)
    thread.start()
    thread.join(patience)
    assert box, "score did not come back"
    return box[0]
