"""What careless users, full disks, killed processes and hostile writers do to a run and its folder."""

import io
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from builders import make_rollout, make_scores
from run_folders import write_run

import rlkit as rl
from rlkit.cli import ctl, main
from rlkit.run import folder as folder_module
from rlkit.run.folder import cut_lines
from rlkit.run.knobs import Numbers
from rlkit.run.line_files import read_json
from rlkit.run.lock import lives, lock
from rlkit.run.svg import picture
from rlkit.view.panels import History
from rlkit.view.static import as_page


@pytest.fixture
def run(tmp_path):
    return rl.Run(tmp_path / "run")


@pytest.fixture
def disk():
    """`disk(bytes)` bounds the size of files, as a full disk does; `disk(None)` frees it."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    free = resource.getrlimit(resource.RLIMIT_FSIZE)

    def bound(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, free if size is None else (size, free[1]))

    yield bound
    bound(None)
    signal.signal(signal.SIGXFSZ, before)


def in_the_first_step(run, text):
    """What a loop of two steps does with a line that stands in commands.jsonl."""
    knobs = run.knobs(beta=0.1)
    for step, _ in run.steps(range(2), 2, progress=False):
        if step == 0:
            (run.path / "commands.jsonl").write_text(text + "\n")
    return knobs.beta


# --- a full disk ---


def test_a_line_that_did_not_fit_spoils_no_other(run, disk):
    run.log(0, a=1)
    disk((run.path / "metrics.jsonl").stat().st_size + 5)
    with pytest.raises(OSError, match="too large"):
        run.log(1, a=2)
    disk(None)
    run.log(1, a=3)
    assert run.metrics["a"].tolist() == [1, 3] and rl.Run.open(run.path).metrics["a"].tolist() == [1, 3]


def test_a_loop_goes_on_after_the_step_in_which_the_disk_was_full(run, disk):
    with pytest.raises(OSError, match="too large"):
        for step, _ in run.steps(range(4), 4, progress=False):
            run.log(step, a=step)
            if step == 1:
                disk(20)
    disk(None)
    for step, _ in run.steps(range(4), 4, progress=False):
        run.log(step, a=step)
    assert run.metrics["a"].tolist() == [0, 1, 2, 3] and run.stopped == "done"


# --- a folder that goes away ---


def train(run, policy, optimizer, steps, in_step=None):
    """A loop that really updates the policy; `in_step(step)` is called before the step is logged."""
    for step, _ in run.steps(range(99), steps, progress=False):
        loss = sum((parameter**2).sum() for parameter in policy.trainable_parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if in_step is not None:
            in_step(step)
        run.log(step, loss_now=float(loss.detach()))


@pytest.fixture
def trained(run, policy):
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.01)
    run.track(policy, optimizer)
    return run, policy, optimizer


def test_a_deleted_folder_ends_the_loop_with_a_word_and_nothing_else_is_lost(trained, tmp_path):
    run, policy, optimizer = trained

    def delete(step):
        if step == 2:
            shutil.rmtree(run.path)

    with pytest.raises(FileNotFoundError) as caught:
        train(run, policy, optimizer, 5, delete)
    said = str(caught.value)
    assert str(run.path) in said and "deleted or moved" in said and "policy.save_pretrained" in said
    assert run.stopped == "left" and not run.path.exists()  # not created again without its history
    for work in (run.save, lambda: run.log(3, a=1.0), lambda: run.control("stop")):
        with pytest.raises(FileNotFoundError):
            work()
    assert not run.path.exists()
    policy.save_pretrained(tmp_path / "kept")
    after = rl.Run(tmp_path / "run")
    after.track(policy, optimizer)
    train(after, policy, optimizer, 2)
    assert after.path == run.path and after.stopped == "done" and len(after.metrics) == 2
    assert (after.path / "ckpt" / "step-000002").is_dir()


def test_a_folder_that_is_moved_back_goes_on(trained, tmp_path):
    run, policy, optimizer = trained

    def move(step):
        if step == 2:
            run.path.rename(tmp_path / "elsewhere")

    with pytest.raises(FileNotFoundError, match="move it back and run the loop again"):
        train(run, policy, optimizer, 5, move)
    (tmp_path / "elsewhere").rename(run.path)
    train(run, policy, optimizer, 5)
    assert run.metrics["step"].tolist() == [0, 1, 2, 3, 4] and run.stopped == "done"


def test_a_log_with_a_broken_line_can_be_cut(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0}\n\x00\x00\x00\n{"no": 1}\n[1]\n{"step": 1, "a": 0.1}\n{"step": 2}\n{"st')
    cut_lines(file, 2)
    assert file.read_bytes() == b'{"step": 0}\n{"step": 1, "a": 0.1}\n'


# --- processes ---


@pytest.mark.integration
def test_runs_that_start_at_once_get_a_folder_each(tmp_path):
    code = (
        "import sys, time, rlkit as rl\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "run = rl.Run('run', config={'who': int(sys.argv[1])}); run.log(0, who=int(sys.argv[1]))\n"
        "print(run.path, flush=True); sys.stdin.readline()\n"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(who)],
            cwd=tmp_path,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for who in range(3)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        _, error = worker.communicate("\n")
        assert worker.returncode == 0, error
    folders = sorted(tmp_path.glob("run*"))
    assert [folder.name for folder in folders] == ["run", "run-2", "run-3"]
    for folder in folders:
        (logged,) = rl.Run.open(folder).metrics["who"]
        assert read_json(folder / "config.json")["parameters"] == {"who": logged}


def test_a_run_that_came_and_went_while_another_chose_its_folder_is_not_written_into(tmp_path, monkeypatch):
    def late_lock(path):
        if path.name == "run":  # between the look into the folder and its lock
            (path / "metrics.jsonl").write_text('{"step": 0}\n')
        return lock(path)

    monkeypatch.setattr(folder_module, "lock", late_lock)
    assert folder_module.claimed_folder(tmp_path / "run") == tmp_path / "run-2"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_process_that_nobody_buried_is_dead():
    """In a container process 1 may never ask for its children's ends."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert lives(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie until `wait`
    assert not lives(process.pid)
    assert process.wait() == -signal.SIGKILL
    assert not any(map(lives, (0, -1, 10**30)))


def test_a_changed_working_directory_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = rl.Run("runs/x")
    run.log(0, a=1)
    reader = rl.Run.open("runs/x")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.log(1, a=2)
    assert reader.refresh() and reader.metrics["a"].tolist() == [1, 2]


# --- commands ---


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "NaN", "1e999"])
def test_no_number_ends_a_loop(run, value, capsys):
    assert in_the_first_step(run, f'{{"command": "set", "name": "beta", "value": {value}}}') == 0.1
    assert run.stopped == "done" and "beta must be finite" in capsys.readouterr().out


def test_the_sender_of_a_command_is_printed_as_letters(run, capsys):
    line = {"command": "set", "name": "beta", "value": 1, "by": "a\ud800\x1b[2J\nb"}
    assert in_the_first_step(run, json.dumps(line)) == 1.0
    said = capsys.readouterr().out
    assert "(by a??[2J?b)" in said and "\x1b" not in said


def test_a_loop_runs_without_controls_that_cannot_be_read(run, capsys):
    (run.path / "commands.jsonl").mkdir()
    assert [step for step, _ in run.steps(range(2), 2, progress=False)] == [0, 1]
    assert capsys.readouterr().out.count("cannot be read") == 1


@pytest.mark.parametrize(
    "state",
    [
        {"status": "running"},
        {"status": "running", "pid": 10**30, "time": 1},
        {"status": "running", "numbers": [1], "bounds": "x", "pid": "p", "host": 1, "time": "z", "max_steps": {}},
        {"status": "\x1b[31m", "numbers": {"\x1b[2J": 1}, "bounds": {"\x1b[2J": [1]}},
    ],
)
def test_ctl_shows_any_state(tmp_path, state):
    import socket

    (tmp_path / "state.json").write_text(json.dumps({"host": socket.gethostname()} | state))
    assert "\x1b" not in ctl.describe(tmp_path)


# --- numbers ---


def test_a_number_of_the_checkpoint_that_no_longer_fits_is_said(unchecked):
    before = Numbers()
    before.declare({"beta": 0.02, "k": 1.0}, {})
    before.set("beta", 0.5)
    before.set("k", 1.5)
    after = Numbers()
    after.restore(before.state())
    notes = after.declare({"beta": 0.02, "k": 1}, {"beta": (0, 0.1)})
    assert after.values() == {"beta": 0.02, "k": 1}
    assert "beta is 0.02, not 0.5" in notes[0] and "k is 1, not 1.5" in notes[1]


def test_an_infinite_bound_is_none(run):
    run.knobs(beta=1.0, bounds={"beta": (-math.inf, math.inf)})
    assert [step for step, _ in run.steps(range(1), 1, progress=False)] == [0]
    assert json.loads((run.path / "state.json").read_text(), parse_constant=pytest.fail)["bounds"] == {
        "beta": [None, None]
    }


def test_a_step_of_numpy_is_a_step(run, unchecked):
    assert run.log(np.int64(3), a=1)["step"] == 3
    with pytest.raises(TypeError, match=r"step must be a whole number.*4\.5"):
        run.log(4.5, a=1)


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, 2, math.nan], ">f4"),
        np.array([2.0, 1.0])[::-1],
        np.array([1, 2], np.longdouble),
        np.ma.array([1.5, 9], mask=[0, 1]),
        np.broadcast_to(np.float32(1.5), (3,)),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    ],
)
def test_an_array_of_any_make_is_a_number(run, unchecked, value):
    assert run.log(0, a=value)["a"] == 1.5


@pytest.mark.parametrize("value", [2**24 + 1, np.array(2**24 + 1), torch.tensor(2**24 + 1)])
def test_a_count_keeps_its_digits(run, unchecked, value):
    assert run.log(0, a=value, b=np.ma.masked) == {"step": 0, "a": 2**24 + 1, "b": None}


def test_what_names_a_folder_can_be_printed_anywhere(tmp_path, unchecked, monkeypatch):
    """`print(run)` in a terminal of another encoding."""
    run = rl.Run(tmp_path / "ü🎉")
    run.log(0, a=1.0)
    knobs = run.knobs(größe=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
        said = [repr(one) for one in (run, knobs, rl.Run.open(run.path))]
    assert all(text.encode("cp1252") for text in said) and "größe=1.0" in said[1]


def test_parameters_of_any_kind_are_kept(tmp_path):
    itself = []
    itself.append(itself)
    config = {"weights": {("a", 1): 0.5}, "limit": math.inf, "itself": itself, 3: {4}}
    path = rl.Run(tmp_path / "run", config=config).path
    found = json.loads((path / "config.json").read_text(), parse_constant=pytest.fail)["parameters"]
    assert found["weights"] == {"('a', 1)": 0.5} and found["limit"] == "inf" and found["3"] == "{4}"
    assert rl.Run.open(path).config["parameters"] == found


# --- readers ---


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "state.json", "config.json"])
def test_a_folder_opens_whatever_stands_in_place_of_a_file(run, name):
    run.log(0, a=1)
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).mkdir()
    reader = rl.Run.open(run.path)
    assert any(name in note for note in reader.notes)
    assert "Run run" in as_page([History(reader)])


@pytest.mark.parametrize("step", ["NaN", "1e999", "-1e999", "true", "0.5", "1" + "0" * 400, '"1"', "null", "[1]"])
def test_a_line_whose_step_is_none_is_left_out(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}, "a": 1}}\n{{"step": 7, "a": 2}}\n')
    reader = rl.Run.open(tmp_path)
    assert reader.metrics.to_dict("list") == {"step": [7], "a": [2.0]}
    assert any("without a step" in note for note in reader.notes)


def test_a_state_nested_without_end_is_no_state(tmp_path):
    (tmp_path / "state.json").write_text('{"a": ' + "[" * 100_000)
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert rl.Run.open(tmp_path).state == {} and read_json(tmp_path / "config.json") is None


def test_any_name_of_a_metric_can_be_read_and_drawn(run):
    names = ["\x00\x1b[31m", "<script>", "\ud800", "\ufffd", "]]>&", "\u202e", ""]
    run.log(0, **dict.fromkeys(names, 1.0))
    run.log(1, **dict.fromkeys(names, 2.0))
    reader = rl.Run.open(run.path)
    assert reader.metrics.shape == (2, 1 + len(names) - 1)  # half a pair and its stand-in are one in print
    history = History(reader)
    while history.update():
        pass
    assert as_page([history]).count("<img") >= 1
    for name in names:
        ET.fromstring(picture(name, {name: ([0, 1], [1, 2]), "other": ([0], [1])}))


@pytest.mark.parametrize("values", [[1e308, -1e308], [1.7e308, 1.7e308], [5e-324, 0.0], [1e300, 1e300]])
def test_any_number_can_be_drawn(values):
    drawn = picture("t", {"a": ([0, 1], values)})
    assert "nan" not in drawn and "inf" not in drawn


def test_names_that_come_once_cost_their_step_only(tmp_path):
    """A metric with the step in its name: a column of each would be filled up at every other step."""
    seconds = []
    for names in (1, 2000):
        lines = "".join(json.dumps({"step": step, f"a{step % names}": step}) + "\n" for step in range(2000))
        (tmp_path / "metrics.jsonl").write_text(lines)
        started = time.process_time()
        reader = rl.Run.open(tmp_path)
        seconds.append(time.process_time() - started)
    assert len(reader.names) == 2000 and reader.series("a7")[0].tolist() == [7]
    assert reader.metrics["a7"].notna().tolist() == [step == 7 for step in range(2000)]
    assert sum(map(len, reader._metrics.columns.values())) < 2000 * 2000 * 0.6
    assert seconds[1] < 100 * max(seconds[0], 0.01)


def test_an_empty_rollout_is_logged_and_shown(run, capsys):
    rollout, scores = make_rollout().select([]), make_scores([1, 0, 0, 1], [0, 0, 1, 1]).select([])
    line = run.log(0, rollout, scores, torch.zeros(0), ref_logps=torch.zeros(rollout.completion_ids.shape))
    assert line["completions/mean_length"] is None and len(run.rollouts(0)) == 0
    rl.show_completions(run.path, sort="-reward")
    assert "0 of 0 completions" in capsys.readouterr().out


def test_a_torn_rollout_is_named_in_the_terminal(run, capsys):
    run.log(0, make_rollout(), make_scores([1, 0, 0, 1], [0, 0, 1, 1]))
    (run.path / "rollouts" / "step-00000001.parquet").write_bytes(b"PAR1")
    rl.show_completions(run.path, sort="reward")
    assert "step-00000001.parquet cannot be read" in capsys.readouterr().out.replace("\n", " ")


# --- the command line ---


@pytest.mark.parametrize(
    "words, status, said",
    [
        (["report", "RUN", "-o", "RUN"], 2, "is a folder; name the file"),
        (["report", "RUN", "-o", "RUN/config.json/x.html"], 2, "config.json"),
        (["ctl", "RUN", "set", "beta", "0,5"], 1, "'0,5' is no number; write it like 0.1"),
        (["ctl", "RUN", "set", "beta", "-1e-3"], 0, "beta will be -1e-3"),
        (["ctl", "RUN", "set", "beta"], 2, "expected set NAME VALUE"),
        (["ctl", "RUN", "stop", "now"], 2, "nothing after it"),
    ],
)
def test_the_command_line_names_what_is_wrong(tmp_path, capsys, words, status, said):
    folder = write_run(tmp_path / "run", steps=1)
    assert main([word.replace("RUN", str(folder)) for word in words]) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_megabytes_are_a_finite_number(tmp_path, capsys):
    for text in ("inf", "nan", "-1", "x"):
        with pytest.raises(SystemExit, match="2"):
            main(["report", str(tmp_path), "--max-mb", text])
        assert "--max-mb" in capsys.readouterr().err
