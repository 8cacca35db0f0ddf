"""World: one process, seeded."""

import random

import numpy as np
import pytest
import torch
from builders import tiny_policy
from hypothesis import given
from hypothesis import strategies as st

import rlkit as rl
from rlkit.distributed import collectives
from rlkit.strategies.updater import verify_gradients


def draws():
    legacy = float(np.random.rand())  # noqa: NPY002 the state that libraries draw from
    return random.random(), legacy, float(torch.rand(())), int(torch.randint(2**62, ()))


def test_a_seed_fixes_every_random_source():
    rl.setup(seed=3)
    first = draws()
    rl.setup(seed=3)
    assert draws() == first
    rl.setup(seed=4)
    assert all(one != other for one, other in zip(draws(), first, strict=True))


def test_one_process():
    world = rl.setup(seed=2)
    assert (world.rank, world.size, world.main, world.seed) == (0, 1, True, 2)
    assert world.device == (torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    assert "rank 0 of 1" in repr(world) and "seed 2" in repr(world)


def test_completions_follow_the_seed(policy):
    """Two runs with one seed agree, with two seeds they differ."""

    def completions(seed):
        rl.setup(seed=seed)
        return rl.sample(policy, ["1="], num_generations=8, max_completion_length=6).completion_ids.tolist()

    assert completions(1) == completions(1) != completions(2)


def test_torchrun_with_one_process_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rl.setup().size == 1


def test_several_processes_without_a_place_to_meet_are_refused(monkeypatch):
    """Never N runs that each believe to be alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError, match=r"rl\.setup: WORLD_SIZE=2 but RANK, MASTER_ADDR, MASTER_PORT not set.*torchrun"
    ):
        rl.setup()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40])
def test_large_seeds_work(seed):
    assert rl.setup(seed=seed).seed == seed


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match=r"rl\.setup: seed must be at least 0, got -1"):
        rl.setup(seed=-1)


def test_prepare_builds_the_optimizer_from_the_trainable_parameters(policy):
    frozen = policy.model.lm_head.weight
    frozen.requires_grad_(False)
    same, optimizer = rl.setup().prepare(policy, lambda params: torch.optim.SGD(params, lr=0.5))
    assert same is policy and isinstance(optimizer, torch.optim.SGD)
    given = optimizer.param_groups[0]["params"]
    assert len(given) == len(list(policy.model.parameters())) - 1 and all(p is not frozen for p in given)


def test_prepare_refuses_an_optimizer_that_exists_already(policy):
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.5)
    with pytest.raises(TypeError, match=r"world\.prepare: expected a function that makes the optimizer.*lambda params"):
        rl.setup().prepare(policy, optimizer)


def test_prepare_refuses_a_reference():
    with pytest.raises(
        ValueError, match=r"world\.prepare: '.*\(reference\)' has no trainable parameter; a reference is frozen"
    ):
        rl.setup().prepare(tiny_policy().reference(), lambda params: torch.optim.SGD(params, lr=0.5))


# --- several processes, as far as one can tell; the rest is in tests/torchrun ---


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_the_whole_each_thing_once_and_even(count, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "size", lambda: size)
        shares = []
        for rank in range(size):
            patch.setattr(collectives, "rank", lambda rank=rank: rank)
            shares.append(list(range(count))[collectives.share(count)])
    assert [thing for share in shares for thing in share] == list(range(count))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("others", "right"),
    [((3, 6.0), True), ((3, 6.0 + 1e-9), True), ((3, 6.1), False), ((2, 6.0), False)],
)
def test_gradients_that_differ_between_processes_are_refused(others, right):
    """Of the other process comes (number of tensors, sum of absolute values)."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    for parameter in parameters[:3]:
        parameter.grad = torch.tensor([1.5, -0.5])
    if right:
        verify_gradients(parameters, lambda mine: [mine, others])
    else:
        with pytest.raises(RuntimeError, match=r"differ between the processes: rank 0: 6 in 3 tensors, rank 1: 6"):
            verify_gradients(parameters, lambda mine: [mine, others])
