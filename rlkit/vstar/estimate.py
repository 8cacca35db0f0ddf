"""`estimate_vstar`: stage 1 of A*-PO, in memory."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkit.advantages import optimal_value
from rlkit.prompts import check_prompt_column, make_batch
from rlkit.rewards.score import RewardFunction, score
from rlkit.rollout import text_of
from rlkit.sampling.sample import sample
from rlkit.vstar.table import ValueTable

if TYPE_CHECKING:
    from rlkit.policy import Policy


def estimate_vstar(
    policy: "Policy",
    dataset: Any,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    num_value_samples: int = 8,
    beta1: float = 0.5,
    success_threshold: float = 0.0,
    batch_size: int = 64,
    max_completion_length: int | None = None,
    seed: int = 0,
    progress: bool = True,
    weights: Sequence[float] | None = None,
    clip_range: tuple[float, float] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> ValueTable:
    """Sample N completions per row from the reference, score them, and keep the rewards.

    V*(x) = beta1 * log mean exp(r / beta1) is then a property of the table, see `optimal_value`.

    Args:
        policy: the reference; what trains later must start from it.
        dataset: `datasets.Dataset` or list of rows with a `prompt` column. Rows of identical content are sampled once.
        reward_funcs: as in `score`.
        num_value_samples: N per row.
        beta1: temperature of V*, > 0, in units of reward.
        success_threshold: a sample is a success if its reward is above this.
        batch_size: prompts sampled at once.
        max_completion_length: None takes what the model's context leaves, at most 256.
        seed: of the samples.
        progress: show a progress bar.
        weights: one weight per reward function, as in `score`.
        clip_range: bounds of the weighted sum, as in `score`.
        chat_template_kwargs: as in `PromptLoader`.
        **sampling: further settings of `sample` (temperature, top_p, ...); use those of the training.

    Returns:
        A `ValueTable` over the distinct rows of the dataset, in their order.

    Raises:
        ValueError: empty dataset, no prompt column, bad settings.

    Source: Brantley et al. 2025 (arXiv 2505.20686), stage 1.
    """
    check_prompt_column(dataset, "estimate_vstar")
    if num_value_samples < 1:
        raise ValueError(f"estimate_vstar: num_value_samples must be at least 1, got {num_value_samples}.")
    if batch_size < 1:
        raise ValueError(f"estimate_vstar: batch_size must be at least 1, got {batch_size}.")
    optimal_value(torch.zeros(1), beta1=beta1)
    if max_completion_length is None:
        max_completion_length = _room(policy, dataset, chat_template_kwargs)

    places: Iterable[int] = range(0, len(dataset), batch_size)
    if progress:
        from tqdm.auto import tqdm

        places = tqdm(places, desc="estimate_vstar", unit="batch", file=sys.stderr, leave=False)
    rewards: dict[int, torch.Tensor] = {}
    prompts: dict[int, str] = {}
    calls = 0
    for start in places:
        rows = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
        batch = make_batch(policy, rows, first_group_id=start, **(chat_template_kwargs or {}))
        first = {row: i for i, row in reversed([*enumerate(batch.row_id.tolist())])}
        fresh = sorted(i for row, i in first.items() if row not in rewards)
        if not fresh:
            continue
        batch = type(batch)(
            rows=tuple(batch.rows[i] for i in fresh),
            token_ids=tuple(batch.token_ids[i] for i in fresh),
            row_id=batch.row_id[fresh],
            group_id=batch.group_id[fresh],
        )
        rollout = sample(
            policy,
            batch,
            num_generations=num_value_samples,
            max_completion_length=max_completion_length,
            seed=seed,
            **sampling,
        )
        scores = score(rollout, reward_funcs, weights=weights, clip_range=clip_range)
        calls += len(rollout)
        for i, row in enumerate(batch.row_id.tolist()):
            rewards[row] = scores.reward[rollout.group_id == batch.group_id[i].to(rollout.group_id.device)].cpu()
            prompts[row] = text_of(batch.rows[i]["prompt"])
    return ValueTable(
        row_id=torch.tensor(list(rewards), dtype=torch.int64),
        rewards=torch.stack(list(rewards.values())),
        prompts=tuple(prompts.values()),
        beta1=beta1,
        success_threshold=success_threshold,
        reward_calls=calls,
    )


def _room(policy: "Policy", dataset: Any, chat_template_kwargs: Mapping[str, Any] | None) -> int:
    """Tokens that the model's context leaves for a completion of the longest prompt, at most 256."""
    limit = policy.max_context or math.inf
    batch = make_batch(policy, list(dataset), **(chat_template_kwargs or {}))
    longest = max(len(ids) for ids in batch.token_ids)
    if longest >= limit:
        raise ValueError(f"estimate_vstar: a prompt of {longest} tokens fills the model's context of {limit}.")
    return int(min(256, limit - longest))
