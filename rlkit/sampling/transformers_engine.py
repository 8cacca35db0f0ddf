"""The default engine: the policy's own model, in this process, on transformers' public cache API.

Each prompt is prefilled once for all its completions, finished rows leave the batch, and the log-probabilities of the
sampled tokens fall out of the loop for free. A model whose cache cannot be expanded (recurrent states) is sampled by
its own `generate`, which is slower; the engine says so once.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.logps import causal_lm_of, score_rollout
from rlkit.rollout import Rollout, SamplingParams
from rlkit.sampling.draw import build_processors, draw, uniform_noise
from rlkit.sampling.engine import Completion, FinishReason

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

COMPACT_WHEN_FINISHED = 1 / 8
"""Share of finished rows at which the batch is compacted: copying the cache for every single row would cost more."""


class TransformersEngine:
    """Samples with the policy's model in this process.

    Args:
        policy: the policy to sample from.
        max_rows: most completions decoded side by side; None takes the whole batch. Bounds the size of the cache.
    """

    name = "transformers"

    def __init__(self, policy: "Policy", *, max_rows: int | None = None) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"TransformersEngine: max_rows must be at least 1 or None, got {max_rows}.")
        self.policy = policy
        self.max_rows = max_rows
        self.can_expand_cache: bool | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        *,
        num_generations: int,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Completion]]:
        """For each prompt, `num_generations` completions. The same seed and group id give the same completions."""
        at_once = len(prompts) if self.max_rows is None else max(1, self.max_rows // num_generations)
        result: list[list[Completion]] = []
        with self.policy.without_gradient(), self.policy.inference_settings():
            for start in range(0, len(prompts), max(1, at_once)):
                part = slice(start, start + at_once)
                result += self._generate(prompts[part], group_ids[part], num_generations, params, seed)
        return result

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        num_generations: int,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Completion]]:
        if self.can_expand_cache is None:
            self.can_expand_cache = _can_expand_cache(self.policy.model)
            if not self.can_expand_cache:
                self.name = "transformers (generate)"
                logger.warning(
                    "%s: its cache cannot be expanded from one prompt to several completions, so rlkit samples with "
                    "the model's own generate(): slower, and completions depend on the whole batch and the seed.",
                    type(self.policy.model).__name__,
                )
        if not self.can_expand_cache:
            return _sample_by_length(self.policy, prompts, group_ids, num_generations, params, seed)
        noise = uniform_noise(seed, group_ids, num_generations, params.max_completion_length)
        return _decode(self.policy, prompts, num_generations, params, noise)


def _can_expand_cache(model: Any) -> bool:
    """True if the model keeps its past in attention caches that can be repeated and selected by row."""
    from transformers import DynamicCache
    from transformers.cache_utils import CacheLayerMixin, DynamicLayer

    lm = causal_lm_of(model)
    arguments = inspect.signature(lm.forward).parameters
    if "past_key_values" not in arguments or getattr(lm, "_is_stateful", False):
        return False
    probe = torch.zeros(1, 1, dtype=torch.int64, device=next(lm.parameters()).device)
    cache = DynamicCache(config=lm.config)
    try:
        output = lm(input_ids=probe, attention_mask=torch.ones_like(probe), past_key_values=cache, use_cache=True)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return False
    layers = getattr(cache, "layers", [])
    plain = all(isinstance(layer, DynamicLayer) and not _has_recurrent_state(layer) for layer in layers)
    return output.past_key_values is cache and bool(layers) and plain and isinstance(layers[0], CacheLayerMixin)


def _has_recurrent_state(layer: object) -> bool:
    return hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")


def _decode(
    policy: "Policy", prompts: Sequence[Sequence[int]], num_generations: int, params: SamplingParams, noise: Tensor
) -> list[list[Completion]]:
    from transformers import DynamicCache

    lm = causal_lm_of(policy.model)
    device = policy.device
    ids, mask = _left_pad(prompts, policy.pad_id, device)
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
    chooser = _Chooser(policy, params, [list(prompt) for prompt in prompts for _ in range(num_generations)])
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


class _Chooser:
    """Turns logits into tokens under the sampling settings; returns the policy's own log-probability beside each."""

    def __init__(self, policy: "Policy", params: SamplingParams, prompts: list[list[int]]) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor, StopStringCriteria

        self.params = params
        self.processors = build_processors(params)
        self.penalty = None
        if params.repetition_penalty != 1:
            self.penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
            # Pad with a token of the prompt itself: a pad id would be penalised, and it may be the end of sequence.
            width = max(len(prompt) for prompt in prompts)
            self.prompts = torch.tensor(
                [[prompt[0]] * (width - len(prompt)) + prompt for prompt in prompts], device=policy.device
            )
        self.stop = None
        if params.stop_strings:
            self.stop = StopStringCriteria(policy.tokenizer, list(params.stop_strings))

    def __call__(
        self, logits: Tensor, so_far: Tensor, rows: Tensor, uniform: Tensor, step: int, eos_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        tempered = logits / self.params.temperature
        scores = logits
        if self.penalty is not None:
            scores = self.penalty(torch.cat([self.prompts[rows], so_far], dim=1), scores)
        if step < self.params.min_completion_length:
            scores = scores.index_fill(1, eos_ids, -torch.inf)
        scores = self.processors(so_far, scores / self.params.temperature)
        token = draw(scores, uniform)
        return token, tempered.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)

    def hits_stop_string(self, so_far: Tensor) -> Tensor:
        if self.stop is None:
            return torch.zeros(len(so_far), dtype=torch.bool, device=so_far.device)
        return self.stop(so_far, None).to(so_far.device)


def _left_pad(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def _sample_by_length(
    policy: "Policy",
    prompts: Sequence[Sequence[int]],
    group_ids: Sequence[int],
    num_generations: int,
    params: SamplingParams,
    seed: int,
) -> list[list[Completion]]:
    """Prompts of one length at a time: a recurrent model that ignores the attention mask would read padding as text."""
    result: dict[int, list[Completion]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        part = [prompts[place] for place in places]
        groups = [group_ids[place] for place in places]
        done = _sample_by_generate(policy, part, groups, num_generations, params, seed)
        result.update(zip(places, done, strict=True))
    return [result[place] for place in range(len(prompts))]


def _sample_by_generate(
    policy: "Policy",
    prompts: Sequence[Sequence[int]],
    group_ids: Sequence[int],
    num_generations: int,
    params: SamplingParams,
    seed: int,
) -> list[list[Completion]]:
    """The model's own `generate`, every sampling setting spelled out; log-probabilities come from a second pass."""
    from transformers import GenerationConfig

    model: Any = policy.model
    ids, mask = _left_pad(prompts, policy.pad_id, policy.device)
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
        stop_strings=list(params.stop_strings) or None,
        eos_token_id=list(policy.eos_ids),
        pad_token_id=policy.pad_id,
        bos_token_id=policy.tokenizer.bos_token_id,
    )
    own_config = model.generation_config
    model.generation_config = (
        settings  # generate() fills unset fields from here: nothing of the checkpoint's may leak in
    )
    devices = [policy.device] if policy.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(uniform_noise(seed, group_ids[:1], 1, 1).item() * 2**62))
            sequences = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                tokenizer=policy.tokenizer if params.stop_strings else None,
            )
    finally:
        model.generation_config = own_config
    chooser = _Chooser(policy, params, [list(prompt) for prompt in prompts for _ in range(num_generations)])
    tokens, reasons = [], []
    for row in sequences[:, ids.shape[1] :]:
        ends = torch.isin(row, torch.tensor(policy.eos_ids, device=row.device)).nonzero()
        row = row[: int(ends[0]) + 1] if len(ends) else row
        reason: FinishReason = "eos" if len(ends) else "length"
        if not len(ends) and chooser.stop is not None:
            for end in range(1, len(row) + 1):
                if bool(chooser.hits_stop_string(row[None, :end])[0]):
                    row, reason = row[:end], "stop"
                    break
        tokens.append(row.tolist())
        reasons.append(reason)
    logp = _recompute_logp(policy, [list(p) for p in prompts for _ in range(num_generations)], tokens, params)
    done = [Completion(t, lp, r) for t, lp, r in zip(tokens, logp, reasons, strict=True)]
    return [done[start : start + num_generations] for start in range(0, len(done), num_generations)]


def _recompute_logp(
    policy: "Policy", prompts: list[list[int]], tokens: list[list[int]], params: SamplingParams
) -> list[list[float]]:
    from rlkit.sampling.assemble import pad_completions

    prompt_ids, prompt_mask = _left_pad(prompts, policy.pad_id, policy.device)
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
