"""From an engine's lists of tokens, which are checked, to the padded tensors of a `Rollout`."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.engine import Completion, Engine, EngineError
from rlkit.engines.token_sampler import left_pad
from rlkit.engines.token_text import pieces_of
from rlkit.types import Prompt, PromptBatch, Rollout, SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy


def pad_completions(tokens: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad token lists on the right; the mask comes from the lengths, so a pad id equal to EOS stays counted.

    Example:
        >>> ids, mask = pad_completions([[7, 8, 2], [7]], pad_id=2)
        >>> ids.tolist(), mask.int().tolist()
        ([[7, 8, 2], [7, 2, 2]], [[1, 1, 1], [1, 0, 0]])
    """
    width = max((len(row) for row in tokens), default=0)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in tokens], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
    return ids.reshape(len(tokens), width), torch.arange(width) < lengths[:, None]


def cut_at_end(tokens: Sequence[int], eos_ids: Sequence[int]) -> tuple[list[int], bool]:
    """Cut a completion after its first end-of-sequence token; the flag says whether there was one.

    Example:
        >>> cut_at_end([5, 106, 9, 9], eos_ids=[1, 106])
        ([5, 106], True)
    """
    for place, token in enumerate(tokens):
        if token in eos_ids:
            return list(tokens[: place + 1]), True
    return list(tokens), False


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
    prompt_ids, prompt_mask = left_pad(batch.token_ids, policy.pad_id, policy.device)
    completion_ids, completion_mask = pad_completions([c.token_ids for c in flat], policy.pad_id)
    logp = torch.zeros(completion_ids.shape, dtype=torch.float32)
    logp[completion_mask] = torch.tensor([value for c in flat for value in c.logp], dtype=torch.float32)
    # transformers decodes an empty batch to one empty text
    texts = policy.tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True) if flat else []
    rows = [batch.rows[i] for i in owner]
    device, index = policy.device, torch.tensor(owner, dtype=torch.int64)
    columns = dict.fromkeys(name for row in batch.rows for name in row if name != "prompt")
    return Rollout(
        prompt_ids=prompt_ids[index.to(device)],
        prompt_mask=prompt_mask[index.to(device)].bool(),
        completion_ids=completion_ids.to(device),
        completion_mask=completion_mask.to(device),
        sampler_logp=logp.to(device),
        group_id=batch.group_id[index].to(device),
        row_id=batch.row_id[index].to(device),
        truncated=torch.tensor([c.finish_reason == "length" for c in flat], dtype=torch.bool).to(device),
        prompts=tuple(row["prompt"] for row in rows),
        completions=tuple(_in_form_of(row["prompt"], text) for row, text in zip(rows, texts, strict=True)),
        columns={name: tuple(row.get(name) for row in rows) for name in columns},
        sampling=params,
        policy_version=policy.version,
        engine=engine_name,
        pieces=pieces_of(policy.tokenizer, completion_ids[completion_mask]),
    )


def _in_form_of(prompt: Prompt, text: str) -> Any:
    """Text for a text prompt, a list with one assistant message for a conversation (TRL's form)."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def join(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Concatenate rollouts that were sampled with the same settings, on the CPU."""
    kept = [rollout for rollout in rollouts if len(rollout)] or list(rollouts[:1])
    wide = max(rollout.prompt_ids.shape[1] for rollout in kept)
    long = max(rollout.completion_ids.shape[1] for rollout in kept)

    def rows(name: str, width: int | None = None, *, left: bool = False, fill: float = 0) -> Tensor:
        parts = [getattr(rollout, name).cpu() for rollout in kept]
        if width is not None:
            gaps = [width - part.shape[1] for part in parts]
            parts = [
                torch.nn.functional.pad(part, (gap, 0) if left else (0, gap), value=fill)
                for part, gap in zip(parts, gaps, strict=True)
            ]
        return torch.cat(parts)

    names = dict.fromkeys(name for rollout in kept for name in rollout.columns)
    return Rollout(
        prompt_ids=rows("prompt_ids", wide, left=True, fill=pad_id),
        prompt_mask=rows("prompt_mask", wide, left=True),
        completion_ids=rows("completion_ids", long, fill=pad_id),
        completion_mask=rows("completion_mask", long),
        sampler_logp=rows("sampler_logp", long),
        group_id=rows("group_id"),
        row_id=rows("row_id"),
        truncated=rows("truncated"),
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
