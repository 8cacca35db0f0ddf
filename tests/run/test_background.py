"""Loops in a background thread: torch's state, errors, the end of Python; and the same in a real kernel."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest
import torch
from waiting import LONG, interrupt_when, until

import rlkit as rl
from rlkit.cli import main
from rlkit.run.background import Background, same_torch_state
from rlkit.run.commands import send
from rlkit.run.line_files import read_json, read_lines
from rlkit.run.signals import StopFlag


@pytest.fixture
def run(tmp_path):
    return rl.Run(tmp_path / "run")


def in_background(run, loop):
    """As `run.start` does it in a kernel."""
    path = str(run.path)
    run._state.started, run._state.background = True, Background(loop, path, run._state.flag)
    run._state.background.start()


def seen_by_torch():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "device": str(torch.get_default_device()),
        "autocast": {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")},
        "dtype": torch.get_autocast_dtype("cpu"),
        "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
        "cache": torch.is_autocast_cache_enabled(),
        "made on": str(torch.ones(1).device),
    }


STATES = {
    "plain": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    **({"autocast of a GPU": lambda: torch.autocast("cuda")} if torch.cuda.is_available() else {}),
    "autocast without cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
}


@pytest.mark.parametrize("enter", STATES.values(), ids=STATES)
def test_torch_is_in_the_thread_as_it_was_at_the_start(run, enter):
    """Grad mode, default device and autocast are torch's per-thread state, which a thread begins without."""
    found = {}

    def bare():
        found["bare"] = seen_by_torch()

    def loop():
        found["loop"] = seen_by_torch()

    with enter():
        expected = seen_by_torch()
        in_background(run, loop)
        plain = threading.Thread(target=bare)
        plain.start()
        plain.join()
    run.wait()
    assert found["loop"] == expected
    if enter is not contextlib.nullcontext:
        assert found["bare"] != expected  # a plain thread has none of it


def test_a_default_device_set_for_good_is_carried(run):
    torch.set_default_device("meta")
    try:
        state = same_torch_state()
    finally:
        torch.set_default_device(None)
    with state():
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"


def test_the_cell_goes_on_while_the_loop_runs(run):
    done = threading.Event()

    def loop():
        for step, _ in run.steps(range(99), 50, progress=False):
            done.wait(LONG)
            run.log(step, loss=1.0)

    in_background(run, loop)
    until(lambda: (run.path / "state.json").exists(), "the first step")
    assert run.stopped is None and run.step == 0
    done.set()
    run.wait()
    assert (run.stopped, run.step, len(run.metrics)) == ("done", 50, 50)
    run.wait()  # once more: nothing to wait for


def test_an_error_of_the_loop_comes_out_of_wait_with_its_place(run, capsys):
    def loop():
        for step, _ in run.steps(range(99), 50, progress=False):
            if step == 1:
                raise ZeroDivisionError("of the loop")

    in_background(run, loop)
    until(lambda: not run._state.background.alive, "the error")
    assert "the loop ended with ZeroDivisionError: of the loop; run.wait() shows where" in capsys.readouterr().out
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="of the loop") as error:
            run.wait()
        assert error.traceback[-1].name == "loop"
    assert (run.stopped, run.step) == ("left", 1)


def listens(handler):
    """True once the handler of before is no longer in charge: `run.wait` listens."""
    return lambda: signal.getsignal(signal.SIGINT) is not handler


def endless(run):
    """A loop that goes on until it is stopped."""

    def loop():
        for step, _ in run.steps(iter(int, 1), 10**9, progress=False):
            time.sleep(0.01)
            run.log(step, loss=1.0)

    return loop


def test_an_interrupt_of_wait_stops_the_loop_after_its_step(run, sigint_guard):
    in_background(run, endless(run))
    until(lambda: run.step > 2, "some steps")
    interrupt_when(listens(sigint_guard))
    run.wait()
    assert run.stopped == "interrupted" and run.step == len(run.metrics)
    assert signal.getsignal(signal.SIGINT) is sigint_guard
    assert [step for step, _ in run.steps(range(9), run.step + 1, progress=False)] == [run.step - 1]


def test_a_second_interrupt_gives_the_cell_back_and_the_loop_still_ends_in_order(run, sigint_guard):
    go_on = threading.Event()

    def loop():
        for step, _ in run.steps(range(99), 50, progress=False):
            if step == 2:
                go_on.wait(LONG)
            run.log(step, loss=1.0)

    in_background(run, loop)
    until(lambda: run.step == 2, "step 2")

    def press_again():
        until(lambda: run._state.flag.reason == "interrupted", "the first interrupt")
        os.kill(os.getpid(), signal.SIGINT)

    interrupt_when(listens(sigint_guard), then=press_again)
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert run._state.background.alive and run.step == 2
    go_on.set()
    run.wait()
    assert (run.stopped, run.step) == ("interrupted", 3) and len(run.metrics) == 3


def test_two_loops_at_once_are_refused(run, tmp_path, policy):
    """Of one run or of two: they would draw from one random state in an order of chance."""
    other = rl.Run(tmp_path / "other")
    in_background(run, endless(run))
    for one in (run, other):
        with pytest.raises(RuntimeError, match=r"run\.start: the loop of .*run is going in the background"):
            in_background(one, endless(one))
    until(lambda: run.step > 0, "a step")
    with pytest.raises(RuntimeError, match=r"run\.steps: a loop of this run is going in the background"):
        next(run.steps(range(9), 5, progress=False))
    again = rl.Run(run.path)  # the whole cell once more: it would cut the log under the loop
    again.track(policy, torch.optim.AdamW(policy.model.parameters()))
    with pytest.raises(RuntimeError, match=r"run\.resume: the loop of .*run is going in the background"):
        again.resume()
    run.control("stop")
    run.wait()
    assert run.stopped == "stopped"
    in_background(other, lambda: None)
    other.wait()


def test_a_knob_that_is_turned_elsewhere_waits_for_the_end_of_the_step(run):
    """A step sees one value, also if another cell assigns the knob in its middle."""
    knobs = run.knobs(beta=0.1)
    middle, assigned, seen = threading.Event(), threading.Event(), []

    def loop():
        for step, _ in run.steps(range(9), 3, progress=False):
            seen.append(knobs.beta)
            if step == 1:
                middle.set()
                assigned.wait(LONG)
                seen.append(knobs.beta)
            if step == 2:
                knobs.beta = 0.9  # in the loop itself: at once
                seen.append(knobs.beta)

    in_background(run, loop)
    assert middle.wait(LONG)
    knobs.beta = 0.5
    assigned.set()
    run.wait()
    assert seen == [0.1, 0.1, 0.1, 0.5, 0.9]
    knobs.beta = 0.3  # no loop: at once
    assert knobs.beta == 0.3


def test_wait_inside_the_loop_and_before_any_start_are_errors(run, tmp_path, unchecked):
    with pytest.raises(RuntimeError, match=r"run\.wait: nothing was started; call run\.start\(loop\) first"):
        run.wait()
    in_background(run, run.wait)
    with pytest.raises(RuntimeError, match="called inside the loop that it would wait for"):
        run.wait()
    with pytest.raises(TypeError, match=r"expected a function without arguments, got None. Write run\.start\(loop\)"):
        rl.Run(tmp_path / "other").start(None)


def test_outside_a_kernel_it_runs_in_place(run):
    """In the main thread, so that signals work; an error is raised at once."""
    where = []

    def loop():
        for _ in run.steps(range(9), 2, progress=False):
            where.append(threading.current_thread() is threading.main_thread())

    run.start(loop)
    run.wait()
    assert where == [True, True] and run.stopped == "done"
    with pytest.raises(ZeroDivisionError):
        run.start(lambda: 1 / 0)


def test_a_flag_that_came_too_late_does_not_stop_the_next_loop(run, sigint_guard):
    """An interrupt of wait() after the last step, while the function evaluates."""
    ended = threading.Event()

    def loop():
        list(run.steps(range(9), 1, progress=False))
        ended.wait(LONG)

    in_background(run, loop)
    until(lambda: run.stopped == "done", "the loop")

    def end():
        until(lambda: run._state.flag.reason == "interrupted", "the interrupt")
        ended.set()

    interrupt_when(listens(sigint_guard), then=end)
    run.wait()
    assert [step for step, _ in run.steps(range(9), 3, progress=False)] == [1, 2]


def test_the_handler_says_its_word_from_a_thread(sigint_guard):
    """A print inside a signal handler that interrupts a print is an error of Python's; a thread waits its turn."""
    said = []
    flag = StopFlag(lambda text: said.append((text, threading.current_thread().name)))
    with flag.listening():
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: said, "the word")
    assert said == [("rlkit: stopping after this step; interrupt again to stop at once", "rlkit-talk")]
    until(lambda: "rlkit-talk" not in [thread.name for thread in threading.enumerate()], "the thread's end")


# --- in a real kernel ---


class Kernel:
    """A real Jupyter kernel."""

    def __init__(self):
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=LONG)
        self.manager.shutdown_wait_time = LONG  # then it is killed, and not in order

    def run(self, code):
        """Execute a cell to its end: (status, what it printed)."""
        shown = []

        def hook(message):
            if message["msg_type"] == "stream":
                shown.append(message["content"]["text"])
            elif message["msg_type"] == "error":
                shown.append(f"{message['content']['ename']}: {message['content']['evalue']}")

        reply = self.client.execute_interactive(code, timeout=LONG, output_hook=hook)
        return reply["content"]["status"], "".join(shown)


@pytest.fixture
def kernel():
    one = Kernel()
    yield one
    one.client.stop_channels()
    one.manager.shutdown_kernel(now=True)


CELLS = """
import time, threading, torch, rlkit as rl
torch.set_grad_enabled(False)
run = rl.Run({folder!r})
knobs = run.knobs(beta=0.1)
seen = []
def loop():
    for step, batch in run.steps(iter(int, 1), 10_000):
        time.sleep(0.02)
        seen.append((threading.current_thread() is threading.main_thread(), torch.is_grad_enabled()))
        run.log(step, half=step / 2)
"""


# A cell that waits for the loop, and leaves a file once an interrupt would reach `run.wait`.
WAIT = """
import pathlib, signal
def watch(before=signal.getsignal(signal.SIGINT)):
    while signal.getsignal(signal.SIGINT) is before:
        time.sleep(0.02)
    pathlib.Path({folder!r}, "listens").touch()
threading.Thread(target=watch, daemon=True).start()
run.wait()
"""


@pytest.mark.slow
def test_a_kernel_runs_a_loop_in_the_background(kernel, tmp_path, capsys):
    """Other cells run meanwhile; the command line pauses, changes and resumes; the interrupt button on wait() stops."""
    folder = tmp_path / "run"
    state = lambda: read_json(folder / "state.json") or {}  # noqa: E731
    assert kernel.run(CELLS.format(folder=str(folder)))[0] == "ok"
    assert kernel.run("run.start(loop)")[0] == "ok"
    until(lambda: state().get("step", 0) > 2, "some steps")
    assert kernel.run("print(seen[0], 1 + 1)") == ("ok", "(False, False) 2\n")
    status, shown = kernel.run("run.start(loop)")
    assert status == "error" and "is going in the background" in shown

    assert main(["ctl", str(folder), "pause"]) == 0
    until(lambda: state().get("status") == "paused", "the pause")
    held = state()["step"]
    assert main(["ctl", str(folder), "set", "beta", "0.5"]) == 0
    until(lambda: state()["numbers"] == {"beta": 0.5}, "the change")
    status, shown = kernel.run("knobs.beta = 0.25")
    until(lambda: state()["numbers"] == {"beta": 0.25}, "the change of another cell")
    assert state()["step"] == held and state()["status"] == "paused"
    assert main(["ctl", str(folder), "resume"]) == 0
    until(lambda: state()["step"] > held + 2, "going on")

    kernel.client.execute(WAIT.format(folder=str(tmp_path)))
    until((tmp_path / "listens").exists, "run.wait()")
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=LONG)
    assert reply["content"]["status"] == "ok", reply["content"]
    assert kernel.run("print(run.stopped, run.step == len(run.metrics) > 0)") == ("ok", "interrupted True\n")
    assert state()["status"] == "interrupted"
    lines = read_lines(folder / "metrics.jsonl")
    assert lines[held - 1]["knobs/beta"] == 0.1 and lines[held]["knobs/beta"] == 0.25
    assert kernel.run("print(torch.is_grad_enabled())") == ("ok", "False\n")


@pytest.mark.slow
def test_a_kernel_that_is_shut_down_stops_the_loop_in_order(kernel, tmp_path):
    """The end of Python with a loop in the background: its step is finished and the state says so."""
    folder = tmp_path / "run"
    assert kernel.run(CELLS.format(folder=str(folder)) + "\nrun.start(loop)")[0] == "ok"
    until(lambda: (read_json(folder / "state.json") or {}).get("step", 0) > 2, "some steps")
    kernel.manager.shutdown_kernel(now=False)
    state = json.loads((folder / "state.json").read_text())
    assert state["status"] == "interrupted"
    assert state["step"] == len(read_lines(folder / "metrics.jsonl"))
    assert not (folder / "lock").exists()


@pytest.mark.slow
def test_prints_of_the_loop_reach_the_cell_that_started_it(kernel, tmp_path):
    """With the context of the cell."""
    cells = CELLS.format(folder=str(tmp_path / "run")).replace("run.log(", "print('step', step); run.log(")
    code = cells + "\nrun.start(loop)\nrun.wait()"

    def stop():
        until(lambda: (read_json(tmp_path / "run" / "state.json") or {}).get("step", 0) > 2, "some steps")
        send(tmp_path / "run", "stop", by="the test")

    other = threading.Thread(target=stop)
    other.start()
    status, shown = kernel.run(code)
    other.join()
    assert status == "ok", shown
    assert "step 0" in shown and "step 2" in shown and "stopped after step" in shown
