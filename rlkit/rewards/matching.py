"""Rewards that compare the answer with the right one: as text, as a number, as the content of a box.

Each is a small frozen object: it can be pickled, so `score(..., timeout=...)` can run it in a process of its own. The
lower-case names are the ones with default settings. None means that the row has no right answer to compare with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.record import Prompt
from rlkit.rewards.answers import answer_part, boxes, completion_text, gold_column, last_boxed
from rlkit.rewards.numerals import last_number, only_number


@dataclass(frozen=True)
class ExactMatch:
    """1 where the answer is the right one and nothing else (white space around it aside), else 0.

    Attributes:
        column: of the right answer; None takes `answer`, else `solution`.
        ignore_case: "Paris" is "paris".

    Example:
        >>> ExactMatch()(["46", " 46 ", "<answer>46</answer>", "it is 46"], answer=["46"] * 4)
        [1.0, 1.0, 1.0, 0.0]
    """

    column: str | None = None
    ignore_case: bool = False
    __name__ = "exact_match"

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        """One reward per completion."""
        gold = gold_column(columns, self.column, "ExactMatch")
        return [
            None if right is None else float(self._plain(answer_part(completion_text(c))) == self._plain(str(right)))
            for c, right in zip(completions, gold, strict=True)
        ]

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


@dataclass(frozen=True)
class NumericMatch:
    r"""1 where the last number of the answer is the right one, else 0. If there is a box, the number must be all of it,
    and a box that was opened and never closed holds none.

    Reads 1,234.50, -3, 3/4, \frac{3}{4}, 1 1/2, 1e-3, 3 \times 10^5 and ignores units, currency and per cent signs; the
    grammar is in `rlkit.rewards.numerals`. The right answer is one number: after GSM8K's "####", else in the last box,
    else all of it ("x = 7 dollars"). None where that is not one number ("2\pi", "3 or 4").

    Attributes:
        column: of the right answer; None takes `answer`, else `solution`.
        tolerance: relative and absolute, >= 0.

    Example:
        >>> NumericMatch()(["so 1,234.0 dollars", "12 or 13", "1/2", "7"], answer=["#### 1234", "12", "0.5", "2 or 7"])
        [1.0, 0.0, 1.0, None]
    """

    column: str | None = None
    tolerance: float = 1e-6
    __name__ = "numeric_match"

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"NumericMatch: tolerance must be at least 0 and finite, got {self.tolerance}.")

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        """One reward per completion."""
        gold = gold_column(columns, self.column, "NumericMatch")
        return [self._one(completion_text(c), right) for c, right in zip(completions, gold, strict=True)]

    def _one(self, text: str, right: Any) -> float | None:
        wanted = None if right is None else _gold_number(str(right))
        if wanted is None:
            return None
        part = answer_part(text)
        boxed, cut = boxes(part)
        found = only_number(boxed) if boxed is not None else None if cut else last_number(part)
        return float(found is not None and math.isclose(found, wanted, rel_tol=self.tolerance, abs_tol=self.tolerance))


@dataclass(frozen=True)
class BoxedMatch:
    r"""1 where the last complete `\boxed{...}` of the answer holds the right one (white space aside), else 0.

    The right answer may itself be boxed. Text against text: for mathematical equality see `Accuracy`.

    Attributes:
        column: of the right answer; None takes `answer`, else `solution`.

    Example:
        >>> BoxedMatch()([r"\boxed{\frac{1}{2}}", r"\boxed{2}", "2"], answer=[r"\frac{1}{2}", "3", "2"])
        [1.0, 0.0, 0.0]
    """

    column: str | None = None
    __name__ = "boxed_match"

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        """One reward per completion."""
        gold = gold_column(columns, self.column, "BoxedMatch")
        return [
            None if right is None else self._one(completion_text(c), str(right))
            for c, right in zip(completions, gold, strict=True)
        ]

    @staticmethod
    def _one(text: str, right: str) -> float:
        found, boxed = last_boxed(answer_part(text)), last_boxed(right)
        return float(
            found is not None and "".join(found.split()) == "".join((right if boxed is None else boxed).split())
        )


def _gold_number(text: str) -> float | None:
    """A right answer as a number; None if it is not one."""
    _, marked, after = text.rpartition("####")
    boxed, cut = (None, False) if marked else boxes(text)
    return None if cut and boxed is None else only_number(after if boxed is None else boxed)


exact_match, numeric_match, boxed_match = ExactMatch(), NumericMatch(), BoxedMatch()
