"""From an engine's lists of tokens, which are checked, to the padded tensors of a `Rollout`."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlkit.engine import Completion, Engine, EngineError
from rlkit.engines.token_text import pieces_of
from rlkit.types import PromptBatch, Rollout, SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy


def pad_tokens(
    tokens: Sequence[Sequence[int]], pad_id: int, *, side: Literal["left", "right"] = "right"
) -> tuple[Tensor, Tensor]:
    """Token lists as (B,L) ids and bool mask, from the lengths, so a token that equals the pad id stays counted.

    Example:
        >>> ids, mask = pad_tokens([[7, 8, 2], [7]], pad_id=2)
        >>> ids.tolist(), mask.int().tolist()
        ([[7, 8, 2], [7, 2, 2]], [[1, 1, 1], [1, 0, 0]])
    """
    rows = [torch.tensor(row, dtype=torch.int64) for row in tokens]
    return _pad(rows, side, pad_id), _pad([torch.ones_like(row) for row in rows], side).bool()


def _pad(rows: Sequence[Tensor], side: str = "right", value: float = 0) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=torch.int64)
    return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)


def check_completions(groups: list[list[Completion]], batch: PromptBatch, num_generations: int, engine: Engine) -> None:
    """Check what an engine returns: it may be the user's own code."""
    who, now = f"sample: engine {engine.name!r}", engine.policy.version
    sizes = [len(group) for group in groups]
    if sizes != [num_generations] * len(batch):
        raise RuntimeError(f"{who} returned groups of {sizes}, expected {len(batch)} groups of {num_generations}.")
    for number, (token_ids, logp, _, version) in enumerate(one for group in groups for one in group):
        place = number // num_generations
        if version not in (None, now):
            raise EngineError(
                f"{who} drew for prompt {place} with weights of version {version}; the policy is at {now}."
            )
        if not token_ids or len(token_ids) != len(logp):
            raise RuntimeError(
                f"{who} returned {len(token_ids)} tokens with {len(logp)} log-probabilities for prompt {place}; "
                "expected one for each, at least one."
            )
        if any(map(math.isnan, logp)):
            raise FloatingPointError(
                f"{who} returned a NaN log-probability for prompt {place}: the policy's weights or logits are not "
                "finite. Load the policy again, or resume from a checkpoint. loss_step raises if an update makes "
                "weights NaN, so something else has changed them."
            )


def assemble(
    policy: "Policy",
    batch: PromptBatch,
    completions: Sequence[Sequence[Completion]],
    params: SamplingParams,
    engine_name: str,
) -> Rollout:
    """Build the rollout of P prompts with their completions, prompt-major, on the policy's device."""
    counts = [len(group) for group in completions]
    flat = [completion for group in completions for completion in group]
    owner = [prompt for prompt, count in enumerate(counts) for _ in range(count)]
    prompt_ids, prompt_mask = pad_tokens(batch.token_ids, policy.pad_id, side="left")
    completion_ids, completion_mask = pad_tokens([c.token_ids for c in flat], policy.pad_id)
    logp = torch.zeros(completion_ids.shape, dtype=torch.float32)
    logp[completion_mask] = torch.tensor([value for c in flat for value in c.logp], dtype=torch.float32)
    # transformers decodes an empty batch to one empty text
    texts = policy.tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True) if flat else []
    rows = [batch.rows[i] for i in owner]
    device, index = policy.device, torch.tensor(owner, dtype=torch.int64)
    columns = dict.fromkeys(name for row in batch.rows for name in row if name != "prompt")
    return Rollout(
        prompt_ids=prompt_ids[index].to(device),
        prompt_mask=prompt_mask[index].to(device),
        completion_ids=completion_ids.to(device),
        completion_mask=completion_mask.to(device),
        sampler_logp=logp.to(device),
        group_id=batch.group_id[index].to(device),
        row_id=batch.row_id[index].to(device),
        truncated=torch.tensor([c.finish_reason == "length" for c in flat], dtype=torch.bool).to(device),
        prompts=tuple(row["prompt"] for row in rows),
        completions=tuple(
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]  # TRL's form
            for row, text in zip(rows, texts, strict=True)
        ),
        columns={name: tuple(row.get(name) for row in rows) for name in columns},
        sampling=params,
        policy_version=policy.version,
        engine=engine_name,
        pieces=pieces_of(policy.tokenizer, completion_ids[completion_mask]),
    )


def join(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Concatenate rollouts that were sampled with the same settings, on the CPU."""
    kept = [rollout for rollout in rollouts if len(rollout)] or list(rollouts[:1])

    def padded(name: str, side: str = "right", value: float = 0) -> Tensor:
        rows = [row for rollout in kept for row in getattr(rollout, name).cpu()]
        return _pad(rows, side, value).to(getattr(kept[0], name).dtype)  # without rows it has no dtype

    def flat(name: str) -> Tensor:
        return torch.cat([getattr(rollout, name).cpu() for rollout in kept])

    names = dict.fromkeys(name for rollout in kept for name in rollout.columns)
    return Rollout(
        prompt_ids=padded("prompt_ids", "left", pad_id),
        prompt_mask=padded("prompt_mask", "left"),
        completion_ids=padded("completion_ids", value=pad_id),
        completion_mask=padded("completion_mask"),
        sampler_logp=padded("sampler_logp"),
        group_id=flat("group_id"),
        row_id=flat("row_id"),
        truncated=flat("truncated"),
        prompts=tuple(prompt for rollout in kept for prompt in rollout.prompts),
        completions=tuple(completion for rollout in kept for completion in rollout.completions),
        columns={
            name: tuple(cell for rollout in kept for cell in rollout.columns.get(name, (None,) * len(rollout)))
            for name in names
        },
        sampling=kept[0].sampling,
        policy_version=kept[0].policy_version,
        engine=kept[0].engine,
        pieces={token: text for rollout in kept for token, text in rollout.pieces.items()},
        logp_recomputed=kept[0].logp_recomputed,
    )
