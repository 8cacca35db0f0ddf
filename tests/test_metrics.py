"""Metrics by hand, NaN and all; every number that a full step logs is declared."""

import dataclasses
import json
import math

import pytest
import torch
from builders import make_rollout, make_scores, tiny_policy
from hypothesis import given
from hypothesis import strategies as st
from tolerances import CLOSE, FLOAT32

import rlkit as rl
from rlkit.metrics import (
    METRICS,
    advantage_metrics,
    describe,
    for_json,
    frac_zero_std,
    kl_row_metrics,
    length_metrics,
    reward_metrics,
    score_metrics,
)

NAN, INF = math.nan, math.inf


def assert_metrics(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], float(value), equal_nan=True, **FLOAT32, msg=f"{name}: {got[name]} is not {value}"
        )


def test_what_is_not_finite_becomes_none_in_json():
    got = for_json({"a": 1.5, "b": NAN, "c": INF, "d": -INF, "e": 0.0})
    assert got == {"a": 1.5, "b": None, "c": None, "d": None, "e": 0.0}
    assert json.loads(json.dumps(got, allow_nan=False)) == got


# --- rollouts ---


def metrics_of_lengths(rollout):
    return length_metrics(rollout.lengths, rollout.truncated)


def metrics_of_kl(rollout, ref):
    return kl_row_metrics(rl.compute_kl(rollout, ref), rollout.lengths)


def test_lengths_and_truncation_by_hand():
    """Lengths 3, 1, 2, 6; the last was cut off, so the terminated ones are 3, 1, 2."""
    got = metrics_of_lengths(make_rollout((3, 1, 2, 6), truncated=[False, False, False, True]))
    assert_metrics(
        got,
        {
            "completions/mean_length": 3,
            "completions/min_length": 1,
            "completions/max_length": 6,
            "completions/mean_terminated_length": 2,
            "completions/min_terminated_length": 1,
            "completions/max_terminated_length": 3,
            "completions/clipped_ratio": 0.25,
        },
    )


def test_terminated_lengths_are_zero_where_nothing_ended():
    """No NaN, no crash."""
    got = metrics_of_lengths(make_rollout((4, 4), truncated=[True, True]))
    assert got["completions/clipped_ratio"] == 1
    assert [got[f"completions/{which}_terminated_length"] for which in ("mean", "min", "max")] == [0, 0, 0]


def test_an_end_token_at_the_limit_is_not_truncation():
    """Completion [5,106,9,9], EOS ids {1,106}: cut after 106, not truncated, two tokens count."""
    from rlkit.engine import Completion
    from rlkit.engines.rollout_assembly import assemble

    policy = tiny_policy()
    both = [[Completion([5, 6], [-1.0, -1.0], "eos"), Completion([5, 6, 9, 9], [-1.0] * 4, "length")]]
    params = rl.SamplingParams(max_completion_length=4)
    rollout = assemble(policy, rl.make_batch(policy, ["1="]), both, params, "test")
    assert rollout.completion_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert rollout.truncated.tolist() == [False, True]


# --- scores ---


def test_reward_metrics_by_hand():
    """Rewards 1, 0, (none), 4: mean 5/3; unbiased std = sqrt(((2/3)^2 + (5/3)^2 + (7/3)^2) / 2) = sqrt(13/3)."""
    scores = make_scores([1, 0, None, 4], group_id=[0, 0, 1, 1])
    got = score_metrics(scores)
    want = {
        "reward": 5 / 3,
        "reward_std": math.sqrt(13 / 3),
        "frac_reward_zero_std": 0.5,
        "frac_no_reward": 0.25,
        "rewards/r/mean": 5 / 3,
        "rewards/r/std": math.sqrt(13 / 3),
    }
    assert_metrics(got, want)


def test_each_function_is_averaged_where_it_did_not_abstain():
    """Sparse rewards of two functions, one of which never answers."""
    scores = rl.Scores(
        parts=torch.tensor([[1.0, NAN, NAN], [3.0, 2.0, NAN]]),
        names=("a", "b", "never"),
        weights=torch.tensor([1.0, 0.5, 1.0]),
        reward=torch.tensor([1.0, 4.0]),
        group_id=torch.tensor([0, 0]),
        metrics={"judged": 7.0},
    )
    got = score_metrics(scores)
    assert got["rewards/a/mean"] == 2 and got["rewards/a/std"] == pytest.approx(math.sqrt(2))
    assert got["rewards/b/mean"] == 2 and math.isnan(got["rewards/b/std"])
    assert math.isnan(got["rewards/never/mean"]) and for_json(got)["rewards/never/mean"] is None
    assert got["judged"] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.sampled_from([0.7, 0.1, 1 / 3, -2.3, 1e5 + 0.1, 1e-8, 1e30]), st.integers(2, 70))
def test_equal_rewards_have_a_spread_of_exactly_0(dtype, value, rows):
    """The monitor looks for 0; a mean that is not exact gave 1e-17."""
    rewards = torch.full((rows,), value, dtype=dtype)
    got = reward_metrics(rewards, rewards[:, None], ["f"], torch.zeros(rows, dtype=torch.int64))
    assert got["reward_std"] == got["rewards/f/std"] == 0


def test_rewards_that_are_all_missing_give_nan_and_no_crash():
    got = score_metrics(make_scores([None, None, None], group_id=[0, 0, 1]))
    assert math.isnan(got["reward"]) and math.isnan(got["reward_std"])
    assert got["frac_reward_zero_std"] == 1 and got["frac_no_reward"] == 1


ZERO_STD = [
    ([1, 1, 0, 1], [0, 0, 1, 1], 0.5),
    ([1, 0, 1, 0], [0, 0, 0, 0], 0.0),
    ([1, 0, 1, 0], [7, -3, 7, -3], 1.0),
    ([1, None, 0, 1], [0, 0, 1, 1], 0.5),
    ([None, None, 0, 1], [0, 0, 1, 1], 0.5),
    ([0.1 + 0.2, 0.3], [0, 0], 1.0),
]


@pytest.mark.parametrize(("rewards", "groups", "want"), ZERO_STD)
def test_share_of_groups_without_signal(rewards, groups, want):
    """By group id, over the scorable rows."""
    scores = make_scores(rewards, groups)
    assert frac_zero_std(scores.reward, scores.group_id) == want


NEAR = [0.0, 1e-12, 0.1, 0.1 + 2**-27, 1.0, 1e5, 1e5 + 0.5, 1e8, 1e8 + 1, NAN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(NEAR)), min_size=2, max_size=12))
@pytest.mark.filterwarnings("ignore:.*single completion")
def test_a_group_without_signal_is_one_whose_advantages_are_all_zero(dtype, rows):
    """Rewards that nearly agree, such as 1e5 and 1e5 + 0.5: the metric and the advantage decide alike."""
    groups, rewards = torch.tensor([group for group, _ in rows]), torch.tensor([r for _, r in rows], dtype=dtype)
    groups[1] = groups[0]
    advantages = rl.compute_loo_advantage(rewards, group_id=groups)
    silent = [not bool(advantages[groups == group].any()) for group in groups.unique()]
    assert frac_zero_std(rewards, groups) == pytest.approx(sum(silent) / len(silent), abs=1e-12)


def test_the_share_of_groups_without_signal_is_what_chance_says():
    """p=0.1819, G=2: 0.702. 40,000 groups: standard error 0.0023, bound 4 of them (false alarm 6e-5)."""
    draw = torch.Generator().manual_seed(0)
    rewards = (torch.rand(80_000, generator=draw) < 0.1819).float()
    groups = torch.arange(40_000).repeat_interleave(2)
    scores = dataclasses.replace(make_scores([0.0]), parts=rewards[:, None], reward=rewards, group_id=groups)
    share = frac_zero_std(scores.reward, scores.group_id)
    assert abs(share - 0.7024) < 0.0092
    advantages = rl.compute_loo_advantage(rewards, group_id=groups).reshape(-1, 2)
    assert share == pytest.approx((advantages == 0).all(-1).float().mean().item())  # the counter means what it says


# --- KL and advantages ---


def test_kl_is_a_mean_over_tokens_and_may_be_negative():
    """(1 + 2 - 9) / 3 per token, (3 - 9) / 2 per sequence; the masked slot holds NaN."""
    sampler = torch.tensor([[-1.0, -1.0], [-10.0, NAN]])
    ref = torch.tensor([[-2.0, -3.0], [-1.0, NAN]])
    got = metrics_of_kl(make_rollout((2, 1), sampler_logp=sampler), ref)
    assert_metrics(got, {"kl": -2, "kl_sequence": -3})


def test_kl_of_a_rollout_agrees_with_compute_kl():
    rollout = make_rollout((3, 1, 2, 4), sampler_logp=torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    ref = torch.zeros(4, 4)
    got, sequence = metrics_of_kl(rollout, ref), rl.compute_kl(rollout, ref)
    assert got["kl_sequence"] == pytest.approx(sequence.mean().item(), rel=CLOSE)
    assert got["kl"] == pytest.approx(sequence.sum().item() / 10, rel=CLOSE)


def test_advantages_are_measured_where_there_is_one():
    assert_metrics(advantage_metrics(torch.tensor([1.0, NAN, 3.0])), {"advantage": 2, "advantage_std": math.sqrt(2)})
    assert_metrics(advantage_metrics(torch.tensor([NAN])), {"advantage": NAN, "advantage_std": NAN})


# --- declarations ---


def reward(completions, answer):
    return [float(a in text) for text, a in zip(completions, answer, strict=True)]


ROWS = [{"prompt": f"{i}+1=", "answer": "1"} for i in range(4)]


def full_step(path, algorithm):
    """One whole step as the notebooks write it; the line that was logged."""
    policy = tiny_policy()
    reference = policy.reference()
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    run = rl.Run(path)
    prompts = rl.PromptLoader(ROWS, policy, batch_size=4)
    for step, batch in run.steps(prompts, 1, progress=False):
        generations = 4 if algorithm == "rloo" else 1
        rollout = rl.sample(policy, batch, num_generations=generations, max_completion_length=4, seed=1)
        scores = rl.score(rollout, reward)
        ref_logps = rl.compute_logps(reference, rollout)
        extra = {}
        if algorithm == "rloo":
            advantages = rl.compute_loo_advantage(scores, kl=rl.compute_kl(rollout, ref_logps), beta=0.02)
            loss = rl.RLOO()
        else:
            table = rl.estimate_vstar(reference, ROWS, reward, max_completion_length=4, progress=False)
            run.count_reward_calls(table.reward_calls)
            extra["v_star"] = table(rollout)
            advantages, loss = rl.compute_optimal_advantage(scores, extra["v_star"]), rl.AStarPO()
        update = rl.loss_step(
            policy,
            optimizer,
            rollout,
            advantages,
            loss=loss,
            ref_logps=ref_logps,
            scheduler=scheduler,
            mask_truncated=True,
        )
        return run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps, **extra)


RLOO_NAMES = {
    "num_tokens",
    "reward_calls",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "frac_no_reward",
    "entropy",
    "kl",
    "loss",
    "grad_norm",
    "learning_rate",
    "frac_masked",
    "sampler_gap/mean",
    "sampler_gap/max",
    "rewards/reward/mean",
    "rewards/reward/std",
    "advantage",
    "clip_ratio/region_mean",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "completions/clipped_ratio",
}


@pytest.mark.parametrize("algorithm", ["rloo", "astarpo"])
def test_every_metric_of_a_full_step_is_declared(tmp_path, algorithm):
    """Names are TRL's; each has a sentence, a unit and a healthy range."""
    line = full_step(tmp_path / "run", algorithm)
    for name in line:
        metric = describe(name)
        assert metric.sentence and metric.unit and metric.healthy
    clip = {name for name in RLOO_NAMES if name.startswith("clip_ratio")}
    wanted = RLOO_NAMES if algorithm == "rloo" else (RLOO_NAMES - clip) | {"v_star", "implicit_reward"}
    assert wanted <= line.keys()
    assert all(value is None or math.isfinite(value) for value in line.values())


def test_reward_calls_include_stage_one(tmp_path):
    """RLOO 4 prompts x 4; A*-PO 4 prompts x 8 offline and 4 on-policy."""
    assert full_step(tmp_path / "rloo", "rloo")["reward_calls"] == 16
    assert full_step(tmp_path / "astarpo", "astarpo")["reward_calls"] == 36


def test_every_declaration_says_what_it_is():
    for name, metric in METRICS.items():
        assert metric.name == name and describe(name) is metric
        assert metric.sentence.endswith(".") and metric.unit and metric.healthy
    assert describe("rewards/correct/mean").name == "rewards/*/mean"


def test_an_undeclared_name_is_an_error():
    with pytest.raises(KeyError, match=r"no metric 'rewards' is declared in rlkit\.metrics"):
        describe("rewards")
