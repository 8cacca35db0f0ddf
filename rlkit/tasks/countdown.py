"""Countdown: reach a target with the four operations from given numbers, each used once: `25, 3, 4 -> 79`.

There are many right answers, so the reward evaluates the expression, with exact fractions and without `eval`. The
prompts and the rule that every number is used exactly once follow TinyZero (Pan et al. 2025); the numbers are drawn
here, with a solution for each row.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rlkit.record import Prompt
from rlkit.rewards.answers import answer_part, completion_text
from rlkit.tasks import Task

OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
LONGEST = 200  # characters of an expression; longer ones are wrong


def load(
    *,
    numbers: int = 3,
    highest: int = 20,
    size: int = 2000,
    test_size: int = 200,
    conversational: bool = True,
    seed: int = 0,
) -> Task:
    """The countdown task.

    Args:
        numbers: how many numbers a row has, 2 to 6.
        highest: largest of them, at least 2.
        size: rows of train.
        test_size: rows of test; no choice of numbers and target is in both.
        conversational: chat messages instead of text.
        seed: of the rows.

    Returns:
        A `Task` whose rows have `prompt`, `answer` (one solution of many), `numbers` and `target`.

    Raises:
        ValueError: settings out of range, or that allow for too few different rows.
    """
    import datasets

    if not 2 <= numbers <= 6 or highest < 2 or size < 1 or test_size < 1:
        raise ValueError(
            f"countdown: expected 2 to 6 numbers, highest >= 2 and sizes >= 1, got {numbers}, {highest}, {size}, "
            f"{test_size}."
        )
    rng = random.Random(seed)
    rows: dict[tuple[tuple[int, ...], int], dict[str, Any]] = {}
    for _ in range(50 * (size + test_size)):
        if len(rows) == size + test_size:
            break
        drawn = [rng.randint(1, highest) for _ in range(numbers)]
        solution, target = _draw_solution(drawn, rng)
        if target is not None:
            row = {"prompt": _prompt(drawn, target, conversational), "answer": solution}
            rows.setdefault((tuple(sorted(drawn)), target), row | {"numbers": drawn, "target": target})
    if len(rows) < size + test_size:
        raise ValueError(
            f"countdown: found only {len(rows)} different rows; allow for larger numbers or ask for fewer."
        )
    found = list(rows.values())
    test, train = found[:test_size], found[test_size:]
    return Task("countdown", datasets.Dataset.from_list(train), datasets.Dataset.from_list(test), rewards=(solved,))


def solved(
    completions: Sequence[Prompt], numbers: Sequence[list[int]], target: Sequence[int], **columns: Any
) -> list[float]:
    """1 where the answer is an expression of the given numbers, each used once, that has the target's value, else 0.

    Example:
        >>> solved(["<answer>(25-4)*3</answer>", "25+4+3", "63"], numbers=[[25, 3, 4]] * 3, target=[63] * 3)
        [1.0, 0.0, 0.0]
    """
    rewards = []
    for completion, given, wanted in zip(completions, numbers, target, strict=True):
        found = evaluate_expression(answer_part(completion_text(completion)).partition("=")[0])
        right = found is not None and found[0] == wanted and sorted(found[1]) == sorted(given)
        rewards.append(float(right))
    return rewards


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Value of an expression of whole numbers, + - * / and brackets, and the numbers in it; None for any other text.

    Example:
        >>> evaluate_expression("(25 - 4) * 3")
        (Fraction(63, 1), [25, 4, 3])
    """
    text = text.strip()
    if not text or len(text) > LONGEST or not text.isascii():
        return None
    try:
        used: list[int] = []
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _value(node.left, used), _value(node.right, used)
        kind = OPERATIONS[type(node.op)]
        if kind == "+":
            return left + right
        if kind == "-":
            return left - right
        return left * right if kind == "*" else left / right
    raise ValueError("no expression of numbers")


def _draw_solution(numbers: list[int], rng: random.Random) -> tuple[str, int | None]:
    """A random expression of the numbers, and its value if that is a fair target: whole and positive."""
    left = [str(number) for number in rng.sample(numbers, len(numbers))]
    while len(left) > 1:
        one, other = left.pop(rng.randrange(len(left))), left.pop(rng.randrange(len(left)))
        left.append(f"({one} {rng.choice('+-*/')} {other})")
    text = left[0][1:-1]
    found = evaluate_expression(text)
    fair = found is not None and found[0].denominator == 1 and 1 <= found[0] <= 1000
    return text, int(found[0]) if fair and found is not None else None


def _prompt(numbers: list[int], target: int, conversational: bool) -> Any:
    text = (
        f"Using the numbers {numbers}, write an expression that equals {target}. You can use + - * / and brackets, and "
        "must use every number exactly once. Give the expression in <answer> </answer> tags, for example "
        "<answer>(1 + 2) / 3</answer>."
    )
    return [{"role": "user", "content": text}] if conversational else text + "\n"
