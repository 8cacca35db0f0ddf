"""Chat templates of real models (TRL ships them): every message in its place, word for word, on one date."""

import datetime
import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import character_tokenizer, tiny_policy

import rlkit as rl
from rlkit.prompts import PromptTokenizer

FOLDER = Path(find_spec("trl").origin).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
CALL = [{"type": "function", "id": "123456789", "function": {"name": "add", "arguments": {"x": 1}}}]
assert len(TEMPLATES) > 20


def tokenizer_of(template):
    return character_tokenizer(chat_template=(FOLDER / f"{template}.jinja").read_text())


def message(role, content, **more):
    return {"role": role, "content": content, **more}


ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
ROLES |= {"d": "developer", "h": "human", "c": "critic", "f": "function", "U": "User"}


def said(letters):
    """A conversation of roles given by their letters, in which every content occurs once, and in no template."""
    return [message(ROLES[one], f"words number {place} of {ROLES[one]}") for place, one in enumerate(letters)]


def with_calls(letters, *, text):
    """As `said`, with a tool call in each assistant's message before a tool's answer."""
    made = said(letters)
    for one, following in itertools.pairwise(made):
        if one["role"] == "assistant" and following["role"] == "tool":
            one |= {"tool_calls": CALL, "content": one["content"] if text else ""}
            following |= {"tool_call_id": "123456789", "name": "add"}
    return made


PLAIN = "u su uau suau uauau du sdu udu h hu uhu ucu cu uacu uu au uaau usu uasu uas ssu uausu susu ut utu uf uU cuau"
CALLS = "uat suat uatt uatau uatu uatat"
CONVERSATIONS = [said(letters) for letters in PLAIN.split()]
CONVERSATIONS += [with_calls(letters, text=text) for letters in CALLS.split() for text in (True, False)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_message_is_in_the_prompt_in_its_place_or_named(template):
    """What a model would not see, or would see elsewhere, is never left out silently. The oracle is the prompt."""
    tokenizer = PromptTokenizer(tokenizer_of(template))
    for conversation in CONVERSATIONS:
        contents = [one["content"] for one in conversation if one["content"]]
        written = tokenizer.tokenizer.apply_chat_template
        try:
            text = tokenizer.render(conversation).text
        except ValueError as error:
            if "refuses the conversation" in str(error):
                continue
            text = written(conversation, tokenize=False, add_generation_prompt=True)
            places = [text.find(content) for content in contents]
            lost_call = any("tool_calls" in one for one in conversation) and "add" not in text
            assert -1 in places or places != sorted(places) or lost_call, f"{template} {conversation}: {error}"
            continue
        places = [text.find(content) for content in contents]
        places = places[1:] if conversation[0]["role"] == "system" else places
        assert -1 not in places and places == sorted(places), f"{template} {conversation}"
        assert all(one["content"] in text for one in conversation)
        assert ("add" in text) or not any("tool_calls" in one for one in conversation)


NAMED = {
    "developer": ("qwen3", "du", r"leaves out message 0, of role 'developer': 'words number 0 of dev"),
    "in the middle": ("phi3", "ucu", r"leaves out message 1, of role 'critic'"),
    "first": ("glm4moe", "hu", r"leaves out message 0, of role 'human'"),
    "last": ("qwen2_5", "uh", r"leaves out the last message, of role 'human'"),
    "moved": ("deepseekv3", "uasu", r"moves message 2, of role 'system', to another place"),
    "replaced": ("deepseek_r1_distill", "ssu", r"leaves out message 0, of role 'system'"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "roles", "reason"), NAMED.values(), ids=NAMED.keys())
def test_the_error_names_row_message_and_role(template, roles, reason):
    policy = tiny_policy(tokenizer=tokenizer_of(template))
    rows = [{"prompt": said("u")}, {"prompt": said(roles)}]
    with pytest.raises(ValueError, match=f"PromptLoader: row 1: the chat template {reason}"):
        rl.PromptLoader(rows, policy, batch_size=1)
    with pytest.raises(ValueError, match=f"make_batch: row 1: the chat template {reason}"):
        rl.make_batch(policy, rows)


def test_a_role_whose_words_stand_elsewhere_is_missed_too():
    """'23' is in the user's question: looking for the content in the prompt would not show that it was left out."""
    tokenizer = PromptTokenizer(tokenizer_of("qwen3"))
    with pytest.raises(ValueError, match="leaves out message 0, of role 'developer': '23'"):
        tokenizer.render([message("developer", "23"), message("user", "1+23=")])


def test_lost_tool_calls_are_named():
    with pytest.raises(ValueError, match=r"leaves out a tool call of message 1, of role 'assistant': 'add'"):
        PromptTokenizer(tokenizer_of("phi3")).render(with_calls("uat", text=False))
    with pytest.raises(ValueError, match=r"leaves out message 1, of role 'assistant'"):  # text beside a tool call
        PromptTokenizer(tokenizer_of("llama3_1")).render(with_calls("uat", text=True))


def test_the_thoughts_of_past_turns_are_the_templates_own_business():
    """Qwen3 and R1 remove them by design."""
    for template in ("qwen3", "deepseek_r1_distill"):
        past = message("assistant", "<think>\nI add\n</think>\n\nIt is 2.")
        text = PromptTokenizer(tokenizer_of(template)).render([message("user", "1+1"), past, message("user", "2")]).text
        assert "It is 2." in text and "I add" not in text


def test_one_rendering_with_marks_does_for_all_conversations_of_a_shape(monkeypatch):
    tokenizer = tokenizer_of("qwen3")
    calls = []
    apply = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda self, *a, **k: calls.append(a) or apply(self, *a, **k)
    )
    own = PromptTokenizer(tokenizer)
    for row in range(50):
        own.render([message("system", f"s{row}"), message("user", f"u{row}")])
    assert len(calls) == 2 * 50 + 1


# --- what the assistant is to continue ---

PREFILLS = ["so", " so \n", "\n\n2", "1 ", "<think>\n1", "<think>\n1\n</think>\n\n2 ", "<think>", "  ", "{", "é"]
OPEN_HEADER = {"gptoss", "muse_glimmer"}  # their model itself writes '<|channel|>final<|message|>' or a recipient
PARTS_ONLY = {"idefics3", "smolvlm", "llava_next"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_prefill_follows_the_generation_prompt_word_for_word(template, thinking):
    tokenizer = tokenizer_of(template)
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    before = [message("user", "1+1=")]
    own = PromptTokenizer(tokenizer, kwargs)
    if template in PARTS_ONLY:
        return
    opened = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True, **kwargs)
    for begun in PREFILLS:
        doubled = begun.startswith("<think>") and "<think>" in opened
        if doubled or (template in OPEN_HEADER and not begun.startswith("<")):
            with pytest.raises(ValueError, match=r"Leave it out of the message|a header that the model completes"):
                own.render([*before, message("assistant", begun)])
            continue
        shown = own.render([*before, message("assistant", begun)])
        assert shown.text == opened + begun
        assert shown.text.endswith(shown.tail) and shown.tail.endswith(begun)


NO_PROMPT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"


def test_without_a_generation_prompt_the_template_says_what_stands_before_an_answer():
    own = PromptTokenizer(character_tokenizer(chat_template=NO_PROMPT))
    assert own.render([message("user", "1"), message("assistant", "so 2")]).text == "user: 1\nassistant: so 2"
    shown = own.render([message("user", "1"), message("assistant", " so 2 \n")])
    assert shown.text == "user: 1\nassistant:  so 2 \n" and shown.tail == "assistant:  so 2 \n"
    assert own.render([message("assistant", "so")]).text == "assistant: so"
    own = PromptTokenizer(
        character_tokenizer(chat_template=NO_PROMPT.replace("{{ m['content']", "<think></think>{{ m['content']"))
    )
    with pytest.raises(
        ValueError, match=r"no generation prompt, and writes 'assistant: <think></think>' before past answers"
    ):
        own.render([message("user", "1"), message("assistant", "so")])


def test_a_system_message_that_moves_with_the_last_user_message_stays_before_a_prefill():
    """As Mistral has it: the system message stands in the last message, if that is the user's."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[{% if loop.last and messages[0]['role'] == 'system' %}"
        "{{ messages[0]['content'] }} {% endif %}{{ m['content'] }}]"
        "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{% endif %}{% endfor %}"
    )
    own = PromptTokenizer(character_tokenizer(chat_template=template))
    turns = [message("system", "s"), message("user", "1"), message("assistant", "2"), message("user", "3")]
    assert own.render(turns).text == "[1] 2[s 3]"
    assert own.render([*turns, message("assistant", "so")]).text == "[1] 2[s 3]so"


def test_tool_calls_and_thoughts_cannot_be_continued():
    own = PromptTokenizer(tokenizer_of("qwen3"))
    for more in ({"tool_calls": CALL}, {"reasoning_content": "I add"}):
        for text in ("", "so"):
            if text or "tool_calls" in more:
                with pytest.raises(ValueError, match=f"has '{next(iter(more))}'; only its content can be continued"):
                    own.render([message("user", "1"), message("assistant", text, **more)])


# --- the date ---


class Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(days=1)


ROWS = [{"prompt": [message("user", str(row))]} for row in range(4)]


@pytest.fixture
def dated():
    template = "{{ 'Today Date: ' + strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return lambda: tiny_policy(tokenizer=character_tokenizer(chat_template=template))


def test_real_templates_write_the_date_of_the_tokenizer():
    """llama3_2 and gpt-oss ask for it; the day of the machine does not matter."""
    date = datetime.date(2024, 2, 29)
    for template, written in (("llama3_2", "29 Feb 2024"), ("gptoss", "2024-02-29")):
        own = PromptTokenizer(tokenizer_of(template), date=date)
        assert written in own.render(said("u")).text
        own = PromptTokenizer(tokenizer_of(template), {"strftime_now": datetime.date(2025, 1, 2).strftime}, date=date)
        assert written not in own.render(said("u")).text


def test_the_date_of_the_prompts_stays_when_midnight_passes(dated, monkeypatch):
    """Of the loader, of batches made without one, of evaluations, and of V*."""
    policy = dated()
    policy.date = datetime.date(2024, 2, 29)
    loader = rl.PromptLoader(ROWS, policy, batch_size=2, shuffle=False)
    before, batch = loader.next_batch().token_ids, rl.make_batch(policy, ROWS)
    evaluate = lambda: rl.evaluate(policy, ROWS, lambda completions: [0.0] * 4, max_completion_length=1).rollout  # noqa: E731
    first = evaluate()
    assert before[0][: len("Today Date: 29 Feb 2024")] == tuple(
        policy.tokenizer("Today Date: 29 Feb 2024")["input_ids"]
    )
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    monkeypatch.setattr(datetime, "datetime", Tomorrow)
    loader.next_batch()
    assert loader.next_batch().token_ids == before
    assert rl.make_batch(policy, ROWS).token_ids == batch.token_ids
    assert evaluate().prompt_ids.tolist() == first.prompt_ids.tolist()
    assert rl.make_batch(policy.reference(), ROWS).token_ids == batch.token_ids


def test_a_resumed_loader_goes_on_with_the_date_of_its_checkpoint(dated):
    old, new = dated(), dated()
    old.date = datetime.date(2024, 7, 26)
    loader = rl.PromptLoader(ROWS, old, batch_size=2, seed=1)
    loader.next_batch()
    state = json.loads(json.dumps(loader.state_dict()))
    want = [loader.next_batch().token_ids for _ in range(3)]
    resumed = rl.PromptLoader(ROWS, new, batch_size=2, seed=1)
    assert resumed.next_batch().token_ids != want[0]
    resumed.load_state_dict(state)
    assert [resumed.next_batch().token_ids for _ in range(3)] == want
    assert new.date == old.date  # what is evaluated from now on has it too
    assert rl.make_batch(new, ROWS).token_ids == rl.make_batch(old, ROWS).token_ids
    resumed.load_state_dict({name: value for name, value in state.items() if name != "date"})  # an older checkpoint
