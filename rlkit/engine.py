"""The protocol that every engine speaks: token ids in, token ids with log-probabilities out; weights in.

`sample` treats all engines alike. Before it draws a token it compares `engine.version` with `policy.version` and hands
the weights over where they differ (`rlkit.engines.weights`), on every process of the run.
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
            truncation of the distribution (top-p and the like), so that the importance ratio stays unbiased; unless the
            engine says that it `renormalises`, then `sample` takes the policy's own numbers instead.
        finish_reason: "eos" (an id of `policy.eos_ids`), "stop" (a stop string) or "length" (truncated).
        version: policy version of the weights that drew it, as the engine read it back; None where it cannot say.
    """

    token_ids: list[int]
    logp: list[float]
    finish_reason: FinishReason
    version: int | None = None


class EngineError(RuntimeError):
    """An engine cannot do what was asked: its weights are not the policy's, it is closed, it died."""


@runtime_checkable
class Engine(Protocol):
    """Draws completions from the policy's current weights.

    Attributes:
        name: short name, recorded in each rollout.
        policy: the `Policy` whose completions these are.
    """

    name: str
    policy: Any  # a Policy, which knows this protocol and not the other way round

    @property
    def version(self) -> int | None:
        """Policy version of the weights it has now; None before the first `sync` and after one that failed."""
        ...

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and completion together, or None if only the model sets a limit."""
        ...

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
            ValueError: settings that this engine does not have, or prompts that do not fit.
        """
        ...

    def renormalises(self, params: SamplingParams) -> bool:
        """True if under these settings `Completion.logp` is of the truncated distribution, not of the policy's own."""
        ...

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the policy's weights, named as in a plain Hugging Face checkpoint; every process of the run calls it.

        When it returns, `version` is the engine's version and nothing that was cached from older weights is left. When
        it raises, the engine refuses to generate until a later `sync` succeeds.

        Raises:
            ValueError: names or shapes are not the engine's own; it is as it was before.
            EngineError: the weights did not get there.
        """
        ...

    def check(self) -> None:
        """Nothing if the engine can generate; otherwise the error says what is wrong and what to do.

        Raises:
            EngineError: it is closed, dead, or has no valid weights.
        """
        ...

    def close(self) -> None:
        """Give back memory, processes and files; closing twice is harmless."""
        ...


class PolicyModelEngine:
    """What an engine that draws with the policy's own model has to say: there is no second copy of the weights.

    Left to it: `name`, `policy` and `generate`.
    """

    policy: Any
    max_context: int | None = None  # only the model's own

    @property
    def version(self) -> int:
        """The policy's."""
        return self.policy.version

    def renormalises(self, params: SamplingParams) -> bool:
        """Never: log-probabilities are taken before the distribution is truncated."""
        return False

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing can be wrong with it that is not wrong with the policy."""

    def close(self) -> None:
        """Nothing to give back."""
