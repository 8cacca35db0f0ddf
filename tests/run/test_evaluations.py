"""run.log_evaluation: an evaluation whole in the run's folder, its numbers as a line that a reader gives."""

import math

import pytest
import torch
from builders import length, never, tiny_policy

import rlkit as rl

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def measured(policy, reward=length, seed=0):
    return rl.evaluate(policy, ROWS, reward, max_completion_length=4, seed=seed)


def test_what_is_logged_can_be_read(policy, tmp_path):
    run = rl.Run(tmp_path / "run")
    reader = rl.Run.open(run.path)
    assert reader.evaluations.columns.tolist() == ["name", "step", "file"] and not len(reader.evaluations)
    first, second = measured(policy), measured(policy, never)
    file = run.log_evaluation("before", first)
    assert file == run.path / "evaluations" / "before-000000.pt"
    run.step = 7
    run.log_evaluation("test-set_2.0", second)
    assert reader.refresh() and not reader.refresh()
    table = reader.evaluations
    assert table["name"].tolist() == ["before", "test-set_2.0"] and table["step"].tolist() == [0, 7]
    assert table["reward"][0] == first.reward and math.isnan(table["reward"][1])  # null in the file
    loaded = rl.Evaluation.load(reader.path / table["file"][0])
    assert loaded.metrics == first.metrics and torch.equal(loaded.scores.reward, first.scores.reward)


def test_the_same_name_at_the_same_step_replaces(policy, tmp_path):
    """A cell that is run again, and a resumed run, leave no doubles; a line that a crash tore is dropped."""
    run = rl.Run(tmp_path / "run")
    for seed in (0, 1):
        run.log_evaluation("test", measured(policy, seed=seed))
        with open(run.path / "evaluations.jsonl", "a", encoding="utf-8") as handle:
            handle.write('{"name": "to')
    reader = rl.Run.open(run.path)
    assert reader.evaluations["reward"].tolist() == [measured(policy, seed=1).reward]
    assert "evaluations.jsonl: the last line is not whole and was left out." in reader.notes


def test_a_resumed_run_forgets_those_after_its_checkpoint(tmp_path):
    policy = tiny_policy()

    def begin(policy):
        run = rl.Run(tmp_path / "run")
        run.track(policy, torch.optim.SGD(policy.model.parameters(), lr=0.1))
        return run

    def go(run, steps):
        for step, _ in run.steps(range(100), steps):
            run.log_evaluation("test", evaluation)
            run.log(step, loss=0.0)

    evaluation = measured(policy)
    run = begin(policy)
    go(run, 2)
    run.log_evaluation("test", evaluation)  # at 2 finished steps
    run.step = 5
    run.log_evaluation("test", evaluation)
    run = begin(policy)
    assert run.resume() == 2
    assert rl.Run.open(run.path).evaluations["step"].tolist() == [0, 1, 2]
    go(run, 4)
    assert rl.Run.open(run.path).evaluations["step"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "ä", "x" * 101, None])
def test_a_name_that_is_no_file_name_is_refused(name, policy, tmp_path, unchecked):
    run = rl.Run(tmp_path / "run")
    with pytest.raises(ValueError, match="log_evaluation: expected a name of letters"):
        run.log_evaluation(name, measured(policy))
    assert run.folder is None


def test_numbers_are_no_evaluation(tmp_path, unchecked):
    with pytest.raises(TypeError, match=r"expected what rl\.evaluate returned, got float"):
        rl.Run(tmp_path / "run").log_evaluation("test", 0.5)
