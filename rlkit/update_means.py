"""Means over a whole update from the sums of its micro-batches and processes, never means of means."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.losses import Loss, LossInputs, loss_name


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


@dataclass(frozen=True, eq=False)
class Piece:
    """Results of one micro-batch; `logp`, `entropy` and `clipped` are its rows of those of the `Update`.

    `shares` are its parts of the means over the whole update, by metric; `top` its maxima, of -x for a name in _min.
    """

    logp: Tensor
    entropy: Tensor
    clipped: Tensor | None = None
    shares: dict[str, float] = field(default_factory=dict)
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


def measure(
    measured: Mapping[str, Tensor], counts: Tensor, totals: Totals
) -> tuple[dict[str, float], dict[str, float]]:
    """`shares` and `top` of a `Piece`, from (b,) values by metric of the rows that count."""
    shares, top = {}, {}
    for name, values in measured.items():
        values = values.detach()[counts]
        if name.endswith(("_min", "_max")):
            values = -values if name.endswith("_min") else values
            top[name] = float(values.max()) if len(values) else -math.inf
        else:
            shares[name] = float(values.sum()) / totals.rows
    return shares, top


def merge(pieces: list[Piece]) -> dict[str, float]:
    """Means and extremes over the whole update: all micro-batches of all processes."""
    # A process without rows does not know the names.
    names = collectives.gather(([*pieces[0].shares], [*pieces[0].top]) if pieces else ([], []))
    shares = dict.fromkeys(name for shares, _ in names for name in shares)
    tops = dict.fromkeys(name for _, top in names for name in top)
    means = collectives.sums({name: math.fsum(piece.shares[name] for piece in pieces) for name in shares})
    top = collectives.maxima({name: max((piece.top[name] for piece in pieces), default=-math.inf) for name in tops})
    return means | {name: -value if name.endswith("_min") else value for name, value in top.items()}
