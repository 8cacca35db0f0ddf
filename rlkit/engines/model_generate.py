"""Sampling by the model's own `generate`, for models whose cache cannot be repeated for several completions.

Recurrent and hybrid models keep states, not past keys. Prompts are grouped by length, because some models (RWKV) ignore
the attention mask and would read padding as text; and sampled one row at a time if a batch gives other numbers than a
single row (RWKV in transformers 5.19).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.causal_lm import causal_lm_of
from rlkit.engine import Completion, FinishReason
from rlkit.engines.assembly import cut_at_end, pad_completions
from rlkit.engines.token_sampler import Chooser, left_pad, uniform_noise
from rlkit.token_scorer import score_rollout
from rlkit.types import Rollout, SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy


def sample_by_length(
    policy: "Policy",
    prompts: Sequence[Sequence[int]],
    group_ids: Sequence[int],
    generations: range,
    params: SamplingParams,
    seed: int,
    *,
    batches: bool,
) -> list[list[Completion]]:
    """Completions by `generate`, for prompts of one length at a time; without `batches`, for one row at a time."""
    result: dict[int, list[Completion]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        part = [prompts[place] for place in places]
        groups = [group_ids[place] for place in places]
        if batches:
            done = _sample_by_generate(policy, part, groups, generations, params, seed)
        else:
            done = [
                [
                    _sample_by_generate(policy, [prompt], [group], range(g, g + 1), params, seed)[0][0]
                    for g in generations
                ]
                for prompt, group in zip(part, groups, strict=True)
            ]
        result.update(zip(places, done, strict=True))
    return [result[place] for place in range(len(prompts))]


def can_generate_batches(lm: Any) -> bool:
    """True if a decoding step of two rows equals that of single rows (RWKV in transformers 5.19 mixes the rows)."""
    from transformers import GenerationConfig

    ids = torch.tensor([[0, 1, 2], [2, 1, 0]], device=next(lm.parameters()).device)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=2,
        min_new_tokens=2,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    out = lm.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    expected = lm(input_ids=out.sequences[:, :4], use_cache=False).logits[:, -1].float()
    return bool(torch.allclose(out.logits[1].float(), expected, rtol=1e-2, atol=1e-2, equal_nan=True))


def _sample_by_generate(
    policy: "Policy",
    prompts: Sequence[Sequence[int]],
    group_ids: Sequence[int],
    generations: range,
    params: SamplingParams,
    seed: int,
) -> list[list[Completion]]:
    """Call `generate` with every sampling setting explicit; a second pass computes the log-probabilities."""
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    if params.regex is not None:
        raise ValueError(
            f"sample: regex is not there for {type(causal_lm_of(policy.model)).__name__}, which rlkit samples with the "
            "model's own generate(). Sample with vLLM, or let the reward function check the format."
        )
    num_generations = len(generations)
    model: Any = causal_lm_of(policy.model)  # adapters live inside; a wrapper's generate() would change its settings
    chooser = Chooser(policy, params, [list(prompt) for prompt in prompts for _ in generations])
    ids, mask = left_pad(prompts, policy.pad_id, policy.device)
    settings = GenerationConfig(
        do_sample=True,
        num_return_sequences=num_generations,
        max_new_tokens=params.max_completion_length,
        min_new_tokens=params.min_completion_length or None,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=list(policy.eos_ids),
        pad_token_id=policy.pad_id,
        bos_token_id=policy.tokenizer.bos_token_id,
    )
    own_config = model.generation_config
    model.generation_config = settings  # else generate() fills unset fields from the checkpoint's
    devices = [policy.device] if policy.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(uniform_noise(seed, group_ids[:1], generations.start + 1, 1)[-1].item() * 2**62))
            sequences = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([_refuse_nan, chooser.rule_out_unused]),
                # The completion only: a prompt may end with the first half of a stop string.
                stopping_criteria=StoppingCriteriaList(
                    [lambda tokens, scores: chooser.hits_stop_string(tokens[:, ids.shape[1] :])]
                ),
            )
    finally:
        model.generation_config = own_config
    tokens, reasons = [], []
    for row in sequences[:, ids.shape[1] :]:
        kept, ended = cut_at_end(row.tolist(), policy.eos_ids)  # padding follows
        reason: FinishReason = "eos" if ended else "length"
        # A stop string may come before the end of sequence; at the same token the latter is the reason.
        for end in range(1, len(kept) + 1 - ended) if chooser.stop is not None else ():
            if bool(chooser.hits_stop_string(row[None, :end])[0]):
                kept, reason = kept[:end], "stop"
                break
        tokens.append(kept)
        reasons.append(reason)
    logp = _recompute_logp(policy, [list(p) for p in prompts for _ in range(num_generations)], tokens, params)
    done = [Completion(t, lp, r) for t, lp, r in zip(tokens, logp, reasons, strict=True)]
    return [done[start : start + num_generations] for start in range(0, len(done), num_generations)]


def _refuse_nan(tokens: Tensor, scores: Tensor) -> Tensor:
    if bool(scores.isnan().any()):
        raise FloatingPointError(
            "sample: the policy's weights or logits are not finite. Load the policy again, or resume from a "
            "checkpoint. loss_step raises if an update makes weights not finite, so something else changed them."
        )
    return scores


def _recompute_logp(
    policy: "Policy", prompts: list[list[int]], tokens: list[list[int]], params: SamplingParams
) -> list[list[float]]:
    prompt_ids, prompt_mask = left_pad(prompts, policy.pad_id, policy.device)
    completion_ids, completion_mask = pad_completions(tokens, policy.pad_id)
    blank = tuple("" for _ in tokens)
    rollout = Rollout(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask.bool(),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        sampler_logp=torch.zeros(completion_ids.shape),
        group_id=torch.zeros(len(tokens), dtype=torch.int64),
        row_id=torch.zeros(len(tokens), dtype=torch.int64),
        truncated=torch.zeros(len(tokens), dtype=torch.bool),
        prompts=blank,
        completions=blank,
        sampling=params,
    )
    scores = score_rollout(policy.local_scorer, rollout).logp.tolist()
    return [row[: len(ids)] for row, ids in zip(scores, tokens, strict=True)]
