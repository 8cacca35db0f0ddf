"""Log-probabilities and entropies of sampled tokens, without the (B,T,V) logits in memory.

One forward pass that everything shares: the policy with gradient, the reference, the old policy. Three choices matter:

- Prompt and completion are packed side by side and padded on the right only, so a row's numbers do not depend on its
  neighbours, positions are the natural ones, and recurrent models see no padding before the text.
- The hidden states of the tokens that count are gathered first; the language-model head runs over them in chunks, and
  chunks are recomputed in the backward pass. Memory is one chunk of logits, whatever the vocabulary.
- Everything runs in evaluation mode: dropout would make the first ratio differ from 1 (known_faults B23).

The head of most models is a linear layer, some scale or soft-cap its output (Cohere, Granite, Gemma 2). Which one it is
gets *measured* on first use against the model's own logits; a model that fits none falls back to its own full logits.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlkit.rollout import Rollout
from rlkit.timing import phase

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

MAX_CHUNK_ELEMENTS = 2**24
"""Most logits in memory at once (64 MiB in float32)."""

EntropyMode = Literal["detached", "grad"]


class TokenScores(NamedTuple):
    """(B,T) log-probabilities and entropies in nats, float32 or better; 0 in masked slots.

    And, if asked for, the load-balancing loss of a mixture-of-experts model, a scalar.
    """

    logp: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    balance_loss: Float[Tensor, ""] | None = None


class PackedRows(NamedTuple):
    """Prompts and completions side by side, padded on the right: (B,S); and where each completion starts: (B,)."""

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
    """A causal language model seen as a function from token sequences to log-probabilities of chosen tokens.

    It is a module so that a wrapper for many processes can stand around its `forward`, the one way in.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._head: Callable[[Tensor], Tensor] | None = None
        self._head_known = False
        self.zero3: Any = None  # rlkit.zero3.ZeRO3, if the weights lie in its shards

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
        """Log-probability and entropy of the N tokens at (rows, columns), given everything before each in its row.

        With `balance` also the load-balancing loss of a mixture-of-experts model.
        """
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
        """Find the head now, while the weights are whole, if the first pass has not done so."""
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
    # A token that is ruled out (a logit of -inf) contributes 0, not 0 * -inf, and no NaN to the gradient either.
    finite = torch.where(logits.isneginf(), 0.0, logits)
    expected = ((logits - normaliser[:, None]).exp() * finite).sum(-1)
    return logp, normaliser - expected


def balance_loss(model: nn.Module, output: Any, attention_mask: Bool[Tensor, "B S"]) -> Float[Tensor, ""]:
    """Load-balancing loss of a mixture-of-experts model, from the model's own function and the router logits.

    Raises:
        ValueError: the model gives no router logits, or its module has no such function.
    """
    lm = causal_lm_of(model)
    function = getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
    logits = getattr(output, "router_logits", None)
    if function is None or not logits:
        raise ValueError(
            f"loss_step: {type(lm).__name__} has no router whose load could be balanced; router_aux_loss_coef is for "
            "mixture-of-experts models such as Mixtral or Qwen-MoE. Leave it at 0."
        )
    return function(logits, lm.num_experts, lm.num_experts_per_tok, attention_mask.long())


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
    # Scatter back: slots that do not count hold an exact 0 that no gradient touches.
    blank = logp.new_zeros(mask.shape)
    logp, values = blank.index_put((rows, steps), logp), blank.index_put((rows, steps), values)
    return TokenScores(logp, values, balance_value)


@phase("compute_logps")
def compute_logps(policy: "Policy", rollout: Rollout, *, micro_batch_size: int | None = None) -> Float[Tensor, "B T"]:
    r"""Log-probabilities of a rollout's tokens under a policy or reference, without gradient.

    .. math:: \log \mathrm{softmax}(\text{logits} / \text{temperature})[\text{token}]

    Args:
        policy: the policy or a reference.
        rollout: B completions; its temperature is used.
        micro_batch_size: rows per forward pass; None takes all at once.

    Returns:
        (B,T) nats, float32 or better, on the policy's device; 0 in masked slots.

    Raises:
        ValueError: micro_batch_size < 1.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"compute_logps: micro_batch_size must be at least 1 or None, got {micro_batch_size}.")
    size = micro_batch_size or max(1, len(rollout))
    with policy.without_gradient():
        parts = [
            policy.score_tokens(rollout.select(slice(start, start + size))).logp
            for start in range(0, len(rollout), size)
        ]
    return torch.cat(parts) if parts else rollout.sampler_logp.new_zeros(rollout.completion_ids.shape)


def causal_lm_of(model: Any) -> Any:
    """The causal language model inside an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: nn.Module) -> Any:
    """The part of a causal language model below its head."""
    return causal_lm_of(model).base_model


def vocabulary_size(model: nn.Module) -> int:
    """Number of logits per token."""
    return int(causal_lm_of(model).config.get_text_config().vocab_size)


def find_head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function from hidden states to logits, checked against the model's own logits on a probe; None if unknown."""
    lm = causal_lm_of(model)
    linear = lm.get_output_embeddings()
    decoder = getattr(lm, "base_model", None)
    if linear is None or decoder is None or decoder is lm:
        _report_no_head(lm)
        return None
    config = lm.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    multiply, divide = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    candidates: list[Callable[[Tensor], Tensor]] = []  # what the config says first: a cap hardly shows on small logits
    if cap:
        candidates.append(lambda hidden: cap * torch.tanh(linear(hidden) / cap))
    if multiply:
        candidates.append(lambda hidden: linear(hidden) * multiply)
    if divide:
        candidates.append(lambda hidden: linear(hidden) / divide)
    candidates.append(linear)
    probe = torch.arange(3, device=next(lm.parameters()).device)[None] % config.vocab_size
    inputs = {"input_ids": probe, "attention_mask": torch.ones_like(probe), "use_cache": False}
    with torch.no_grad():
        logits = lm(**inputs).logits
        expected = logits.float()
        # The same operations on the same numbers: a few roundings apart at most.
        tolerance = 4 * torch.finfo(logits.dtype).eps * max(1e-30, float(expected.abs().max()))
        hidden = decoder(**inputs).last_hidden_state
        for head in candidates:
            got = head(hidden).float()
            if got.shape == expected.shape and torch.allclose(got, expected, rtol=0, atol=tolerance, equal_nan=True):
                return head
    _report_no_head(lm)
    return None


def _report_no_head(lm: nn.Module) -> None:
    logger.warning(
        "%s: its logits are not a known function of its last hidden state, so rlkit takes the model's own full logits: "
        "more memory, same numbers.",
        type(lm).__name__,
    )


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, each module's own mode restored afterwards. Gradient checkpointing keeps working.

    transformers checkpoints a layer only if the layer itself is in training mode, so those layers (not what is inside
    them) stay in it, with their own functional dropout and layerdrop set to 0.
    """
    was_training = [module for module in model.modules() if module.training]
    silenced: list[tuple[nn.Module, str, float]] = []
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and torch.is_grad_enabled():
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float) and value:  # OPT has layerdrop
                    silenced.append((module, name, value))
    for module, name, _ in silenced:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in silenced:
            setattr(module, name, value)
        model.eval()
        for module in was_training:
            module.training = True
