"""From logits to tokens under the sampling settings, for every engine that runs in this process.

Noise is fixed by (seed, group id, completion, position) and turned into a token by the inverse of the cumulative
distribution, so a completion does not depend on the other rows of its batch, their order, or the rank. A global random
state would make it depend on all three.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlkit.engines.regex import RegexMask
from rlkit.token_scorer import MAX_CHUNK_ELEMENTS
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

BELOW_ONE = 1.0 - 1e-12


def uniform_noise(seed: int, group_ids: Sequence[int], num_generations: int, length: int) -> Tensor:
    """(P*G, length) float64 in [0, 1), a function of seed, group id, completion index and position only.

    A longer `length` or a larger `num_generations` extends what a smaller one gives for the same group.
    """
    rows = [
        np.random.Generator(
            np.random.Philox(np.random.SeedSequence([*seed_words(seed), *seed_words(group), g]))
        ).random(length)
        for group in group_ids
        for g in range(num_generations)
    ]
    return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, length))).clamp(max=BELOW_ONE)


def seed_words(value: int) -> tuple[int, int]:
    """A signed 64-bit number as two 32-bit words; numpy's own split would let different sequences collide."""
    return value % 2**32, value % 2**64 >> 32


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Pick one token per row by inverse transform sampling.

    Args:
        scores: (B,V) unnormalised log-probabilities; -inf rules a token out.
        uniform: (B,) float64 in [0, 1).

    Returns:
        (B,) token ids, each with positive probability.

    Example:
        >>> draw(torch.tensor([[0.1, 0.2, 0.7]]).log().expand(3, 3), torch.tensor([0.05, 0.25, 0.9]).double()).tolist()
        [0, 1, 2]
    """
    tokens = []
    size = max(1, MAX_CHUNK_ELEMENTS // scores.shape[-1])
    for part, u in zip(scores.split(size), uniform.split(size), strict=True):
        cdf = part.double().softmax(-1).cumsum(-1)
        # right=True: u equal to a boundary belongs to the next token, so a token of probability 0 is never picked.
        tokens.append(torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).squeeze(-1))
    # A row of NaN is searched past its end; the clamp keeps its NaN log-probability, which `sample` refuses by name.
    return (
        torch.cat(tokens).clamp(max=scores.shape[-1] - 1)
        if tokens
        else torch.zeros(0, dtype=torch.int64, device=scores.device)
    )


def build_processors(params: SamplingParams) -> Any:
    """The logits processors of transformers for the settings that are not neutral, in its order; no temperature."""
    from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    processors = LogitsProcessorList()
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


class Chooser:
    """Samples tokens from logits under the sampling settings, each with the policy's own log-probability.

    Attributes:
        looks_back: the choice depends on the earlier tokens, so the rows of one call must have equal length.
    """

    def __init__(self, policy: "Policy", params: SamplingParams, prompts: list[list[int]]) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor, StopStringCriteria

        self.params = params
        self.processors = build_processors(params)
        self.penalty = None
        if params.repetition_penalty != 1:
            self.penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
            # Pad with a token of the prompt: a pad id would be penalised, and it may be the end of sequence.
            width = max(len(prompt) for prompt in prompts)
            self.prompts = torch.tensor(
                [[prompt[0]] * (width - len(prompt)) + prompt for prompt in prompts], device=policy.device
            )
        self.unused = torch.tensor(policy.unused_ids, dtype=torch.int64, device=policy.device)
        self.regex = None if params.regex is None else RegexMask(policy, params.regex, len(prompts))
        self.looks_back = params.min_completion_length > 0 or self.penalty is not None or self.regex is not None
        self.stop: Any = None
        if params.stop_strings:
            try:
                self.stop = StopStringCriteria(policy.tokenizer, list(params.stop_strings))
            except ValueError:  # it needs a tokenizer that can encode a certain word
                self.stop = _StopByText(policy, params.stop_strings)

    def __call__(
        self, logits: Tensor, so_far: Tensor, rows: Tensor, uniform: Tensor, step: int, eos_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B,) tokens and their log-probabilities under the policy, from (B,V) logits."""
        tempered = logits / self.params.temperature
        scores = logits
        if self.penalty is not None:
            scores = self.penalty(torch.cat([self.prompts[rows], so_far], dim=1), scores)
        if step < self.params.min_completion_length:
            scores = scores.index_fill(1, eos_ids, -torch.inf)
        scores = self.rule_out_unused(so_far, scores)
        if self.regex is not None:
            scores = self.regex(scores, so_far, rows)
        scores = self.processors(so_far, scores / self.params.temperature)
        token = draw(scores, uniform)
        return token, tempered.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)

    def rule_out_unused(self, so_far: Tensor, scores: Tensor) -> Tensor:
        """(B,V) scores with -inf for ids without a token; also a logits processor of `generate`."""
        return scores.index_fill(1, self.unused, -torch.inf) if len(self.unused) else scores

    def hits_stop_string(self, so_far: Tensor) -> Tensor:
        """(B,) True where the completion so far ends with a stop string."""
        if self.stop is None:
            return torch.zeros(len(so_far), dtype=torch.bool, device=so_far.device)
        return self.stop(so_far, None).to(so_far.device)


class _StopByText:
    """Finds stop strings in the decoded completions: slower than transformers' criterion, for any tokenizer."""

    def __init__(self, policy: "Policy", stop_strings: Sequence[str]) -> None:
        self.tokenizer, self.stop_strings = policy.tokenizer, stop_strings

    def __call__(self, tokens: Tensor, scores: None) -> Tensor:
        texts = self.tokenizer.batch_decode(tokens)
        return torch.tensor([any(stop in text for stop in self.stop_strings) for text in texts], dtype=torch.bool)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as (P,L) ids and mask (1 for tokens), padded on the left."""
    width = max((len(prompt) for prompt in prompts), default=0)
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], dtype=torch.int64)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.int64)
    return ids.reshape(len(prompts), width).to(device), mask.reshape(len(prompts), width).to(device)
