# ruff: noqa: E501 - one metric a line reads as a table
"""Every metric once: its name, what it says in a sentence, its unit, and the range in which a run is healthy.

Names are TRL's wherever the quantity is TRL's. The functions below measure records; `Update.metrics` comes from
`loss_step`. Means skip NaN, and the mean of nothing is NaN, which a log holds as None.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.advantages import group_index
from rlkit.types import Scores


@dataclass(frozen=True)
class Metric:
    """One metric: `name` may hold `*` for a part that the user chooses (a reward function's name)."""

    name: str
    sentence: str
    unit: str
    healthy: str


_ALL = [
    Metric("step", "Optimizer steps done before this one.", "steps", "grows by 1"),
    Metric("num_tokens", "Prompt and completion tokens of all steps so far.", "tokens", "grows"),
    Metric("reward_calls", "Completions scored so far, those of stage 1 of A*-PO included.", "completions", "grows"),
    Metric("completions/mean_length", "Mean length of the completions, the end token included.", "tokens", "below the limit"),
    Metric("completions/min_length", "Length of the shortest completion.", "tokens", "at least 1"),
    Metric("completions/max_length", "Length of the longest completion.", "tokens", "at most the limit"),
    Metric("completions/mean_terminated_length", "Mean length of the completions that ended by themselves; 0 if none did.", "tokens", "> 0"),
    Metric("completions/min_terminated_length", "Length of the shortest completion that ended by itself; 0 if none did.", "tokens", "> 0"),
    Metric("completions/max_terminated_length", "Length of the longest completion that ended by itself; 0 if none did.", "tokens", "> 0"),
    Metric("completions/clipped_ratio", "Share of completions that the length limit cut off.", "share", "near 0"),
    Metric("reward", "Mean reward (weighted sum) over the completions that have one, before any KL penalty.", "reward", "grows"),
    Metric("reward_std", "Standard deviation of the reward over the whole batch.", "reward", "> 0"),
    Metric("rewards/*/mean", "Mean of one reward function where it did not abstain.", "reward", "grows"),
    Metric("rewards/*/std", "Standard deviation of one reward function where it did not abstain.", "reward", "> 0"),
    Metric("rewards/*/errors", "Share of completions on which a reward function failed (with on_error='none').", "share", "0"),
    Metric("rewards/*/timeouts", "Share of completions that a reward function lost to its timeout.", "share", "0"),
    Metric("frac_reward_zero_std", "Share of prompts whose completions all got the same reward: they teach nothing.", "share", "below 0.5"),
    Metric("frac_no_reward", "Share of completions for which every reward function abstained.", "share", "0"),
    Metric("kl", "Mean over tokens of log pi - log pi_ref of the sampled tokens (k1); an estimate, may be negative.", "nats/token", "small, slowly growing"),
    Metric("kl_sequence", "Mean over completions of the summed log-ratio to the reference.", "nats", "small, slowly growing"),
    Metric("advantage", "Mean advantage of the rows that have one (A*-PO: reward - V*).", "reward", "near 0 for RLOO"),
    Metric("advantage_std", "Standard deviation of the advantages.", "reward", "> 0"),
    Metric("v_star", "Mean V* of the step's prompts (A*-PO).", "reward", "above the reference's reward"),
    Metric("implicit_reward", "Mean of beta2 * log(pi / pi_ref) (A*-PO).", "reward", "approaches the advantage"),
    Metric("loss", "The loss; in RLOO it has no meaning beyond its gradient.", "reward", "finite"),
    Metric("grad_norm", "Norm of the gradient before clipping.", "1", "finite, no jumps"),
    Metric("learning_rate", "Learning rate of the first parameter group.", "1", "as scheduled"),
    Metric("entropy", "Mean entropy of the policy at the tokens in the loss.", "nats/token", "does not fall to 0"),
    Metric("clip_ratio/region_mean", "Share of rows whose ratio was clipped, either side. 0 by construction with one update per rollout.", "share", "below 0.2"),
    Metric("clip_ratio/low_mean", "Share of rows clipped below 1 - epsilon (negative advantage).", "share", "below 0.2"),
    Metric("clip_ratio/low_min", "1 only if every row was clipped below.", "share", "below 0.2"),
    Metric("clip_ratio/high_mean", "Share of rows clipped above 1 + epsilon_high (positive advantage).", "share", "below 0.2"),
    Metric("clip_ratio/high_max", "1 if any row was clipped above.", "share", "below 0.2"),
    Metric("sampler_gap/mean", "Mean distance between the sampler's and the policy's log-probabilities of the same tokens, on the first update.", "nats/token", "below 0.02"),
    Metric("sampler_gap/max", "Largest such distance of any token.", "nats", "below 1"),
    Metric("sampler_logp/recomputed", "1 where the engine's log-probabilities were those of a truncated distribution (top_p and the like) and the policy's own took their place; sampler_gap then says nothing about the engine. Not there otherwise.", "0 or 1", "not there"),
    Metric("frac_masked", "Share of rows without a token in the loss (truncated and masked, or without a target).", "share", "near 0"),
    Metric("skipped", "1 if the step had nothing to learn and the optimizer was not stepped.", "0 or 1", "0"),
    Metric("aux_loss", "Load-balancing loss of a mixture-of-experts model.", "1", "falls"),
    Metric("knobs/*", "A number that `run.knobs` declared, as it was in the step.", "as declared", "as set"),
    Metric("step_time", "Wall time of the step; kept apart from the other metrics, which repeat bit for bit.", "s", "steady"),
]  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def describe(name: str) -> Metric:
    """The declaration of a metric, also for a name such as `rewards/correct/mean`.

    Raises:
        KeyError: unknown name.
    """
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        if "*" in pattern and fnmatch.fnmatchcase(name, pattern):
            return metric
    raise KeyError(f"no metric {name!r} is declared in rlkit.metrics")


def markdown_table() -> str:
    """All metrics as the table in docs/metrics.md; a test keeps the two in step."""
    rows = [f"| `{m.name}` | {m.sentence} | {m.unit} | {m.healthy} |" for m in METRICS.values()]
    return "\n".join(["| metric | what it says | unit | healthy |", "|---|---|---|---|", *rows])


def length_metrics(lengths: Tensor, truncated: Tensor) -> dict[str, float]:
    """Lengths and truncation of (B,) completions; 0 for the terminated lengths where none ended by itself.

    NaN where there is no completion at all.
    """
    length = lengths.float() if len(lengths) else torch.full((1,), math.nan)
    if not len(lengths):
        truncated = torch.zeros(1, dtype=torch.bool)
    ended = length[~truncated] if bool((~truncated).any()) else length.new_zeros(1)
    return {
        "completions/mean_length": float(length.mean()),
        "completions/min_length": float(length.min()),
        "completions/max_length": float(length.max()),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": float(ended.min()),
        "completions/max_terminated_length": float(ended.max()),
        "completions/clipped_ratio": float(truncated.float().mean()) if len(lengths) else math.nan,
    }


def score_metrics(scores: Scores) -> dict[str, float]:
    """Rewards of a rollout, see `reward_metrics`, and the numbers that reward functions logged."""
    return reward_metrics(scores.reward, scores.parts, scores.names, scores.group_id) | dict(scores.metrics)


def reward_metrics(reward: Tensor, parts: Tensor, names: Sequence[str], group_id: Tensor) -> dict[str, float]:
    """Means and spreads of (B,) rewards and their (B,K) parts, and the share of groups that carry no signal.

    NaN where there is nothing to average.
    """
    result = {
        "reward": _mean(reward),
        "reward_std": _std(reward),
        "frac_reward_zero_std": frac_zero_std(reward, group_id),
        "frac_no_reward": float(reward.isnan().float().mean()),
    }
    for k, name in enumerate(names):
        result[f"rewards/{name}/mean"] = _mean(parts[:, k])
        result[f"rewards/{name}/std"] = _std(parts[:, k])
    return result


def frac_zero_std(reward: Tensor, group_id: Tensor) -> float:
    """Share of groups whose scorable completions all have the same reward (or where there are fewer than two)."""
    if not len(group_id):
        return math.nan
    spread, _ = reward_spread(reward, group_id)
    return float((spread <= 0).double().mean())  # as the advantage decides it: nearly equal is not equal


def reward_spread(reward: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor]:
    """Highest minus lowest reward of each group, -inf without any, in float64; and the group's index of each row."""
    group = group_index(group_id)
    known = ~reward.isnan()
    low = torch.full((len(group.unique()),), math.inf, dtype=torch.float64, device=group.device)
    high = (-low).scatter_reduce(0, group[known], reward[known].double(), "amax")
    low = low.scatter_reduce(0, group[known], reward[known].double(), "amin")
    return high - low, group


def kl_row_metrics(kl: Tensor, lengths: Tensor) -> dict[str, float]:
    """Mean of the (B,) summed log-ratios per token and per completion."""
    return {"kl": float(kl.sum() / lengths.sum().clamp(min=1)), "kl_sequence": float(kl.mean())}


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Mean and spread of the advantages that are numbers."""
    return {"advantage": _mean(advantages), "advantage_std": _std(advantages)}


def for_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON values: numbers that are not finite become None."""
    return {name: (value if math.isfinite(value) else None) for name, value in metrics.items()}


def _mean(values: Tensor) -> float:
    known = values[~values.isnan()].double()
    return float(known.mean()) if len(known) else math.nan


def _std(values: Tensor) -> float:
    known = values[~values.isnan()].double()
    return float((known - known[0]).std()) if len(known) > 1 else math.nan  # of equal values exactly 0
