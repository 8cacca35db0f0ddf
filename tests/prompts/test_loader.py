"""Prompts: tokens, ids, and an order that a seed fixes and a checkpoint continues."""

import json
import logging
from collections import Counter

import pytest
import torch
from builders import (
    BOS,
    CHAT_TEMPLATE,
    CONTEXT,
    EOS,
    assert_identical,
    character_tokenizer,
    ids_of,
    tiny_policy,
    tokenize_prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rl
from rlkit.prompts import content_id

ROWS = [{"prompt": f"{row}+1=", "answer": row + 1} for row in range(10)]


def texts(batch):
    return [row["prompt"] for row in batch.rows]


def take(loader, count):
    return [loader.next_batch() for _ in range(count)]


def user(text):
    return [{"role": "user", "content": text}]


# --- the order ---


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10])
def test_every_prompt_is_served_exactly_once_per_epoch(frozen_policy, batch_size):
    """Also with a last batch that is smaller; the epoch counts prompts, not completions."""
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=batch_size)
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = take(loader, len(loader))
        assert Counter(text for batch in batches for text in texts(batch)) == Counter(row["prompt"] for row in ROWS)
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(loader) - 1)
        assert len(batches[-1]) == (10 % batch_size or batch_size)
        assert loader.served == 10 * (epoch + 1)


def test_epochs_are_shuffled_each_in_its_own_way(frozen_policy):
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=10)
    orders = [tuple(texts(batch)) for batch in take(loader, 4)]
    assert len({*orders, tuple(row["prompt"] for row in ROWS)}) == 5


def test_the_order_is_a_function_of_the_seed_alone(frozen_policy):
    """Neither the global random state nor the batch size enters; another seed gives another order."""

    def order(seed, batch_size):
        torch.manual_seed(batch_size)
        loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=batch_size, seed=seed)
        return [text for batch in take(loader, 2 * len(loader)) for text in texts(batch)]

    assert order(5, 3) == order(5, 5) == order(5, 10)
    assert order(5, 5) != order(6, 5)


def test_serving_prompts_leaves_the_global_random_state_alone(frozen_policy):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    take(rl.PromptLoader(ROWS, frozen_policy, batch_size=4), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_shuffling_the_rows_come_as_they_are(frozen_policy):
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=4, shuffle=False)
    for _ in range(2):
        assert [text for batch in take(loader, 3) for text in texts(batch)] == [row["prompt"] for row in ROWS]


def test_drop_last_serves_whole_batches_only(frozen_policy):
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=4, drop_last=True)
    assert len(loader) == 2
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = take(loader, 2)
        assert [len(batch) for batch in batches] == [4, 4]
        assert len({text for batch in batches for text in texts(batch)}) == 8


def test_iterating_never_ends(frozen_policy):
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=10)
    assert len([batch for _, batch in zip(range(7), loader, strict=False)]) == 7


# --- the position ---


@pytest.mark.parametrize("done", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"drop_last": True}], ids=["shuffled", "in order", "drop_last"]
)
def test_a_loader_goes_on_from_a_saved_position_with_the_same_batches(frozen_policy, done, options):
    """Also in the middle of an epoch, through JSON, with rows, ids, tokens and group ids the same."""

    def fresh():
        return rl.PromptLoader(ROWS, frozen_policy, batch_size=4, seed=3, **options)

    loader = fresh()
    take(loader, done)
    state = json.loads(json.dumps(loader.state_dict()))
    want = take(loader, 6)
    other = fresh()
    other.load_state_dict(state)
    for one, two in zip(take(other, 6), want, strict=True):
        assert one.rows == two.rows and one.token_ids == two.token_ids
        assert_identical([one.row_id, one.group_id], [two.row_id, two.group_id])
    assert other.epoch == loader.epoch and other.served == loader.served


def test_a_state_is_a_snapshot(frozen_policy):
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=4)
    state = loader.state_dict()
    before = dict(state)
    take(loader, 2)
    assert state == before != loader.state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seed": 1},
            r"PromptLoader\.load_state_dict: the saved position was made with seed=1, this loader has seed=0",
        ),
        ({"rows": 9}, r"made with rows=9, this loader has rows=10, so the saved position would select other"),
    ],
)
def test_a_position_of_other_prompts_is_refused(frozen_policy, changes, message):
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=4)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(loader.state_dict() | changes)


def test_a_position_in_shuffled_prompts_means_nothing_without_the_shuffle(frozen_policy):
    """The same seed and size, yet other prompts: refused, not served twice or never."""
    shuffled = rl.PromptLoader(ROWS, frozen_policy, batch_size=4)
    take(shuffled, 1)
    with pytest.raises(ValueError, match="shuffle"):
        rl.PromptLoader(ROWS, frozen_policy, batch_size=4, shuffle=False).load_state_dict(shuffled.state_dict())


# --- ids ---


def test_group_ids_are_unique_over_epochs(frozen_policy):
    """The same prompt in two epochs is two groups."""
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=4)
    groups = torch.cat([batch.group_id for batch in take(loader, 9)]).tolist()
    assert groups == list(range(len(groups)))


def test_row_ids_stay_with_their_rows_through_filter_and_shuffle(frozen_policy):
    """A datasets.Dataset, shuffled and filtered, and a plain list give the same ids."""
    from datasets import Dataset

    dataset = Dataset.from_list(ROWS)

    def ids(data, **options):
        loader = rl.PromptLoader(data, frozen_policy, batch_size=10, **options)
        batch = loader.next_batch()
        return dict(zip(texts(batch), batch.row_id.tolist(), strict=True))

    want = ids(ROWS, shuffle=False)
    assert len(set(want.values())) == 10
    assert ids(dataset) == want
    kept = ids(dataset.shuffle(seed=1).filter(lambda row: row["answer"] % 2 == 0))
    assert kept == {text: row_id for text, row_id in want.items() if text in kept} and len(kept) == 5


def test_the_same_prompt_with_another_answer_is_another_row():
    """A column that is None is one that the row does not have, as tables have it."""
    assert content_id({"prompt": "a", "answer": 1}) != content_id({"prompt": "a", "answer": 2})
    assert content_id({"prompt": "a", "answer": "1"}) != content_id({"prompt": "a", "answer": 1})
    assert content_id({"prompt": "a", "answer": [None]}) != content_id({"prompt": "a", "answer": []})
    assert content_id({"prompt": "a", "answer": None}) == content_id({"prompt": "a"})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=3),
    lambda x: st.lists(x, max_size=2),
    max_leaves=3,
)


@settings(max_examples=20)
@given(st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3))
def test_a_row_id_does_not_depend_on_the_order_of_columns_and_fits_int64(row):
    number = content_id(row)
    assert number == content_id(dict(reversed(row.items())))
    assert 0 <= number < 2**63


def test_a_row_id_is_the_same_in_every_process():
    """A constant from another process: Python's own hash would change from run to run."""
    import hashlib

    text = '{"answer": 2, "prompt": "é"}'
    want = int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) // 2
    assert content_id({"prompt": "é", "answer": 2}) == want


# --- tokens ---


def test_plain_prompts_are_tokenised_as_they_are(frozen_policy):
    batch = rl.make_batch(frozen_policy, ["12+3=", {"prompt": "7", "answer": 1}], first_group_id=5)
    assert [list(ids) for ids in batch.token_ids] == [ids_of("12+3="), ids_of("7")]
    assert batch.group_id.tolist() == [5, 6] and batch.rows[1]["answer"] == 1


PLAIN, TEMPLATED = "1+1=", "<bos>1+1="


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("prompt", [PLAIN, TEMPLATED, user("1+1=")], ids=["plain", "templated text", "conversation"])
def test_there_is_exactly_one_bos_if_the_tokenizer_uses_one_and_the_prompt_stays_open(adds_bos, adds_eos, prompt):
    """Llama-like tokenizers (add it) and templates that contain it. No end token at the end of a prompt."""
    tokenizer = character_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos, chat_template=CHAT_TEMPLATE)
    ids = tokenize_prompt(tokenizer, prompt)
    uses_bos = adds_bos or prompt != PLAIN
    assert ids.count(BOS) == int(uses_bos) and (ids[0] == BOS) == uses_bos
    assert EOS not in ids
    body = "1+1=" if isinstance(prompt, str) else "u:1+1= a:"
    assert ids[int(uses_bos) :] == ids_of(body)


TWICE = "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("prompt", "template"),
    [("<bos><bos>1+1=", CHAT_TEMPLATE), ("<bos>1+1=", CHAT_TEMPLATE), (user("1+1="), TWICE)],
    ids=["text with two", "text with one", "template with two"],
)
def test_several_beginnings_in_front_become_one(prompt, template):
    """However they came there."""
    tokenizer = character_tokenizer(adds_bos=True, chat_template=template)
    assert tokenize_prompt(tokenizer, prompt) == [BOS, *ids_of("1+1=")]


@pytest.mark.parametrize("prompt", ["1+<bos>1=", " <bos>1+1=", user("<bos>1+1="), user("1+1=<bos>")])
def test_a_beginning_that_is_spelled_out_further_on_is_refused_by_name(prompt):
    """`<s>` in a web page would be a second beginning."""
    policy = tiny_policy(tokenizer=character_tokenizer(adds_bos=True, chat_template=CHAT_TEMPLATE))
    rows = [{"prompt": "1="}, {"prompt": prompt}]
    with pytest.raises(ValueError, match="row 1: the text spells out the beginning-of-sequence token '<bos>' at char"):
        rl.PromptLoader(rows, policy, batch_size=1)
    # Where the tokenizer uses none, or in the model's own format, it is a token like others.
    assert BOS in tokenize_prompt(character_tokenizer(chat_template=CHAT_TEMPLATE), prompt)
    assert tokenize_prompt(policy.tokenizer, "<bos>1=2<bos>3=") == [BOS, *ids_of("1=2"), BOS, *ids_of("3=")]


def test_an_end_token_that_the_prompt_itself_has_stays():
    tokenizer = character_tokenizer(adds_eos=True)
    assert tokenize_prompt(tokenizer, "1<eos>")[:2] == [*ids_of("1"), EOS]


def test_what_the_loader_serves_is_what_the_rollout_scores(frozen_policy):
    """Tokenised once; engine and trainer see the same ids."""
    policy = tiny_policy(tokenizer=character_tokenizer(adds_bos=True, chat_template=CHAT_TEMPLATE))
    batch = rl.make_batch(policy, ["12=", user("3+4=")])
    rollout = rl.sample(policy, batch, num_generations=2, max_completion_length=3, seed=0)
    for row in range(4):
        ids = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
        assert tuple(ids) == batch.token_ids[row // 2] and ids.count(BOS) == 1


def test_a_conversation_that_ends_with_the_assistant_is_continued():
    """Prefill, without a second generation prompt."""
    tokenizer = character_tokenizer(chat_template=CHAT_TEMPLATE)
    ids = tokenize_prompt(tokenizer, [*user("1+1="), {"role": "assistant", "content": "2"}])
    assert ids == [BOS, *ids_of("u:1+1= a:2")]


def test_options_reach_the_chat_template():
    tokenizer = character_tokenizer(chat_template="{{ bos_token }}{{ messages[0]['content'] }}{% if x %}={% endif %}")
    policy = tiny_policy(tokenizer=tokenizer)
    loader = rl.PromptLoader([{"prompt": user("1")}], policy, batch_size=1, chat_template_kwargs={"x": True})
    assert loader.next_batch().token_ids == ((BOS, *ids_of("1=")),)


def test_the_users_tokenizer_is_not_changed():
    """A tokenizer without a padding token; ours is a copy."""
    tokenizer = character_tokenizer(pad_token=None)
    policy = tiny_policy(tokenizer=tokenizer)
    rl.PromptLoader(ROWS, policy, batch_size=2).next_batch()
    assert tokenizer.pad_token_id is None and tokenizer.padding_side == "right"
    assert policy.pad_id == EOS and len(policy.tokenizer) == len(tokenizer)


# --- long prompts ---

LONG = [{"prompt": "1" * length} for length in (3, 9, 4, 12)]


def test_prompts_that_are_too_long_are_named(frozen_policy):
    """Rows and lengths, and what to do."""
    message = (
        r"PromptLoader: 2 prompt\(s\) are longer than 8 tokens: row 1 \(9 tokens\), row 3 \(12 tokens\)\. "
        r"Raise .*on_long='skip'"
    )
    with pytest.raises(ValueError, match=message):
        rl.PromptLoader(LONG, frozen_policy, batch_size=2, max_prompt_length=8)


def test_prompts_that_are_too_long_can_be_skipped(frozen_policy, caplog):
    """The others keep their ids, and it is said how many went."""
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        loader = rl.PromptLoader(LONG, frozen_policy, batch_size=4, max_prompt_length=8, on_long="skip", shuffle=False)
    assert "left out 2 prompt(s) longer than 8 tokens: row 1 (9 tokens), row 3 (12 tokens)" in caplog.text
    batch = loader.next_batch()
    assert texts(batch) == ["111", "1111"] and loader.epoch == 1
    assert batch.row_id.tolist() == [content_id(LONG[0]), content_id(LONG[2])]


def test_the_models_context_is_the_limit_by_default(frozen_policy):
    rows = [{"prompt": "1" * CONTEXT}, {"prompt": "1" * (CONTEXT + 1)}]
    rl.PromptLoader(rows[:1], frozen_policy, batch_size=1)
    with pytest.raises(
        ValueError, match=rf"PromptLoader: 1 prompt\(s\) are longer than {CONTEXT} tokens: row 1 \({CONTEXT + 1} tok"
    ):
        rl.PromptLoader(rows, frozen_policy, batch_size=1)


# --- errors ---

BAD_LOADERS = {
    "empty": ({"dataset": []}, ValueError, "PromptLoader: the dataset is empty"),
    "no prompt column": (
        {"dataset": [{"question": "1"}]},
        ValueError,
        r"PromptLoader: the dataset has no 'prompt' column; it has \['question'\]\. Rename it: dataset\.rename_column",
    ),
    "a stream": (
        {"dataset": iter(ROWS)},
        TypeError,
        "PromptLoader: expected a dataset with a length .*got list_iterator.*can be read only once.*the function that",
    ),
    "batch_size 0": ({"batch_size": 0}, ValueError, "PromptLoader: batch_size must be at least 1, got 0"),
    "on_long": (
        {"on_long": "cut"},
        ValueError,
        r"PromptLoader: on_long must be 'error', 'skip' or 'truncate-left', got 'cut'",
    ),
    "max_prompt_length 0": (
        {"max_prompt_length": 0},
        ValueError,
        "max_prompt_length must be a whole number of at least 1",
    ),
    "drop_last": (
        {"batch_size": 11, "drop_last": True},
        ValueError,
        "PromptLoader: drop_last with 10 rows and batch_size=11 leaves no batch",
    ),
    "all too long": (
        {"max_prompt_length": 1, "on_long": "skip"},
        ValueError,
        "PromptLoader: every prompt is longer than 1 tokens: row 0",
    ),
    "no template": (
        {"dataset": [{"prompt": user("1")}]},
        ValueError,
        r"PromptLoader: row 0: the prompt is a conversation but the tokenizer has no chat template",
    ),
    "a number": (
        {"dataset": [{"prompt": 7}]},
        TypeError,
        r"PromptLoader: row 0: a prompt must be text or a list of messages .*got int: '7'",
    ),
    "no messages": (
        {"dataset": [{"prompt": []}]},
        TypeError,
        r"PromptLoader: row 0: a prompt must be text or a list of messages .*got list",
    ),
    "messages without role": (
        {"dataset": [{"prompt": [{"content": "1"}]}]},
        TypeError,
        r"PromptLoader: row 0: a prompt must be text or a list of messages",
    ),
    "empty prompt": (
        {"dataset": [{"prompt": ""}]},
        ValueError,
        "PromptLoader: row 0: the prompt has no token: it is empty",
    ),
}


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_LOADERS.values(), ids=BAD_LOADERS.keys())
def test_bad_input_is_named_with_expected_got_and_advice(unchecked, frozen_policy, changes, kind, message):
    options = {"dataset": ROWS, "batch_size": 2} | changes
    with pytest.raises(kind, match=message):
        rl.PromptLoader(options.pop("dataset"), frozen_policy, **options)


def test_make_batch_names_what_is_wrong(frozen_policy):
    with pytest.raises(
        TypeError, match=r"make_batch: expected a list of prompts or rows, got one string; write \[prompt\]"
    ):
        rl.make_batch(frozen_policy, "1+1=")
    with pytest.raises(ValueError, match=r"make_batch: row 1 has no 'prompt'; its columns are \['question'\]"):
        rl.make_batch(frozen_policy, ["1", {"question": "2"}])


def test_a_prompt_without_room_for_a_completion_is_named(frozen_policy):
    """Prompt + completion above the model's context."""
    message = (
        rf"sample: prompt\(s\) \[1\] of the batch do not fit: up to 60 prompt tokens \+ "
        rf"max_completion_length=5 exceed .* {CONTEXT} tokens\. Use max_completion_length <= 4"
    )
    with pytest.raises(ValueError, match=message):
        rl.sample(frozen_policy, ["1", "1" * 60], num_generations=2, max_completion_length=5)
