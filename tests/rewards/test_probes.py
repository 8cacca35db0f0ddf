"""Probes: a reward that can be cheated shows it."""

import logging
import math

import pytest
from builders import CHAT_TEMPLATE, character_tokenizer, length, never, tiny_policy

import rlkit as rl

ROWS = [{"prompt": f"{row}+{row}=", "answer": str(2 * row)} for row in range(10, 18)]


def contains(completions, answer, **kwargs):
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(tokenizer=character_tokenizer(chat_template=CHAT_TEMPLATE)).reference()


def test_a_reward_that_can_be_cheated_shows_it(policy):
    table = rl.rewards.probe(
        policy,
        ROWS,
        [contains, rl.rewards.exact_match, never],
        extra={"all numbers": lambda row: " ".join(map(str, range(99)))},
    )
    assert table["contains"].to_dict() == {
        "right answer": 1,
        "another row's answer": 0,
        "empty": 0,
        "echoed prompt": 0,
        "repeated answer": 1,
        "format only": 0,
        "all numbers": 1,
    }
    assert table["exact_match"].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert table["reward"].tolist() == (table["contains"] + table["exact_match"]).tolist()
    assert all(math.isnan(value) for value in table["never"])


def test_conversations_and_tokens(policy):
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}]
    table = rl.rewards.probe(policy, rows, [rl.rewards.exact_match, length])
    assert table.loc["right answer"].tolist() == [1, 1, 2]
    assert table.loc["echoed prompt", "length"] == 4 and table.loc["empty", "length"] == 1


def test_rows_without_an_answer_are_refused(policy):
    with pytest.raises(ValueError, match=r"probe: expected rows with a column 'answer', got 1 rows"):
        rl.rewards.probe(policy, [{"prompt": "1"}], length)
    assert len(rl.rewards.probe(policy, [{"prompt": "1", "gold": "2"}], length, answer="gold")) == 6


def test_long_texts_give_no_warning_of_the_tokenizer(caplog):
    """Nothing is run through the model, so there are no "indexing errors" to warn of."""
    tokenizer = character_tokenizer()
    tokenizer.model_max_length = 16
    policy = tiny_policy(tokenizer=tokenizer).reference()
    transformers = logging.getLogger("transformers")
    transformers.addHandler(caplog.handler)
    try:
        rl.rewards.probe(policy, ROWS[:1], length)
        with pytest.raises(ValueError, match=r"row 0 \(99 tokens\)"):
            rl.PromptLoader([{"prompt": "1" * 99}], policy, batch_size=1)
    finally:
        transformers.removeHandler(caplog.handler)
    assert not caplog.records
