"""Rewards that shape the length, and one against repetition. The formulas are TRL's; the settings are checked here.

- `SoftOverlong`: Yu et al. 2025, DAPO (arXiv 2503.14476), eq. 13.
- `CosineLength`: Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373), appendix C.1.
- `RepetitionPenalty`: the same, appendix C.2.

Lengths are in tokens, the end token included.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.record import Prompt
from rlkit.rewards.math_accuracy import accuracy


@dataclass(frozen=True)
class SoftOverlong:
    """0 up to `max_length - cache` tokens, then down in a straight line to -1 at `max_length` and beyond.

    Attributes:
        max_length: tokens, at least 1: the `max_completion_length` of the run.
        cache: tokens over which the penalty grows, 0 to max_length.

    Example:
        >>> SoftOverlong(100, cache=20)(completion_ids=[[1] * 80, [1] * 90, [1] * 100])
        [0.0, -0.5, -1.0]
    """

    max_length: int
    cache: int
    __name__ = "soft_overlong"

    def __post_init__(self) -> None:
        if not 1 <= self.max_length or not 0 <= self.cache <= self.max_length:
            raise ValueError(
                f"SoftOverlong: expected max_length >= 1 and 0 <= cache <= max_length, got {self.max_length} and "
                f"{self.cache}."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """One reward per completion."""
        from trl.rewards import get_soft_overlong_punishment

        return get_soft_overlong_punishment(self.max_length, self.cache)(completion_ids=completion_ids)


@dataclass(frozen=True)
class CosineLength:
    r"""A correct completion earns more if it is short; a wrong one loses less if it is long.

    .. math:: v_{long} + \tfrac12 (v_{short} - v_{long}) (1 + \cos(\pi \min(|y| / L, 1)))

    Attributes:
        max_length: L, tokens, at least 1.
        correct: reward that decides what is correct (above 0.5); where it abstains, so does this one.
        correct_short, correct_long, wrong_short, wrong_long: rewards at the ends.

    Example:
        >>> reward = CosineLength(100, correct=lambda completions, **columns: [1.0, 0.0])
        >>> reward(["a", "b"], completion_ids=[[1] * 50, [1] * 100])
        [0.75, -0.5]
    """

    max_length: int
    correct: Callable[..., Sequence[float | None]] = accuracy
    correct_short: float = 1.0
    correct_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    __name__ = "cosine_length"

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"CosineLength: max_length must be at least 1, got {self.max_length}.")

    def __call__(
        self, completions: Sequence[Prompt], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        """One reward per completion."""
        judged = self.correct(completions=completions, completion_ids=completion_ids, **columns)
        return [
            None if value is None else self._one(value > 0.5, len(ids))
            for value, ids in zip(judged, completion_ids, strict=True)
        ]

    def _one(self, correct: bool, tokens: int) -> float:
        short, long = (self.correct_short, self.correct_long) if correct else (self.wrong_short, self.wrong_long)
        cosine = math.cos(math.pi * min(tokens / self.max_length, 1.0))
        return long + 0.5 * (short - long) * (1 + cosine)


@dataclass(frozen=True)
class RepetitionPenalty:
    """0 for a completion that repeats no n-gram of tokens, down to `max_penalty` for one that only repeats.

    Attributes:
        ngram: n, at least 1.
        max_penalty: the lowest reward, at most 0.

    Example:
        >>> RepetitionPenalty(2)(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]])
        [0.0, -0.75]
    """

    ngram: int = 3
    max_penalty: float = -1.0
    __name__ = "repetition_penalty"

    def __post_init__(self) -> None:
        if self.ngram < 1 or not self.max_penalty <= 0:
            raise ValueError(
                f"RepetitionPenalty: expected ngram >= 1 and max_penalty <= 0, got {self.ngram}, {self.max_penalty}."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """One reward per completion."""
        from trl.rewards import get_repetition_penalty_reward

        return get_repetition_penalty_reward(self.ngram, self.max_penalty)(completion_ids=completion_ids)
