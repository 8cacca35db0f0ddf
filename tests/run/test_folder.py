"""The folder's lock, and what other ranks print."""

import errno
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlkit as rl
from rlkit.distributed.rank_output import MOST_CHARACTERS, RankLog
from rlkit.run import lock as lock_module
from rlkit.run.lock import lives, lock, unlock
from rlkit.run.manifest import newest

ROOT = str(Path(__file__).parents[2])
CLAIM = """
import sys, time, pathlib
from rlkit.run.lock import lock
folder = pathlib.Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    lock(folder)
    print("mine", flush=True)
except RuntimeError:
    print("taken", flush=True)
sys.stdin.readline()  # lives on until all have tried
"""


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "a lock of a dead process", "a torn lock"])
def test_of_several_that_claim_a_folder_at_once_one_gets_it(tmp_path, before):
    if before != "nothing":
        text = json.dumps({"host": socket.gethostname(), "pid": dead_pid()})
        (tmp_path / "lock").write_text(text if "dead" in before else text[:9])
    pipes = {
        "env": os.environ | {"PYTHONPATH": ROOT},
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
    }
    claims = [subprocess.Popen([sys.executable, "-c", CLAIM, str(tmp_path)], **pipes) for _ in range(4)]
    try:
        for claim in claims:
            assert claim.stdout.readline() == "ready\n"
        for claim in claims:
            claim.stdin.write("go\n")
            claim.stdin.flush()
        answers = [claim.stdout.readline().strip() for claim in claims]
        owner = json.loads((tmp_path / "lock").read_text())["pid"]
        assert sorted(answers) == ["mine", "taken", "taken", "taken"]
        assert owner == claims[answers.index("mine")].pid
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    finally:
        for claim in claims:
            claim.communicate("end\n")


@pytest.mark.integration
def test_while_one_takes_over_a_dead_lock_another_waits(tmp_path, monkeypatch):
    """Between the look at the dead one's lock and its end; the other would delete, or lose, what it finds then."""
    (tmp_path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": dead_pid()}))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    claim = [sys.executable, "-c", CLAIM, str(tmp_path)]
    with subprocess.Popen(claim, env=os.environ | {"PYTHONPATH": ROOT}, **pipes) as other:
        assert other.stdout.readline() == "ready\n"

        def slowly(pid):
            other.stdin.write("go\n")
            other.stdin.flush()
            select.select([other.stdout], [], [], 1.0)  # it answers only if it did not wait
            return lives(pid)

        monkeypatch.setattr(lock_module, "lives", slowly)
        lock(tmp_path)
        assert other.stdout.readline() == "taken\n"
        other.communicate("end\n")
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_file_system_without_flock_has_locks_all_the_same(tmp_path, monkeypatch):
    def refused(*arguments):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(fcntl, "flock", refused)
    lock(tmp_path)
    lock(tmp_path)
    (tmp_path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    with pytest.raises(RuntimeError, match="in use by process"):
        lock(tmp_path)
    (tmp_path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": dead_pid()}))
    lock(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_lock_is_taken_again_by_its_owner_and_from_the_dead_only(tmp_path):
    lock(tmp_path)
    lock(tmp_path)
    unlock(tmp_path)
    assert not (tmp_path / "lock").exists()
    (tmp_path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": dead_pid()}))
    lock(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    (tmp_path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    with pytest.raises(RuntimeError, match=f"in use by process {os.getppid()}"):
        lock(tmp_path)


def test_a_lock_of_another_machine_holds_though_no_such_process_is_here(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"host": "elsewhere", "pid": dead_pid()}))
    with pytest.raises(RuntimeError, match=r"in use by process \d+ on elsewhere"):
        lock(tmp_path)


def test_a_lock_is_given_back_by_its_owner_only(tmp_path):
    theirs = json.dumps({"host": socket.gethostname(), "pid": os.getppid()})
    (tmp_path / "lock").write_text(theirs)
    unlock(tmp_path)
    assert (tmp_path / "lock").read_text() == theirs


def test_resume_touches_nothing_in_a_folder_that_someone_works_on(tmp_path, policy):
    """A checkpoint that its owner writes at this moment is not given its name by a newcomer."""

    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    run = rl.Run(tmp_path / "run")
    run.track(policy, optimizer)
    list(run.steps(range(9), 2, progress=False))
    folder = run.path / "ckpt"
    os.rename(folder / "step-000002", folder / "step-000002.partial")  # between the two renames of a save
    (run.path / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    newcomer = rl.Run(tmp_path / "run")
    newcomer.track(policy, optimizer)
    with pytest.raises(RuntimeError, match=f"in use by process {os.getppid()}"):
        newcomer.resume()
    assert not (folder / "step-000002").exists()
    (run.path / "lock").unlink()
    assert newcomer.resume() == 2 and newest(folder).exists()


def test_what_another_rank_prints_waits_for_the_run_and_goes_into_its_folder(tmp_path):
    log = RankLog(3)
    print("early", file=log)
    log.move_to(tmp_path / "none")  # a node that does not see the folder
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    log.move_to(tmp_path / "a")
    print("in a \ud800", file=log, flush=True)
    assert (tmp_path / "a" / "rank3.log").read_text() == "early\nin a \\ud800\n"
    log.move_to(tmp_path / "b")
    print("in b", file=log, flush=True)
    log.move_to(tmp_path / "b")
    assert (tmp_path / "a" / "rank3.log").read_text().count("\n") == 2
    assert (tmp_path / "b" / "rank3.log").read_text() == "in b\n"
    assert log.writable() and not log.isatty()


def test_what_waits_is_bounded(tmp_path):
    log = RankLog(1)
    for number in range(40):
        log.write(f"{number:02d}" + "x" * (MOST_CHARACTERS // 10) + "\n")
    log.move_to(tmp_path)
    log.flush()
    text = (tmp_path / "rank1.log").read_text()
    assert MOST_CHARACTERS // 2 < len(text) <= MOST_CHARACTERS and text.splitlines()[-1].startswith("39")
