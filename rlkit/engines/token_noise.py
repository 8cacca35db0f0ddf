"""Drawing a token: the sampler's distribution and the noise that picks from it.

Noise is fixed by (seed, group id, completion, position) and turned into a token by the inverse of the cumulative
distribution. So a completion does not depend on which other rows share its batch, in which order, or on which rank; a
global random state would make it depend on all three.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.token_scorer import MAX_CHUNK_ELEMENTS
from rlkit.types import SamplingParams

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
    """A signed 64-bit number as two 32-bit words: numpy would run numbers of other lengths together."""
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
    # A row of NaN finds no place; the clamp keeps its NaN log-probability readable, and `sample` refuses it by name.
    return (
        torch.cat(tokens).clamp(max=scores.shape[-1] - 1)
        if tokens
        else torch.zeros(0, dtype=torch.int64, device=scores.device)
    )


def build_processors(params: SamplingParams) -> Any:
    """The logits processors of transformers for the settings that are not neutral, in its order.

    The temperature is not among them: it is applied to every pass alike, see `transformers_engine`.
    """
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors
