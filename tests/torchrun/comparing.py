"""When two trainings are the same."""

import json

import torch
from equality_worker import STEPS, G
from launching import Launch

# Sums over rows are taken in another order on two ranks: a few float32 roundings of numbers near 1. See equality_worker
# for why the optimizers are SGD, and AdamW with eps 1e-3: Adam near a gradient of 0 divides noise by noise.
WEIGHTS = 1e-6
METRICS = 1e-6  # of the number or of 1, whichever is larger
ROUNDING = 1e-5  # of what is a rounding itself: sampler_gap is the distance of two ways to add up one number
STRATEGIES = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPTokenScorer"}


def assert_close(found: dict, expected: dict, tolerance: float, what: str) -> None:
    """Tensors, numbers and None by name."""
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].shape == value.shape, (what, name)
            gap = float((found[name] - value).abs().max())
            assert gap <= tolerance, f"{what}: {name} is {gap:.2e} apart"
        elif value is None or found[name] is None:
            assert found[name] is value, (what, name, found[name], value)
        else:
            limit = ROUNDING if name.startswith("sampler_gap/") else tolerance * max(1.0, abs(value))
            assert abs(found[name] - value) <= limit, f"{what}: {name} is {found[name]}, expected {value}"


def assert_same_training(alone: Launch, together: Launch, name: str, strategy: str) -> None:
    """A scenario of equality_worker came to the same on one process and on two."""
    (expected,) = alone.check(name)
    found = together.check(name)
    assert [rank["kind"] for rank in found] == [STRATEGIES[strategy]] * 2
    for step in range(STEPS):
        rows = found[0]["rows"][step] + found[1]["rows"][step]
        assert rows == expected["rows"][step], f"step {step}: other completions than on one process"
        groups = found[0]["groups"][step] + found[1]["groups"][step]
        assert groups == expected["groups"][step] and len(set(groups)) == len(groups)  # no prompt twice, none lost
        assert found[0]["row_ids"][step] + found[1]["row_ids"][step] == expected["row_ids"][step]
    for rank in found:
        assert all(calls % G == 0 for calls in rank["reward_calls"])  # a reward function sees whole groups
        for line, other in zip(rank["lines"], expected["lines"], strict=True):
            assert_close(line, other, METRICS, f"{name}, step {line['step']}")
        assert_close(rank["parameters"], expected["parameters"], WEIGHTS, name)
    assert found[0]["lines"] == found[1]["lines"]  # bit for bit
    for key, value in found[0]["parameters"].items():
        assert torch.equal(value, found[1]["parameters"][key]), key

    # Gradients are exchanged once an update, in the last micro-batch. (One bucket: the models are tiny.)
    if strategy == "ddp":
        updates = sum(1 - int(line["skipped"]) for line in expected["lines"]) * found[0]["updates"]
        assert [rank["exchanges"] for rank in found] == [updates] * 2

    # Files are written once, by the main process, and hold what every rank was told.
    assert found[0]["file"] == found[1]["file"]
    assert [json.loads(line) for line in found[0]["file"].splitlines()] == found[0]["lines"]
    assert found[0]["timing_lines"] == STEPS
    assert (together.folder / f"run-{name}").is_dir() and not (together.folder / f"run-{name}-2").exists()
