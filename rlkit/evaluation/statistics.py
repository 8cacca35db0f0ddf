"""pass@k without bias, and intervals by bootstrap over prompts.

Sources: Chen et al. 2021 (arXiv 2107.03374), eq. 1, for pass@k; Efron & Tibshirani 1993, ch. 13, for the percentile
interval. Prompts are resampled, not completions: completions of one prompt are not independent.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

RESAMPLES = 2000
AT_ONCE = 4_000_000  # numbers drawn at once


def pass_at_k(n: int, c: int, k: int) -> float:
    r"""Chance that at least one of k completions passes, estimated from n of which c passed.

    .. math:: 1 - \binom{n-c}{k} \Big/ \binom{n}{k}

    the share of the k-subsets of the n completions that hold one that passed. NaN if n < k.

    Source: Chen et al. 2021 (arXiv 2107.03374), eq. 1. 1 - (1 - c/n)^k would be biased.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass_at_k: expected 0 <= c <= n and k >= 1, got n={n}, c={c}, k={k}.")
    return math.nan if n < k else 1 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(
    total: Float[Tensor, " P"], weight: Float[Tensor, " P"], *, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of sum(total) / sum(weight), with the prompts drawn with replacement.

    `total` is the summed reward of each prompt, `weight` its number of scored completions. NaN if no prompt has one.

    Example:
        >>> bootstrap_interval(torch.tensor([1.0, 1.0, 1.0]), torch.ones(3))
        (1.0, 1.0)
    """
    kept = weight > 0
    total, weight = total[kept].double(), weight[kept].double()
    count = len(total)
    if not count:
        return math.nan, math.nan
    generator = torch.Generator().manual_seed(seed)
    means = []
    chunk = max(1, AT_ONCE // count)
    for start in range(0, RESAMPLES, chunk):
        drawn = torch.randint(count, (min(chunk, RESAMPLES - start), count), generator=generator)
        means.append(total[drawn].sum(-1) / weight[drawn].sum(-1))
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat(means), edges).tolist()
    return low, high
