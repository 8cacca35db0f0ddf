"""The default engine: the policy's own model, in this process, on transformers' public cache API.

It samples with `decode`. A model whose cache cannot be repeated for the completions of a prompt (recurrent states) is
sampled by its own `generate`, which is slower; the engine warns once.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkit.causal_lm import causal_lm_of
from rlkit.engine import Completion, PolicyModelEngine
from rlkit.engines.decode_loop import decode
from rlkit.engines.model_generate import can_generate_batches, sample_by_length
from rlkit.engines.token_sampler import uniform_noise
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)


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
        self.can_expand_cache: bool | None = None
        self.can_generate_batches = True

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
        limit = self.max_rows or max(1, len(prompts) * num_generations)
        at_once = max(1, limit // num_generations)
        result: list[list[Completion]] = []
        with self.policy.without_gradient(), self.policy.inference_settings():
            for start in range(0, len(prompts), at_once):
                part = slice(start, start + at_once)
                groups: list[list[Completion]] = [[] for _ in prompts[part]]
                for first in range(0, num_generations, limit):
                    some = range(first, min(first + limit, num_generations))
                    for group, done in zip(
                        groups, self._generate(prompts[part], group_ids[part], some, params, seed), strict=True
                    ):
                        group += done
                result += groups
        version = self.policy.version
        return [[completion._replace(version=version) for completion in group] for group in result]

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        generations: range,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Completion]]:
        if self.can_expand_cache is None:
            self.can_expand_cache = _can_expand_cache(self.policy.model)
            if not self.can_expand_cache:
                self.name = "transformers (generate)"
                self.can_generate_batches = can_generate_batches(causal_lm_of(self.policy.model))
                logger.warning(
                    "%s: its cache cannot be expanded from one prompt to several completions, so rlkit samples with "
                    "the model's own generate(): slower, and completions depend on the whole batch and the seed.",
                    type(self.policy.model).__name__,
                )
        if not self.can_expand_cache:
            return sample_by_length(
                self.policy, prompts, group_ids, generations, params, seed, batches=self.can_generate_batches
            )
        noise = uniform_noise(seed, group_ids, generations.stop, params.max_completion_length)
        noise = noise.unflatten(0, (len(prompts), -1))[:, generations.start :].flatten(0, 1)
        return decode(self.policy, prompts, len(generations), params, noise)


def _can_expand_cache(model: Any) -> bool:
    """True if the model uses attention caches whose rows can be repeated and selected."""
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
    states = ("recurrent_states", "conv_states")
    plain = all(isinstance(layer, DynamicLayer) and not any(hasattr(layer, s) for s in states) for layer in layers)
    return output.past_key_values is cache and bool(layers) and plain and isinstance(layers[0], CacheLayerMixin)
