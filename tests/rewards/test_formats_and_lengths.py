"""Format and length rewards: TRL's values where TRL has them, and what is different on purpose."""

import pickle

import pytest

from rlkit.rewards import CosineLength, RepetitionPenalty, SoftOverlong, ThinkFormat, think_format


def message(text):
    return [{"role": "assistant", "content": text}]


TEXTS = [
    "<think>\nreason\n</think>\nanswer",
    "<think>reason</think>answer",
    "<think>reason answer",
    "reason answer",
    "<think>a<think>b</think>c",
    "",
    "prefix <think>a</think>b",
]


def test_trls_values_where_the_opening_tag_is_required():
    from trl.rewards import think_format_reward

    completions = [message(text) for text in TEXTS]
    assert ThinkFormat(opening="required")(completions) == think_format_reward(completions)


def test_the_tag_may_be_in_the_prompt():
    """A chat template ends the prompt with <think>, so that no completion has it."""
    assert think_format(["a</think> 4", "<think>a</think> 4", "4", "a</think>"]) == [1, 1, 0, 0]
    required = ThinkFormat(opening="required")
    assert required(["a</think> 4"]) == [0]
    assert required(["a</think> 4"], prompts=["1+3=<think>\n"]) == [1]
    prefilled = [{"role": "user", "content": "1+3"}, {"role": "assistant", "content": "<think>\n"}]
    assert required([message("a</think> 4")], prompts=[prefilled]) == [1]


@pytest.mark.parametrize("text", ["<think></think>", "<think> </think>4", "<think>a</think> \n", "a</think>b</think>c"])
def test_format_only_is_no_format(text):
    assert think_format([text]) == [0]


def test_options_are_checked(unchecked):
    for make in (
        lambda: ThinkFormat(opening="never"),
        lambda: SoftOverlong(0, cache=0),
        lambda: SoftOverlong(10, cache=11),
        lambda: CosineLength(0),
        lambda: RepetitionPenalty(0),
        lambda: RepetitionPenalty(2, max_penalty=1.0),
    ):
        with pytest.raises(ValueError, match=r"expected|must be"):
            make()


def test_overlong_by_hand():
    """DAPO, eq. 13: L = 100, cache 20; with cache 0 a step."""
    ids = [[1] * length for length in (0, 80, 81, 90, 100, 101)]
    assert SoftOverlong(100, cache=20)(completion_ids=ids) == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    assert SoftOverlong(100, cache=0)(completion_ids=ids) == [0, 0, 0, 0, 0, -1]


def test_cosine_is_trls():
    from trl.rewards import get_cosine_scaled_reward

    texts = [r"\boxed{1}", r"\boxed{2}", r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"]
    ids, solution = [[1] * length for length in (0, 25, 50, 100, 500)], ["1"] * 4 + ["no latex"]
    completions = [message(text) for text in texts]
    want = get_cosine_scaled_reward(max_len=100)(completions, solution, ids)
    got = CosineLength(100)(completions, completion_ids=ids, solution=solution)
    assert got[:4] == pytest.approx(want[:4]) and got[4] is want[4] is None


def test_cosine_takes_any_reward_that_decides():
    reward = CosineLength(
        10, correct=lambda completions, answer, **_: [float(c == a) for c, a in zip(completions, answer, strict=True)]
    )
    assert reward(["a", "b"], completion_ids=[[1] * 10] * 2, answer=["a", "a"]) == pytest.approx([0.5, -0.5])


def test_cosine_stays_at_its_end_beyond_the_maximum():
    reward = CosineLength(10, correct=lambda completions, **_: [1.0] * len(completions))
    assert reward(["a"] * 3, completion_ids=[[1] * 10, [1] * 15, [1] * 20]) == pytest.approx([0.5] * 3)


def test_repetition_by_hand():
    """(1,2) twice among four pairs: 3 of 4 are unique."""
    assert RepetitionPenalty(2)(completion_ids=[[1, 2, 1, 2, 3], [1], []]) == pytest.approx([-0.25, 0, 0])


def test_they_can_be_pickled_and_have_names():
    for reward, name in (
        (SoftOverlong(9, cache=3), "soft_overlong"),
        (CosineLength(9), "cosine_length"),
        (RepetitionPenalty(2), "repetition_penalty"),
        (think_format, "think_format"),
    ):
        assert pickle.loads(pickle.dumps(reward)) == reward and reward.__name__ == name
        assert type(reward).__name__[0].isupper()
