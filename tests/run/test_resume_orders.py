"""In which folder a run goes on: with and without checkpoints, numbers, records written early, and other processes."""

import json
import os
import socket

import pytest
import torch
from builders import tiny_policy

import rlkit as rl
from rlkit.run.folder import fresh_folder
from rlkit.run.lock import unlock
from rlkit.support.process_state import current

EVALUATED = [{"prompt": "1+1="}]


class Killed(BaseException):
    """Ends a job as a kill would: nothing more is written."""


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(layers=1)


@pytest.fixture(scope="module")
def evaluation(policy):
    return rl.evaluate(policy, EVALUATED, lambda completions: [0.0] * len(completions), max_completion_length=2)


@pytest.fixture
def job(tmp_path, policy, evaluation, monkeypatch):
    """`job(resume, dies_after)`: a script that evaluates before its loop; gives its folder and its first step."""

    def start(resume=None, dies_after=None, save_every=2, early=True):
        monkeypatch.setattr(current, "resume", resume)
        run = rl.Run(tmp_path / "a")
        run.track(policy, torch.optim.SGD(policy.trainable_parameters(), lr=0.1))
        began = []
        try:
            if early:
                run.log_evaluation("before", evaluation)
            for step, _ in run.steps(range(99), 4, save_every=save_every, progress=False):
                began.append(step)
                if step == dies_after:
                    raise Killed
                run.log(step, a=1.0)
        except Killed:
            pass
        unlock(run.path)
        return run.path.name, began[0] if began else 4

    return start


def folders(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("early", [True, False])
def test_a_job_that_writes_before_its_loop_goes_on_in_the_newest_folder(tmp_path, job, early):
    """Killed before its first checkpoint, then after it: the third start made a third folder with the first's past."""
    assert job("auto", dies_after=0, early=early) == ("a", 0)
    assert job("auto", dies_after=3, early=early) == ("a-2", 0)
    assert job("auto", early=early) == ("a-2", 2)
    assert job("auto", early=early) == ("a-2", 4)
    assert folders(tmp_path) == ["a", "a-2"]
    assert rl.Run.open(tmp_path / "a-2").metrics["step"].tolist() == [0, 1, 2, 3]
    assert len(rl.Run.open(tmp_path / "a-2").evaluations) == early


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", ["a", "a-2"])
def test_a_named_checkpoint_of_the_run_is_gone_on_from_in_its_folder(tmp_path, job, early, name):
    job()
    job()
    assert job(str(tmp_path / name / "ckpt" / "step-000002"), early=early) == (name, 2)
    assert folders(tmp_path) == ["a", "a-2"]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("where", ["a/ckpt/step-000002", "a/ckpt", "."])
def test_a_checkpoint_may_be_named_from_where_one_stands(tmp_path, job, monkeypatch, early, where):
    """From inside `ckpt` it was taken for another run's, and went on in a new folder."""
    job()
    monkeypatch.chdir(tmp_path / where)
    source = os.path.relpath(tmp_path / "a" / "ckpt" / "step-000002")
    assert job(source, early=early) == ("a", 2)
    assert folders(tmp_path) == ["a"]


@pytest.mark.parametrize("tracks", [True, False])
def test_the_data_go_on_where_they_were_whoever_names_the_loader(tmp_path, policy, tracks):
    """`track` without prompts, then `resume`: the loop began with the first rows again."""
    seen = []
    for steps in (2, 4):
        loader = rl.PromptLoader([{"prompt": str(row)} for row in range(8)], policy, batch_size=2, seed=0)
        run = rl.Run(tmp_path / "a")
        optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
        run.track(policy, optimizer, prompts=loader if tracks else None)
        run.resume()
        for step, batch in run.steps(loader, steps, progress=False):
            seen += batch.row_id.tolist()
            run.log(step)
        unlock(run.path)
    assert len(set(seen)) == 8


def test_a_save_before_the_loop_resumes_first(tmp_path, job, policy, monkeypatch):
    """It made the fresh weights the newest checkpoint, and each start of the job began anew."""
    job()
    monkeypatch.setattr(current, "resume", "auto")
    run = rl.Run(tmp_path / "a")
    run.track(policy, torch.optim.SGD(policy.trainable_parameters(), lr=0.1))
    assert run.save().name == "step-000004" and run.step == 4
    unlock(run.path)
    assert folders(tmp_path) == ["a"]


@pytest.mark.parametrize("early", [True, False])
def test_a_named_checkpoint_of_another_run_is_gone_on_from_in_a_folder_of_its_own(tmp_path, job, early):
    job()
    (tmp_path / "a").rename(tmp_path / "b")
    assert job(str(tmp_path / "b" / "ckpt" / "step-000002"), early=early) == ("a", 2)
    assert folders(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("a: nothing", ("a", 0)),
        ("a: records", ("a-2", 0)),
        ("a: run; a-2: nothing", ("a", 4)),
        ("a: run; a-2: records", ("a", 4)),
        ("a: run; a-2: run", ("a-2", 4)),
        ("a: records; a-3: run", ("a-3", 4)),
        ("a-2: run", ("a-2", 4)),
        ("a-2: records", ("a-3", 0)),
        ("a: run; a-x: run; a-2x: run", ("a", 4)),
        ("a: run; a-10: run; a-9: run", ("a-10", 4)),
    ],
)
def test_auto_takes_the_last_folder_that_has_a_checkpoint(tmp_path, job, before, expected, early):
    for item in before.split("; "):
        name, what = item.split(": ")
        if what == "run":
            job()
            made = max(tmp_path.glob("a*"), key=lambda path: (path / "config.json").stat().st_mtime_ns)
            made.rename(tmp_path / f"_{name}")
        else:
            (tmp_path / f"_{name}").mkdir()
            if what == "records":
                (tmp_path / f"_{name}" / "evaluations.jsonl").write_text("{}\n")
    for path in tmp_path.glob("_*"):
        path.rename(tmp_path / path.name[1:])
    assert job("auto", early=early) == expected


def test_a_new_run_has_the_highest_number(tmp_path):
    """Also where a lower one is free: the last folder is the newest."""
    for name in ("x", "x-2", "x-3"):
        assert fresh_folder(tmp_path / "x").name == name
        (tmp_path / name / "file").touch()
    (tmp_path / "x-2" / "file").unlink()
    assert fresh_folder(tmp_path / "x").name == "x-4"
    (tmp_path / "x-4" / "file").touch()
    (tmp_path / "x" / "file").unlink()
    (tmp_path / "x").rmdir()
    assert fresh_folder(tmp_path / "x").name == "x-5"


@pytest.mark.parametrize("early", [True, False])
def test_a_folder_that_a_living_process_has_is_not_gone_on_in(tmp_path, job, early):
    job()
    job()
    (tmp_path / "a-2" / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    with pytest.raises(RuntimeError, match=rf"a-2 is in use by process {os.getppid()}"):
        job("auto", early=early)
    assert folders(tmp_path) == ["a", "a-2"]


def test_resume_after_something_was_written_elsewhere_is_refused(tmp_path, job, policy, evaluation, monkeypatch):
    """In a notebook: it went on with the weights of `a` in the new folder `a-2`."""
    job()
    monkeypatch.setattr(current, "resume", None)
    run = rl.Run(tmp_path / "a")
    run.track(policy, torch.optim.SGD(policy.trainable_parameters(), lr=0.1))
    run.log_evaluation("before", evaluation)
    with pytest.raises(RuntimeError, match=r"writes into .*a-2 already, .*right after track"):
        run.resume()


def test_checkpoints_that_are_all_damaged_start_no_new_folder(tmp_path, job):
    job()
    for file in (tmp_path / "a" / "ckpt").glob("*/run.json"):
        file.write_text("{")
    with pytest.raises(RuntimeError, match=r"run\.json cannot be read.*No other checkpoint"):
        job("auto")
    assert folders(tmp_path) == ["a"]
