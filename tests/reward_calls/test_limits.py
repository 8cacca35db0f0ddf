"""Time and memory limits: a completion that hangs or eats memory costs little, and nothing is left behind.

The functions stand inside the tests, so that they are sent whole; one of a test module could not be imported elsewhere.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from builders import make_rollout, worker_pids
from waiting import LONG, alive, interrupt_when, until

import rlkit as rl
from rlkit.reward_calls import callers, worker
from rlkit.run.lock import lives

pytestmark = pytest.mark.integration

NAN = float("nan")
BAD = "bad"
ROLLOUT = make_rollout((1,) * 6, completions=("a", "bb", BAD, "", "ccc", "d"), group_id=[0, 0, 0, 1, 1, 1])
LENGTHS = [1.0, 2.0, NAN, 0.0, 3.0, 1.0]
TIMEOUT = 2.0  # a row that is tried again gets a quarter of it
MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_left():
    """No process outlives the workers that are kept, and those end when they are told to."""
    close_workers()  # of other tests: their error stream is one that was captured then
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    kept = worker_pids()
    close_workers()
    until(lambda: not [child for child in children() if child.pid not in before], "the end of what was killed")
    assert not any(psutil.pid_exists(pid) for pid in kept)


def close_workers():
    while worker._idle:
        worker._idle.pop().close()


def children():
    """The processes below this one that have not ended."""
    return alive(psutil.Process().children(recursive=True))


@pytest.fixture
def started(monkeypatch):
    """The workers that are started."""
    found, start = [], worker.Worker.__init__

    def noted(self):
        found.append(self)
        start(self)

    monkeypatch.setattr(worker.Worker, "__init__", noted)
    return found


def endless(completions):
    for text in completions:
        while text == "bad":
            pass


def catastrophic(completions):
    for text in completions:
        if text == "bad":
            re.match(r"(a+)+$", "a" * 60 + "b")  # 2^60 steps, and holds Python's lock


def sleeping(completions):
    for text in completions:
        if text == "bad":
            time.sleep(3600)


def in_c(completions):
    for text in completions:
        if text == "bad":
            sum(range(10**13))


def ignoring_signals(completions):
    for text in completions:
        if text == "bad":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(1)


def with_a_child(completions):
    for text in completions:
        if text == "bad":
            subprocess.run(["sleep", "3600"])


HANGS = [endless, catastrophic, sleeping, in_c, ignoring_signals, with_a_child]


def lengths_after(act):
    """A reward: `act` on the completions, then the length of each."""
    code = act.__code__

    def reward(completions):
        import re
        import signal
        import subprocess
        import time
        import types

        names = {"re": re, "signal": signal, "subprocess": subprocess, "time": time}
        types.FunctionType(code, names | {"__builtins__": __builtins__})(completions)
        return [float(len(text)) for text in completions]

    reward.__name__ = act.__name__
    return reward


@pytest.mark.parametrize("act", HANGS, ids=lambda act: act.__name__)
def test_a_completion_that_hangs_costs_little_and_loses_nobody(act, caplog, started):
    """The siblings keep their rewards; each process that is started has cost one timeout at most."""
    reward = lengths_after(act)
    scores = rl.score(ROLLOUT, reward, timeout=TIMEOUT)
    torch.testing.assert_close(scores.reward, torch.tensor(LENGTHS), equal_nan=True)
    assert len(started) <= 3  # one for the call, one for the row that hangs, one for the rows after it
    name = act.__name__
    assert scores.metrics == {f"rewards/{name}/timeouts": 1 / 6}
    assert scores.extra[f"failures/{name}"][2] == f"no reward within {TIMEOUT} s"
    assert f"'{name}' gave no reward for 1 of 6" in caplog.text and "completion 2: 'bad'" in caplog.text
    assert "thread" not in caplog.text  # it was killed, not left


def test_the_next_call_works_and_processes_do_not_add_up():
    """Five steps with a completion that hangs leave one process."""
    reward = lengths_after(endless)
    for _ in range(3):
        scores = rl.score(ROLLOUT, reward, timeout=TIMEOUT, on_timeout=-5.0)
        assert scores.reward.tolist() == [1.0, 2.0, -5.0, 0.0, 3.0, 1.0]
        assert len(worker_pids()) <= 1


def test_many_that_hang_are_bounded_all_together(started):
    """20 hanging completions would cost 20 timeouts one after the other, and a process each."""
    rollout = make_rollout((1,) * 24, completions=["a"] * 4 + [BAD] * 20)
    scores = rl.score(rollout, lengths_after(sleeping), timeout=TIMEOUT)
    assert len(started) <= 5
    assert scores.reward[:4].tolist() == [1.0] * 4 and bool(scores.reward[4:].isnan().all())


def test_a_function_that_compares_is_tried_again_group_by_group():
    """A group is never split, so the rank within it stays right; the group with the hanging completion is lost."""

    def longest(completions, group_ids):
        while "bad" in completions:
            pass
        top = {g: max(len(c) for c, h in zip(completions, group_ids, strict=True) if h == g) for g in group_ids}
        return [float(len(c) == top[g]) for c, g in zip(completions, group_ids, strict=True)]

    scores = rl.score(ROLLOUT, longest, timeout=TIMEOUT)
    torch.testing.assert_close(scores.reward, torch.tensor([NAN, NAN, NAN, 0.0, 1.0, 0.0]), equal_nan=True)


def test_memory_is_limited(caplog):
    """Each completion may take 200 MiB; one takes a GiB. The address space of this process is not limited."""

    def eater(completions):
        return [float(len(bytearray((1024 if text == "bad" else 20) * 2**20)) > 0) for text in completions]

    scores = rl.score(ROLLOUT, eater, memory=200 * MIB, on_error="none")
    torch.testing.assert_close(scores.reward, torch.tensor([1.0, 1.0, NAN, 1.0, 1.0, 1.0]), equal_nan=True)
    assert scores.extra["failures/eater"][2].startswith("MemoryError")
    assert len(bytearray(1024 * MIB)) > 0
    with pytest.raises(RuntimeError, match=r"'eater' failed with MemoryError.*It fails on completion 2: 'bad'"):
        rl.score(ROLLOUT, eater, memory=200 * MIB)
    torch.testing.assert_close(rl.score(ROLLOUT, eater, timeout=120.0).reward, torch.ones(6))  # no limit, same process


def test_a_process_that_eats_memory_without_end_is_stopped():
    """A list that grows for ever: a MemoryError or the end of the process, whichever the system makes of it."""

    def grows(completions):
        kept = []
        while "bad" in completions:
            kept.append(bytearray(2**20))
        return [1.0] * len(completions)

    scores = rl.score(ROLLOUT, grows, memory=300 * MIB, timeout=60.0, on_error="none")
    torch.testing.assert_close(scores.reward, torch.tensor([1.0, 1.0, NAN, 1.0, 1.0, 1.0]), equal_nan=True)
    assert scores.metrics == {"rewards/grows/errors": 1 / 6, "rewards/grows/timeouts": 0.0}


@pytest.mark.parametrize(
    ("way", "says"),
    [("os._exit(3)", "exit status 3"), ("os.abort()", "SIGABRT"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_process_that_dies_is_a_failure_of_that_completion(way, says):
    def dies(completions):
        import os  # noqa: F401

        for text in completions:
            if text == "bad":
                exec(f"import os; {way}")
        return [1.0] * len(completions)

    scores = rl.score(ROLLOUT, dies, timeout=60.0, on_error="none")
    torch.testing.assert_close(scores.reward, torch.tensor([1.0, 1.0, NAN, 1.0, 1.0, 1.0]), equal_nan=True)
    assert says in scores.extra["failures/dies"][2]
    with pytest.raises(RuntimeError, match=rf"'dies' failed with ProcessDied: .*{says}.*completion 2: 'bad'"):
        rl.score(ROLLOUT, dies, timeout=60.0)


def test_sys_exit_and_prints_do_not_break_the_connection(capfd):
    def leaves(completions):
        import sys

        print("hello from the judge", flush=True)
        for text in completions:
            if text == "bad":
                sys.exit("enough")
        return [1.0] * len(completions)

    scores = rl.score(ROLLOUT, leaves, timeout=60.0, on_error="none")
    assert scores.reward.isnan().tolist() == [False, False, True, False, False, False]
    assert scores.extra["failures/leaves"][2] == "SystemExit: enough"
    assert "hello from the judge" in capfd.readouterr().err


# --- errors ---


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a process"])
def test_an_exception_names_function_row_and_completion(timeout):
    def picky(completions):
        return [1.0 / (text != "bad") for text in completions]

    with pytest.raises(
        RuntimeError,
        match=r"'picky' failed with ZeroDivisionError: .*division by zero. It fails on completion 2: 'bad'",
    ) as caught:
        rl.score(ROLLOUT, picky, timeout=timeout)
    if timeout is None:
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    else:
        assert "in picky" in str(caught.value.__cause__)  # the traceback of the other process


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a process"])
def test_errors_may_be_none_and_are_counted_and_shown(timeout, caplog):
    def picky(completions, log_extra, log_metric):
        log_extra("seen", [text.upper() for text in completions])
        log_metric("calls", 1.0)
        return [1.0 / (text != "bad") for text in completions]

    scores = rl.score(ROLLOUT, picky, on_error="none", timeout=timeout)
    torch.testing.assert_close(scores.reward, torch.tensor([1.0, 1.0, NAN, 1.0, 1.0, 1.0]), equal_nan=True)
    assert scores.metrics["rewards/picky/errors"] == 1 / 6
    assert scores.extra["failures/picky"][2].startswith("ZeroDivisionError")
    assert scores.extra["seen"] == ("A", "BB", None, "", "CCC", "D") and scores.metrics["calls"] == 1.0
    assert "'picky' failed on 1 of 6 completions" in caplog.text and "completion 2: 'bad'" in caplog.text
    assert "ZeroDivisionError" in scores.to_pandas()["failures/picky"][2]


def speechless(completions):
    class Speechless(Exception):
        def __str__(self):
            raise ValueError("no words")

    raise Speechless


def cancelled(completions):
    import asyncio

    raise asyncio.CancelledError  # of asyncio.run in the function, say; no Exception, but no end of the run either


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a process"])
@pytest.mark.parametrize(("reward", "says"), [(speechless, "Speechless: (its text"), (cancelled, "CancelledError")])
def test_odd_exceptions_are_failures_like_others(reward, says, timeout):
    """They passed through `score` without a name, or ended the process."""
    with pytest.raises(RuntimeError, match=rf"'{reward.__name__}' failed with {re.escape(says)}.* on completion 0"):
        rl.score(ROLLOUT, reward, timeout=timeout)
    scores = rl.score(ROLLOUT, reward, timeout=timeout, on_error="none")
    assert all(why.startswith(says) for why in scores.extra[f"failures/{reward.__name__}"])


def test_a_function_that_cuts_the_connection_is_told_how_its_process_ended():
    """It closes all files that it finds: the process cannot answer, and ends with an error of its own."""

    def closes(completions):
        import os

        os.closerange(3, 256)
        return [1.0] * len(completions)

    with pytest.raises(RuntimeError, match="'closes' failed with ProcessDied: its process ended with exit status 1"):
        rl.score(ROLLOUT, closes, timeout=60.0)


def test_values_that_are_no_rewards_are_errors_of_their_row():
    def odd(completions):
        return ["x" if text == "bad" else float("inf") if text == "" else 1.0 for text in completions]

    scores = rl.score(ROLLOUT, odd, on_error="none")
    torch.testing.assert_close(scores.reward, torch.tensor([1.0, 1.0, NAN, NAN, 1.0, 1.0]), equal_nan=True)
    assert scores.metrics == {"rewards/odd/errors": 2 / 6}


def test_a_wrong_count_is_never_tolerated():
    """That is a fault of the function, not of a completion."""
    with pytest.raises(ValueError, match=r"must return 6 rewards.*got 1"):
        rl.score(ROLLOUT, lambda completions: [1.0], on_error="none", timeout=60.0)
    with pytest.raises(TypeError, match=r"must return 6 rewards.*got generator"):
        rl.score(ROLLOUT, lambda completions: (1.0 for _ in completions), on_error="none", timeout=60.0)


def test_an_error_that_no_completion_causes_alone():
    def crowded(completions):
        if len(completions) > 1:
            raise ValueError("too many")
        return [1.0]

    with pytest.raises(RuntimeError, match=r"'crowded' failed with ValueError: too many\.$"):
        rl.score(ROLLOUT, crowded)
    assert rl.score(ROLLOUT, crowded, on_error="none").reward.tolist() == [1.0] * 6


# --- what cannot be sent, and what is ---


def test_what_cannot_be_pickled_runs_in_a_thread_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(callers, "_told", set())
    unsendable = (0 for _ in iter(int, 1))
    release = threading.Event()

    def locked(completions):
        next(unsendable)
        release.wait(LONG if "bad" in completions else 0)
        return [1.0] * len(completions)

    good = ROLLOUT.select([0, 1])
    for _ in range(2):
        assert rl.score(good, locked, timeout=30.0).reward.tolist() == [1.0, 1.0]
    assert caplog.text.count("'locked' runs in a thread, since it cannot be pickled") == 1
    assert "a call that hangs goes on in its thread" in caplog.text
    scores = rl.score(ROLLOUT, locked, timeout=0.3)
    assert bool(scores.reward.isnan().all()) and scores.metrics == {"rewards/locked/timeouts": 1.0}
    release.set()


def test_threads_that_never_end_do_not_add_up(monkeypatch):
    """After eight of them the run is told to stop."""
    unsendable = (0 for _ in iter(int, 1))
    release = threading.Event()

    def stuck(completions):
        next(unsendable)
        release.wait(LONG)
        return [1.0] * len(completions)

    with pytest.raises(RuntimeError, match=r"8 calls of reward functions ran out of time and still run, .* 'stuck'"):
        for _ in range(9):
            rl.score(ROLLOUT, stuck, timeout=0.05)
    release.set()


@pytest.mark.slow
def test_a_script_is_not_run_again_and_its_globals_are_sent(tmp_path):
    """A function of an unguarded script (or a notebook): multiprocessing's spawn would train a second time."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import re, sys, functools
            sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
            from builders import make_rollout, worker_pids
            import rlkit as rl
            print("started", flush=True)
            PATTERN = re.compile("b+")
            BONUS = {{"b": 10.0}}
            def helper(text):
                return [BONUS[c] for c in text if PATTERN.match(c)]
            class Judge:
                scale = 2.0
                def __call__(self, completions):
                    return [self.scale * sum(x for x in helper(text)) for text in completions]
            def plain(completions, trainer_state):
                return [sum(helper(text)) + trainer_state.global_step for text in completions]
            rollout = make_rollout((1, 1), completions=("ab", "bb"))
            scores = rl.score(rollout, [Judge(), plain, functools.partial(plain)], timeout=60.0)
            print(scores.parts.tolist(), flush=True)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "started\n[[20.0, 10.0, 10.0], [40.0, 20.0, 20.0]]\n"
    assert "thread" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is told by the kernel on Linux only")
@pytest.mark.parametrize("way", ["os.kill(os.getpid(), 9)", "os._exit(0)", "raise SystemExit"])
def test_workers_end_with_the_process_that_started_them(tmp_path, way):
    """Also in the middle of an endless loop, and whatever ends the process."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys, threading, time
            sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
            from builders import make_rollout, worker_pids
            import rlkit as rl
            def endless(completions):
                open("begun", "w").close()
                while True: pass
            def quick(completions): return [1.0]
            rollout = make_rollout((1,), completions=("a",))
            rl.score(rollout, quick, timeout=60.0)
            threading.Thread(target=rl.score, args=(rollout, endless), kwargs=dict(timeout=3600.0), daemon=True).start()
            while not os.path.exists("begun"): time.sleep(0.02)
            print(*worker_pids(), flush=True)
            {way}
            """
        )
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
    pids = [int(word) for word in done.stdout.split()]
    assert pids, done.stderr
    until(lambda: not any(map(lives, pids)), "the end of the workers")


@pytest.mark.parametrize("moment", ["the process starts", "it gets the function", "the function runs"])
def test_an_interrupt_kills_the_call_and_leaves_score_usable(sigint_guard, monkeypatch, tmp_path, caplog, moment):
    """Also while the process starts, and nobody knows it yet: it is never called, nor the function in a thread."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    begun, given_up, workers = tmp_path / "begun", threading.Event(), []

    def interrupt():
        signal.pthread_kill(main, signal.SIGINT)
        assert given_up.wait(LONG)

    borrow, load, abandon = worker.borrow, worker.Worker.load, callers.InWorker.abandon

    def late_borrow(digest):
        workers.append(borrow(digest))
        if moment == "the process starts":
            interrupt()
        return workers[-1]

    def late_load(self, *arguments):
        if moment == "it gets the function":
            interrupt()
        return load(self, *arguments)

    def noted_abandon(self):
        abandon(self)
        given_up.set()

    monkeypatch.setattr(worker, "borrow", late_borrow)
    monkeypatch.setattr(worker.Worker, "load", late_load)
    monkeypatch.setattr(callers.InWorker, "abandon", noted_abandon)
    if moment == "the function runs":
        interrupt_when(begun.exists)

    def endless(completions, path=str(begun)):
        while "bad" in completions:
            open(path, "a").close()
        return [float(len(text)) for text in completions]

    with pytest.raises(KeyboardInterrupt):
        rl.score(ROLLOUT, endless, timeout=3600.0)
    monkeypatch.undo()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "rlkit-reward"], "the call's end")
    assert not workers[0].alive and begun.exists() == (moment == "the function runs")
    assert "runs in a thread" not in caplog.text
    scores = rl.score(ROLLOUT.select([0, 1]), endless, timeout=LONG)
    assert scores.reward.tolist() == [1.0, 2.0]


def test_several_limited_functions_run_side_by_side(tmp_path):
    """Each ends only when all have begun; in turn the first would run out of time."""

    def together(completions, name):
        (tmp_path / name).touch()
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.02)
        return [1.0] * len(completions)

    scores = rl.score(ROLLOUT, [functools.partial(together, name=name) for name in "abc"], timeout=LONG)
    assert bool((scores.parts == 1.0).all())


def test_a_function_keeps_its_process_between_steps():
    def pid(completions):
        import os

        return [float(os.getpid())] * len(completions)

    first, second = (rl.score(ROLLOUT, pid, timeout=60.0).reward[0].item() for _ in range(2))
    assert first == second != float(os.getpid())


def test_any_text_reaches_the_process_and_comes_back():
    """NUL, lone surrogates and markup, in completions and in columns."""
    texts = ("\x00", "\ud800", "<script>alert(1)</script>", "\u202e\n", "𝔘")
    rollout = make_rollout((1,) * 5, completions=texts, columns={"answer": texts})

    def same(completions, answer, log_extra):
        log_extra("copy", completions)
        return [float(c == a) + len(c) for c, a in zip(completions, answer, strict=True)]

    scores = rl.score(rollout, same, timeout=60.0)
    assert scores.reward.tolist() == [1.0 + len(text) for text in texts] and scores.extra["copy"] == texts


@pytest.mark.slow
def test_trls_accuracy_has_one_value_everywhere():
    """Math-verify's own timeouts need the main thread; a worker's function runs in its main thread."""
    from trl.rewards import accuracy_reward

    answers = (r"\boxed{\frac{1}{2}}", r"It is \boxed{63}.", "no answer", r"\boxed{0.5}")
    rollout = make_rollout(
        (1,) * 4,
        prompts=[[{"role": "user", "content": "?"}]] * 4,
        completions=[[{"role": "assistant", "content": text}] for text in answers],
        columns={"solution": (r"\frac{1}{2}", "63", "63", r"\frac{1}{2}")},
    )
    here = rl.score(rollout, accuracy_reward)
    assert here.reward.tolist() == [1.0, 1.0, 0.0, 1.0]
    torch.testing.assert_close(rl.score(rollout, accuracy_reward, timeout=120.0).reward, here.reward)


HELPERS = """
import threading
LOCK = threading.Lock()
STREAM = open(__file__)  # what no pickle can hold
def size(text):
    return float(len(text))
"""


def test_a_function_that_uses_modules_runs_in_a_process(tmp_path, monkeypatch, caplog):
    """A module beside the notebook, and rlkit itself in an editable install, are imported there, not sent along."""
    (tmp_path / "helpers_of_a_user.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(tmp_path)
    import helpers_of_a_user

    def measured(completions):
        texts = [rl.rewards.completion_text(completion) for completion in completions]
        while "endless" in texts:
            pass
        return [helpers_of_a_user.size(text) for text in texts]

    rollout = make_rollout([1, 1, 1], completions=("ab", "endless", "abc"))
    try:
        scores = rl.score(rollout, measured, timeout=5.0)
    finally:
        helpers_of_a_user.STREAM.close()
    assert str(scores.reward.tolist()) == "[2.0, nan, 3.0]" and "runs in a thread" not in caplog.text
