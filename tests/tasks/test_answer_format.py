"""The format task: rows are true, splits do not leak, the form is the form."""

import pytest

from rlkit import tasks
from rlkit.tasks.answer_format import in_form, right_in_form


def test_rows_are_true_and_splits_do_not_leak():
    task = tasks.load("format")
    asked = {row["prompt"][0]["content"] for row in task.train} & {row["prompt"][0]["content"] for row in task.test}
    assert not asked and (len(task.train), len(task.test)) == (400, 60)
    for row in task.train:
        words = row["prompt"][0]["content"].split("?")[0].split()
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
