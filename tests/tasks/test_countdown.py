"""Countdown: every row can be solved, splits do not leak, and only a true expression of the numbers earns a reward."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import tasks
from rlkit.tasks.countdown import evaluate_expression, solved


@pytest.fixture(scope="module")
def countdown():
    return tasks.load("countdown", size=150, test_size=30)


def test_every_row_has_a_solution_that_earns_the_reward(countdown):
    for split, count in ((countdown.train, 150), (countdown.test, 30)):
        assert len(split) == count
        rewards = solved(split["answer"][:], numbers=split["numbers"][:], target=split["target"][:])
        assert rewards == [1.0] * count
        # Python itself says what the expression is worth.
        assert all(eval(row["answer"]) == pytest.approx(row["target"]) for row in split)


def test_splits_share_no_problem(countdown):
    def problems(split):
        return {(tuple(sorted(row["numbers"])), row["target"]) for row in split}

    assert not problems(countdown.train) & problems(countdown.test)
    assert len(problems(countdown.train)) == 150


def test_the_same_seed_gives_the_same_rows(countdown):
    again, other = (tasks.load("countdown", size=150, test_size=30, seed=seed) for seed in (0, 1))
    assert again.train.to_list() == countdown.train.to_list() != other.train.to_list()
    text = tasks.load("countdown", size=5, test_size=5, conversational=False)
    assert str(text.train[0]["target"]) in text.train[0]["prompt"]
    assert str(countdown.train[0]["target"]) in countdown.train[0]["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>25 * 4 - 3</answer>", 1),
        ("<think>25+4</think><answer> (25*4)-3 </answer>", 1),
        ("25*4-3 = 97", 1),
        ("97", 0),
        ("25*4-3-3+3", 0),  # a number twice
        ("25*4", 0),
        ("25*(4)-3+0", 0),
        ("<answer>25**4 - 3</answer>", 0),
        ("", 0),
        ("<answer></answer>", 0),
        ("Using the numbers [25, 4, 3], write an expression that equals 97.", 0),
        ("__import__('os').getpid()", 0),
        ("(" * 100 + "25" + ")" * 100, 0),
        ("9" * 150, 0),
        ("1/0", 0),
        ("25*4-3.0", 0),
        ("\x00", 0),
        ("\ud800", 0),
    ],
)
def test_only_a_true_expression_of_the_numbers_earns_the_reward(text, reward):
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert solved([completion], numbers=[[25, 3, 4]], target=[97]) == [reward]


@given(st.recursive(st.integers(0, 30).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({' '.join(t)})"), max_leaves=6))  # fmt: skip  # noqa: E501
def test_values_are_pythons(text):
    """Python's own evaluation with fractions is the oracle."""
    import re

    found = evaluate_expression(text)
    try:
        want = eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        want = None
    assert (found is None) == (want is None) and (found is None or found[0] == want)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match=r"found only \d different rows"):
        tasks.load("countdown", numbers=2, highest=2, size=20, test_size=5)
    with pytest.raises(ValueError, match="expected 2 to 6 numbers"):
        tasks.load("countdown", numbers=1)
