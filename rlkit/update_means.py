"""Means over a whole update from the sums of its micro-batches and processes, never means of means."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.losses import Loss, LossInputs, loss_name

ROWS, TOKENS = "per row: ", "per token: "  # prefix of a sum that is divided by rows or tokens


@dataclass(frozen=True)
class Totals:
    """What counts in the whole update, over all processes: the divisors of every mean."""

    rows: int
    tokens: int
    all_rows: int
    with_signal: int  # rows whose advantage is not 0

    @classmethod
    def count(cls, mask: Tensor, advantages: Tensor) -> "Totals":
        """Over all processes, of the (B,T) loss mask and the (B,) advantages."""
        local = {
            "rows": float(mask.any(-1).sum()),
            "tokens": float(mask.sum()),
            "all_rows": float(len(mask)),
            "with_signal": float((advantages != 0).sum()),
        }
        return cls(**{name: int(value) for name, value in collectives.sums(local).items()})

    @property
    def frac_masked(self) -> float:
        """Share of the rows without a token in the loss."""
        return 1 - self.rows / max(1, self.all_rows)


@dataclass(frozen=True, eq=False)
class Piece:
    """Results of one micro-batch: log-probabilities and entropies, (b,) clip states, sums and maxima by metric."""

    logp: Tensor
    entropy: Tensor
    clipped: Tensor | None = None
    sums: dict[str, float] = field(default_factory=dict)
    top: dict[str, float] = field(default_factory=dict)


def share_of_mean(values: Any, x: LossInputs, totals: Totals, loss: Loss) -> Tensor:
    """This micro-batch's share of the mean over the whole update, from what the loss returned."""
    if isinstance(values, Tensor) and values.shape == x.advantages.shape:
        return torch.where(x.mask.any(-1), values, 0.0).sum() / totals.rows
    if isinstance(values, Tensor) and values.shape == x.mask.shape:
        return torch.where(x.mask, values, 0.0).sum() / totals.tokens
    got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    raise ValueError(
        f"loss_step: the loss {loss_name(loss)!r} must return a tensor of shape (B,) = {tuple(x.advantages.shape)}, "
        f"one value per sequence, or (B,T) = {tuple(x.mask.shape)}, one per token; got {got}. loss_step takes the mean "
        "itself."
    )


def measure(measured: Mapping[str, Tensor], rows: Tensor, sums: dict[str, float]) -> dict[str, float]:
    """Add sums over the rows that count to `sums`; returns maxima (of the negated values for a name in _min)."""
    top = {}
    for name, values in measured.items():
        values = values.detach()[rows]
        if name.endswith(("_min", "_max")):
            values = -values if name.endswith("_min") else values
            top[name] = float(values.max()) if len(values) else -math.inf
        else:
            sums[ROWS + name] = float(values.sum())
    return top


def merge(pieces: list[Piece], totals: Totals) -> dict[str, float]:
    """Means over the whole update from the sums of its micro-batches and processes, never means of means."""
    names = collectives.gather(([*pieces[0].sums], [*pieces[0].top]) if pieces else ([], []))
    sum_names = list(dict.fromkeys(name for sums, _ in names for name in sums))
    top_names = list(dict.fromkeys(name for _, top in names for name in top))
    sums = collectives.sums({name: math.fsum(piece.sums[name] for piece in pieces) for name in sum_names})
    tops = collectives.maxima(
        {name: max((piece.top[name] for piece in pieces), default=-math.inf) for name in top_names}
    )
    divisor = {ROWS: totals.rows, TOKENS: totals.tokens}
    metrics = {}
    for name, value in sums.items():
        kind = next((kind for kind in divisor if name.startswith(kind)), "")
        metrics[name.removeprefix(kind)] = value / divisor.get(kind, 1)
    return metrics | {name: -value if name.endswith("_min") else value for name, value in tops.items()}
