"""Where the answer is: boxes, blocks, numbers; against brute force, and never slow."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlkit.rewards import BoxedMatch, ExactMatch, NumericMatch, boxed_match, exact_match, numeric_match
from rlkit.rewards.answers import answer_part, last_boxed
from rlkit.rewards.numerals import last_number, only_number


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
    [
        r"\boxed{" * 30_000,
        "{" * 200_000,
        "9" * 200_000,
        "9/" * 100_000,
        r"\frac{9" * 30_000,
        r"\frac{" + r"\frac{}" * 30_000,
        "x^{a" * 50_000,
        r"\boxed" + " " * 200_000,
        "<answer>" * 20_000,
        "1," * 100_000,
        "-" * 200_000,
    ],
)
def test_no_text_is_slow(text):
    """Linear: twenty times the text takes far less than 400 times as long (a ratio; the small one has a floor)."""

    def seconds(text):
        start = time.thread_time()  # CPU time: other work on the machine counts little
        last_boxed(text), answer_part(text), last_number(text)
        return time.thread_time() - start

    small = max(min(seconds(text[: len(text) // 20]) for _ in range(3)), 1e-3)
    assert min(seconds(text) for _ in range(2)) < 200 * small


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
        ("</answer><answer>", ""),
        ("<answer>12", ""),  # cut: it may go on as 125
        ("<think>a</think>3 <think>or 4", ""),
        ("<answer>3</answer> <think>or 4", ""),
    ],
)
def test_the_answer_comes_after_the_reasoning_in_the_last_whole_block(text, part):
    assert answer_part(text) == part


# By hand: what a person reads as the last number; None where what comes last is none, or more than one.
NUMBERS = {
    "plain": {"007": 7, "-3": -3, "+5": 5, ".5": 0.5, "5.": 5, "1,2": 2, "1,2,3": 3, "x=-3": -3, "12-34": 34,
              "5 -3": -3, "5 - 3": 3, "(3-5)-2": 2, "- 5 apples": 5, "none": None, "": None, "-": None, ".": None},
    "sentences": {"3 apples.": 3, "is 18.The": 18, "...18": 18, "No.5": 5, "(18)": 18, "The answer is 18!": 18,
                  "18 .": 18, "**18**": 18, "__18__": 18, "`18`": 18, "0.333...": 0.333,
                  "答案是18元": 18, "1+1=2": 2, "#### 18": 18},
    "separators": {"1,234.50": 1234.5, "1,234,56": 56, "1,00,000": 100000, r"$1{,}234$": 1234, r"1\,234\,567": 1234567,
                   "1_000": 1000, "1\u202f000": 1000, "3,000,000.": 3e6},
    "signs of Unicode": {"\u22123": -3, "\uff0d７": -7, "10\u201320": 20, "１２": 12},
    "fractions": {"1/2": 0.5, "-3/4": -0.75, "1 / 2": 0.5, "8/10": 0.8, r"\frac{1}{2}": 0.5, r"-\frac{3}{4}": -0.75,
                  r"\frac{-3}{4}": -0.75, r"\dfrac12": 0.5, "½": 0.5, "1\u20442": 0.5, "5/0": None, "1/2/2024": None,
                  "5 / 3 / 2": None, r"\frac{2\pi}{3}": None, r"\frac{\sqrt{2}}{2}": None, r"\frac{1}{2}\pi": None},
    "mixed": {"1 1/2 cups": 1.5, "1½": 1.5, r"2\frac{1}{2}": 2.5, r"2\frac{3}{2}": None},
    "exponents": {"1e-3": 1e-3, "1.5E3": 1500, r"3 \times 10^{5}": 3e5, "3×10^5": 3e5, "3*10^-2": 0.03, "10^5": 1e5,
                  "10^999": None, "so 1e-3.": 1e-3, "2e": 2, "1e400": None, "9" * 400: None},
    "units": {"$42": 42, r"\$18.00": 18, "-$5": -5, "$-5": -5, "€7": 7, "50%": 50, r"50\%": 50, "18 dollars": 18,
              "5cm": 5, "60 km/h": 60, "$5/day": 5, "25°C": 25, r"18\text{ cm}": 18, "5 million": 5},
    "more than a number": {r"2^{10}": None, "2^10 = 1024": 1024, "2**10": None, "5\u00b2": None, r"2\pi": None,
                           r"\sqrt{2}": None, r"3\sqrt{2}": None, "π": None, "x^2 = 4": 4, "2024-01-05": None,
                           "12:30": None, "1.2.3": None},
    "parts of words": {"H2O": None, "x_1": None, "x_1 = 5": 5, "v1.2.3": None, "3 * 4": 4, "3x4": 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers(kind):
    wanted = NUMBERS[kind]
    found = {text: last_number(text) for text in wanted}
    assert {text for text in found if found[text] is None} == {text for text in wanted if wanted[text] is None}
    for text in found:
        assert found[text] is None or found[text] == pytest.approx(wanted[text], rel=1e-12), text


@pytest.mark.parametrize(
    ("text", "number"),
    {"x = 7 dollars": 7, "6*7 = 42": 42, r"x \approx 3.5": 3.5, r"\{3\}": 3, r"12\text{ cm}": 12, "1,234": 1234,
     "3 or 4": None, "(1,2)": None, r"2\pi": None, "10:30": None, r"[1,\infty)": None, "no": None}.items(),
)  # fmt: skip
def test_the_only_number(text, number):
    assert only_number(text) == number


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
    golds = ["$42", r"so \boxed{42}", "21 * 2 = 42 dollars", "41 or 42", r"42\pi"]
    assert numeric_match([form("42")] * 5, answer=golds) == [1, 1, 1, None, None]
    boxes = [r"\boxed{\frac{1}{2}}", r"\boxed{50\%}", r"\boxed{0.5\pi}", r"\boxed{2 \text{ or } 0.5}", "2 or 1/2"]
    assert numeric_match([form(text) for text in boxes], answer=["1/2"] * 5) == [1, 0, 0, 0, 1]
    assert numeric_match([form("1")] * 3, answer=[None, "no number", ""]) == [None] * 3
    with pytest.raises(ValueError, match="tolerance must be at least 0 and finite"):
        NumericMatch(tolerance=-1)


# Text that was cut, begun again, or thought: (text, what a person takes as its answer).
CUT = {
    r"\boxed{12": None,
    r"12, so \boxed{12": None,
    r"\boxed{1} \boxed{12": "1",
    r"\boxed{\frac{1}{2}": None,
    r"\boxed{\text{12}": None,
    r"\boxed {12}": "12",
    r"\boxed{3} \boxed{12}": "12",
    r"<answer>12": None,
    r"<answer>\boxed{12}": None,
    r"<answer>\boxed{12</answer>": None,
    r"<answer>1</answer><answer>\boxed{12}</answer>": "12",
    r"<think>\boxed{12}</think>": None,
    r"<think>\boxed{12}": None,
    r"<think>1</think> <think>\boxed{12}": None,
    r"<think>\boxed{1}</think> \boxed{12}": "12",
    r"<think><answer>12</answer></think>": None,
}


@pytest.mark.parametrize("text", CUT)
def test_what_was_cut_is_no_answer_for_any_matcher(text):
    rewards = [float(CUT[text] == wanted) for wanted in ("12", "1")]
    assert boxed_match([text] * 2, answer=["12", "1"]) == rewards
    assert numeric_match([text] * 2, answer=["12", "1"]) == rewards
    if "{" not in text:
        assert exact_match([text] * 2, answer=["12", "1"]) == rewards


def test_a_right_answer_that_was_cut_is_none():
    assert numeric_match(["12"], answer=[r"\boxed{12"]) == [None]


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
