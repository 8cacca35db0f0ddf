"""Log-probabilities and entropies of sampled tokens, without the (B,T,V) logits in memory.

The policy with gradient, the reference and the old policy all use this one forward pass:

- Prompt and completion are packed side by side and padded on the right only, so a row's numbers do not depend on its
  neighbours, positions start at 0, and recurrent models see no padding before the text.
- The hidden states of the tokens that count are gathered first; the language-model head runs over them in chunks that
  are recomputed in the backward pass. Memory is one chunk of logits, whatever the vocabulary.
- Everything runs in evaluation mode (`Policy.inference_settings`): with dropout the first ratio would not be 1.

`causal_lm.find_head` tests the head on first use against the model's own logits (Cohere, Granite and Gemma 2 scale or
soft-cap them). A model that fits none uses its own full logits.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlkit.causal_lm import balance_loss, decoder_of, find_head, vocabulary_size
from rlkit.types import Rollout

MAX_CHUNK_ELEMENTS = 2**24  # most logits in memory at once: 64 MiB in float32
EntropyMode = Literal["detached", "grad"]


class TokenScores(NamedTuple):
    """(B,T) log-probabilities and entropies in nats, 0 in masked slots; and the load-balancing loss, if asked for."""

    logp: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    balance_loss: Float[Tensor, ""] | None = None


class PackedRows(NamedTuple):
    """Prompts and completions side by side, padded on the right."""

    input_ids: Int[Tensor, "B S"]
    attention_mask: Bool[Tensor, "B S"]
    prompt_length: Int[Tensor, " B"]


def pack(
    prompt_ids: Int[Tensor, "B L"],
    prompt_mask: Bool[Tensor, "B L"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
) -> PackedRows:
    """Put each row's prompt and completion side by side, with all padding on the right.

    Example:
        >>> ids, mask, start = pack(
        ...     torch.tensor([[0, 7]]),
        ...     torch.tensor([[False, True]]),
        ...     torch.tensor([[8, 9]]),
        ...     torch.tensor([[True, False]]),
        ... )
        >>> ids.tolist(), start.tolist()
        ([[7, 8]], [1])
    """
    prompt_length, completion_length = prompt_mask.sum(-1), completion_mask.sum(-1)
    width = int((prompt_length + completion_length).max()) if len(prompt_ids) else 0
    input_ids = prompt_ids.new_zeros(len(prompt_ids), width)
    rows, _ = prompt_mask.nonzero(as_tuple=True)
    input_ids[rows, (prompt_mask.cumsum(-1) - 1)[prompt_mask]] = prompt_ids[prompt_mask]
    rows, _ = completion_mask.nonzero(as_tuple=True)
    place = prompt_length[:, None] + completion_mask.cumsum(-1) - 1
    input_ids[rows, place[completion_mask]] = completion_ids[completion_mask]
    positions = torch.arange(width, device=prompt_ids.device)
    return PackedRows(input_ids, positions < (prompt_length + completion_length)[:, None], prompt_length)


class TokenScorer(nn.Module):
    """A causal language model as a function from token sequences to log-probabilities of chosen tokens.

    It is a module so that DDP or FSDP can wrap it; every pass goes through its `forward`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._head: Callable[[Tensor], Tensor] | None = None
        self._head_known = False
        self.zero3: Any = None  # rlkit.strategies.zero3.ZeRO3, if the weights are sharded by it

    def forward(
        self,
        input_ids: Int[Tensor, "B S"],
        attention_mask: Bool[Tensor, "B S"],
        rows: Int[Tensor, " N"],
        columns: Int[Tensor, " N"],
        *,
        temperature: float,
        entropy: EntropyMode = "detached",
        balance: bool = False,
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, ""] | None]:
        """Log-probability and entropy of the N tokens at (rows, columns); with `balance` the load-balancing loss."""
        targets = input_ids[rows, columns]
        self.look_for_head()
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask.long(), "use_cache": False}
        if balance:
            inputs["output_router_logits"] = True
        if self._head is None:
            output = self.model(**inputs)
            scores = _logp_and_entropy(output.logits[rows, columns - 1], targets, temperature, entropy)
        else:
            output = decoder_of(self.model)(**inputs)
            scores = self._chunked(output.last_hidden_state[rows, columns - 1], targets, temperature, entropy)
        return *scores, balance_loss(self.model, output, attention_mask) if balance else None

    def look_for_head(self) -> None:
        """Find the head, once; before weights are sharded."""
        if not self._head_known:
            self._head = find_head(self.model)
            self._head_known = True

    def _chunked(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy: EntropyMode
    ) -> tuple[Tensor, Tensor]:
        head = self._head
        assert head is not None

        def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return _logp_and_entropy(head(hidden), targets, temperature, entropy)

        size = max(1, MAX_CHUNK_ELEMENTS // vocabulary_size(self.model))
        if len(targets) <= size:
            return score(hidden, targets)
        parts = []
        for chunk, target in zip(hidden.split(size), targets.split(size), strict=True):
            if torch.is_grad_enabled():
                parts.append(checkpoint(score, chunk, target, use_reentrant=False))
            else:
                parts.append(score(chunk, target))
        return torch.cat([logp for logp, _ in parts]), torch.cat([value for _, value in parts])


def _logp_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, entropy: EntropyMode
) -> tuple[Tensor, Tensor]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normaliser = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if entropy == "detached":
        logits, normaliser = logits.detach(), normaliser.detach()
    # A logit of -inf contributes 0, not 0 * -inf = NaN, to the value and to the gradient.
    finite = torch.where(logits.isneginf(), 0.0, logits)
    expected = ((logits - normaliser[:, None]).exp() * finite).sum(-1)
    return logp, normaliser - expected


def score_rollout(
    scorer: nn.Module, rollout: Rollout, *, entropy: EntropyMode = "detached", balance: bool = False
) -> TokenScores:
    """Log-probabilities of a rollout's completion tokens at the rollout's temperature, through `scorer`'s forward."""
    device = next(scorer.parameters()).device
    mask = rollout.completion_mask.to(device)
    packed = pack(
        rollout.prompt_ids.to(device), rollout.prompt_mask.to(device), rollout.completion_ids.to(device), mask
    )
    rows, steps = mask.nonzero(as_tuple=True)
    columns = packed.prompt_length[rows] + steps
    logp, values, balance_value = scorer(
        packed.input_ids,
        packed.attention_mask,
        rows,
        columns,
        temperature=rollout.sampling.temperature,
        entropy=entropy,
        balance=balance,
    )
    blank = logp.new_zeros(mask.shape)
    logp, values = blank.index_put((rows, steps), logp), blank.index_put((rows, steps), values)
    return TokenScores(logp, values, balance_value)
