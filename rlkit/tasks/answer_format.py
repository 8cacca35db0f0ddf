"""Simple questions to be answered in a given form, for small chat models such as SmolLM2.

An earlier turn of the conversation shows the form once. SmolLM2-135M then uses it in about two samples of three (asked
in words alone: one of a hundred, too rare to learn from), with the right answer in one of six.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from rlkit.record import Prompt
from rlkit.rewards.answers import completion_text
from rlkit.tasks import Task

_FORM = re.compile(r"\s*Answer:[ \t]*(\S[^\n]*?)[ \t]*\s*", re.ASCII)
SHOWN = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "Answer: 4"}]
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing",
    "Egypt": "Cairo", "Greece": "Athens", "Russia": "Moscow", "Austria": "Vienna", "Portugal": "Lisbon",
    "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Poland": "Warsaw", "Hungary": "Budapest",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Kenya": "Nairobi", "India": "New Delhi", "England": "London",
    "Peru": "Lima", "Cuba": "Havana", "Argentina": "Buenos Aires",
}  # fmt: skip


def load(*, size: int = 400, test_size: int = 60, seed: int = 0) -> Task:
    """The format task: sums of small numbers and capitals, to be answered as "Answer: 7" and nothing else.

    Args:
        size: rows of train.
        test_size: rows of test; no question is in both.
        seed: which rows, and their order.

    Returns:
        A `Task` whose rows have `prompt` (a conversation) and `answer`; the rewards are `in_form` and `right_in_form`.

    Raises:
        ValueError: more rows than there are questions.
    """
    import datasets

    questions = [(f"What is {a} + {b}?", str(a + b)) for a in range(1, 31) for b in range(3, 23)]
    questions += [(f"What is the capital of {country}?", capital) for country, capital in CAPITALS.items()]
    if size < 1 or test_size < 1 or size + test_size > len(questions):
        raise ValueError(f"format: there are {len(questions)} questions, got size={size} and test_size={test_size}.")
    random.Random(seed).shuffle(questions)

    def rows(part: list[tuple[str, str]]) -> datasets.Dataset:
        prompts = [[*SHOWN, {"role": "user", "content": question}] for question, _ in part]
        return datasets.Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in part]})

    test, train = questions[:test_size], questions[test_size : test_size + size]
    return Task("format", train=rows(train), test=rows(test), rewards=(in_form, right_in_form))


def in_form(completions: Sequence[Prompt], **columns: Any) -> list[float]:
    r"""1 where the completion is `Answer: ...` in one line and nothing else, else 0.

    Example:
        >>> in_form(["Answer: 7", "Answer: 7\nBecause", "It is 7", "Answer:"])
        [1.0, 0.0, 0.0, 0.0]
    """
    return [float(_FORM.fullmatch(completion_text(completion)) is not None) for completion in completions]


def right_in_form(completions: Sequence[Prompt], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 where the completion has the form and the answer in it is the right one (a full stop aside), else 0.

    Example:
        >>> right_in_form(["Answer: 7", "Answer: 8", "7"], answer=["7"] * 3)
        [1.0, 0.0, 0.0]
    """
    found = [_FORM.fullmatch(completion_text(completion)) for completion in completions]
    return [
        float(match is not None and match.group(1).rstrip(".").casefold() == right.casefold())
        for match, right in zip(found, answer, strict=True)
    ]
