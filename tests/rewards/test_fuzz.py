"""Whatever a reward function returns and a model writes: a right answer or a clear error, nothing in silence."""

import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from numbers import Real

import numpy as np
import torch
from builders import make_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rl

LARGEST = torch.finfo(torch.float32).max
ROWS = 3
ROLLOUT = make_rollout((1,) * ROWS, completions=("a", "b", "c"))

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.fractions(),
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    st.integers(-(2**40), 2**40).map(np.int64),
    st.booleans().map(np.bool_),
    st.floats(width=32).map(torch.tensor),
    st.booleans().map(torch.tensor),
)
strange = st.one_of(
    st.decimals().map(Decimal),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.floats(), max_size=2),
    st.dictionaries(st.integers(), st.floats(), max_size=1),
    st.just(object()),
    st.just(torch.ones(2)),
    st.just(np.ones(1)),
    st.just(np.str_("1")),
    st.just(np.datetime64("2026-01-01")),
    st.just(print),
)
values = st.lists(plain | strange, max_size=5)
containers = st.sampled_from(
    [
        list,
        tuple,
        deque,
        set_of := (lambda items: {id(item): item for item in items}),
        lambda items: (item for item in items),
        iter,
        lambda items: np.array([*items, None], dtype=object)[:-1],
        lambda items: [items],
        lambda items: "1" * len(items),
        lambda items: len(items),
        lambda items: np.zeros((len(items), 1)),
        lambda items: torch.zeros(len(items)),
        lambda items: torch.zeros(1, len(items)),
        lambda items: torch.zeros(len(items), dtype=torch.complex64),
        lambda items: torch.zeros(len(items)).to_sparse(),
        lambda items: torch.zeros(len(items), device="meta"),
        lambda items: None,
    ]
)
del set_of


def expected(value):
    """The reward that a value means, by Python alone; an exception if it means none."""
    if value is None:
        return math.nan
    if isinstance(value, (np.generic, torch.Tensor)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError
    number = float(Fraction(value)) if isinstance(value, int) and abs(value) < 2**1000 else float(value)
    if math.isinf(number) or abs(number) > LARGEST:
        raise ValueError
    return number


@settings(max_examples=400)
@given(values, containers)
def test_any_return_is_right_or_refused(items, container):
    """The oracle decides row by row; a list, a tuple and a 1-D array are all that may hold the values."""
    returned = container(items)
    error = None
    try:
        scores = rl.score(ROLLOUT, lambda completions: returned)
    except (TypeError, ValueError) as caught:
        error = caught
    if error is not None:
        text = str(error)
        assert text.startswith("score: reward function 'lambda' ") and ("expected" in text or "must" in text)
    flat = isinstance(returned, (list, tuple, deque)) or (isinstance(returned, np.ndarray) and returned.ndim == 1)
    if isinstance(returned, torch.Tensor):
        flat = (
            returned.ndim == 1
            and not returned.is_complex()
            and not returned.is_sparse
            and returned.device.type == "cpu"
        )
    try:
        if not flat or len(returned) != ROWS:
            raise TypeError
        want = [expected(value) for value in returned]
    except (TypeError, ValueError, OverflowError):
        assert error is not None, f"{returned!r} was taken for {scores.reward.tolist()}"
        return
    assert error is None, error
    torch.testing.assert_close(scores.reward, torch.tensor(want, dtype=torch.float32), equal_nan=True, rtol=0, atol=0)


wild = st.text(
    alphabet=st.one_of(
        st.characters(), st.characters(categories=["Cs"]), st.sampled_from("\x00\x1b\u202e\r\n%{}<>&\"'")
    ),
    max_size=12,
) | st.sampled_from(["<script>alert(1)</script>", "\ud800", "%s%d", "{0}", "\x00", "</td><td>", "\x1b[31m"])


@given(st.lists(wild, min_size=2, max_size=2), st.lists(wild, min_size=2, max_size=2), st.booleans())
def test_any_text_is_scored_and_shown(prompts, completions, messages):
    """Lengths in characters, a table that runs nothing, and a warning that any terminal can print."""
    answer = tuple(completions)
    if messages:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    rollout = make_rollout((1, 1), prompts=prompts, completions=completions, columns={"answer": answer})

    def same(completions, answer, log_extra):
        texts = [rl.rewards.completion_text(completion) for completion in completions]
        log_extra("copy", texts)
        return [float(len(t)) if t == a else -1.0 for t, a in zip(texts, answer, strict=True)]

    scores = rl.score(rollout, same)
    assert scores.reward.tolist() == [float(len(text)) for text in answer]
    for record in (scores, rollout):
        page = record._repr_html_()
        page.encode("utf-8")
        assert "<script>" not in page


@given(wild, st.booleans())
def test_any_text_in_an_error_can_be_printed(text, tolerated):
    rollout = make_rollout((1, 1), completions=(text, "x" + text))

    def broken(completions):
        if any(not completion.startswith("x") for completion in completions):
            raise ValueError(text)
        return [1.0] * len(completions)

    if text.startswith("x"):
        return
    if tolerated:
        scores = rl.score(rollout, broken, on_error="none")
        assert scores.reward.isnan().tolist() == [True, False]
        scores.extra["failures/broken"][0].encode("utf-8")
    else:
        try:
            rl.score(rollout, broken)
        except RuntimeError as error:
            str(error).encode("utf-8")
            assert "It fails on completion 0" in str(error)
        else:
            raise AssertionError("the error was swallowed")


content = st.one_of(
    wild, st.none(), st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": wild}), max_size=2)
)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": content})


@given(st.lists(message, min_size=1, max_size=3))
def test_any_conversation_reaches_the_function_whole_and_as_its_own(messages):
    """Contents that are None or lists of parts; what the function does to them reaches nobody."""
    rollout = make_rollout((1,), prompts=[messages], completions=[messages])
    seen = []

    def vandal(prompts, completions):
        seen.append((repr(prompts[0]), repr(completions[0])))
        for one in (*prompts[0], *completions[0]):
            if isinstance(one["content"], list):
                one["content"].clear()
            one["role"] = "vandal"
        return [float(len(rl.rewards.completion_text(messages)))]

    rl.score(rollout, [vandal, vandal])
    assert seen == [(repr(messages), repr(messages))] * 2
