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

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.support.timing import phase
from rlkit.types import Rollout

if TYPE_CHECKING:
    from rlkit.policy import Policy


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
