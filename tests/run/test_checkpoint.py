"""Checkpoints in one process: a resumed training is the one that never stopped, and the right checkpoints stay.

The same across processes, strategies and kills: tests/torchrun/test_lifecycle.py. Python's own random numbers are a
matter for it alone: beartype, which checks the types here, draws from them.
"""

import random

import numpy as np
import pytest
import torch
from builders import assert_identical, make_rollout, make_scores, snapshot, tiny_policy

import rlkit as rl
from rlkit.run import checkpoint
from rlkit.run.lock import unlock
from rlkit.run.manifest import newest

ROWS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(3)]
STEPS, HALF = 4, 2


class Died(Exception):
    """What a loop is left by."""


def train(path, steps, *, resume=None, dies_in=None):
    """Up to `steps` steps with everything that has a state; returns the state of all of it at the end.

    In the step `dies_in`, when it is logged, the loop saves and fails.
    """
    rl.setup(seed=1)
    policy = tiny_policy(layers=1)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, STEPS)
    prompts = rl.PromptLoader(ROWS, policy, batch_size=5, seed=0)  # 5, 5, 2, 5: a new epoch on the way
    run = rl.Run(path)
    run.track(policy, optimizer, scheduler=scheduler, prompts=prompts)
    if resume is not None:
        run.resume(resume)
    for step, batch in run.steps(prompts, steps, progress=False):
        rollout = rl.sample(policy, batch, num_generations=2, max_completion_length=4)
        scores = rl.score(rollout, lambda completions: [float(len(text)) for text in completions])
        advantages = rl.compute_loo_advantage(scores)
        update = rl.loss_step(policy, optimizer, rollout, advantages, scheduler=scheduler)
        drawn = np.random.rand() + float(torch.rand(()))  # noqa: NPY002 - what a reward may draw from
        run.log(step, rollout, scores, advantages, update, drawn=drawn)
        if step == dies_in:
            run.save()
            unlock(run.path)
            raise Died
    unlock(run.path)
    return {
        "metrics": (run.path / "metrics.jsonl").read_bytes(),
        "rollouts": run.reader.rollout_steps,
        "states": snapshot(policy.model, optimizer, scheduler, prompts),
        "version": policy.version,
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run", STEPS)


def test_a_resumed_training_is_the_one_that_never_stopped(whole, tmp_path):
    train(tmp_path / "run", HALF)
    assert_identical(train(tmp_path / "run", STEPS, resume="auto"), whole)


def test_steps_after_the_checkpoint_are_done_again(whole, tmp_path):
    train(tmp_path / "run", STEPS - 1)
    (tmp_path / "run" / "ckpt" / "latest").write_text(f"step-{HALF:06d}\n")
    made_at(tmp_path / "made", HALF).rename(tmp_path / "run" / "ckpt" / f"step-{HALF:06d}")
    assert_identical(train(tmp_path / "run", STEPS, resume="auto"), whole)


def test_a_checkpoint_of_the_loop_s_own_holds_the_step_that_was_logged(whole, tmp_path):
    """It was of the step before: the weights of the step were in it, and the resumed run could not log the step."""
    with pytest.raises(Died):
        train(tmp_path / "run", STEPS, dies_in=HALF - 1)
    assert [path.name for path in (tmp_path / "run" / "ckpt").glob("step-*")] == [f"step-{HALF:06d}"]
    assert_identical(train(tmp_path / "run", STEPS, resume="auto"), whole)


@pytest.fixture
def random_states():
    """The four generators by name: how a state is read, and how the generator moves on."""
    before = checkpoint.random_state()
    yield {
        "python": (random.getstate, random.random),
        "numpy": (np.random.get_state, np.random.rand),
        "numpy, between two normals": (np.random.get_state, np.random.randn),
        "torch": (torch.get_rng_state, lambda: torch.rand(())),
        "cuda": (torch.cuda.get_rng_state_all, lambda: torch.rand((), device="cuda")),
    }
    checkpoint.set_random_state(before)


@pytest.mark.parametrize("name", ["python", "numpy", "numpy, between two normals", "torch", "cuda"])
def test_each_random_state_comes_back(tmp_path, random_states, name):
    """Through a file, as a checkpoint has it. (beartype draws from Python's when it checks what has been returned.)"""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    read, draw = random_states[name]
    draw()
    expected = plain(read())
    torch.save(checkpoint.random_state(), tmp_path / "rng-0.pt")
    draw()
    assert plain(read()) != expected
    checkpoint._load_random_state(tmp_path / "rng-0.pt")
    found = plain(read())
    assert found == expected


def plain(state):
    if isinstance(state, (tuple, list)):
        return [plain(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


def made_at(path, steps):
    train(path, steps)
    return path / "ckpt" / f"step-{steps:06d}"


@pytest.fixture
def tracked(policy):
    """Policy and optimizer; the optimizer has not taken a step."""
    return policy, torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2)


def test_an_optimizer_without_a_state_is_saved_without_one(tmp_path, tracked):
    """torch steps it once to save it, and Adam's bias correction would count that."""
    policy, optimizer = tracked
    run = rl.Run(tmp_path / "run")
    run.track(policy, optimizer)
    run.save()
    assert not optimizer.state
    unlock(run.path)
    again = rl.Run(tmp_path / "run")
    again.track(policy, optimizer)
    again.resume()
    assert not optimizer.state


def test_counters_go_on(tmp_path, tracked):
    run = rl.Run(tmp_path / "run")
    run.track(*tracked)
    for step, _ in run.steps(range(1), 1, progress=False):
        first = run.log(step, make_rollout(), make_scores([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]))
    unlock(run.path)
    again = rl.Run(tmp_path / "run")
    again.track(*tracked)
    again.resume()
    second = again.log(1, make_rollout(), make_scores([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]))
    names = [name for name in first if name in ("num_tokens", "reward_calls")]
    assert len(names) == 2 and all(second[name] == 2 * first[name] > 0 for name in names)


@pytest.mark.parametrize(
    ("scores", "kept"),
    [([1.0, 3.0, 2.0, 0.0], [2, 3, 4]), ([1.0, 2.0, 3.0, 4.0], [3, 4]), ([5.0, None, 1.0, 5.0], [3, 4])],
)
def test_the_newest_and_the_best_stay(tmp_path, tracked, scores, kept):
    """Two newest ones, and the one with the largest reward; of two alike the later, and None is no reward."""
    run = rl.Run(tmp_path / "run")
    run.track(*tracked, keep=2, best="reward")
    for step, _ in run.steps(range(4), 4, progress=False, save_every=1):
        run.log(step, reward=float("nan") if scores[step] is None else scores[step])
    folder = run.path / "ckpt"
    assert sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*")) == kept
    best = max((score, step) for step, score in enumerate(scores) if score is not None)[1] + 1
    assert (folder / "best").read_text().split() == [f"step-{best:06d}"]
    assert newest(folder) == folder / "step-000004"


def test_half_a_checkpoint_is_named(tmp_path, tracked):
    run = rl.Run(tmp_path / "run")
    run.track(*tracked)
    saved = run.save()
    (saved / "run.json").unlink()
    unlock(run.path)
    again = rl.Run(tmp_path / "run")
    again.track(*tracked)
    with pytest.raises(FileNotFoundError, match=r"not a whole checkpoint \(run\.json is missing\)"):
        again.resume()
