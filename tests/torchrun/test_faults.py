"""Mistakes on several processes: a clear message within seconds, on every rank, and no hang."""

import re

import pytest

import rlkit as rl

pytestmark = pytest.mark.torchrun

CAUGHT = {
    "wrong_strategy": ("ValueError", r"world\.prepare: strategy must be one of .*got 'fdsp2'\. Did you mean 'fsdp2'\?"),
    "single_on_two": ("ValueError", r"strategy 'single' on 2 processes would train 2 copies.*'ddp' or 'fsdp2'"),
    "other_seed": ("RuntimeError", r"rl\.setup: the processes disagree on seed: rank 0 has 7, rank 1 has 8"),
    "other_model": ("RuntimeError", r"world\.prepare: the processes disagree on parameters: rank 0 has .*same"),
    "other_parameters_trained": ("RuntimeError", r"world\.prepare: the processes disagree on parameters"),
    "other_precision": (
        "RuntimeError",
        r"the processes disagree on autocast: rank 0 has 'torch\.bfloat16'",
    ),
    "other_strategy": ("RuntimeError", r"the processes disagree on strategy: rank 0 has 'fsdp2', rank 1 has 'ddp'"),
    "reference_too_late": ("RuntimeError", r"policy\.reference: .* is prepared as .*before world\.prepare"),
    "prepared_twice": ("ValueError", r"world\.prepare: .* is prepared already"),
    "bypass": ("RuntimeError", r"loss_step: the gradients differ between the processes: rank 0: .*did not go through"),
    "bypass_after_resume": ("RuntimeError", r"loss_step: the gradients differ between the processes"),
}


@pytest.fixture(scope="module")
def normal(launcher):
    """A launch in which every rank comes to its end; the measure of the others' time."""
    return launcher("faults_worker.py", "caught", ranks=2, strategy="ddp")


@pytest.mark.parametrize("name", CAUGHT)
def test_every_rank_is_told(normal, name):
    """Settings that differ, wrong strategies, and a forward pass that bypassed the wrapper."""
    kind, message = CAUGHT[name]
    found = normal.json(name)
    assert len(found) == 2
    for rank in found:
        assert rank["type"] == kind and re.search(message, rank["message"], re.DOTALL), rank
    assert found[0]["message"] == found[1]["message"]


def test_the_ranks_stay_in_step_after_a_mistake(normal):
    assert normal.code == 0, normal.stderr[-3000:]


@pytest.mark.parametrize(("strategy", "step"), [("fsdp2", "0"), ("ddp", "1")])
def test_a_reward_that_raises_on_one_rank_ends_both(launcher, normal, strategy, step):
    """Also before anything was logged; rank 0 shows the traceback of rank 1, and nobody waits for a time-out."""
    found = launcher("faults_worker.py", "reward", step, ranks=2, strategy=strategy)
    assert found.code != 0
    assert len(found.json("raised")) == 1  # on rank 1
    assert "rlkit: rank 0 stops because rank 1 failed:" in found.stderr
    told = found.stderr.split("rank 0 stops because rank 1 failed:")[1]
    for text in (
        "ZeroDivisionError: the judge of rank 1 is broken",
        "in judge",
        "reward function 'judge' failed",
    ):
        assert text in told, found.stderr[-4000:]
    assert found.stderr.count("Error: the judge of rank 1 is broken") >= 2  # rank 1's own, and rank 0's copy
    assert not (found.folder / "run" / "STOPPED").exists()
    assert "it hangs" not in found.stderr and found.seconds < 10 * normal.seconds + 60


@pytest.fixture
def as_rank_0_of_2(monkeypatch):
    """The variables that a launcher sets, in this process; nothing is joined."""
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    return monkeypatch


def test_a_world_size_without_a_place_to_meet(as_rank_0_of_2):
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2 but RANK, MASTER_ADDR, MASTER_PORT not set.*torchrun"):
        rl.setup(seed=1)
    as_rank_0_of_2.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2 but MASTER_ADDR, MASTER_PORT not set"):
        rl.setup(seed=1)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_accelerate_strategy_variables_are_not_read(as_rank_0_of_2, name):
    """accelerate launch starts rlkit too, but its plugins would be ignored in silence."""
    for variable, value in {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", name: "true"}.items():
        as_rank_0_of_2.setenv(variable, value)
    with pytest.raises(RuntimeError, match=rf"rl\.setup: {name} is set.*strategy=.*RLKIT_STRATEGY"):
        rl.setup(seed=1)
