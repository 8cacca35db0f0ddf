"""V* from reference samples: the table, what is kept and dropped, and stage 1 on a real tiny model."""

import math
from dataclasses import replace

import pytest
import torch
from builders import make_rollout
from hypothesis import given
from hypothesis import strategies as st
from tolerances import EXACT, FLOAT32, FLOAT64, STANDARD_ERROR, TABLE_DIGITS

import rlkit as rl
from rlkit.prompts import content_id

NAN = math.nan


def make_table(rewards, rows=None, **options):
    rows = [{"prompt": f"{i}+1="} for i in range(len(rewards))] if rows is None else rows
    samples = [[NAN if r is None else float(r) for r in group] for group in rewards]
    return rl.ValueTable(
        row_id=torch.tensor([content_id(row) for row in rows]),
        rewards=torch.tensor(samples),
        prompts=tuple(row["prompt"] for row in rows),
        **options,
    )


def rows_of(count):
    return [{"prompt": f"{i}+1="} for i in range(count)]


class CountingReward:
    """Right if the completion starts with the row's answer; counts what it was asked."""

    __name__ = "starts_right"

    def __init__(self):
        self.seen = []

    def __call__(self, completions, prompts, answer):
        self.seen += prompts
        return [float(text[:1] in right) for text, right in zip(completions, answer, strict=True)]


# --- values ---


def test_values_are_v_star_of_each_row():
    """r=[1,0,0,0] and r=[1,None,0,None], by hand."""
    table = make_table([[1, 0, 0, 0], [1, None, 0, None], [None] * 4], beta1=0.5)
    torch.testing.assert_close(table.values, torch.tensor([0.47723, 0.71689, NAN]), equal_nan=True, **TABLE_DIGITS)


def test_another_beta1_is_free_and_leaves_the_table_as_it_was():
    """No sampling: the same samples seen with 1e-3 and 1e6."""
    table = make_table([[1, 0, 0, 0]], beta1=0.5)
    small, large = replace(table, beta1=1e-3), replace(table, beta1=1e6)
    torch.testing.assert_close(small.values, torch.tensor([0.99861]), **TABLE_DIGITS)
    torch.testing.assert_close(large.values, torch.tensor([0.25]), **TABLE_DIGITS)
    assert table.beta1 == 0.5 and small.rewards is table.rewards
    with pytest.raises(ValueError, match="beta1 must be a finite number > 0, got 0"):
        replace(table, beta1=0.0)


@given(st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=6), st.floats(0.1, 10))
def test_standard_error_matches_the_delta_method(rewards, beta1):
    """V* = beta1 log(mean w): its error is beta1 std(w) / (mean(w) sqrt(N)), here naively in Python floats."""
    weights = [math.exp(r / beta1) for r in rewards]
    n = len(weights)
    mean = math.fsum(weights) / n
    std = math.sqrt(math.fsum((w - mean) ** 2 for w in weights) / (n - 1))
    got = make_table([rewards], beta1=beta1).standard_errors
    torch.testing.assert_close(got, torch.tensor([beta1 * std / (mean * math.sqrt(n))]), **STANDARD_ERROR)


def test_standard_error_needs_two_scored_samples():
    errors = make_table([[1, None], [1, 1], [None, None]]).standard_errors
    assert errors.isnan().tolist() == [True, False, True] and errors[1] == 0


def test_lookup_is_by_row_and_does_not_depend_on_group_or_order():
    """V* belongs to the row; groups, order and repetition of a rollout's rows do not matter."""
    rows = rows_of(3)
    table = make_table([[1, 1], [0, 0], [1, 0]], rows)
    ids = [content_id(rows[i]) for i in (2, 0, 2, 1)]
    want = table.values[[2, 0, 2, 1]]
    for groups in ([0, 1, 2, 3], [9, -4, 9, 0], [0, 0, 0, 0]):
        torch.testing.assert_close(table(make_rollout((1, 2, 1, 1), row_id=ids, group_id=groups)), want, **EXACT)


def test_a_row_that_is_not_in_the_table_is_named():
    """Evaluation prompts have no V*; the error says which and what to do."""
    rows = rows_of(2)
    rollout = make_rollout((1, 1), row_id=[content_id(rows[0]), 5], prompts=["0+1=", "new?"])
    with pytest.raises(
        KeyError, match=r"ValueTable: 1 prompt\(s\) of the rollout have no V\*, the first is 'new\?'.*estimate_vstar"
    ):
        make_table([[1], [0]], rows)(rollout)


# --- what is kept ---

FILTER_TABLE = [
    ([1, -1], True),
    ([-1, -1], False),
    ([0.0, 1e-9], True),
    ([None, 0], False),
    ([NAN, 1], True),
    ([0, 0], False),
    ([None, None], False),
]


@pytest.mark.parametrize(("rewards", "kept"), FILTER_TABLE)
def test_a_row_is_kept_if_a_scored_sample_is_above_the_threshold(rewards, kept):
    """Rewards [1,-1] / [-1,-1]: never by 'sum == 0'. A second row is always kept."""
    rows = rows_of(2)
    table = make_table([rewards, [1, 1]], rows)
    assert table.keep_solvable(rows) == (rows if kept else rows[1:])
    assert table.solved.tolist() == [kept, True]


def test_the_threshold_can_be_moved():
    """Reward must be above it."""
    rows = rows_of(3)
    rewards = [[0.4, 0.5], [0.5, 0.6], [-1, -2]]
    assert make_table(rewards, rows, success_threshold=0.5).keep_solvable(rows) == rows[1:2]
    assert make_table(rewards, rows, success_threshold=-1.5).keep_solvable(rows) == rows


def test_it_says_how_many_rows_go_and_why(caplog, capsys):
    """Formula 5 of A*-PO: never solved and unscorable are counted apart."""
    rows = rows_of(4)
    table = make_table([[1, 0], [0, 0], [None, None], [0, -1]], rows)
    table.keep_solvable(rows)
    assert "kept 1 of 4 rows; 2 were never solved in 2 samples (reward > 0)" in capsys.readouterr().out
    assert "1 row(s) have no reward at all and are left out, e.g. rows [2]" in caplog.text
    assert "never solved: 2 (50.0%), without a reward: 1" in repr(table)


def test_an_empty_rest_is_an_error_with_advice():
    rows = rows_of(2)
    message = (
        r"keep_solvable: no row is left: none of 2 reference samples of any of 2 rows .*Start from a stronger reference"
    )
    with pytest.raises(ValueError, match=message):
        make_table([[0, 0], [None, -1]], rows).keep_solvable(rows)


def test_the_same_prompt_with_other_answers_is_two_rows():
    """Same prompt, two rows, other answers, [0,0] and [1,0]: two V*; only the first row is dropped."""
    rows = [{"prompt": "1+1=", "answer": 3}, {"prompt": "1+1=", "answer": 2}]
    table = make_table([[0, 0], [1, 0]], rows)
    torch.testing.assert_close(table.values, torch.tensor([0.0, 0.71689]), **TABLE_DIGITS)
    assert table.keep_solvable(rows) == rows[1:]
    rollout = make_rollout((1, 1), row_id=[content_id(row) for row in rows], prompts=["1+1="] * 2)
    torch.testing.assert_close(table(rollout), torch.tensor([0.0, 0.71689]), **TABLE_DIGITS)


def test_a_dataset_stays_a_dataset_and_rows_may_repeat():
    from datasets import Dataset

    rows = rows_of(2)
    dataset = Dataset.from_list([rows[0], rows[1], rows[0]])
    kept = make_table([[1, 0], [0, 0]], rows).keep_solvable(dataset)
    assert isinstance(kept, Dataset) and kept.to_list() == [rows[0], rows[0]]


def test_rows_that_were_never_estimated_are_named():
    """A changed column makes another row."""
    rows = rows_of(2)
    with pytest.raises(
        KeyError, match=r"keep_solvable: row\(s\) \[1\] of the dataset \(1 in all\) have no V\*: call estimate_vstar"
    ):
        make_table([[1], [1]], rows).keep_solvable([rows[0], {**rows[1], "answer": 3}])


# --- the record ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_id": torch.tensor([1, 1])}, "ValueTable: a row id occurs twice"),
        ({"row_id": torch.tensor([1])}, "ValueTable: row_id, rewards and prompts must have one entry per dataset row"),
        ({"prompts": ("a",)}, "ValueTable: row_id, rewards and prompts must have one entry per dataset row"),
        ({"beta1": -1.0}, "beta1 must be a finite number > 0, got -1"),
        ({"rewards": torch.ones(2, 0)}, "N >= 1"),
    ],
)
def test_a_bad_table_is_refused(unchecked, changes, message):
    values = {"row_id": torch.tensor([1, 2]), "rewards": torch.ones(2, 3), "prompts": ("a", "b")} | changes
    with pytest.raises(ValueError, match=message):
        rl.ValueTable(**values)


def test_a_table_shows_itself():
    frame = make_table([[1, 0], [None, None]], [{"prompt": "<b>"}, {"prompt": "2"}], beta1=0.5).to_pandas()
    assert frame["v_star"][0] == pytest.approx(0.71689, abs=1e-5)
    assert frame["scored"].tolist() == [2, 0] and frame["solved"].tolist() == [True, False]
    assert frame["mean_reward"][0] == 0.5 and frame["max_reward"][0] == 1 and math.isnan(frame["max_reward"][1])
    html = make_table([[1, 0]], [{"prompt": "<script>x</script>"}])._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_the_curve_falls_from_the_maximum_to_the_mean():
    table = make_table([[1, 0, 0, 0], [1, 1, 0, 0], [None] * 4])
    curve = table.curve([1e-6, 0.1, 1.0, 1e6])
    values = curve["mean_v_star"].tolist()
    assert values[0] == pytest.approx(1.0, abs=1e-4) and values[-1] == pytest.approx((0.25 + 0.5) / 2, abs=1e-4)
    assert values == sorted(values, reverse=True)


# --- stage 1 ---

ROWS = [{"prompt": f"{i}+1=", "answer": "0123456789"} for i in range(5)]


def estimate(policy, rows=ROWS, reward=None, **options):
    options = {"num_value_samples": 4, "max_completion_length": 3, "progress": False} | options
    return rl.estimate_vstar(policy, rows, CountingReward() if reward is None else reward, **options)


def test_stage_one_keeps_the_rewards_of_the_samples_of_each_row(frozen_policy):
    """Against sampling and judging by hand, prompt by prompt."""
    table = estimate(frozen_policy, seed=4)
    batch = rl.make_batch(frozen_policy, ROWS)
    rollout = rl.sample(frozen_policy, batch, num_generations=4, max_completion_length=3, seed=4)
    right = torch.tensor(
        [[float(text[:1] in "0123456789") for text in rollout.texts[4 * i : 4 * i + 4]] for i in range(5)]
    )
    assert 0 < right.mean() < 1
    torch.testing.assert_close(table.rewards, right, **EXACT)
    assert table.row_id.tolist() == [content_id(row) for row in ROWS] and table.prompts[2] == "2+1="
    assert table.reward_calls == 20


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_stage_one_does_not_depend_on_its_batches(frozen_policy, batch_size):
    torch.testing.assert_close(
        estimate(frozen_policy, batch_size=batch_size).rewards, estimate(frozen_policy).rewards, **EXACT
    )


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_identical_rows_are_sampled_once_and_differing_ones_apart(frozen_policy, batch_size):
    """Reward calls counted; the same prompt with another answer is judged by its own answer."""
    rows = [ROWS[0], ROWS[1], ROWS[0], {**ROWS[0], "answer": ""}, ROWS[1]]
    judged = []

    def reward(completions, answer):
        judged.extend(answer)
        return [float(a == "") for a in answer]

    table = estimate(frozen_policy, rows, reward, batch_size=batch_size)
    assert len(table) == 3 and table.reward_calls == len(judged) == 12
    assert table.row_id.tolist() == [content_id(rows[i]) for i in (0, 1, 3)]
    assert table.rewards.tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4]
    rollout = make_rollout((1,) * 5, row_id=[content_id(row) for row in rows])
    got = table(rollout)
    assert got.tolist() == [0, 0, 0, 1, 0]


def test_a_table_of_another_beta1_asks_nothing(frozen_policy):
    reward = CountingReward()
    table = estimate(frozen_policy, reward=reward)
    asked = len(reward.seen)
    replace(table, beta1=0.1), table.curve()
    assert len(reward.seen) == asked == 20


def test_stage_one_goes_with_training_on_the_kept_rows(frozen_policy):
    """From the table to the advantages of stage 2: reward - V*, one completion per prompt."""
    table = estimate(frozen_policy, num_value_samples=8)
    kept = table.keep_solvable(ROWS)
    loader = rl.PromptLoader(kept, frozen_policy, batch_size=2, seed=7)
    rollout = rl.sample(frozen_policy, loader.next_batch(), num_generations=1, max_completion_length=3, seed=1)
    scores = rl.score(rollout, CountingReward())
    advantages = rl.compute_optimal_advantage(scores, table(rollout))
    by_prompt = dict(zip(table.prompts, table.values.tolist(), strict=True))
    want = [r - by_prompt[prompt] for r, prompt in zip(scores.reward.tolist(), rollout.prompts, strict=True)]
    torch.testing.assert_close(advantages, torch.tensor(want), **FLOAT32)


def test_unscorable_samples_stay_apart_from_wrong_ones(frozen_policy):
    """None for every sample of one row."""

    def reward(completions, prompts):
        return [None if prompt == "3+1=" else 1.0 for prompt in prompts]

    table = estimate(frozen_policy, reward=reward)
    assert table.scorable.tolist() == [True, True, True, False, True]
    assert table.keep_solvable(ROWS) == [*ROWS[:3], ROWS[4]]


def test_weights_and_clipping_are_those_of_score(frozen_policy):
    table = estimate(
        frozen_policy, reward=[lambda completions: [1.0] * len(completions)], weights=[3.0], clip_range=(0.0, 2.0)
    )
    assert table.rewards.unique().tolist() == [2.0]


def test_the_settings_of_rewards_are_keywords_or_one_object(frozen_policy):
    """As for `score`; a name that neither knows is refused before anything is sampled."""
    keywords = {"weights": [2.0], "clip_range": (0.0, 1.5), "on_error": "none"}
    settings = rl.rewards.RewardSettings(**keywords)
    one, other = estimate(frozen_policy, reward_settings=settings), estimate(frozen_policy, **keywords)
    assert torch.equal(one.rewards, other.rewards) and one.rewards.max() == 1.5
    with pytest.raises(TypeError, match=r"estimate_vstar: give \['memory'\] as keywords or in reward_settings="):
        estimate(frozen_policy, reward_settings=settings, memory=1)
    with pytest.raises(
        TypeError, match=r"estimate_vstar: unexpected keyword argument 'timeuot'. Did you mean 'timeout'"
    ):
        estimate(frozen_policy, timeuot=1.0)


def test_the_room_for_completions_is_what_the_context_leaves(frozen_policy):
    """64 tokens of context, the longest prompt has 60."""
    rows = [{"prompt": "1" * 60, "answer": "1"}, {"prompt": "1", "answer": "1"}]
    lengths = []

    def reward(completion_ids):
        lengths.extend(len(ids) for ids in completion_ids)
        return [1.0] * len(completion_ids)

    estimate(frozen_policy, rows, reward, max_completion_length=None, num_value_samples=16)
    assert max(lengths) == 4


BAD_ESTIMATES = {
    "empty": ({"rows": []}, "estimate_vstar: the dataset is empty"),
    "no prompt": ({"rows": [{"question": "1"}]}, "estimate_vstar: the dataset has no 'prompt' column"),
    "no samples": ({"num_value_samples": 0}, "estimate_vstar: num_value_samples must be at least 1, got 0"),
    "batch_size": ({"batch_size": 0}, "estimate_vstar: batch_size must be at least 1, got 0"),
    "beta1": ({"beta1": 0.0}, "optimal_value: beta1 must be a finite number > 0, got 0"),
    "context full": (
        {"rows": [{"prompt": "1" * 64, "answer": ""}], "max_completion_length": None},
        "estimate_vstar: a prompt of 64 tokens fills the model's context of 64",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_ESTIMATES.values(), ids=BAD_ESTIMATES.keys())
def test_bad_input_is_named_before_anything_is_sampled(frozen_policy, changes, message):
    reward = CountingReward()
    with pytest.raises(ValueError, match=message):
        estimate(frozen_policy, reward=reward, **changes)
    assert reward.seen == []


def test_v_star_in_float64_keeps_its_digits():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    table = rl.ValueTable(row_id=torch.tensor([1]), rewards=rewards, prompts=("a",), beta1=0.5)
    want = 0.5 * math.log((math.exp(2) + 3) / 4)
    torch.testing.assert_close(table.values, torch.tensor([want], dtype=torch.float64), **FLOAT64)


def test_a_prompt_with_half_a_letter_is_shown():
    table = rl.ValueTable(torch.arange(2), torch.rand(2, 3), ("a\ud800", "$5"))
    assert table.to_pandas()["prompt"].tolist() == ["a\ufffd", "$5"] and "mathjax_ignore" in table._repr_html_()
