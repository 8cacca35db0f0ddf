"""The addition task: rows are true sums, splits do not leak, rewards judge text and messages alike."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlkit import tasks
from rlkit.tasks.addition import correct, correct_number

FIRST_TEST_PROMPTS = ["84+99=", "94+51=", "74+36=", "71+10="]


def _numbers(prompt: str) -> tuple[int, int]:
    a, b = prompt.rstrip("=").split("+")
    return int(a), int(b)


def _message(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def addition():
    return tasks.load("addition")


def test_rows_are_all_sums_of_two_digit_numbers(addition):
    rows = [*addition.train, *addition.test]
    pairs = [_numbers(row["prompt"]) for row in rows]
    assert set(pairs) == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert len(pairs) == 90 * 90
    assert all(row["answer"] == str(a + b) for row, (a, b) in zip(rows, pairs, strict=True))
    assert rows[0]["prompt"] == f"{pairs[0][0]}+{pairs[0][1]}="


def test_splits_share_no_sum_in_either_order(addition):
    train = {frozenset(_numbers(p)) for p in addition.train["prompt"]}
    test = {frozenset(_numbers(p)) for p in addition.test["prompt"]}
    assert not train & test
    assert len(addition.test) >= 500


def test_loading_again_gives_the_same_rows_and_another_seed_others(addition):
    again, other = tasks.load("addition"), tasks.load("addition", seed=1)
    assert addition.train.to_list() == again.train.to_list()
    assert addition.test.to_list() == again.test.to_list()
    assert set(addition.test["prompt"]) != set(other.test["prompt"])


def test_the_held_out_sums_are_pinned(addition):
    # tiny-add was trained on this train split: other held-out rows would be rows that it has seen
    assert addition.test["prompt"][:4] == FIRST_TEST_PROMPTS


def test_conversational_prompts_ask_the_same_sums(addition):
    chat = tasks.load("addition", conversational=True)
    assert chat.test["answer"][:] == addition.test["answer"][:]
    a, b = _numbers(addition.test["prompt"][0])
    assert chat.test[0]["prompt"] == [{"role": "user", "content": f"What is {a}+{b}? Answer with the number only."}]
    assert chat.rewards == (correct_number,)
    assert addition.rewards == (correct,)


@pytest.mark.parametrize("wrap", [str, _message], ids=["text", "messages"])
def test_correct_wants_the_answer_and_nothing_else(wrap):
    completions = [wrap(text) for text in ["46", " 46\n", "046", "46.", "4 6", "", "-46"]]
    assert correct(completions, answer=["46"] * 7, prompts=None) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("wrap", [str, _message], ids=["text", "messages"])
def test_correct_number_takes_the_last_integer(wrap):
    completions = [wrap(text) for text in ["46", "12+34 = **46**.", "46, not 45", "forty-six", "", "146", "046"]]
    assert correct_number(completions, answer=["46"] * 7, prompts=None) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_rewards_read_the_last_message_in_any_form():
    turns = [{"role": "assistant", "content": "45"}, {"role": "user", "content": "sure?"}, *_message("46")]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "6"}]}]
    completions = [turns, parts, _message(None), []]
    for reward in (correct, correct_number):
        assert reward(completions, answer=["46"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_rewards_refuse_answers_of_another_length():
    with pytest.raises(ValueError, match="shorter"):
        correct(["46", "46"], answer=["46"])


def test_unknown_name_lists_the_tasks_and_the_nearest():
    with pytest.raises(ValueError, match=r"'adition'.*Known tasks: addition.*Did you mean 'addition'"):
        tasks.load("adition")
    with pytest.raises(ValueError, match="Known tasks") as info:
        tasks.load("zzz")
    assert "Did you mean" not in str(info.value)


def test_shows_itself(addition):
    n_train, n_test = len(addition.train), len(addition.test)
    assert repr(addition) == f"Task('addition', train={n_train} rows, test={n_test} rows, rewards=(correct))"
    page = addition._repr_html_()
    assert "<table" in page and addition.train[0]["prompt"] in page


@pytest.mark.integration
def test_importing_tasks_does_not_import_datasets():
    # `rlkit` itself is replaced by a bare package, so that this says something of tasks alone
    code = (
        "import sys, types; p = types.ModuleType('rlkit'); p.__path__ = [sys.argv[1]]; sys.modules['rlkit'] = p;"
        "import rlkit.tasks, rlkit.tasks.addition; sys.exit('datasets' in sys.modules)"
    )
    folder = str(Path(tasks.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code, folder]).returncode == 0
