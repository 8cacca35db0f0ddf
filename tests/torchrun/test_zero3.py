"""ZeRO-3 on two ranks against one process: the same batch gives the same weights, samples and metrics.

DeepSpeed is an extra; without it these tests are skipped. On CPUs rlkit leaves DeepSpeed's compiled all-reduce out, so
nothing is built here.
"""

import importlib.util

import pytest
import torch
from launching import RANKS

import rlkit as rl

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

WORKER = "zero3_worker.py"
WEIGHTS = {"rtol": 0.0, "atol": 1e-6}  # after 3 updates; measured: 1.2e-7, two roundings of float32
NUMBERS = {"rel": 1e-4, "abs": 1e-5}  # metrics in float32 over rows that were scored in another split
TRAININGS = (
    *("uneven", "accumulation", "accumulation_adamw", "one_group", "last_batch", "lora", "lora_accumulation"),
    *("tied", "gpt2", "checkpointing", "a2po", "per_token", "two_updates", "nothing_to_learn"),
    *("chunked", "chunked_tied", "persistent", "persistent_tied"),
)


@pytest.fixture(scope="module")
def one(launcher):
    launch = launcher(WORKER, ranks=1)
    assert launch.code == 0, launch.stderr[-3000:]
    return launch


@pytest.fixture(scope="module")
def two(launcher):
    launch = launcher(WORKER, ranks=RANKS, strategy="zero3", DS_ACCELERATOR="cpu")
    assert launch.code == 0, launch.stderr[-3000:]
    return launch


@pytest.mark.parametrize("name", TRAININGS)
def test_the_weights_are_those_of_one_process(one, two, name):
    (alone,), ranks = one.check(name), two.check(name)
    assert len(ranks) == RANKS
    for rank in ranks:
        assert rank["kind"] == "_EngineScorer"  # and not, by a mistake of the test, another strategy
        assert rank["parameters"].keys() == alone["parameters"].keys()
        for key, value in alone["parameters"].items():
            torch.testing.assert_close(rank["parameters"][key], value, msg=lambda m, key=key: f"{key}: {m}", **WEIGHTS)


@pytest.mark.parametrize("name", TRAININGS)
def test_the_samples_and_metrics_are_those_of_one_process(one, two, name):
    (alone,), ranks = one.check(name), two.check(name)
    for step, rows in enumerate(alone["rows"]):
        assert [row for rank in ranks for row in rank["rows"][step]] == rows
    assert ranks[0]["lines"] == ranks[1]["lines"]
    for ours, theirs in zip(ranks[0]["lines"], alone["lines"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert (ours[key] is None) == (value is None)
            if value is not None:
                assert ours[key] == pytest.approx(value, **NUMBERS), key


def test_the_ranks_had_unequal_work(two):
    """Otherwise the equality above would show little: another number of rows, of tokens, and none at all."""
    first, second = two.check("uneven")
    assert all(len(a) != len(b) for a, b in zip(first["rows"], second["rows"], strict=True))
    assert two.check("one_group")[1]["rows"] == [[], [], []]


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_a_resumed_run_is_the_uninterrupted_one(two, kind):
    for rank in two.check(f"resume-{kind}"):
        assert rank["done"] == 2
        assert rank["rows"][0] == rank["rows"][1] and rank["lines"][0] == rank["lines"][1]
        assert rank["learning_rate"][0] == rank["learning_rate"][1]
        whole, resumed = rank["parameters"]
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_save_pretrained_writes_the_whole_model(one, two, kind):
    (alone,), ranks = one.check(f"export-{kind}"), two.check(f"export-{kind}")
    for rank in ranks:
        assert rank["repr"] == alone["repr"]
        assert rank["between"] == 0  # nothing is whole between two passes
    if kind == "tied":
        saved = rl.load_policy(two.folder / "export-tied", device="cpu").model.state_dict()
    else:
        from safetensors.torch import load_file

        saved = load_file(two.folder / "export-lora" / "adapter_model.safetensors")
        saved = {key.replace(".weight", ".default.weight"): value for key, value in saved.items()}
    expected = alone["parameters"]
    assert saved and saved.keys() <= expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in saved.items())


@pytest.mark.parametrize("name", ["prepared", "whole", "adapter"])
def test_a_reference_follows_the_policy(one, two, name):
    (alone,), ranks = one.check(f"follow-{name}"), two.check(f"follow-{name}")
    for rank in ranks:
        assert rank["unmoved"] and rank["arrived"] <= WEIGHTS["atol"] * 10
        torch.testing.assert_close(rank["moved"], alone["moved"], rtol=1e-4, atol=1e-5)
        assert bool((rank["moved"] > 1e-3).any())


def test_a_gradient_that_is_not_finite_steps_nothing(one, two):
    (alone,), ranks = one.check("skipped"), two.check("skipped")
    for rank in ranks:
        assert rank["skipped"] == alone["skipped"] == "the gradient norm is nan" and rank["unchanged"]
        assert rank["norm"] == pytest.approx(alone["norm"], **NUMBERS)
        for key, value in alone["parameters"].items():
            torch.testing.assert_close(rank["parameters"][key], value, **WEIGHTS)


def test_autocast_reaches_the_passes_inside_the_engine(one, two):
    """DeepSpeed's engine switches an outer autocast off. One rounding of bfloat16 is 2e-3, so the two are far apart."""
    (alone,), ranks = one.check("bf16"), two.check("bf16")
    for rank in ranks:
        assert rank["to_half"] < 1e-5 < 1e-3 < rank["to_full"]
        for key, value in alone["parameters"].items():
            torch.testing.assert_close(rank["parameters"][key], value, rtol=0.0, atol=2e-3)
