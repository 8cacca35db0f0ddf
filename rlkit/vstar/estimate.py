"""`estimate_vstar`: stage 1 of A*-PO, in memory."""

import inspect
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkit.advantages import optimal_value
from rlkit.distributed import collectives
from rlkit.engine import Engine
from rlkit.prompts import as_rows, make_batch
from rlkit.reward_calls.settings import RewardSettings
from rlkit.sampling import owner_and_engine, sample
from rlkit.scoring import RewardFunction, score
from rlkit.support.timing import phase
from rlkit.types import PromptBatch, text_of
from rlkit.vstar.table import ValueTable

if TYPE_CHECKING:
    from rlkit.policy import Policy


@phase("estimate_vstar")
def estimate_vstar(
    policy: "Policy | Engine",
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
    reward_settings: RewardSettings | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> ValueTable:
    """Sample N completions per row from the reference, score them, and keep the rewards; processes share the rows.

    V*(x) = beta1 * log mean exp(r / beta1) is then a property of the table, see `optimal_value`.

    Args:
        policy: the reference; what trains later must start from it. Or an engine of it; that of the policy itself
            will do as long as no step was taken.
        dataset: `datasets.Dataset` or list of rows with a `prompt` column. Rows of identical content are sampled once.
        reward_funcs: as in `score`.
        num_value_samples: N per row.
        beta1: temperature of V*, > 0, in units of reward.
        success_threshold: a sample is a success if its reward is above this.
        batch_size: prompts sampled at once.
        max_completion_length: None takes what the model's context leaves, at most 256.
        seed: of the samples.
        progress: show a progress bar.
        reward_settings: weights, clip range and limits of the reward functions.
        chat_template_kwargs: as in `PromptLoader`.
        **sampling: further settings of `sample` (temperature, top_p, ...); use those of the training. And those of
            `RewardSettings` by their names (weights, timeout, ...).

    Returns:
        A `ValueTable` over the distinct rows of the dataset, in their order.

    Raises:
        ValueError: empty dataset, no prompt column, bad settings.

    Source: Brantley et al. 2025 (arXiv 2505.20686), stage 1.
    """
    reward_settings, sampling = RewardSettings.split(
        reward_settings, sampling, "estimate_vstar", inspect.signature(sample).parameters
    )
    dataset = as_rows(dataset, "estimate_vstar")
    if num_value_samples < 1:
        raise ValueError(f"estimate_vstar: num_value_samples must be at least 1, got {num_value_samples}.")
    if batch_size < 1:
        raise ValueError(f"estimate_vstar: batch_size must be at least 1, got {batch_size}.")
    optimal_value(torch.zeros(1), beta1=beta1)
    reference, engine = owner_and_engine(policy)
    whole = make_batch(reference, list(dataset), **(chat_template_kwargs or {}))
    first = {row: place for place, row in reversed([*enumerate(whole.row_id.tolist())])}
    distinct = sorted(first.values())
    if max_completion_length is None:
        max_completion_length = _room(reference, engine, whole)

    # Every process takes the same number of batches, the last of which may be empty: gathering shards is an exchange.
    mine = distinct[collectives.share(len(distinct))]
    count = math.ceil(math.ceil(len(distinct) / collectives.size()) / batch_size)
    batches: Iterable[int] = range(count)
    if progress:
        from tqdm.auto import tqdm

        batches = tqdm(batches, desc="estimate_vstar", unit="batch", file=sys.stderr, leave=False)
    rewards: list[torch.Tensor] = []
    for number in batches:
        batch = whole.select(mine[number * batch_size : (number + 1) * batch_size])
        rollout = sample(
            engine,
            batch,
            num_generations=num_value_samples,
            max_completion_length=max_completion_length,
            seed=seed,
            **sampling,
        )
        scores = score(rollout, reward_funcs, settings=reward_settings)
        # Completions are prompt-major as `sample` promises; ids are checked all the same, a swapped reward is silent.
        owner = batch.group_id.repeat_interleave(num_value_samples)
        if not torch.equal(rollout.group_id.cpu(), owner):
            raise RuntimeError("estimate_vstar: the rollout's groups are not those of the batch.")
        rewards.append(scores.reward.cpu().reshape(len(batch), num_value_samples))
    table = torch.cat(collectives.gather(torch.cat(rewards)))
    return ValueTable(
        row_id=whole.row_id[distinct],
        rewards=table,
        prompts=tuple(text_of(whole.rows[place]["prompt"]) for place in distinct),
        beta1=beta1,
        success_threshold=success_threshold,
        reward_calls=table.numel(),
    )


def _room(policy: "Policy", engine: Engine, batch: PromptBatch) -> int:
    """Tokens that the context of model and engine leaves for a completion of the longest prompt, at most 256."""
    limits = [limit for limit in (policy.max_context, engine.max_context) if limit is not None]
    limit = min(limits, default=math.inf)
    longest = max(len(ids) for ids in batch.token_ids)
    if longest >= limit:
        raise ValueError(f"estimate_vstar: a prompt of {longest} tokens fills the model's context of {limit}.")
    return int(min(256, limit - longest))
