"""The decode loop: one forward pass for each token on transformers' public cache API.

Each prompt is prefilled once, its cache is repeated for its completions, and finished rows leave the batch.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.causal_lm import causal_lm_of
from rlkit.engine import Completion, FinishReason
from rlkit.engines.token_sampler import Chooser, left_pad
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

COMPACT_WHEN_FINISHED = 1 / 8
"""Share of finished rows at which the batch is compacted; compacting copies the cache."""


def decode(
    policy: "Policy", prompts: Sequence[Sequence[int]], num_generations: int, params: SamplingParams, noise: Tensor
) -> list[list[Completion]]:
    """G completions for each of P prompts, chosen by (P*G, max length) uniform noise."""
    from transformers import DynamicCache

    lm = causal_lm_of(policy.model)
    device = policy.device
    ids, mask = left_pad(prompts, policy.pad_id, device)
    takes_positions = "position_ids" in inspect.signature(lm.forward).parameters
    takes_keep = "logits_to_keep" in inspect.signature(lm.forward).parameters
    keep_last = {"logits_to_keep": 1} if takes_keep else {}

    def forward(tokens: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:
        extra = {"position_ids": positions} if takes_positions else {}
        output = lm(
            input_ids=tokens, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **keep_last, **extra
        )
        return output.logits[:, -1].float()

    # Prefill each prompt once, then give every prompt's cache to its completions.
    cache = DynamicCache(config=lm.config)
    logits = forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)).repeat_interleave(num_generations, 0)
    cache.batch_repeat_interleave(num_generations)
    mask = mask.repeat_interleave(num_generations, 0)
    position = mask.sum(-1)
    rows = torch.arange(len(logits), device=device)  # where each row of the running batch belongs
    noise = noise.to(device)

    count, length = len(rows), params.max_completion_length
    tokens_out = torch.full((count, length), policy.pad_id, dtype=torch.int64, device=device)
    logp_out = torch.zeros(count, length, dtype=torch.float32, device=device)
    lengths = torch.full((count,), length, dtype=torch.int64, device=device)
    endings: list[tuple[Tensor, FinishReason]] = []
    eos_ids = torch.tensor(policy.eos_ids, device=device)
    chooser = Chooser(policy, params, [list(prompt) for prompt in prompts for _ in range(num_generations)])
    alive = torch.ones(count, dtype=torch.bool, device=device)

    for step in range(length):
        token, logp = chooser(logits, tokens_out[rows, :step], rows, noise[rows, step], step, eos_ids)
        tokens_out[rows, step] = torch.where(alive, token, policy.pad_id)
        logp_out[rows, step] = torch.where(alive, logp, 0.0)
        ended = alive & torch.isin(token, eos_ids)
        stopped = alive & ~ended & chooser.hits_stop_string(tokens_out[rows, : step + 1])
        endings += [(rows[ended], "eos"), (rows[stopped], "stop")]
        lengths[rows[ended | stopped]] = step + 1
        alive = alive & ~(ended | stopped)
        if step + 1 == length or not bool(alive.any()):
            break
        if int((~alive).sum()) >= COMPACT_WHEN_FINISHED * len(alive):
            keep = alive.nonzero().squeeze(-1)
            cache.batch_select_indices(keep)
            rows, mask, position, token, alive = rows[keep], mask[keep], position[keep], token[keep], alive[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = forward(token[:, None], mask, position[:, None])
        position = position + 1

    reasons: list[FinishReason] = ["length"] * count
    for ended_rows, reason in endings:
        for row in ended_rows.tolist():
            reasons[row] = reason
    ids_list, logp_list, length_list = tokens_out.tolist(), logp_out.tolist(), lengths.tolist()
    done = [Completion(ids_list[i][:n], logp_list[i][:n], reasons[i]) for i, n in enumerate(length_list)]
    return [done[start : start + num_generations] for start in range(0, len(done), num_generations)]
