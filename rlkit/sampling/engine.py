"""The protocol that every engine speaks: token ids in, token ids with log-probabilities out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from rlkit.rollout import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

FinishReason = Literal["eos", "stop", "length"]


class Completion(NamedTuple):
    """One completion as an engine returns it.

    Attributes:
        token_ids: the sampled tokens, the one that ended the completion included.
        logp: log-probability of each token in nats, softmax(logits / temperature) over the whole vocabulary, before any
            truncation of the distribution (top-p and the like), so that the importance ratio stays unbiased.
        finish_reason: "eos" (an id of `policy.eos_ids`), "stop" (a stop string) or "length" (truncated).
    """

    token_ids: list[int]
    logp: list[float]
    finish_reason: FinishReason


class Engine(Protocol):
    """Draws completions from the policy's current weights.

    Attributes:
        name: short name, recorded in each rollout.
        policy: whose completions these are.
    """

    name: str
    policy: "Policy"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        *,
        num_generations: int,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Completion]]:
        """For each prompt, `num_generations` completions. The same seed and group id give the same completions."""
        ...
