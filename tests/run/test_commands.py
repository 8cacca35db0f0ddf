"""Controls: commands in a file, taken between two steps, whoever writes them and whatever they hold."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from waiting import LONG, until

import rlkit as rl
from rlkit.cli import main
from rlkit.run.commands import Inbox, parse, send
from rlkit.run.line_files import read_json, read_lines
from rlkit.run.lock import unlock
from rlkit.support import timing


def state_of(run):
    return json.loads((run.path / "state.json").read_text())


def status_is(run, status):
    return lambda: (read_json(run.path / "state.json") or {}).get("status") == status


@pytest.fixture
def run(tmp_path):
    run = rl.Run(tmp_path / "run")
    assert run.path.exists()  # chosen here, not by whichever thread asks first
    return run


@pytest.fixture
def others(run):
    """Start functions in threads, as other writers of the file; what they raise fails the test."""
    started, errors = [], []

    def start(function):
        def work():
            try:
                function()
            except BaseException as error:
                errors.append(error)
                run._state.flag.reason = "interrupted"  # the loop may wait for this thread for ever

        started.append(threading.Thread(target=work))
        started[-1].start()

    yield start
    for thread in started:
        thread.join(LONG)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def steps(run, max_steps, **options):
    return run.steps(range(1000), max_steps, progress=False, **options)


def tracked(run, policy):
    """Track a policy with an optimizer, so that there is something to save."""
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    run.track(policy, optimizer)
    return optimizer


# --- the commands ---


def test_stop_ends_the_loop_after_the_step_as_the_interrupt_does(run, policy, capsys):
    tracked(run, policy)
    for step, _ in steps(run, 9):
        if step == 2:
            send(run.path, "stop", by="a button")
        run.log(step, loss=1.0)
    assert (run.stopped, run.step) == ("stopped", 3)
    assert state_of(run)["status"] == state_of(run)["stopped"] == "stopped"
    assert (run.path / "ckpt" / "latest").read_text() == "step-000003\n"
    assert "stopped after step 2 of 9; everything is in" in capsys.readouterr().out
    assert [step for step, _ in steps(run, 5)] == [3, 4] and run.stopped == "done"


def test_pause_holds_the_next_step_until_resume(run, others):
    held = []

    def other():
        until(status_is(run, "paused"), "the pause")
        held.append(state_of(run)["step"])
        time.sleep(0.5)
        held.append(state_of(run)["step"])
        held.append(time.monotonic())
        send(run.path, "resume")

    others(other)
    seen = {}
    for step, _ in steps(run, 4):
        seen[step] = time.monotonic()
        if step == 1:
            send(run.path, "pause")
    assert held[:2] == [2, 2] and seen[1] < held[2] < seen[2]
    assert (run.stopped, run.step) == ("done", 4)


@pytest.mark.parametrize("way", ["stop", "interrupt"])
def test_a_paused_run_can_be_stopped_saved_and_changed(run, policy, others, sigint_guard, way):
    tracked(run, policy)
    knobs = run.knobs(beta=0.1)

    def other():
        until(status_is(run, "paused"), "the pause")
        taken = send(run.path, "set", name="beta", value=0.5)
        taken = max(taken, send(run.path, "save"))
        until(lambda: state_of(run)["taken"] >= taken, "set and save")
        assert state_of(run)["numbers"] == {"beta": 0.5} and state_of(run)["status"] == "paused"
        assert (run.path / "ckpt" / "latest").read_text() == "step-000001\n"
        if way == "stop":
            send(run.path, "stop")
        else:
            os.kill(os.getpid(), signal.SIGINT)

    others(other)
    for step, _ in steps(run, 4):
        assert step == 0
        send(run.path, "pause")
    assert run.stopped == {"stop": "stopped", "interrupt": "interrupted"}[way]
    assert run.step == 1 and knobs.beta == 0.5


def test_a_change_holds_from_the_next_step_on_and_is_logged(run, capsys):
    knobs = run.knobs(beta=0.1, count=4)
    for step, _ in steps(run, 4):
        if step == 1:
            send(run.path, "set", name="beta", value=0.5, by="the view")
            send(run.path, "set", name="count", value=8)
        run.log(step, seen=knobs.beta)
    assert run.metrics["seen"].tolist() == run.metrics["knobs/beta"].tolist() == [0.1, 0.1, 0.5, 0.5]
    assert run.metrics["knobs/count"].tolist() == [4, 4, 8, 8] and isinstance(knobs.count, int)
    assert state_of(run)["numbers"] == {"beta": 0.5, "count": 8}
    assert "rlkit: beta 0.1 -> 0.5 (by the view), from step 2 on" in capsys.readouterr().out


def test_save_writes_a_checkpoint_now(run, policy):
    tracked(run, policy)
    for step, _ in steps(run, 3):
        if step == 1:
            assert not (run.path / "ckpt").exists()
            run.control("save")
        if step == 2:
            assert (run.path / "ckpt" / "latest").read_text() == "step-000002\n"


def test_save_without_anything_tracked_says_so(run, capsys):
    for _ in steps(run, 2):
        run.control("save")
    assert "nothing is saved (by run.control): no run.track" in capsys.readouterr().out


def test_what_was_written_before_the_loop_is_history(run, policy):
    """A stop of yesterday does not stop today's run, nor does one that came too late for its loop."""
    tracked(run, policy)
    for step, _ in steps(run, 2):
        if step == 1:
            send(run.path, "stop")  # in the last step: simply the end
    assert run.stopped == "done"
    with open(run.path / "commands.jsonl", "a") as file:
        file.write('{"command": "stop"}\n{"command": "sto')
    unlock(run.path)
    again = rl.Run(run.path)
    tracked(again, policy)
    assert again.resume() == 2
    for step, _ in steps(again, 5):
        if step == 3:
            send(again.path, "stop")
    assert (again.stopped, again.step) == ("stopped", 4)
    assert state_of(again)["taken"] == 4  # stop, stop, the torn line that the last one ended, stop


NONSENSE = [
    b"",
    b"not json",
    b"[1, 2]",
    b'"stop"',
    b"null",
    b'{"command": "explode"}',
    b'{"command": ["stop"]}',
    b'{"command": "set"}',
    b'{"command": "set", "name": 3, "value": 1}',
    b'{"command": "set", "name": "beta", "value": "much"}',
    b'{"command": "set", "name": "beta", "value": NaN}',
    b'{"command": "set", "name": "beta", "value": Infinity}',
    b'{"command": "set", "name": "beta", "value": -1}',
    b'{"command": "set", "name": "beta", "value": true}',
    b'{"command": "set", "name": "gamma", "value": 1}',
    b"\xff\xfe\x00stop",
    b"[" * 100_000,
    b'{"command": "stop", "by": ' + b"1" * 5000 + b"}",
]


def test_nonsense_is_skipped_with_a_note_and_what_follows_is_taken(run, capsys):
    """Anyone can write to the file, with any program; nothing there stops the training."""
    knobs = run.knobs(beta=0.1, bounds={"beta": (0, 1)})
    before = math.nan
    for step, _ in steps(run, 6):
        if step == 1:
            with open(run.path / "commands.jsonl", "ab") as file:
                file.write(b"\n".join(NONSENSE[:-1]) + b'\n{"command": "set", "name": "beta", "value": 0.75}\n')
        if step == 3:
            before = knobs.beta
    assert before == knobs.beta == 0.75 and run.stopped == "done"
    notes = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert len(notes) == len(NONSENSE) - 2  # all but the empty line
    assert state_of(run)["taken"] == len(NONSENSE)


def test_a_line_that_is_being_written_is_waited_for(run):
    inbox = Inbox(run.path)
    for piece, found in (
        (b'{"comm', []),
        (b'and": "st', []),
        (b'op"}\n{', ["stop"]),
        (b'"command": "save"}\n', ["save"]),
    ):
        with open(run.path / "commands.jsonl", "ab") as file:
            file.write(piece)
        commands, notes = inbox.take()
        assert [command.order for command in commands] == found and not notes
    assert inbox.taken == 2


def test_a_line_without_end_does_not_stop_the_file(run):
    inbox = Inbox(run.path)
    (run.path / "commands.jsonl").write_bytes(b"x" * (3 << 20) + b'\n{"command": "stop"}\n')
    found = [command.order for _ in range(6) for command in inbox.take()[0]]
    assert found == ["stop"]


def test_a_file_that_is_emptied_or_gone_is_read_from_its_start(run):
    file = run.path / "commands.jsonl"
    file.write_bytes(b'{"command": "save"}\n' * 3)
    inbox = Inbox(run.path)
    file.unlink()
    assert inbox.take() == ([], [])
    file.write_bytes(b'{"command": "stop"}\n')
    assert [command.order for command in inbox.take()[0]] == ["stop"]


def test_a_file_that_cannot_be_read_is_noted_once(run):
    inbox = Inbox(run.path)
    (run.path / "commands.jsonl").mkdir()
    (run.path / "commands.jsonl" / "x").touch()
    notes = [note for _ in range(3) for note in inbox.take()[1]]
    assert len(notes) == 1 and "cannot be read" in notes[0]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_line_costs_only_itself(run, cut):
    """Someone dies in the middle of a line; the next sender begins a new one."""
    for step, _ in steps(run, 4):
        if step == 0:
            (run.path / "commands.jsonl").write_bytes(b'{"command": "stop", "by": "a dying process"}\n'[:cut])
        if step == 1:
            send(run.path, "stop")
    assert (run.stopped, run.step) == ("stopped", 2)


def test_many_writers_lose_nothing(run, others):
    """Whole lines, whoever writes, and each sender learns the number of its own."""
    run.knobs(beta=0)
    numbers = []
    for step, _ in steps(run, 2):
        if step == 0:
            threads = [
                threading.Thread(
                    target=lambda: [numbers.append(send(run.path, "set", name="beta", value=i)) for i in range(20)]
                )
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert sorted(numbers) == list(range(1, 161))
    assert state_of(run)["taken"] == 160


# --- what a sender is told ---


def test_a_command_to_a_folder_without_a_loop_is_refused(run, tmp_path):
    for folder in (tmp_path / "none", run.path):
        with pytest.raises(FileNotFoundError, match="no loop has begun in"):
            send(folder, "stop")


def test_a_command_to_a_loop_that_has_ended_is_refused(run):
    list(steps(run, 2))
    with pytest.raises(RuntimeError, match=r"nothing in .* takes a command: its loop has ended \(done\) at step 2"):
        send(run.path, "pause")
    assert not (run.path / "commands.jsonl").exists()


def test_a_command_to_a_process_that_died_is_refused(run):
    next(iter(steps(run, 2)))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    state = state_of(run) | {"pid": dead.pid, "status": "running"}
    (run.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(RuntimeError, match=f"its process {dead.pid} no longer runs"):
        send(run.path, "pause")


BAD = {
    "unknown order": (
        ("explode", None, None),
        ValueError,
        "expected one of pause, resume, stop, save, set, got 'explode'",
    ),
    "unknown number": (("set", "gamma", 1.0), ValueError, "there is no number 'gamma': declared are beta, count"),
    "no name": (("set", None, 1.0), ValueError, "there is no number None: declared are beta, count"),
    "nan": (("set", "beta", math.nan), ValueError, "beta must be finite, got nan"),
    "inf": (("set", "beta", math.inf), ValueError, "beta must be finite, got inf"),
    "bounds": (("set", "beta", 2.0), ValueError, "beta must be between 0 and 1, got 2.0"),
    "no value": (("set", "beta", None), TypeError, "beta must be a number, got None"),
    "text": (("set", "beta", "much"), TypeError, "beta must be a number, got 'much'"),
    "bool": (("set", "beta", True), TypeError, "beta must be a number, got True"),
    "not whole": (("set", "count", 2.5), ValueError, "count must be a whole number, got 2.5"),
    "a value too many": (("stop", None, 3.0), TypeError, "name and value belong to 'set', not to 'stop'"),
}


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_commands_are_refused_where_they_are_sent(run, unchecked, call, kind, message):
    run.knobs(beta=0.1, count=4, bounds={"beta": (0, 1)})
    for _ in steps(run, 1):
        order, name, value = call
        with pytest.raises(kind, match=message):
            send(run.path, order, name=name, value=value)
        assert not (run.path / "commands.jsonl").exists()


def test_parsing_keeps_the_sender_short():
    assert len(parse(json.dumps({"command": "stop", "by": "x" * 1000}).encode()).by) == 80


# --- state.json ---


def test_the_state_says_what_a_view_needs(run):
    run.knobs(beta=0.1, rate=2.0, bounds={"beta": (0, 1)})
    for _ in steps(run, 2):
        state = state_of(run)
        assert state["status"] == "running" and state["stopped"] is None
        assert state["numbers"] == {"beta": 0.1, "rate": 2.0}
        assert state["bounds"] == {"beta": [0, 1], "rate": [None, None]}
        assert state["pid"] == os.getpid() and abs(state["time"] - time.time()) < LONG and state["taken"] == 0
    assert state_of(run)["status"] == "done"


def test_an_error_between_steps_leaves_a_state_that_says_so(run):
    """A stream that fails: the run does not look as if it still went on."""

    def broken():
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(run.steps(broken(), 5, progress=False))
    assert (run.stopped, state_of(run)["status"]) == ("left", "left")


# --- the command line ---


def test_the_command_line_does_the_same(run, capsys):
    run.knobs(beta=0.1, bounds={"beta": (0, None)})
    folder = str(run.path)
    for step, _ in steps(run, 9):
        if step == 1:
            assert main(["ctl", folder, "set", "beta", "0.25"]) == 0
            assert main(["ctl", folder, "set", "gamma", "0.25"]) == 1
            assert main(["ctl", folder, "set", "beta", "much"]) == 1
            assert main(["ctl", folder, "set", "beta", "-1"]) == 1
            assert main(["ctl", folder, "set", "beta"]) == main(["ctl", folder, "stop", "now"]) == 2
        if step == 2:
            assert main(["ctl", folder, "status"]) == 0
            assert main(["ctl", folder, "stop"]) == 0
    assert (run.stopped, run.step) == ("stopped", 3) and run.metrics.empty
    out, err = capsys.readouterr()
    assert f"{folder}: running, 2 of 9 steps done" in out and "beta = 0.25  (from 0 to anything)" in out
    assert "declared are beta" in err and "expected set NAME VALUE, got set beta" in err
    assert main(["ctl", folder, "pause"]) == 1 and main(["ctl", folder + "x", "status"]) == 1
    with pytest.raises(SystemExit):
        main(["ctl", folder, "explode"])


# --- time per phase ---


def test_the_time_of_a_step_is_split_into_phases(run, policy):
    """The phases add up to the step; what is inside another phase is counted once; what is outside of steps never."""
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)

    def slow(completions):
        time.sleep(0.05)
        return [float(len(text)) for text in completions]

    rl.evaluate(policy, [{"prompt": "1="}], slow, max_completion_length=4)  # before the loop: no step's time
    for step, _ in steps(run, 2):
        rollout = rl.sample(policy, ["1=", "2="], num_generations=2, max_completion_length=4)
        scores = rl.score(rollout, slow)
        rl.compute_logps(policy, rollout)
        rl.loss_step(policy, optimizer, rollout, rl.compute_loo_advantage(scores))
        if step == 1:
            rl.evaluate(policy, [{"prompt": "1="}], slow, max_completion_length=4)
        time.sleep(0.05)
    first, second = read_lines(run.path / "timings.jsonl")
    assert set(first["phases"]) == {"sample", "score", "compute_logps", "loss_step", "other"}
    assert set(second["phases"]) == {*first["phases"], "evaluate"}
    for line in (first, second):
        assert sum(line["phases"].values()) == pytest.approx(line["step_time"], rel=1e-9)
        assert line["phases"]["score"] >= 0.05 and line["phases"]["other"] >= 0.05
    assert second["phases"]["evaluate"] >= 0.05  # its own score inside


def test_a_phase_counts_on_its_own_thread_and_also_when_it_fails():
    @timing.phase("nap")
    def nap(fail=False):
        time.sleep(0.01)
        if fail:
            raise KeyError

    timing.take()
    thread = threading.Thread(target=nap)
    thread.start()
    thread.join()
    assert timing.take() == {}
    with pytest.raises(KeyError):
        nap(fail=True)
    nap()
    assert 0.02 <= timing.take()["nap"] < LONG


def test_the_controls_cost_no_more_than_a_step_writes_anyway(run):
    """Looking for commands is an open and a short read: cheaper than the write of state.json that each step does."""
    inbox = Inbox(run.path)
    list(steps(run, 1))
    send_nothing = min(_seconds(inbox.take) for _ in range(5))
    write = min(
        _seconds(lambda: (run.path / "state.json").write_text((run.path / "state.json").read_text())) for _ in range(5)
    )
    assert send_nothing < write


def _seconds(function):
    started = time.perf_counter()
    for _ in range(200):
        function()
    return time.perf_counter() - started
