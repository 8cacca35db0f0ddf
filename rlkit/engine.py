"""The protocol of engines: token ids in, token ids with log-probabilities out; weights in.

Before `sample` draws a token it compares `engine.version` with `policy.version`, and transfers the weights if they
differ (`rlkit.engines.weights`), on every process of the run.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from rlkit.types import SamplingParams

FinishReason = Literal["eos", "stop", "length"]


class Completion(NamedTuple):
    """One completion as an engine returns it.

    Attributes:
        token_ids: the sampled tokens, the one that ended the completion included.
        logp: log-probability of each token in nats, softmax(logits / temperature) over the whole vocabulary, before any
            truncation of the distribution (top-p and the like), so that the importance ratio stays unbiased. If the
            engine `renormalises`, `sample` replaces it by the policy's own.
        finish_reason: "eos" (an id of `policy.eos_ids`), "stop" (a stop string) or "length" (truncated).
        version: policy version of the weights that drew it, as the engine reports it; None if unknown.
    """

    token_ids: list[int]
    logp: list[float]
    finish_reason: FinishReason
    version: int | None = None


class EngineError(RuntimeError):
    """An engine failed: its weights are not the policy's, it is closed, or it died."""


@runtime_checkable
class Engine(Protocol):
    """Draws completions from the policy's current weights. A class with `__slots__` needs `__weakref__` among them.

    An engine with weights of its own may have a `probe`, whose `after_sync()` raises `EngineError` if they differ from
    the policy's; it is called after each transfer.

    Attributes:
        name: short name, recorded in each rollout.
        policy: the `Policy` that is sampled.
    """

    name: str
    policy: Any  # a Policy, whose module imports this one

    @property
    def version(self) -> int | None:
        """Policy version of its weights; None before the first `sync` and after one that failed."""

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and completion together; None if only the model limits it."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        *,
        num_generations: int,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Completion]]:
        """For each prompt, `num_generations` completions. The same seed and group id give the same completions.

        No prompts (an empty share of the step) give no completions.

        Raises:
            EngineError: the engine has no valid weights, or cannot generate.
            ValueError: settings that it does not support, or prompts that do not fit.
        """

    def renormalises(self, params: SamplingParams) -> bool:
        """True if under these settings `Completion.logp` is that of the truncated distribution."""

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the policy's weights, named as in a plain Hugging Face checkpoint; every process of the run calls it.

        Afterwards `version` is the engine's version, and nothing cached from older weights is left. If it raises, the
        engine refuses to generate until a later `sync` succeeds.

        Raises:
            ValueError: names or shapes differ from the engine's; nothing was changed.
            EngineError: the weights did not arrive.
        """

    def check(self) -> None:
        """Raise `EngineError`, with what to do, if it is closed, dead, or has no valid weights."""

    def close(self) -> None:
        """Release memory, processes and files; closing twice is harmless."""


class PolicyModelEngine:
    """Base of engines that sample with the policy's own model; they add `name`, `policy` and `generate`."""

    policy: Any
    max_context: int | None = None

    @property
    def version(self) -> int:
        """That of the policy."""
        return self.policy.version

    def renormalises(self, params: SamplingParams) -> bool:
        """False: log-probabilities are taken before truncation."""
        return False

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Do nothing: there is no second copy of the weights."""

    def check(self) -> None:
        """Do nothing: it can always generate."""

    def close(self) -> None:
        """Do nothing: it holds no resources."""
