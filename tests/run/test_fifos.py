"""What is not a regular file under the name of one: nobody waits for it, whoever reads the folder."""

import os
import shutil
import signal
import socket

import pytest
import torch
from builders import make_rollout, make_scores, tiny_policy

import rlkit as rl
from rlkit.cli import main
from rlkit.distributed.rank_output import RankLog
from rlkit.run.commands import send
from rlkit.run.folder import append_line
from rlkit.run.line_files import read_json, read_lines
from rlkit.run.lock import unlock
from rlkit.support.files import regular, written_whole

READ = [
    *("metrics.jsonl", "timings.jsonl", "evaluations.jsonl", "commands.jsonl", "changes.jsonl"),
    *("state.json", "config.json", "sinks.json", "lock", "STOPPED"),
    *("rollouts/step-00000001.parquet", "ckpt/latest", "ckpt/best"),
]
WRITTEN = ["metrics.jsonl", "state.json", "ckpt/latest", "ckpt/best", "rollouts/step-00000002.parquet"]


@pytest.fixture(autouse=True)
def in_time():
    """An open that waits for another process ends the test."""

    def late(*_):
        raise TimeoutError("waits for the other end of a FIFO")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def loop(path, policy, steps):
    run = rl.Run(path)
    run.track(policy, torch.optim.SGD(policy.trainable_parameters(), lr=0.1), best="reward")
    run.resume()
    for step, _ in run.steps(range(9), steps, save_every=1, progress=False):
        run.log(step, make_rollout(), make_scores([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]))
    unlock(run.path)
    return run


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(layers=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, policy):
    return loop(tmp_path_factory.mktemp("whole") / "run", policy, 2).path


def other_kinds(file, kind):
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")  # never ends
    else:
        with socket.socket(socket.AF_UNIX) as end:
            here = os.getcwd()
            os.chdir(file.parent)  # its name may have 107 bytes
            end.bind(file.name)
            os.chdir(here)


@pytest.mark.parametrize("kind", ["fifo", "device", "socket"])
@pytest.mark.parametrize("partial", [False, True])
def test_a_folder_is_read_and_gone_on_in(whole, policy, tmp_path, kind, partial):
    path = shutil.copytree(whole, tmp_path / "run")
    for name in WRITTEN if partial else READ:
        other_kinds(path / (f"{name}.partial" if partial else name), kind)
    reader = rl.Run.open(path)
    assert len(reader.metrics) == (2 if partial else 0) and len(reader.rollouts()) == (8 if partial else 4)
    for name in [] if partial else ["metrics.jsonl", "timings.jsonl", "evaluations.jsonl", "state.json", "config.json"]:
        assert any(name in note for note in reader.notes)
    assert main(["ctl", str(path), "status"]) == (0 if partial else 1)
    assert main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 0
    run = loop(path, policy, 4)
    assert run.stopped == "done" and run.path == path and run.metrics["step"].tolist()[-2:] == [2, 3]


def test_each_reader_and_writer(tmp_path, policy):
    file = tmp_path / "file"
    os.mkfifo(file)
    assert read_json(file) is None and read_lines(file) == []
    with pytest.raises(OSError, match="not a regular file"):
        rl.ValueTable.load(file)
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        append_line(file, {"a": 1})
    reading = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # with a reader its opening does not fail by itself
    with pytest.raises(OSError, match="not a regular file"):
        append_line(file, {"a": 1})
    os.close(reading)
    file.rename(tmp_path / "rank1.log")
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        RankLog(1).move_to(tmp_path)
    (tmp_path / "rank1.log").rename(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match=r"config\.json of the run is missing or not whole"):
        rl.model_card(policy, method="RLOO", run=tmp_path)


def test_a_file_is_whole_or_not_there_and_no_link_is_followed(tmp_path):
    (tmp_path / "file.partial").symlink_to(tmp_path / "elsewhere")
    with written_whole(tmp_path / "file") as partial:
        partial.write_text("text")
    assert (tmp_path / "file").read_text() == "text" and not (tmp_path / "elsewhere").exists()
    with pytest.raises(ZeroDivisionError), written_whole(tmp_path / "file") as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_text() == "text" and len(list(tmp_path.iterdir())) == 1
    with open(tmp_path / "file", opener=regular) as handle:
        assert handle.read() == "text"


def test_commands_to_a_fifo_are_refused(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "run")
    (path / "state.json").write_text('{"status": "running", "step": 1}')
    os.mkfifo(path / "commands.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        send(path, "stop")
