"""Prompts of every kind: one BOS, prefill, system messages, template settings, long ones; and random ones."""

import logging

import pytest
from builders import (
    BOS,
    CHAT_TEMPLATE,
    CONTEXT,
    EOS,
    VOCABULARY,
    character_tokenizer,
    ids_of,
    tiny_policy,
    tokenize_prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rl
from rlkit.prompts import PromptTokenizer, content_id

# Reads a setting, and leaves out every role that it does not know, as many real templates do.
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}u:{{ m['content'] | trim }} "
    "{% elif m['role'] == 'system' %}s:{{ m['content'] | trim }} {% elif m['role'] == 'assistant' %}"
    "a:{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:"
    "{% if think is defined and think %}+{% endif %}{% endif %}"
)


def user(text, **more):
    return {"role": "user", "content": text, **more}


@pytest.fixture(scope="module")
def strict():
    return tiny_policy(tokenizer=character_tokenizer(adds_bos=True, chat_template=STRICT)).reference()


def served(policy, rows, **options):
    loader = rl.PromptLoader(rows, policy, batch_size=len(rows), shuffle=False, **options)
    return [list(ids) for ids in loader.next_batch().token_ids]


CONVERSATIONS = {
    "user": ([user("1+1=")], "u:1+1= a:"),
    "system": ([{"role": "system", "content": "sum"}, user("1")], "s:sum u:1 a:"),
    "several turns": ([user("1"), {"role": "assistant", "content": "2"}, user("3")], "u:1 a:2<eos>u:3 a:"),
    "prefill": ([user("1"), {"role": "assistant", "content": "2 is"}], "u:1 a:2 is"),
    "prefill with a space at its end": ([user("1"), {"role": "assistant", "content": "2 "}], "u:1 a:2 "),
    "empty prefill": ([user("1"), {"role": "assistant", "content": ""}], "u:1 a:"),
    "parts": ([user([{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}])], "u:1+1= a:"),
    "keys of other rows": ([user("1", name=None, tool_calls=None)], "u:1 a:"),
    "a call": ([user("1"), {"role": "assistant", "content": None, "tool_calls": [{}]}, user("3")], "u:1 a:<eos>u:3 a:"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "text"), CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_conversations_become_what_the_template_says_with_one_bos(strict, messages, text):
    """Written out by hand; the engine is given the same ids that are scored."""
    expected = [BOS]
    for number, piece in enumerate(text.split("<eos>")):
        expected += [EOS] * (number > 0) + ids_of(piece)
    assert served(strict, [{"prompt": messages}]) == [expected]
    assert tokenize_prompt(strict.tokenizer, messages) == expected
    assert list(rl.make_batch(strict, [messages]).token_ids[0]) == expected
    assert expected.count(BOS) == 1


def test_a_row_may_have_its_own_template_settings(strict):
    """TRL's column chat_template_kwargs; None is what a dataset on disk puts where a row has no such key."""
    rows = [
        {"prompt": [user("1")], "chat_template_kwargs": kwargs} for kwargs in ({"think": True}, {"think": None}, None)
    ]
    plain, thinking = [BOS, *ids_of("u:1 a:")], [BOS, *ids_of("u:1 a:+")]
    assert served(strict, rows) == [thinking, plain, plain]
    assert served(strict, rows, chat_template_kwargs={"think": True}) == [thinking] * 3
    off = [{"prompt": [user("1")], "chat_template_kwargs": {"think": False}}]
    assert served(strict, off, chat_template_kwargs={"think": True}) == [plain]
    evaluation = rl.evaluate(strict, rows, lambda completions: [0.0] * len(completions), max_completion_length=2)
    assert evaluation.rollout.prompt_mask.sum(-1).tolist() == [len(thinking), len(plain), len(plain)]


def test_tools_are_left_out_and_it_is_said_once(strict, caplog):
    rows = [{"prompt": [user("1")], "tools": [{"name": "search"}]}, {"prompt": [user("1")], "tools": [{}]}]
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        assert served(strict, rows) == [[BOS, *ids_of("u:1 a:")]] * 2
    assert caplog.text.count("rlkit runs no tools") == 1
    caplog.clear()
    served(strict, [{"prompt": [user("1")], "tools": None}])
    assert not caplog.text
    seen = []
    rl.score(
        rl.sample(strict, rows, num_generations=1, max_completion_length=1),
        lambda completions, tools: [float(len(seen.append(tools) or completions))] * 2,
    )
    assert seen == [[[{"name": "search"}], [{}]]]


BAD_MESSAGES = {
    "unknown role": ([{"role": "usr", "content": "1"}], r"leaves out the last message, of role 'usr': '1'"),
    "role is no text": ([{"role": 3, "content": "1"}], "message 0: the role must be a text such as 'user', got 3"),
    "no content": ([{"role": "user"}], r"message 0 \(user\): the content must be text, got NoneType"),
    "content is a number": ([user(7)], r"message 0 \(user\): the content must be text, got int"),
    "an image": ([user([{"type": "image"}])], "parts of type image; this policy reads text only"),
    "parts without type": ([{"role": "user", "content": ["1"]}], "parts of type str; this policy reads text only"),
    "surrogate": ([user("1\ud800")], r"lone surrogate, U\+D800"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "reason"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_message_that_the_model_would_not_see_is_an_error(strict, messages, reason):
    """Never silently another prompt. The error names the row."""
    with pytest.raises((TypeError, ValueError), match=f"PromptLoader: row 1: .*{reason}"):
        served(strict, [{"prompt": [user("1")]}, {"prompt": messages}])


def test_a_template_that_refuses_says_so():
    template = "{{ raise_exception('roles must alternate') }}"
    policy = tiny_policy(tokenizer=character_tokenizer(chat_template=template))
    with pytest.raises(ValueError, match=r"row 0: the chat template refuses the conversation: roles must alternate"):
        served(policy, [{"prompt": [user("1")]}])


def test_settings_that_rlkit_decides_are_refused(strict):
    for kwargs in ({"tokenize": False}, {"add_generation_prompt": False}):
        with pytest.raises(ValueError, match=r"cannot be set there; rlkit decides it itself"):
            served(strict, [{"prompt": [user("1")]}], chat_template_kwargs=kwargs)
    with pytest.raises(TypeError, match="chat_template_kwargs must hold a dict, got str"):
        served(strict, [{"prompt": [user("1")], "chat_template_kwargs": "think"}])


# --- long prompts ---


def test_truncate_left_keeps_the_generation_prompt_and_the_bos(strict, caplog):
    """By hand: limit 8 = BOS, the last 5 characters of 'u:123456789 ', and 'a:'."""
    rows = [{"prompt": [user("123456789")], "answer": 1}, {"prompt": [user("1")], "answer": 2}]
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        loader = rl.PromptLoader(
            rows, strict, batch_size=2, shuffle=False, max_prompt_length=8, on_long="truncate-left"
        )
    assert "cut the beginning of 1 prompt(s) longer than 8 tokens: row 0 (15 tokens)" in caplog.text
    batch = loader.next_batch()
    assert [list(ids) for ids in batch.token_ids] == [[BOS, *ids_of("6789 a:")], [BOS, *ids_of("u:1 a:")]]
    # The row, its id and its group are those of the whole prompt.
    assert batch.rows == tuple(rows) and batch.row_id.tolist() == [content_id(row) for row in rows]
    rollout = rl.sample(strict, batch, num_generations=3, max_completion_length=2, seed=0)
    assert rollout.group_id.tolist() == [0, 0, 0, 1, 1, 1] and rollout.columns["answer"] == (1, 1, 1, 2, 2, 2)


def test_truncate_left_keeps_what_the_assistant_is_to_continue(strict):
    rows = [{"prompt": [user("123456789"), {"role": "assistant", "content": "so 4"}]}]
    assert served(strict, rows, max_prompt_length=9, on_long="truncate-left") == [[BOS, *ids_of("9 a:so 4")]]
    with pytest.raises(ValueError, match=r"row 0: max_prompt_length=6 cannot hold what must stay of the prompt: 7 tok"):
        served(strict, rows, max_prompt_length=6, on_long="truncate-left")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_truncate_left_of_plain_text(adds_bos):
    policy = tiny_policy(tokenizer=character_tokenizer(adds_bos=adds_bos))
    front = [BOS] if adds_bos else []
    got = served(policy, [{"prompt": "123456789="}], max_prompt_length=5, on_long="truncate-left")
    assert got == [front + ids_of("123456789=")[-(5 - len(front)) :]]


@settings(max_examples=30)
@given(
    texts=st.lists(st.text("0123456789", min_size=1, max_size=20), min_size=1, max_size=6),
    limit=st.integers(5, 24),
    chat=st.booleans(),
)
def test_truncation_leaves_a_suffix_of_the_whole_prompt(strict, texts, limit, chat):
    rows = [{"prompt": [user(text)] if chat else text} for text in texts]
    whole, cut = served(strict, rows), served(strict, rows, max_prompt_length=limit, on_long="truncate-left")
    for before, after in zip(whole, cut, strict=True):
        assert len(after) == min(limit, len(before))
        assert after[0] == BOS and after.count(BOS) == 1
        assert after[1:] == before[len(before) - len(after) + 1 :]


def test_what_can_be_seen_to_fit_is_not_tokenised_before_it_is_served(strict, monkeypatch):
    """The start costs one look at each row, not one call of the tokenizer for each."""
    calls = []
    encode = PromptTokenizer.encode
    monkeypatch.setattr(
        PromptTokenizer, "encode", lambda self, prompts: calls.append(len(prompts)) or encode(self, prompts)
    )
    loader = rl.PromptLoader([{"prompt": str(row)} for row in range(3000)], strict, batch_size=4)
    assert sum(calls) == 0
    loader.next_batch()
    assert sum(calls) == 4
    calls.clear()
    # Near the limit only tokens tell: whole batches of rows in one call.
    rl.PromptLoader([{"prompt": "1" * (CONTEXT - 2)}] * 3000, strict, batch_size=4)
    assert sum(calls) == 3000 and len(calls) <= 4


# --- random prompts: right or a clear error, never something else ---

TEXTS = st.text(st.one_of(st.characters(), st.sampled_from("\x00\ud800\udfff<>{}%é漢0123 ")), max_size=12)
CONTENTS = st.one_of(
    TEXTS,
    st.none(),
    st.integers(),
    st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image"])}, optional={"text": TEXTS}), max_size=2),
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "tool", "usr", "", None, 3]),
        "content": CONTENTS,
    },
)
PROMPTS = st.one_of(
    TEXTS, st.lists(MESSAGES, max_size=4), st.integers(), st.none(), st.dictionaries(TEXTS, TEXTS, max_size=1)
)


@settings(max_examples=300)
@given(PROMPTS)
def test_random_prompts_are_right_or_refused_by_name(strict, prompt):
    """Any text, any structure: an error that names the row, or one BOS with the last words after it."""
    try:
        (ids,) = served(strict, [{"prompt": prompt}])
    except (TypeError, ValueError) as error:
        assert "row 0" in str(error) or "empty" in str(error), error
        return
    assert ids.count(BOS) == 1 and ids[0] == BOS
    if isinstance(prompt, str):
        assert ids[1:] == strict.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    else:
        shown = strict.tokenizer.decode(ids)
        # Characters outside the vocabulary become <unk>; what is inside must be there.
        last = prompt[-1]["content"]
        last = last if isinstance(last, str) else "".join(part["text"] for part in last or [])
        for character in set(last.strip()) & set(VOCABULARY):
            assert character in shown


@given(TEXTS)
def test_random_texts_have_an_id(text):
    row = {"prompt": text, "answer": [text, None]}
    assert content_id(row) == content_id(dict(reversed(row.items())))
    assert content_id(row) != content_id({"prompt": text + "\x00", "answer": [text, None]})


def test_real_templates_and_nul_through_a_byte_level_tokenizer():
    """NUL is a character like others where the vocabulary has it."""
    policy = tiny_policy(tokenizer=character_tokenizer(chat_template=CHAT_TEMPLATE))
    ids = tokenize_prompt(policy.tokenizer, [user("1\x002")])
    assert ids == [BOS, *ids_of("u:1"), VOCABULARY["<unk>"], *ids_of("2 a:")]
