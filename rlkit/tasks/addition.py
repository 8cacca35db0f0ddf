"""Sums of two two-digit numbers: `12+34=` -> `46`.

The shipped starting model (`tiny-add`) gets well under half of the samples right and learns within a minute or two on
a CPU. `12+34` and `34+12` are always in the same split, so no held-out sum is known from its mirror image. Numbers
start at 10, so all prompts of the plain form have the same length.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from rlkit.record import Prompt
from rlkit.rewards.answers import completion_text
from rlkit.tasks import Task

LOW, HIGH = 10, 99  # both included
TEST_PAIRS = 320  # unordered pairs held out: about 635 rows, for each pair a != b gives two


def load(*, conversational: bool = False, seed: int = 0) -> Task:
    """The addition task: 8100 sums, split into train and test by unordered pair.

    Args:
        conversational: False gives prompts as text, `"12+34="`, judged by `correct`. True gives them as chat messages
            that ask for the number, judged by `correct_number`: the form for real chat models.
        seed: which pairs are held out, and the order of the rows. `tiny-add` was trained on the train split of seed 0:
            with another seed it has seen some of the test rows.

    Returns:
        A `Task` whose rows have the columns `prompt` and `answer` (text, such as `"46"`).
    """
    import datasets

    rng = random.Random(seed)
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(a, HIGH + 1)]
    rng.shuffle(pairs)

    def split(pairs: list[tuple[int, int]]) -> datasets.Dataset:
        ordered = sorted({order for a, b in pairs for order in ((a, b), (b, a))})
        rng.shuffle(ordered)  # so that the first rows, or any slice, are a fair sample
        prompts = [_prompt(a, b, conversational) for a, b in ordered]
        return datasets.Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in ordered]})

    test, train = split(pairs[:TEST_PAIRS]), split(pairs[TEST_PAIRS:])
    return Task("addition", train=train, test=test, rewards=(correct_number if conversational else correct,))


def correct(completions: Sequence[Prompt], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the completion is the answer and nothing else (surrounding white space aside), else 0.

    Example:
        >>> correct(["46", "46 ", "046", "46."], answer=["46"] * 4)
        [1.0, 1.0, 0.0, 0.0]
    """
    return [float(completion_text(c).strip() == a) for c, a in zip(completions, answer, strict=True)]


def correct_number(completions: Sequence[Prompt], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the last integer of the completion is the answer, else 0: chat models like to wrap the number in words.

    Example:
        >>> correct_number(["12 + 34 = **46**.", "46, not 45", "forty-six"], answer=["46"] * 3)
        [1.0, 0.0, 0.0]
    """
    numbers = [re.findall(r"\d+", completion_text(c), flags=re.ASCII) for c in completions]
    return [float(bool(found) and int(found[-1]) == int(a)) for found, a in zip(numbers, answer, strict=True)]


def _prompt(a: int, b: int, conversational: bool) -> str | list[dict[str, str]]:
    if conversational:
        return [{"role": "user", "content": f"What is {a}+{b}? Answer with the number only."}]
    return f"{a}+{b}="
