"""One process and two give the same: rollouts token for token, weights, gradient norms and metrics within 1e-6.

The same worker runs as plain `python` and under torchrun, with DDP and FSDP2, on the same global batches.
"""

import numpy as np
import pytest
import torch
from comparing import STRATEGIES, WEIGHTS, assert_close, assert_same_training
from equality_worker import SCENARIOS, STEPS, G
from parts import ROWS

import rlkit as rl

# Log-probabilities of the same tokens by weights that are WEIGHTS apart, and sums of them.
ROLLOUTS = {"rtol": 1e-4, "atol": 1e-4}

pytestmark = pytest.mark.torchrun


@pytest.fixture(scope="module")
def alone(launcher):
    return launcher("equality_worker.py", ranks=1)


@pytest.fixture(scope="module", params=STRATEGIES)
def together(request, launcher):
    return launcher("equality_worker.py", ranks=2, strategy=request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_train_as_one(alone, together, name):
    """Several processes equal one, also where ranks have no group, or fewer micro-batches."""
    assert_same_training(alone, together, name, together.folder.name.split("-")[0])


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rollouts_of_two_processes_are_those_of_one(alone, together, name):
    """One file a step, by the main process, with the rows of all (also where a rank has none) in their order."""
    one, two = (rl.Run.open(launch.folder / f"run-{name}") for launch in (alone, together))
    assert one.rollout_steps == two.rollout_steps == list(range(STEPS)) and two.notes == []
    expected, found = one.rollouts(), two.rollouts()
    assert list(found.columns) == list(expected.columns)
    for column in expected:
        for row, (value, other) in enumerate(zip(expected[column], found[column], strict=True)):
            if isinstance(value, float) or getattr(value, "dtype", None) == np.float32:
                np.testing.assert_allclose(other, value, **ROLLOUTS, err_msg=f"{column}, row {row}")
            else:
                np.testing.assert_array_equal(other, value, err_msg=f"{column}, row {row}")


def test_the_scenarios_are_what_they_say(alone, together):
    """Uneven lengths, an odd number of groups, a rank without a group, skipped steps, NaN rewards, scheduled rates."""
    uneven = [rank["rows"] for rank in together.check("uneven")]
    assert all(len({len(tokens) for _, tokens in rows[0]}) > 2 for rows in uneven)
    assert [len(rows[0]) for rows in uneven] == [3 * G, 2 * G]
    assert [[len(step) for step in rank["rows"]] for rank in together.check("one_group")] == [[G] * 3, [0] * 3]
    assert [[len(step) // G for step in rank["rows"]] for rank in together.check("last_batch")] == [
        [2, 2, 1],
        [1, 1, 0],
    ]
    (alone_truncated,) = alone.check("truncated")
    assert [line["frac_masked"] for line in alone_truncated["lines"]] == [pytest.approx(0.4)] * 3
    (nothing,) = alone.check("nothing_to_learn")
    assert [line["skipped"] for line in nothing["lines"]] == [1.0] * 3
    assert any(line["frac_no_reward"] > 0 for name in SCENARIOS for line in alone.check(name)[0]["lines"])
    rates = [line["learning_rate"] for line in alone.check("two_updates")[0]["lines"]]
    assert len(set(rates)) == 3
    assert any(line["clip_ratio/region_mean"] > 0 for line in alone.check("two_updates")[0]["lines"])
    assert all(line["grad_norm"] > 0.01 for name in SCENARIOS if name != "nothing_to_learn"
               for line in alone.check(name)[0]["lines"])  # fmt: skip


def test_every_update_moved_the_weights(alone):
    """The comparison would hold for a loop that does nothing."""
    start = alone.check("uneven")[0]["parameters"]
    for name in SCENARIOS:
        if SCENARIOS[name].model == "llama" and name not in ("uneven", "unequal_start", "checkpointing"):
            moved = alone.check(name)[0]["parameters"]
            assert max(float((moved[key] - start[key]).abs().max()) for key in start) > 100 * WEIGHTS, name


def test_weights_that_start_apart_become_those_of_rank_0(alone, together):
    """FSDP2 does not broadcast: without our own it made a model of two halves. The reference starts as the policy."""
    (expected,) = alone.check("unequal_start")
    assert [rank["first_kl"] < 1e-4 for rank in [expected, *together.check("unequal_start")]] == [True] * 3


@pytest.mark.parametrize("rows", ["seven", "one"])
def test_evaluate_over_two_processes(alone, together, rows):
    """The table is in the dataset's order; a row that stands twice is measured twice; a rank may have no row."""
    expected = alone.check("measure")[0][rows]
    prompts = [ROWS[place]["prompt"] for place in ((0, 1, 2, 3, 4, 5, 1) if rows == "seven" else (0,))]
    assert expected["prompts"] == [prompt for prompt in prompts for _ in range(3)]
    for rank in together.check("measure"):
        found = rank[rows]
        assert found["prompts"] == found["table_prompts"] == expected["prompts"]
        assert found["completions"] == expected["completions"]
        assert torch.equal(found["reward"].nan_to_num(-1), expected["reward"].nan_to_num(-1))
        assert found["metrics"].keys() == expected["metrics"].keys()
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=0, abs=0, nan_ok=True), name


@pytest.mark.parametrize("rows", ["seven", "one"])
def test_vstar_over_two_processes(alone, together, rows):
    """Every rank ends with the same complete table, duplicates counted once, uneven and empty shares."""
    expected = alone.check("measure")[0][rows]
    assert len(expected["v_rows"]) == (6 if rows == "seven" else 1)
    for rank in together.check("measure"):
        found = rank[rows]
        assert torch.equal(found["v_rows"], expected["v_rows"])
        assert torch.equal(found["v_rewards"].nan_to_num(-1), expected["v_rewards"].nan_to_num(-1))
        assert found["v_prompts"] == expected["v_prompts"]
        assert found["v_calls"] == expected["v_calls"] == 5 * len(expected["v_rows"])


def test_dynamic_sampling_leaves_unequal_shares_and_the_same_groups(alone, together):
    """3 groups and 1, 2 and none, none and none: no rank waits for another, and one process keeps the same."""
    (expected,) = alone.check("dynamic")
    first, second = together.check("dynamic")
    for rank in (first, second):
        assert [kept[:3] for kept in rank["kept"]] == [kept[:3] for kept in expected["kept"]]
        assert [sorted(kept[3]) for kept in rank["kept"]] == [sorted(kept[3]) for kept in expected["kept"]]
        assert rank["skipped"] == expected["skipped"] and rank["served"] == expected["served"]
        for found, wanted in zip(rank["metrics"], expected["metrics"], strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert found[name] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), name
    assert expected["skipped"][0] is None and expected["skipped"][2] is not None
    assert {len(first["local"][0]), len(second["local"][0])} == {3, 1}
    assert sorted(len(rank["local"][1]) for rank in (first, second)) == [0, 2]
    assert_close(first["parameters"], expected["parameters"], WEIGHTS, "dynamic")


def test_a_reference_that_was_not_prepared_is_evaluated_as_well(alone, together):
    for rank in together.check("measure"):
        assert rank["frozen"] == alone.check("measure")[0]["frozen"]


def test_export_of_the_whole_model(together):
    """save_pretrained from any strategy; every process calls it, one writes."""
    expected = together.check("export-tied")[0]["parameters"]
    policy = rl.load_policy(together.folder / "export-tied", device="cpu")
    assert policy.model.get_input_embeddings().weight is policy.model.lm_head.weight
    assert_close(policy.model.state_dict(), expected, 0.0, "export")


def test_export_of_an_adapter(alone, together):
    """Only the trained adapter, whole, and not the frozen copy that is its reference."""
    from safetensors.torch import load_file

    assert not (together.folder / "export-lora" / "reference").exists()
    expected = load_file(alone.folder / "export-lora" / "adapter_model.safetensors")
    assert_close(load_file(together.folder / "export-lora" / "adapter_model.safetensors"), expected, 0.0, "adapter")
