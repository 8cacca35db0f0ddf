"""The default engine: the policy's own model, in this process.

It samples on transformers' public cache API: each prompt is prefilled once, its cache is repeated for its completions,
and finished rows leave the batch. A model whose cache cannot be repeated (recurrent states) is sampled by its own
`generate`, which is slower; the engine warns once.
"""

import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.causal_lm import causal_lm_of
from rlkit.engine import Completion, PolicyModelEngine
from rlkit.engines.rollout_assembly import pad_tokens
from rlkit.engines.token_sampler import TokenSampler
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

COMPACT_WHEN_FINISHED = 1 / 8
"""Share of finished rows at which the batch is compacted; compacting copies the cache."""


class TransformersEngine(PolicyModelEngine):
    """Samples with the policy's model in this process.

    Args:
        policy: the policy to sample from.
        max_rows: most completions decoded at a time, which bounds the cache; None takes the whole batch.
    """

    name = "transformers"

    def __init__(self, policy: "Policy", *, max_rows: int | None = None) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"TransformersEngine: max_rows must be at least 1 or None, got {max_rows}.")
        self.policy = policy
        self.max_rows = max_rows
        self._can_expand_cache: bool | None = None
        self._can_generate_batches = True

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
        with self.policy.without_gradient(), self.policy.inference_settings():  # gathers, so without prompts too
            if not prompts:
                return []
            sampler = TokenSampler(self.policy, prompts, group_ids, num_generations, params, seed)
            if self._can_expand_cache is None:
                self._examine_model()
            for rows in torch.arange(len(sampler), device=self.policy.device).split(self.max_rows or len(sampler)):
                if self._can_expand_cache:
                    _decode(sampler, rows)
                else:
                    for some in self._rows_of_one_length(sampler, rows):
                        _generate(sampler, some)
            return sampler.completions()

    def _examine_model(self) -> None:
        lm = causal_lm_of(self.policy.model)
        self._can_expand_cache = _can_expand_cache(lm)
        if not self._can_expand_cache:
            self.name = "transformers (generate)"
            self._can_generate_batches = _can_generate_batches(lm)
            logger.warning(
                "%s: its cache cannot be expanded from one prompt to several completions, so rlkit samples with the "
                "model's own generate(), which is slower.",
                type(self.policy.model).__name__,
            )

    def _rows_of_one_length(self, sampler: TokenSampler, rows: Tensor) -> Iterable[Tensor]:
        """Some models (RWKV) ignore the attention mask and would read padding as text."""
        if not self._can_generate_batches:
            return rows.split(1)
        lengths = torch.tensor([len(prompt) for prompt in sampler.prompts], device=rows.device)
        lengths = lengths[rows // sampler.num_generations]
        return [rows[lengths == length] for length in lengths.unique()]


def _decode(sampler: TokenSampler, rows: Tensor) -> None:
    """Complete some rows, one forward pass for each token."""
    from transformers import DynamicCache

    lm = causal_lm_of(sampler.policy.model)
    arguments = inspect.signature(lm.forward).parameters
    cache = DynamicCache(config=lm.config)
    keep_last = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        extra = {"position_ids": positions} if "position_ids" in arguments else {}
        out = lm(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **keep_last, **extra)
        return out.logits[:, -1]

    prompts, where = torch.unique(rows // sampler.num_generations, return_inverse=True)
    ids, is_token = pad_tokens([sampler.prompts[i] for i in prompts.tolist()], sampler.policy.pad_id, side="left")
    mask = is_token.long().to(rows.device)
    logits = forward(ids.to(rows.device), (mask.cumsum(-1) - 1).clamp(min=0))[where]
    cache.batch_select_indices(where)
    mask = mask[where]
    position = mask.sum(-1)
    for step in range(1, sampler.params.max_completion_length + 1):
        token, ended = sampler(logits, rows), sampler.ended[rows]
        finished = int(ended.sum())
        if step == sampler.params.max_completion_length or finished == len(rows):
            return
        if finished >= COMPACT_WHEN_FINISHED * len(rows):
            keep = (~ended).nonzero()[:, 0]
            cache.batch_select_indices(keep)
            rows, mask, position, token = rows[keep], mask[keep], position[keep], token[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = forward(token[:, None], position[:, None])
        position = position + 1


def _generate(sampler: TokenSampler, rows: Tensor) -> None:
    """Complete rows whose prompts have one length by the model's own `generate`."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    policy = sampler.policy
    lm = causal_lm_of(policy.model)  # adapters live inside; a wrapper's generate() would change its settings
    prompts = [sampler.prompts[row // sampler.num_generations] for row in rows.tolist()]
    ids = torch.tensor(prompts, device=rows.device)
    # RecurrentGemma keeps states in its modules, and a prompt of one token would go on from those of the last call.
    lm(input_ids=ids[:1, :1], use_cache=False)
    _call_generate(
        lm,
        ids,
        max_new_tokens=sampler.params.max_completion_length,
        eos_token_id=list(policy.eos_ids),
        pad_token_id=policy.pad_id,
        logits_processor=LogitsProcessorList([lambda tokens, scores: sampler.only_chosen(scores, rows)]),
        stopping_criteria=StoppingCriteriaList([lambda tokens, scores: sampler.ended[rows]]),
    )


def _call_generate(lm: Any, ids: Tensor, **settings: Any) -> Any:
    """`generate` of the likeliest tokens under these settings only."""
    from transformers import GenerationConfig

    own_config = lm.generation_config
    lm.generation_config = GenerationConfig()  # generate() fills unset fields from the checkpoint's
    try:
        return lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    finally:
        lm.generation_config = own_config


def _can_expand_cache(lm: Any) -> bool:
    """True if the model uses attention caches whose rows can be repeated and selected."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if "past_key_values" not in inspect.signature(lm.forward).parameters or getattr(lm, "_is_stateful", False):
        return False
    probe = torch.zeros(1, 1, dtype=torch.int64, device=next(lm.parameters()).device)
    cache = DynamicCache(config=lm.config)
    try:
        output = lm(input_ids=probe, attention_mask=torch.ones_like(probe), past_key_values=cache, use_cache=True)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return False
    states = ("recurrent_states", "conv_states")
    plain = [isinstance(part, DynamicLayer) and not any(hasattr(part, s) for s in states) for part in cache.layers]
    return output.past_key_values is cache and bool(plain) and all(plain)


def _can_generate_batches(lm: Any) -> bool:
    """True if a decoding step of two rows equals that of single rows (RWKV in transformers 5.19 mixes the rows)."""
    ids = torch.tensor([[0, 1, 2], [2, 1, 0]], device=next(lm.parameters()).device)
    out = _call_generate(
        lm, ids, min_new_tokens=2, max_new_tokens=2, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    expected = lm(input_ids=out.sequences[:, :4], use_cache=False).logits[:, -1].float()
    return bool(torch.allclose(out.logits[1].float(), expected, rtol=1e-2, atol=1e-2, equal_nan=True))
