"""Where the answer is: boxes, blocks, numbers; against brute force, and never slow."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlkit.rewards import BoxedMatch, ExactMatch, NumericMatch, boxed_match, exact_match, numeric_match
from rlkit.rewards.answers import answer_part, last_boxed
from rlkit.rewards.matching import last_number


def message(text):
    return [{"role": "assistant", "content": text}]


def parts(text):
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


forms = pytest.mark.parametrize("form", [str, message, parts], ids=["text", "messages", "parts"])


def boxed_by_brute_force(text):
    """Of all boxes that are closed, the one that closes last: each box tried by counting braces from its start."""
    closed = {}
    for start in range(len(text)):
        if not text.startswith(r"\boxed{", start):
            continue
        backslashes = len(text[:start]) - len(text[:start].rstrip("\\"))
        if backslashes % 2:  # this backslash is itself escaped
            continue
        depth, place = 1, start + len(r"\boxed{")
        while place < len(text) and depth:
            if text[place] == "\\":
                place += 2 if not text.startswith(r"\boxed{", place) else len(r"\boxed")
                continue
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        if not depth:
            closed[place] = text[start + len(r"\boxed{") : place - 1]
    return closed[max(closed)] if closed else None


@given(
    st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "1", "\\frac", " "]), max_size=12).map(
        "".join
    )
)
@example(r"\boxed{\boxed{1}")
@example(r"\boxed{1}} \boxed{2")
@example(r"{ \boxed{\{3\}}")
def test_the_last_complete_box_is_found(text):
    assert last_boxed(text) == boxed_by_brute_force(text)


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" * 30_000, "{" * 200_000, r"\boxed" + " " * 200_000, "<answer>" * 20_000, "1," * 100_000, "-" * 200_000],
)
def test_no_text_is_slow(text):
    """Linear: twenty times the text takes far less than 400 times as long (a ratio; the small one has a floor)."""

    def seconds(text):
        start = time.perf_counter()
        last_boxed(text), answer_part(text), last_number(text)
        return time.perf_counter() - start

    small = max(min(seconds(text[: len(text) // 20]) for _ in range(3)), 1e-3)
    assert seconds(text) < 200 * small


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("4", "4"),
        ("<think>3</think>4", "4"),
        ("3</think> 4", " 4"),  # the opening tag was in the prompt
        ("<think>3", ""),
        ("<answer>3</answer> or <answer> 4 </answer>.", "4"),
        ("<answer>3</answer> <answer>4", "3"),
        ("<answer>3</answer></think>none", "none"),
        ("</answer><answer>", "</answer><answer>"),
    ],
)
def test_the_answer_comes_after_the_reasoning_in_the_last_whole_block(text, part):
    assert answer_part(text) == part


NUMBERS = {
    "1,234.50": 1234.5, "-3": -3, "−3": -3, "x=-3": -3, "12-34": 34,
    ".5": 0.5, "5.": 5, "1e-3": 0.001, "1,2": 2, "3 apples.": 3,
    "none": None, "": None,
    "-": None, ".": None, "1,234,56": 56, "007": 7, "$42": 42, "50%": 50, "9" * 400: float("inf"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "number"), NUMBERS.items(), ids=map(repr, NUMBERS))
def test_numbers(text, number):
    assert last_number(text) == number


@given(st.text(st.sampled_from("0123456789.,-+eE x"), max_size=12))
def test_a_number_that_is_found_is_one_that_python_reads(text):
    found = last_number(text)
    assert found is None or isinstance(found, float)


@forms
def test_exact_match(form):
    texts = ["Paris", " Paris\n", "<think>Rome?</think>Paris", "paris", "It is Paris", "", "<answer>Paris</answer>!"]
    completions = [form(text) for text in texts]
    assert exact_match(completions, answer=["Paris"] * 7) == [1, 1, 1, 0, 0, 0, 1]
    assert ExactMatch(ignore_case=True)(completions, answer=["PARIS"] * 7) == [1, 1, 1, 1, 0, 0, 1]
    assert exact_match(completions[:2], solution=[None, 3]) == [None, 0]


@forms
def test_numeric_match(form):
    completions = [form(text) for text in ["so 42.", r"12 \boxed{42} 7", "#### 41", "forty-two", "42.0000001"]]
    assert numeric_match(completions, answer=["6*7 = 42 of 50 #### 42"] * 5) == [1, 1, 0, 0, 1]
    assert NumericMatch(tolerance=0)(completions, answer=[42] * 5) == [1, 1, 0, 0, 0]
    assert numeric_match([form("1")] * 3, answer=[None, "no number", ""]) == [None] * 3
    with pytest.raises(ValueError, match="tolerance must be at least 0 and finite"):
        NumericMatch(tolerance=-1)


@forms
def test_boxed_match(form):
    completions = [
        form(text) for text in [r"\boxed{ \frac{1}{2} }", r"\boxed{1}", r"\frac{1}{2}", r"\boxed{\frac{1}{2}"]
    ]
    assert boxed_match(completions, solution=[r"so \boxed{\frac{1}{2}}"] * 4) == [1, 0, 0, 0]
    assert BoxedMatch("gold")(completions[:2], gold=[None, "1"]) == [None, 1]


@pytest.mark.parametrize("reward", [exact_match, numeric_match, boxed_match])
def test_a_missing_column_is_named(reward):
    with pytest.raises(
        ValueError, match=r"expected a column answer or solution in the dataset; there are \['target'\]"
    ):
        reward(["1"], target=["1"])
    with pytest.raises(ValueError, match="shorter"):
        reward(["1", "2"], answer=["1"])


def probes(prompt, answer):
    """What a policy that looks for a short cut writes."""
    return [
        "",
        prompt,
        f"{answer} " * 50,
        "<think></think>",
        "<answer></answer>",
        r"\boxed{}",
        "\x00",
        "\ud800",
        "<script>",
    ]


def test_short_cuts_earn_nothing():
    texts = probes("What is 17+25?", "42")
    for reward in (exact_match, boxed_match):
        assert reward(texts, answer=["42"] * len(texts)) == [0] * len(texts)
    # A repeated answer is an answer: whoever minds adds RepetitionPenalty.
    assert numeric_match(texts, answer=["42"] * len(texts)) == [0, 0, 1, 0, 0, 0, 0, 0, 0]
