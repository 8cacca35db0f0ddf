"""Stopped, killed and taken up again: the run is the one that was never interrupted, bit for bit."""

import json
import os
import shutil
import socket

import pytest
import torch
from builders import assert_identical
from comparing import WEIGHTS, assert_close
from lifecycle_worker import HALF, STEPS, TORN, train

from rlkit.run import lock
from rlkit.run.line_files import read_lines
from rlkit.run.manifest import newest

pytestmark = pytest.mark.torchrun

PROCESSES = {"single": 1, "ddp": 2, "fsdp2": 2}
SAME_PROCESSES = ["half", "usr1", "term", "killed"]


class Life:
    """One number of processes and strategy: the launches, and the folder where all their runs lie."""

    def __init__(self, launcher, strategy):
        ranks = PROCESSES[strategy]
        self.first = launcher("lifecycle_worker.py", "first", ranks=ranks, strategy=strategy)
        self.folder = self.first.folder
        self.files = {name: self.read(name) for name in ("whole", "half", "term", "usr1")}
        self.stopped = {name: (self.folder / name / "STOPPED").read_text() for name in ("term", "usr1")}
        self.killed = launcher("lifecycle_worker.py", "killed", ranks=ranks, strategy=strategy, folder=self.folder)
        self.left_by_kill = sorted(path.name for path in (self.folder / "killed" / "ckpt").iterdir())
        self.lines_of_killed = read_lines(self.folder / "killed" / "metrics.jsonl")
        self.lock_of_killed = json.loads((self.folder / "killed" / "lock").read_text())
        self.strategy, self.ranks, self._launcher = strategy, ranks, launcher

    def go_on(self):
        arguments = {"ranks": self.ranks, "strategy": self.strategy, "folder": self.folder}
        self.second = self._launcher("lifecycle_worker.py", "second", **arguments)
        return self

    def read(self, name):
        return (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lives(launcher):
    """Every life up to its death; then each takes up its own runs and one of another number of processes."""
    found = {strategy: Life(launcher, strategy) for strategy in PROCESSES}
    shutil.copytree(found["ddp"].folder / "half", found["single"].folder / "from_two")
    for strategy in ("ddp", "fsdp2"):
        shutil.copytree(found["single"].folder / "half", found[strategy].folder / "from_one")
    return {strategy: life.go_on() for strategy, life in found.items()}


@pytest.fixture(scope="module", params=PROCESSES)
def life(request, lives):
    return lives[request.param]


@pytest.mark.parametrize("name", SAME_PROCESSES)
def test_taken_up_is_never_interrupted(life, name):
    """4 steps against 2 + resume + 2: weights, optimizer, scheduler, random states, position and log, bit for bit."""
    whole = life.first.check("whole")
    found = life.second.check(f"{name}-resumed")
    assert len(whole) == len(found) == life.ranks
    for rank, expected in zip(found, whole, strict=True):
        assert (rank["resumed_at"], rank["step"], rank["stopped"], rank["folder"]) == (HALF, STEPS, "done", name)
        for key in ("parameters", "optimizer", "scheduler", "version", "position", "random_states"):
            assert_identical(rank[key], expected[key])
    assert life.read(name) == life.files["whole"]
    assert [line["step"] for line in read_lines(life.folder / name / "timings.jsonl")] == list(range(STEPS))
    assert not (life.folder / name / "STOPPED").exists()
    assert not list((life.folder / name / "ckpt").glob("*.partial"))


def test_the_comparison_could_fail(life):
    """Half of the run is another state, the learning rate is scheduled, and each rank has random states of its own."""
    half, whole = life.first.check("half"), life.first.check("whole")
    assert not torch.equal(half[0]["parameters"]["lm_head.weight"], whole[0]["parameters"]["lm_head.weight"])
    assert half[0]["scheduler"]["last_epoch"] == HALF and whole[0]["scheduler"]["last_epoch"] == STEPS
    assert half[0]["optimizer"]["param_groups"][0]["lr"] != whole[0]["optimizer"]["param_groups"][0]["lr"]
    assert len({rank["random_states"][0] for rank in whole}) == life.ranks
    assert life.files["half"] == "".join(life.files["whole"].splitlines(keepends=True)[:HALF])


@pytest.mark.parametrize(("strategy", "name"), [("single", "from_two"), ("ddp", "from_one"), ("fsdp2", "from_one")])
def test_taken_up_by_another_number_of_processes(lives, strategy, name):
    """1 to 2 ranks and 2 to 1: within 1e-6 of the uninterrupted run on one process."""
    (expected,) = lives["single"].first.check("whole")
    for rank in lives[strategy].second.check(f"{name}-resumed"):
        assert (rank["resumed_at"], rank["step"]) == (HALF, STEPS)
        assert_close(rank["parameters"], expected["parameters"], WEIGHTS, name)
        assert rank["scheduler"] == expected["scheduler"] and rank["position"] == expected["position"]
        assert rank["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
        for key, state in expected["optimizer"]["state"].items():
            assert_close(rank["optimizer"]["state"][key], state, WEIGHTS, key)
    lines = read_lines(lives[strategy].folder / name / "metrics.jsonl")
    for line, other in zip(lines, map(json.loads, lives["single"].files["whole"].splitlines()), strict=True):
        assert_close(line, other, WEIGHTS, f"{name}, step {line['step']}")


def test_lives_with_and_without_shards_are_one_run(lives):
    (expected,) = lives["single"].first.check("whole")
    for strategy in ("ddp", "fsdp2"):
        assert_close(lives[strategy].first.check("whole")[0]["parameters"], expected["parameters"], WEIGHTS, strategy)


def test_a_signal_ends_the_run_after_its_step(life):
    """SIGTERM to one rank, SIGUSR1 to all, in the middle of step 1: the step is finished, saved, and the exit is 0."""
    for rank in life.first.check("term"):
        assert (rank["ended"], rank["step"], rank["stopped"]) == (0, HALF, "preempted")
    assert life.stopped == {"term": f"{HALF}\n", "usr1": f"{HALF}\n"}
    assert life.first.code == 0, life.first.stderr[-2000:]
    half = life.first.check("half")
    for name in ("term", "usr1"):
        assert life.files[name] == life.files["half"]
        for rank, expected in zip(life.first.check(name), half, strict=True):
            assert_identical(rank["parameters"], expected["parameters"])


def test_kill_in_the_middle_of_a_save(life):
    """kill -9 between writing checkpoint 3 and giving it its name: 2 is in force, the log has a torn line."""
    assert life.killed.code not in (0, 1) or life.ranks > 1  # -9; torchrun reports a killed worker as 1
    assert life.killed.code != 0
    assert life.left_by_kill == ["latest", "step-000001", "step-000002", "step-000003.partial"]
    assert [line["step"] for line in life.lines_of_killed] == [0, 1, 2]
    assert life.lock_of_killed["host"] == socket.gethostname()  # of a dead process: the second launch took it over
    assert not lock.lives(life.lock_of_killed["pid"])
    assert TORN not in life.read("killed")


def test_kill_while_a_checkpoint_is_written_again(lives):
    """A run that is done, saved once more: at no time is there not a whole checkpoint."""
    life = lives["single"]
    assert (life.folder / "rewritten" / "was_killed").exists()
    (found,), (whole,) = life.second.check("rewritten-resumed"), life.first.check("whole")
    assert found["resumed_at"] == HALF
    assert_identical(found["parameters"], whole["parameters"])


def test_a_save_changes_nothing(life):
    """A checkpoint before the first update: torch gives a fresh optimizer its state by a step, which Adam counts."""
    for rank, expected in zip(life.first.check("saved_early"), life.first.check("half"), strict=True):
        assert_identical(rank["parameters"], expected["parameters"])
        assert_identical(rank["optimizer"], expected["optimizer"])
    assert life.read("saved_early") == life.files["half"]


def test_the_newest_and_the_best_are_kept(life):
    """keep=2 and best: of 5 checkpoints the last two stay, and the one with the highest metric."""
    folder = life.folder / "kept" / "ckpt"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best",
        "latest",
        "step-000002",
        "step-000004",
        "step-000005",
    ]
    assert (folder / "best").read_text() == "step-000002\n" and (folder / "latest").read_text() == "step-000005\n"
    assert newest(folder).name == "step-000005"
    assert json.loads((folder / "step-000002" / "run.json").read_text())["score"] == 0.0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_damage_that_one_process_finds_is_known_to_all(launcher, tmp_path, strategy):
    kept = launcher("lifecycle_worker.py", "first", ranks=2, strategy=strategy).folder / "kept"
    for name in ("flipped", "cut", "forged"):
        shutil.copytree(kept, tmp_path / name)
    sums = json.loads((kept / "ckpt" / "step-000005" / "run.json").read_text())["files"]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "rng-0.pt", "rng-1.pt"} <= sums.keys()
    found = launcher("lifecycle_worker.py", "damaged", ranks=2, strategy=strategy, folder=tmp_path)
    (expected,) = {rank["version"] for rank in found.check("cut-resumed")}
    for name, said in (("flipped", "__1_0.distcp differ"), ("cut", "rng-1.pt has 500 bytes"), ("forged", "os.system")):
        for rank in found.check(f"{name}-resumed"):
            assert (rank["resumed_at"], rank["step"], rank["version"]) == (4, 5, expected)
        assert said in found.stdout
    assert not (tmp_path / "executed").exists() and found.code == 0


@pytest.mark.parametrize("strategy", PROCESSES)
def test_a_disk_that_is_full_for_one_process(launcher, strategy):
    found = launcher("lifecycle_worker.py", "full", ranks=PROCESSES[strategy], strategy=strategy)
    for rank in found.check("full-said"):
        assert "step-000002 could not be written" in rank["said"] and "Traceback" not in rank["said"]
        assert rank["left"] == ["latest", "step-000002"] and rank["again"] == "step-000002"


@pytest.fixture
def stopped_run(launcher, tmp_path):
    """A copy of a run that was stopped half way."""
    first = launcher("lifecycle_worker.py", "first", ranks=1, strategy="single")
    shutil.copytree(first.folder / "saved_early", tmp_path / "run")
    return tmp_path / "run"


def test_from_a_checkpoint_of_no_steps(launcher, stopped_run):
    """An optimizer that has not stepped comes back as one that has not."""
    train(stopped_run, HALF, resume=stopped_run / "ckpt" / "step-000000")
    found = torch.load(stopped_run.with_name("run-resumed-rank0.pt"), weights_only=False)
    (half,) = launcher("lifecycle_worker.py", "first", ranks=1, strategy="single").check("half")
    assert (found["resumed_at"], found["step"]) == (0, HALF)
    for key in ("parameters", "optimizer"):  # beartype, in this process, draws from Python's random state
        assert_identical(found[key], half[key])


def test_a_folder_in_use_is_refused(stopped_run):
    """Two runs on one folder: the parent of this process lives."""
    (stopped_run / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    before = (stopped_run / "metrics.jsonl").read_text()
    with pytest.raises(RuntimeError, match=rf"Run: .*run is in use by process {os.getppid()} on .*another folder"):
        train(stopped_run, STEPS, resume="auto")
    assert (stopped_run / "metrics.jsonl").read_text() == before


def test_a_lock_of_another_machine_is_refused(stopped_run):
    """Its processes cannot be seen from here; the message says which file to delete."""
    (stopped_run / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    with pytest.raises(RuntimeError, match=r"by process 1 on elsewhere.*if that process has ended, delete .*lock"):
        train(stopped_run, STEPS, resume="auto")


def test_an_unlocked_folder_is_taken(stopped_run):
    (stopped_run / "lock").unlink(missing_ok=True)
    assert train(stopped_run, HALF + 1, resume="auto").step == HALF + 1
