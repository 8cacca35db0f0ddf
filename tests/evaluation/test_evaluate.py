"""evaluate: pass@k against enumeration, intervals, tables, batches, files; no group is needed."""

import itertools
import logging
import math
import statistics

import pytest
import torch
from builders import assert_identical, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rl
from rlkit.evaluation.statistics import bootstrap_interval, pass_at_k

ROWS = [{"prompt": f"{row}+{row * 7 % 10}=", "likes": "0123456789"[row % 3 :: 2]} for row in range(11)]
FLOAT64 = 1e-12


def liked(completions, likes, **kwargs):
    return [float(text[:1] in like and text != "") for text, like in zip(completions, likes, strict=True)]


def sometimes(completions, **kwargs):
    """Abstains where the completion begins with one of a few letters."""
    return [None if text[:1] in "abcdef" else float(len(text) % 2) for text in completions]


# --- pass@k ---


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(passed, k):
    """The oracle enumerates every k of the n completions."""
    subsets = list(itertools.combinations(passed, k))
    want = sum(map(any, subsets)) / len(subsets) if subsets else math.nan
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(want, abs=FLOAT64, nan_ok=True)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_pass_at_k_is_unbiased_and_the_plug_in_is_not(p):
    """The expectation over every outcome of n draws is 1 - (1-p)^k exactly."""
    n, k = 6, 3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=FLOAT64)
    naive = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert abs(naive - (1 - (1 - p) ** k)) > 0.01


def test_pass_at_k_of_an_evaluation(frozen_policy):
    evaluation = rl.evaluate(
        frozen_policy, ROWS, [liked, sometimes], weights=[1, 0], num_generations=5, k=(1, 2, 5), max_completion_length=3
    )
    by_hand = {k: [] for k in (1, 2, 5)}
    for place in range(len(ROWS)):
        passed = (evaluation.scores.reward[evaluation.rollout.group_id == place] > 0.5).tolist()
        for k, values in by_hand.items():
            subsets = list(itertools.combinations(passed, k))
            values.append(sum(map(any, subsets)) / len(subsets))
    for k, values in by_hand.items():
        assert evaluation.metrics[f"pass@{k}"] == pytest.approx(sum(values) / len(values), abs=FLOAT64)
        assert evaluation.per_prompt()[f"pass@{k}"].tolist() == pytest.approx(values, abs=FLOAT64)
    assert evaluation.metrics["pass@1"] == pytest.approx(evaluation.reward, abs=1e-6)


def test_a_reward_at_the_threshold_has_not_passed(frozen_policy):
    evaluation = rl.evaluate(
        frozen_policy,
        ROWS[:3],
        lambda completions: [1.0] * len(completions),
        success_threshold=1.0,
        max_completion_length=2,
    )
    assert evaluation.metrics["pass@1"] == 0 and evaluation.per_prompt()["pass@1"].tolist() == [0, 0, 0]


def test_completions_without_a_reward_are_no_failures(frozen_policy):
    """A prompt with fewer than k scored completions says nothing about pass@k."""
    evaluation = rl.evaluate(frozen_policy, ROWS, sometimes, num_generations=4, k=(1, 4), max_completion_length=3)
    table = evaluation.per_prompt()
    assert (table["scored"] < 4).any() and (table["scored"] == 4).any(), "the example shows nothing"
    assert (table["pass@4"].isna() == (table["scored"] < 4)).all()
    assert evaluation.metrics["pass@4"] == pytest.approx(table["pass@4"].mean(), abs=FLOAT64)


@pytest.mark.parametrize(("generations", "expected"), [(1, {1}), (3, {1}), (4, {1, 4}), (8, {1, 4, 8})])
def test_the_usual_ks_are_those_that_fit(frozen_policy, generations, expected):
    evaluation = rl.evaluate(frozen_policy, ROWS[:2], liked, num_generations=generations, max_completion_length=2)
    assert {int(name[5:]) for name in evaluation.metrics if name.startswith("pass@")} == expected


def test_a_k_that_needs_more_completions_is_left_out_and_that_is_said(frozen_policy, caplog):
    """One completion per prompt and the usual k: what can be estimated is, and only that."""
    evaluation = rl.evaluate(frozen_policy, ROWS[:2], liked, num_generations=1, k=(1, 4, 8), max_completion_length=2)
    assert [name for name in evaluation.metrics if name.startswith("pass@")] == ["pass@1"]
    assert evaluation.settings["k"] == (1,)
    assert "pass@4, pass@8 needs as many completions per prompt, and num_generations is 1; left out" in caplog.text


BAD = {
    "k": ({"num_generations": 4, "k": (8,)}, r"pass@8 needs as many completions .* num_generations is 4\. Draw more"),
    "k of 0": ({"k": (0,)}, "got k=0"),
    "k of True": ({"k": (True,)}, "got k=True"),
    "num_generations": ({"num_generations": 0}, "num_generations must be a whole number of at least 1, got 0"),
    "greedy": ({"num_generations": 2, "greedy": True}, "greedy completions are all the same"),
    "batch_size": ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_settings_that_make_no_sense_are_named(frozen_policy, unchecked, options, message):
    with pytest.raises(ValueError, match=f"evaluate: .*{message}"):
        rl.evaluate(frozen_policy, ROWS, liked, **options)


def test_the_settings_of_rewards_are_keywords_or_one_object(frozen_policy):
    """As for `score`; a name that neither knows is refused before anything is sampled."""
    keywords = {"weights": [2.0, 0.5], "clip_range": (-1.0, 1.0), "on_error": "none"}
    settings = rl.rewards.RewardSettings(**keywords)
    options = {"num_generations": 2, "max_completion_length": 2}
    one = rl.evaluate(frozen_policy, ROWS[:2], [liked, liked], reward_settings=settings, **options)
    other = rl.evaluate(frozen_policy, ROWS[:2], [liked, liked], **keywords, **options)
    assert torch.equal(one.scores.reward, other.scores.reward) and one.scores.weights.tolist() == [2.0, 0.5]
    assert one.scores.metrics == other.scores.metrics and "rewards/liked/errors" in one.scores.metrics
    with pytest.raises(
        TypeError, match=r"evaluate: give \['memory'\] as keywords or in reward_settings=RewardSettings"
    ):
        rl.evaluate(frozen_policy, ROWS, liked, reward_settings=settings, memory=1)
    with pytest.raises(TypeError, match=r"evaluate: unexpected keyword argument 'weigths'. Did you mean 'weights'\?"):
        rl.evaluate(frozen_policy, ROWS, liked, weigths=[1.0])


# --- batches ---


@pytest.mark.parametrize("generations", [1, 3])
def test_batches_change_nothing_but_the_memory(frozen_policy, generations):
    """A partial last batch, one prompt at a time, all at once: the same completions, rewards and metrics."""
    options = {"num_generations": generations, "max_completion_length": 6, "temperature": 0.7, "seed": 3}
    whole = rl.evaluate(frozen_policy, ROWS, liked, **options)
    for size in (1, 4, 9):
        part = rl.evaluate(frozen_policy, ROWS, liked, batch_size=size, **options)
        assert part.rollout.completions == whole.rollout.completions
        assert part.rollout.group_id.tolist() == whole.rollout.group_id.tolist()
        assert_identical(dict(part.metrics), dict(whole.metrics))


def test_every_row_is_measured_once_in_order(frozen_policy):
    evaluation = rl.evaluate(frozen_policy, [*ROWS, ROWS[0]], liked, max_completion_length=2, batch_size=5)
    assert list(evaluation.rollout.prompts) == [row["prompt"] for row in [*ROWS, ROWS[0]]]
    table = evaluation.per_prompt()
    assert table.index.tolist() == list(range(12)) and table["likes"].tolist()[-1] == ROWS[0]["likes"]
    assert table["completions"].tolist() == [1] * 12


def test_rows_of_a_list_may_have_different_columns(frozen_policy):
    rows = [{"prompt": "1", "a": 1}, {"prompt": "2"}, {"prompt": "3", "b": 2}]
    evaluation = rl.evaluate(frozen_policy, rows, lambda completions: [1.0] * 3, max_completion_length=2, batch_size=1)
    assert evaluation.rollout.columns == {"a": (1, None, None), "b": (None, None, 2)}


def test_lengths_and_truncation_are_measured(frozen_policy):
    evaluation = rl.evaluate(frozen_policy, ROWS, liked, num_generations=2, max_completion_length=4)
    table = evaluation.per_prompt()
    assert evaluation.metrics["completions/mean_length"] == pytest.approx(table["mean_length"].mean())
    assert evaluation.metrics["completions/clipped_ratio"] == pytest.approx(table["truncated"].mean())
    assert evaluation.metrics["completions/max_length"] == 4


def test_greedy_needs_no_luck(frozen_policy):
    runs = [rl.evaluate(frozen_policy, ROWS, liked, greedy=True, seed=seed, max_completion_length=4) for seed in (0, 1)]
    assert runs[0].rollout.completions == runs[1].rollout.completions
    sampled = rl.evaluate(frozen_policy, ROWS, liked, max_completion_length=4)
    assert sampled.rollout.completions != runs[0].rollout.completions


def test_evaluation_prompts_need_no_value():
    """V* of other prompts is in the table; rewards of new ones are measured all the same."""
    policy = tiny_policy()
    rl.estimate_vstar(policy, ROWS[:3], liked, max_completion_length=3, progress=False)
    assert math.isfinite(rl.evaluate(policy, ROWS[5:], liked, max_completion_length=3).reward)


# --- intervals ---


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """400 samples of 60 prompts: 95 % of the intervals hold the mean.

    The binomial sd is 1.1 %; the bound is 5 % below, for the percentile bootstrap's known shortfall in small samples:
    a false-alarm rate below 1e-3, and the seed is fixed.
    """
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for trial in range(400):
        low, high = bootstrap_interval(
            (torch.rand(60, generator=generator) < 0.3).double(), torch.ones(60).double(), seed=trial
        )
        hits += low <= 0.3 <= high
    assert 0.90 <= hits / 400 <= 0.99


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_of_many_prompts_the_interval_is_that_of_the_normal_distribution(level):
    """Mean ± z sd / sqrt(P). A quantile of 2000 resamples has a relative sd of 3 % at most; the seed is fixed."""
    reward = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_interval(reward, torch.ones(1000).double(), level=level)
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    assert (high - low) / 2 == pytest.approx(z * float(reward.std()) / math.sqrt(1000), rel=0.08)


def test_prompts_are_resampled_and_not_completions():
    """Eight equal completions of each of 20 prompts are 20 pieces of evidence: the interval is that of one each."""
    reward = torch.tensor([0.0, 1.0] * 10).double()
    alone = bootstrap_interval(reward, torch.ones(20).double())
    assert bootstrap_interval(reward * 8, torch.full((20,), 8.0).double()) == alone
    assert alone[1] - alone[0] > 0.3


def test_an_evaluation_shows_its_interval(frozen_policy):
    evaluation = rl.evaluate(frozen_policy, ROWS, liked, num_generations=4, max_completion_length=3)
    low, high = evaluation.interval
    assert low <= evaluation.reward <= high and low < high
    assert f"[{low:.4f}, {high:.4f}], pass@1" in repr(evaluation)
    none = rl.evaluate(frozen_policy, ROWS, lambda completions: [None] * len(completions), max_completion_length=2)
    assert math.isnan(none.reward) and math.isnan(none.interval[0]) and math.isnan(none.metrics["pass@1"])


# --- before and after ---


def with_rewards(evaluation, rewards):
    import dataclasses

    reward = torch.tensor(rewards, dtype=torch.float32)
    scores = dataclasses.replace(evaluation.scores, reward=reward, parts=reward[:, None])
    return dataclasses.replace(evaluation, scores=scores)


def test_a_comparison_is_paired_prompt_by_prompt(frozen_policy):
    """By hand: differences 1, 1, 0, 0, -1 and one prompt without a reward, which is left out."""
    base = rl.evaluate(frozen_policy, ROWS[:6], liked, max_completion_length=2)
    nan = math.nan
    before, after = with_rewards(base, [0, 0, 1, 0, 1, nan]), with_rewards(base, [1, 1, 1, 0, 0, 1])
    found = after.compare(before)
    assert found.difference == pytest.approx(0.2) and found.interval[0] < 0.2 < found.interval[1]
    assert [found.metrics[name] for name in ("better", "worse", "equal")] == [2, 1, 2]
    table = found.to_pandas()
    assert table["difference"].tolist()[:5] == [1, 1, 0, 0, -1] and math.isnan(table["difference"][5])
    assert found.summary().loc["reward", "before"] == pytest.approx(0.4)
    assert "0.4000 -> 0.6000, difference +0.2000" in repr(found)
    assert before.compare(after).difference == pytest.approx(-0.2)


def test_what_the_prompts_share_cancels(frozen_policy):
    """Every prompt is better by the same 0.1, some are hard: the paired interval has no width at all."""
    base = rl.evaluate(frozen_policy, ROWS, liked, max_completion_length=2)
    hard = torch.linspace(0, 10, len(ROWS))
    found = with_rewards(base, (hard + 0.5).tolist()).compare(with_rewards(base, hard.tolist()))
    assert found.interval == pytest.approx((0.5, 0.5), abs=1e-6)


def test_rows_are_paired_by_content_whatever_their_order(frozen_policy):
    doubled = [*ROWS, ROWS[3]]
    before = rl.evaluate(frozen_policy, doubled, liked, greedy=True, max_completion_length=3)
    after = rl.evaluate(frozen_policy, doubled[::-1], liked, greedy=True, max_completion_length=3)
    found = after.compare(before)
    assert found.metrics["equal"] == 12 and found.place.tolist() == list(range(12))


def test_evaluations_of_different_rows_or_settings_are_told_apart(frozen_policy, caplog):
    first = rl.evaluate(frozen_policy, ROWS[:4], liked, max_completion_length=2)
    with pytest.raises(ValueError, match="different rows: 1 only before, 2 only after, 3 in both"):
        rl.evaluate(frozen_policy, ROWS[1:6], liked, max_completion_length=2).compare(first)
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        rl.evaluate(frozen_policy, ROWS[:4], liked, max_completion_length=3, temperature=0.5).compare(first)
    assert "different settings: max_completion_length, temperature" in caplog.text


# --- files ---


@settings(max_examples=5)
@given(st.integers(1, 4))
def test_an_evaluation_comes_back_from_its_file(frozen_policy, tmp_path_factory, generations):
    path = tmp_path_factory.mktemp("run") / "evaluation.pt"
    evaluation = rl.evaluate(
        frozen_policy, ROWS, [liked, sometimes], num_generations=generations, max_completion_length=3
    )
    evaluation.save(path)
    again = rl.Evaluation.load(path)
    assert_identical(dict(again.metrics), dict(evaluation.metrics))
    assert again.per_prompt().equals(evaluation.per_prompt())
    found = again.compare(evaluation)
    assert found.difference == 0 and found.interval == (0, 0)
    found.save(path)
    assert type(found).load(path).to_pandas().equals(found.to_pandas())
