"""An enumerable language model: its true policy gradient, KL and V* are sums over *all* completions, not estimates.

With 3 to 5 tokens and completions of up to 4 of them, every expectation is a short sum, and an estimator is right if
its mean is that sum. The mean over groups is a sum too (`enumerate_groups`), so most such tests need no chance at all.

One axis more than elsewhere: C, all completions there are. It takes the place of B in `advantages` and `losses`. Two
ways in: `EnumerableLM`, a table of logits, for the maths and for teaching; `enumerate_completions`, a `Rollout` of all
that a real `Policy` with a tiny vocabulary can say, for the code. Formulas: Brantley et al. 2025 (arXiv 2505.20686).
Left out: rewards per token, discounting, and prompts in the table.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlkit.causal_lm import vocabulary_size
from rlkit.engine import Completion
from rlkit.engines.rollout_assembly import assemble, pad_tokens
from rlkit.logps import compute_logps
from rlkit.prompts import make_batch
from rlkit.types import Prompt, PromptBatch, Rollout, SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

MAX_ENUMERATED = 1_000_000
"""Most completions, or groups of completions, that are listed."""


def enumerate_sequences(vocab_size: int, eos_ids: Iterable[int], max_length: int) -> list[tuple[int, ...]]:
    """Every completion of at most `max_length` tokens: the finished ones, shortest first, then the truncated ones.

    Raises:
        ValueError: max_length < 1, no end token inside the vocabulary, or more than `MAX_ENUMERATED` completions.

    Example:
        >>> enumerate_sequences(2, eos_ids=[0], max_length=2)
        [(0,), (1, 0), (1, 1)]
    """
    ends = {token for token in eos_ids if 0 <= token < vocab_size}
    if max_length < 1 or not ends:
        raise ValueError(
            f"enumerate_sequences: expected max_length >= 1 and an end token in 0..{vocab_size - 1}, got "
            f"max_length={max_length} and end tokens {sorted(ends)}."
        )
    inner = vocab_size - len(ends)
    total = sum(inner**length * len(ends) for length in range(max_length)) + inner**max_length
    if total > MAX_ENUMERATED:
        raise ValueError(
            f"enumerate_sequences: {vocab_size} tokens and up to {max_length} of them make {total:,} completions, more "
            f"than {MAX_ENUMERATED:,}. Use a smaller vocabulary or a smaller max_length."
        )
    finished: list[tuple[int, ...]] = []
    unfinished: list[tuple[int, ...]] = [()]
    for _ in range(max_length):
        longer = [(*prefix, token) for prefix in unfinished for token in range(vocab_size)]
        finished += [sequence for sequence in longer if sequence[-1] in ends]
        unfinished = [sequence for sequence in longer if sequence[-1] not in ends]
    return finished + unfinished


class EnumerableLM(nn.Module):
    r"""A language model that is a table: one row of logits for each prefix, so it can express every distribution.

    .. math:: \pi(y) = \prod_t \mathrm{softmax}(\text{logits}[y_{<t}])[y_t]

    Args:
        vocab_size: V, tokens 0..V-1.
        max_length: T, most tokens of a completion, the end token included.
        eos_id: the token that ends a completion.
        seed: of the logits, drawn from a normal distribution.
        scale: standard deviation of the logits; 0 makes every next token equally likely.
        dtype: of the logits; float64, so that sums can be compared to 1e-12.

    Attributes:
        logits: (R,V) the parameters, a row for each prefix that can be continued.
        completions: C completions as tuples of token ids, in the order of `enumerate_sequences`.
        completion_ids: (C,T) token ids, padded on the right with `eos_id`.
        mask: (C,T) True for the tokens of a completion, its end token included.
        truncated: (C,) True where the length limit, not the end token, ended the completion.

    Example:
        >>> lm = EnumerableLM(vocab_size=2, max_length=2, scale=0.0)
        >>> lm.completions, lm.probabilities().tolist()
        ([(0,), (1, 0), (1, 1)], [0.5, 0.25, 0.25])
    """

    completion_ids: Tensor
    mask: Tensor
    truncated: Tensor
    prefix_row: Tensor

    def __init__(
        self,
        vocab_size: int = 3,
        max_length: int = 3,
        *,
        eos_id: int = 0,
        seed: int = 0,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.completions = enumerate_sequences(vocab_size, [eos_id], max_length)
        prefixes = {sequence[:t] for sequence in self.completions for t in range(len(sequence))}
        row_of = {prefix: row for row, prefix in enumerate(sorted(prefixes, key=lambda prefix: (len(prefix), prefix)))}
        noise = torch.randn(len(row_of), vocab_size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        self.logits = nn.Parameter(scale * noise)
        rows = [[row_of[sequence[:t]] for t in range(len(sequence))] for sequence in self.completions]
        ids, mask = pad_tokens(self.completions, eos_id)
        self.register_buffer("completion_ids", ids)
        self.register_buffer("mask", mask)
        self.register_buffer("truncated", torch.tensor([sequence[-1] != eos_id for sequence in self.completions]))
        self.register_buffer("prefix_row", pad_tokens(rows, 0)[0])

    def token_logps(self) -> Float[Tensor, "C T"]:
        """(C,T) log-probability in nats of each token given the tokens before it, with gradient; 0 in masked slots."""
        return torch.where(self.mask, self.logits.log_softmax(-1)[self.prefix_row, self.completion_ids], 0.0)

    def sequence_logps(self) -> Float[Tensor, " C"]:
        """(C,) log-probability in nats of each completion, with gradient."""
        return self.token_logps().sum(-1)

    def probabilities(self) -> Float[Tensor, " C"]:
        """(C,) probability of each completion, with gradient; they sum to 1."""
        return self.sequence_logps().exp()

    def sample(self, n: int, *, generator: torch.Generator) -> Int[Tensor, " n"]:
        """Draw n completions; returns their places in the enumeration, so `lm.token_logps()[places]` is (n,T)."""
        return torch.multinomial(self.probabilities().detach(), n, replacement=True, generator=generator)

    def reference(self) -> "EnumerableLM":
        """A frozen copy of the model as it is now."""
        return copy.deepcopy(self).requires_grad_(False)

    def with_distribution(self, logps: Float[Tensor, " C"]) -> "EnumerableLM":
        """A copy whose completions have these log-probabilities (normalised here); the inverse of `sequence_logps`.

        Example:
            >>> model = EnumerableLM(2, 2).with_distribution(torch.tensor([0.2, 0.3, 0.5]).double().log())
            >>> model.probabilities().detach()
            tensor([0.2000, 0.3000, 0.5000], dtype=torch.float64)
        """
        probability = logps.detach().to(self.logits).softmax(-1)
        # A token's weight is the mass of all completions that pass through it.
        place = (self.prefix_row[self.mask], self.completion_ids[self.mask])
        through = probability[:, None].expand(self.mask.shape)[self.mask]
        mass = torch.zeros_like(self.logits).index_put(place, through, accumulate=True)
        model = copy.deepcopy(self)
        with torch.no_grad():
            model.logits.copy_(mass.clamp(min=torch.finfo(mass.dtype).tiny).log())
        return model


def kl_divergence(logps: Float[Tensor, " C"], ref_logps: Float[Tensor, " C"]) -> Float[Tensor, ""]:
    r"""KL(pi || pi_ref) in nats, the sum over all completions of pi (log pi - log pi_ref); differentiable.

    Example:
        >>> kl_divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log())  # (log 2 + log 2/3) / 2
        tensor(0.1438)
    """
    _need_one_shape("kl_divergence", logps, ref_logps)
    return (logps.exp() * (logps - ref_logps)).sum()


def expected_reward(
    logps: Float[Tensor, " C"],
    rewards: Float[Tensor, " C"],
    *,
    ref_logps: Float[Tensor, " C"] | None = None,
    beta: float = 0.0,
) -> Float[Tensor, ""]:
    r"""The objective: expected reward, minus beta times the KL from the reference if one is given.

    .. math:: J = \sum_y \pi(y)\, r(y) - \beta\, \mathrm{KL}(\pi \| \pi_{ref})

    Args:
        logps: (C,) log-probabilities of all completions under the policy, in nats, with gradient.
        rewards: (C,) reward of each completion.
        ref_logps: (C,) log-probabilities under the reference; needed with beta.
        beta: weight of the KL, in units of reward per nat.

    Returns:
        A scalar in units of reward. Its derivative by autograd is the true gradient, that of the KL included.

    Raises:
        ValueError: beta without ref_logps.

    Example:
        >>> expected_reward(torch.tensor([0.25, 0.75]).log(), torch.tensor([1.0, 0.0]))
        tensor(0.2500)
    """
    _need_one_shape("expected_reward", logps, rewards)
    value = (logps.exp() * rewards).sum()
    if beta == 0:
        return value
    if ref_logps is None:
        raise ValueError(f"expected_reward: beta={beta} needs ref_logps, the reference's (C,) log-probabilities.")
    return value - beta * kl_divergence(logps, ref_logps)


def policy_gradient(
    model: EnumerableLM,
    rewards: Float[Tensor, " C"],
    *,
    ref_logps: Float[Tensor, " C"] | None = None,
    beta: float = 0.0,
) -> Float[Tensor, "R V"]:
    r"""The true gradient of `expected_reward` (same arguments) with respect to the logits, by autograd of the sum.

    Example:
        >>> policy_gradient(EnumerableLM(2, 1, scale=0.0), torch.tensor([1.0, 0.0]).double())  # pi (r - E[r])
        tensor([[ 0.2500, -0.2500]], dtype=torch.float64)
    """
    value = expected_reward(model.sequence_logps(), rewards, ref_logps=ref_logps, beta=beta)
    return torch.autograd.grad(value, model.logits)[0]


def optimal_value(ref_logps: Float[Tensor, " C"], rewards: Float[Tensor, " C"], *, beta1: float) -> Float[Tensor, ""]:
    r"""V* itself, which `rlkit.optimal_value` estimates from N samples: the most that `expected_reward` can reach.

    .. math:: V^* = \beta_1 \log \sum_y \pi_{ref}(y)\, e^{r(y)/\beta_1}
        = \max_\pi\ \mathbb{E}_\pi[r] - \beta_1 \mathrm{KL}(\pi \| \pi_{ref})

    Args:
        ref_logps: (C,) log-probabilities of all completions under the reference, in nats.
        rewards: (C,) reward of each completion.
        beta1: weight of the KL, > 0, in units of reward per nat.

    Raises:
        ValueError: beta1 is not a finite number > 0.

    Example:
        >>> optimal_value(torch.tensor([0.25, 0.75]).log(), torch.tensor([1.0, 0.0]), beta1=0.5)
        tensor(0.4772)
    """
    if not (beta1 > 0 and math.isfinite(beta1)):
        raise ValueError(f"optimal_value: beta1 must be a finite number > 0, got {beta1}.")
    _need_one_shape("optimal_value", ref_logps, rewards)
    return beta1 * (ref_logps + rewards / beta1).logsumexp(-1)


def optimal_policy(ref_logps: Float[Tensor, " C"], rewards: Float[Tensor, " C"], *, beta: float) -> Float[Tensor, " C"]:
    r"""(C,) log-probabilities of the policy that reaches V*: the reference, tilted towards reward.

    .. math:: \pi^*(y) = \pi_{ref}(y)\, e^{(r(y) - V^*)/\beta}

    Example:
        >>> optimal_policy(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]), beta=1 / math.log(3)).exp()
        tensor([0.7500, 0.2500])
    """
    return ref_logps + (rewards - optimal_value(ref_logps, rewards, beta1=beta)) / beta


def _need_one_shape(where: str, logps: Tensor, other: Tensor) -> None:
    """One value per completion on both sides: a shape that broadcasts would give a wrong sum without an error."""
    if logps.ndim != 1 or logps.shape != other.shape:
        raise ValueError(f"{where}: expected two (C,) tensors, got {tuple(logps.shape)} and {tuple(other.shape)}.")


class Groups(NamedTuple):
    """All M = C^G groups of G completions: their places in the enumeration (M,G), and their probabilities (M,)."""

    places: Int[Tensor, "M G"]
    probability: Float[Tensor, " M"]


def enumerate_groups(logps: Float[Tensor, " C"], group_size: int) -> Groups:
    """Every group of G independent completions: an estimator's exact mean is the sum of probability times estimate.

    Args:
        logps: (C,) log-probabilities of all completions, in nats.
        group_size: G >= 1.

    Raises:
        ValueError: group_size < 1, or more than `MAX_ENUMERATED` groups.

    Example:
        >>> places, probability = enumerate_groups(torch.tensor([0.25, 0.75]).log(), 2)
        >>> places.tolist(), probability
        ([[0, 0], [0, 1], [1, 0], [1, 1]], tensor([0.0625, 0.1875, 0.1875, 0.5625]))
    """
    if group_size < 1 or len(logps) ** group_size > MAX_ENUMERATED:
        raise ValueError(
            f"enumerate_groups: expected group_size >= 1 and at most {MAX_ENUMERATED:,} groups, got {len(logps)} "
            f"completions in groups of {group_size}."
        )
    every = torch.arange(len(logps), device=logps.device)
    places = torch.cartesian_prod(*[every] * group_size).reshape(-1, group_size)
    return Groups(places, logps.detach()[places].sum(-1).exp())


def enumerate_completions(
    policy: "Policy",
    batch: PromptBatch | Sequence[Prompt | dict[str, Any]],
    *,
    max_completion_length: int,
    temperature: float = 1.0,
) -> Rollout:
    """Every completion of a real policy, each once, as a `Rollout`: the counterpart of `sample`.

    `sampler_logp.sum(-1).exp()` are the probabilities, which sum to 1 for each prompt; `policy.score_tokens(rollout)`
    has the gradient; `rollout.select(places)` makes samples and groups of them.

    Args:
        policy: with a tiny vocabulary; every token id of the model counts, also those that the tokenizer lacks.
        batch: P prompts, as in `sample`.
        max_completion_length: most tokens per completion, the end token included.
        temperature: divides the logits, > 0.

    Returns:
        A `Rollout` of P*C rows, prompt-major, each prompt's completions in the order of `enumerate_sequences`.
    """
    if not isinstance(batch, PromptBatch):
        batch = make_batch(policy, batch)
    params = SamplingParams(max_completion_length=max_completion_length, temperature=temperature)
    sequences = enumerate_sequences(vocabulary_size(policy.model), policy.eos_ids, max_completion_length)
    ends = set(policy.eos_ids)
    group = [Completion(list(ids), [0.0] * len(ids), "eos" if ids[-1] in ends else "length") for ids in sequences]
    rollout = assemble(policy, batch, [group] * len(batch), params, "enumeration")
    return dataclasses.replace(rollout, sampler_logp=compute_logps(policy, rollout))
