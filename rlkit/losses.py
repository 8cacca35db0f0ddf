"""Losses: pure functions of tensors, and the objects through which `loss_step` calls them.

A loss returns its values *before* the mean: (B,), one per sequence (RLOO, A*-PO), or (B,T), one per token. `loss_step`
takes the mean over the rows, or tokens, that count in the whole update, whatever the split into micro-batches or ranks.

To write your own, pass any function of a `LossInputs`, or a subclass of `Loss`:

    def reinforce(x: LossInputs):
        return -x.logp * x.advantages[:, None]           # (B,T): a mean over tokens

Sources: Ahmadian et al. 2024 (arXiv 2402.14740) and TRL's RLOOTrainer for `rloo_loss`; Brantley et al. 2025
(arXiv 2505.20686) and TRL's A2POTrainer for `a2po_loss`. Left out of RLOO: per-token clipping, and a KL term in the
loss (the gradient of the k1 term would not depend on the reference; here the KL is part of the reward).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0  # bound before exp: e^20 = 4.9e8 is far outside every clip range, and finite in float32


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss is computed from: the rows of one micro-batch. All masked slots hold 0.

    Attributes:
        logp: (B,T) log-probabilities of the policy, with gradient.
        old_logp: (B,T) log-probabilities before the first update on this rollout, without gradient.
        ref_logp: (B,T) log-probabilities of the reference, or None.
        sampler_logp: (B,T) log-probabilities that the engine reported when it sampled.
        entropy: (B,T) entropy of the policy in nats; with gradient if the loss says `needs_entropy_grad = True`.
        mask: (B,T) True where a token counts in the loss.
        advantages: (B,) advantages; 0 in rows that are masked out.
    """

    logp: Float[Tensor, "B T"]
    old_logp: Float[Tensor, "B T"]
    ref_logp: Float[Tensor, "B T"] | None
    sampler_logp: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    advantages: Float[Tensor, " B"]


LossFunction = Callable[[LossInputs], Tensor]


@runtime_checkable
class Loss(Protocol):
    """What `loss_step` reads of a loss. Inherit it to get the defaults; of a plain function they hold (`as_loss`).

    Attributes:
        needs_reference: `loss_step` must be given `ref_logps`.
        needs_entropy_grad: `LossInputs.entropy` carries a gradient (costs memory).
        zero_advantage_is_no_signal: a step whose advantages are all 0 is skipped; true where the loss is proportional
            to the advantage, false for a regression.
        epsilon, epsilon_high: clip range of the ratio, which an `Update` records; None without a clip.
    """

    needs_reference: bool = False
    needs_entropy_grad: bool = False
    zero_advantage_is_no_signal: bool = False
    epsilon: float | None = None
    epsilon_high: float | None = None

    def __call__(self, x: LossInputs, /) -> Tensor:
        """(B,) loss of each sequence or (B,T) loss of each token, before any mean."""
        ...

    def row_metrics(self, x: LossInputs, /) -> Mapping[str, Tensor]:
        """(B,) values by metric name: averaged over the rows, or reduced as a name that ends in _min or _max says.

        `clip_ratio/low_mean` and `clip_ratio/high_mean`, 1.0 where a row is clipped, also become `Update.clipped`.
        """
        return {}


class _WithDefaults(Loss):
    """A function, or an object with some of the attributes of `Loss`; the others have their defaults."""

    def __init__(self, function: Any) -> None:
        self.function, self.__name__ = function, loss_name(function)
        for name in (*Loss.__annotations__, "row_metrics"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, x: LossInputs, /) -> Tensor:
        return self.function(x)


def as_loss(loss: Loss | LossFunction) -> Loss:
    """The loss with every attribute of `Loss`.

    Raises:
        TypeError: a class, not callable, or an attribute of another type than `Loss` declares.
    """
    if isinstance(loss, type) or not callable(loss):
        got = f"the class {loss.__name__}; write {loss.__name__}()" if isinstance(loss, type) else type(loss).__name__
        raise TypeError(f"loss_step: loss must be RLOO(), AStarPO() or a function of LossInputs, got {got}.")
    full = loss if isinstance(loss, Loss) else _WithDefaults(loss)
    for name in ("needs_reference", "needs_entropy_grad", "zero_advantage_is_no_signal", "row_metrics"):
        value = getattr(full, name)
        if not (callable(value) if name == "row_metrics" else isinstance(value, bool)):
            expected = "a method" if name == "row_metrics" else "True or False"
            raise TypeError(f"loss_step: {name} of the loss {loss_name(loss)!r} must be {expected}, got {value!r}.")
    return full


def loss_name(loss: Any) -> str:
    """Name of a function, or of an object's class."""
    return getattr(loss, "__name__", type(loss).__name__)


def sequence_log_ratio(
    logp: Float[Tensor, "B T"], other: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Sum of logp - other over the tokens that count, in float32 or better; masked slots may hold anything.

    Example:
        >>> sequence_log_ratio(torch.tensor([[0.5, 9.0]]), torch.tensor([[0.2, 1.0]]), torch.tensor([[True, False]]))
        tensor([0.3000])
    """
    if not logp.shape == other.shape == mask.shape:
        raise ValueError(
            f"sequence_log_ratio: expected one (B,T) shape, got {tuple(logp.shape)}, {tuple(other.shape)} "
            f"and mask {tuple(mask.shape)}."
        )
    dtype = torch.promote_types(torch.promote_types(logp.dtype, other.dtype), torch.float32)
    # Masked slots are replaced before the subtraction: inf - inf would put NaN into the gradient.
    kept = torch.where(mask, logp.to(dtype), 0.0) - torch.where(mask, other.to(dtype), 0.0)
    return kept.sum(-1)


def importance_ratio(
    logp: Float[Tensor, "B T"], old_logp: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Ratio of each sequence's probabilities under the new and the old policy; its log is bounded by MAX_LOG_RATIO."""
    return sequence_log_ratio(logp, old_logp, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def rloo_loss(
    logp: Float[Tensor, "B T"],
    old_logp: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Float[Tensor, " B"]:
    r"""Clipped policy-gradient loss of RLOO, one ratio per sequence.

    .. math:: \ell_i = -\min(\rho_i A_i,\ \mathrm{clip}(\rho_i, 1-\epsilon, 1+\epsilon_{high}) A_i), \quad
        \rho_i = \exp \sum_t m_{it} (\log\pi - \log\pi_{old})

    On the first update after sampling rho is exactly 1 and the gradient is that of REINFORCE.

    Args:
        logp: (B,T) log-probabilities of the policy, with gradient.
        old_logp: (B,T) log-probabilities before the first update on the rollout, treated as constants.
        mask: (B,T) True where a token counts.
        advantages: (B,) advantages, no NaN.
        epsilon: lower clip range, in (0, 1).
        epsilon_high: upper clip range, > 0; None means epsilon.

    Returns:
        (B,) loss of each sequence; 0 for a row without a loss token.

    Raises:
        ValueError: shapes differ or a clip range is out of bounds.

    Source: Ahmadian et al. 2024, eq. 7, with PPO's clip as in `RLOOTrainer._compute_loss`.

    Example:
        >>> logp = torch.tensor([[math.log(1.5)], [math.log(0.5)]])
        >>> ones = torch.ones(2, 1, dtype=torch.bool)
        >>> rloo_loss(logp, torch.zeros(2, 1), ones, torch.tensor([1.0, 1.0]))
        tensor([-1.2000, -0.5000])
    """
    low, high = clip_range(epsilon, epsilon_high)
    ratio = importance_ratio(logp, old_logp.detach(), mask)
    advantages = _per_row(advantages, ratio, "rloo_loss")
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return torch.where(mask.any(-1), loss, 0.0)


def a2po_loss(
    logp: Float[Tensor, "B T"],
    ref_logp: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    *,
    beta2: float = 1e-3,
) -> Float[Tensor, " B"]:
    r"""Squared error between the implicit reward and the optimal advantage.

    .. math:: \ell_i = \left(\beta_2 \sum_t m_{it} (\log\pi - \log\pi_{ref}) - A_i\right)^2, \quad A_i = R_i - V^*_i

    The sum over tokens is not divided by their number: padding changes nothing. Its gradient is that of REINFORCE with
    advantage A - beta2 * log-ratio, times 2 * beta2.

    Args:
        logp: (B,T) log-probabilities of the policy, with gradient.
        ref_logp: (B,T) log-probabilities of the reference, treated as constants.
        mask: (B,T) True where a token counts.
        advantages: (B,) reward minus V*.
        beta2: scale of the implicit reward, > 0, in units of reward per nat.

    Returns:
        (B,) loss of each sequence; 0 for a row without a loss token.

    Raises:
        ValueError: shapes differ or beta2 is not a finite number > 0.

    Source: Brantley et al. 2025, eq. 5; `A2POTrainer.compute_loss`.

    Example:
        >>> ones = torch.ones(1, 2, dtype=torch.bool)
        >>> a2po_loss(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]]), ones, torch.tensor([0.6]), beta2=0.1)
        tensor([0.2500])
    """
    implicit = implicit_reward(logp, ref_logp.detach(), mask, beta2=beta2)
    advantages = _per_row(advantages, implicit, "a2po_loss")
    return torch.where(mask.any(-1), (implicit - advantages).square(), 0.0)


def implicit_reward(
    logp: Float[Tensor, "B T"], ref_logp: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, beta2: float
) -> Float[Tensor, " B"]:
    """beta2 times the log-ratio of policy and reference: the reward for which the policy would be optimal.

    Example:
        >>> ones = torch.ones(1, 1, dtype=torch.bool)
        >>> implicit_reward(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), ones, beta2=0.5)
        tensor([1.])
    """
    if not (beta2 > 0 and math.isfinite(beta2)):
        raise ValueError(f"a2po_loss: beta2 must be a finite number > 0, got {beta2}; 1e-3 is the usual choice.")
    return beta2 * sequence_log_ratio(logp, ref_logp, mask)


def clip_range(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """The interval (1 - epsilon, 1 + epsilon_high) of ratios that are not clipped."""
    high = epsilon if epsilon_high is None else epsilon_high
    if not (0 < epsilon < 1 and 0 < high and math.isfinite(high)):
        raise ValueError(
            f"rloo_loss: expected 0 < epsilon < 1 and epsilon_high > 0, got epsilon={epsilon}, "
            f"epsilon_high={epsilon_high}; 0.2 is the usual choice."
        )
    return 1 - epsilon, 1 + high


def _per_row(advantages: Tensor, like: Tensor, where: str) -> Tensor:
    if advantages.shape != like.shape:
        raise ValueError(f"{where}: expected one advantage per row {tuple(like.shape)}, got {tuple(advantages.shape)}.")
    return advantages.detach().to(like)


@dataclass(frozen=True)
class RLOO(Loss):
    """`rloo_loss` with its settings `epsilon` and `epsilon_high`, for `loss_step(..., loss=RLOO(epsilon=0.2))`."""

    epsilon: float = 0.2
    epsilon_high: float | None = None
    zero_advantage_is_no_signal = True

    def __post_init__(self) -> None:
        clip_range(self.epsilon, self.epsilon_high)

    def __call__(self, x: LossInputs, /) -> Float[Tensor, " B"]:
        """(B,) loss of each sequence."""
        return rloo_loss(x.logp, x.old_logp, x.mask, x.advantages, epsilon=self.epsilon, epsilon_high=self.epsilon_high)

    def row_metrics(self, x: LossInputs, /) -> dict[str, Float[Tensor, " B"]]:
        """1.0 for each row whose ratio is clipped (its gradient is 0), else 0.0: below, above, and either.

        As in TRL, a ratio below the range is clipped only where the advantage is negative, above only where positive.
        """
        low, high = clip_range(self.epsilon, self.epsilon_high)
        ratio = importance_ratio(x.logp, x.old_logp, x.mask)
        is_low, is_high = (ratio < low) & (x.advantages < 0), (ratio > high) & (x.advantages > 0)
        return {
            "clip_ratio/low_mean": is_low.float(),
            "clip_ratio/low_min": is_low.float(),
            "clip_ratio/high_mean": is_high.float(),
            "clip_ratio/high_max": is_high.float(),
            "clip_ratio/region_mean": (is_low | is_high).float(),
        }


@dataclass(frozen=True)
class AStarPO(Loss):
    """`a2po_loss` with its setting `beta2`, for `loss_step(..., loss=AStarPO(beta2=1e-3), ref_logps=...)`."""

    beta2: float = 1e-3
    needs_reference = True

    def __post_init__(self) -> None:
        if not (self.beta2 > 0 and math.isfinite(self.beta2)):
            raise ValueError(f"AStarPO: beta2 must be a finite number > 0, got {self.beta2}.")

    def __call__(self, x: LossInputs, /) -> Float[Tensor, " B"]:
        """(B,) loss of each sequence."""
        assert x.ref_logp is not None  # loss_step checks needs_reference
        return a2po_loss(x.logp, x.ref_logp, x.mask, x.advantages, beta2=self.beta2)

    def row_metrics(self, x: LossInputs, /) -> dict[str, Float[Tensor, " B"]]:
        """The implicit reward of each row, beta2 * log(pi / pi_ref), in units of reward."""
        assert x.ref_logp is not None
        return {"implicit_reward": implicit_reward(x.logp, x.ref_logp, x.mask, beta2=self.beta2)}
