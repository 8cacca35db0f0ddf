"""Render a conversation with its tokenizer's chat template, with every message in its place.

Templates leave out roles that they do not know, move system messages to the front, and rewrite the message that the
assistant is to continue. Here a message that is left out or moved is an error, and the assistant continues the
generation prompt followed by its message, unchanged. What templates remove inside earlier answers (Qwen3: past
thoughts) is the model's format and stays removed.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.prompts.identity import without_none

TOOL_ROLES = frozenset({"tool", "function", "ipython"})
SYSTEM_ROLES = frozenset({"system", "developer"})
NOT_CONTINUED = ("tool_calls", "reasoning_content", "reasoning", "thinking")
MARK = "rlkit0answer"
TAG = re.compile(r"\s*([<\[][^<>\[\]\s]+[>\]])")  # <think>, [THINK]


class ChatTemplate:
    """The chat template of a tokenizer, with a fixed date for templates that write today's (`strftime_now`)."""

    def __init__(self, tokenizer: Any, date: datetime.date) -> None:
        self.tokenizer, self.date = tokenizer, date
        self._known: set[int] = set()  # shapes of conversations in which every message keeps its place

    def render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """The text of plain messages, and its end that no truncation may touch: the generation prompt with the message
        that the assistant is to continue, if there is one.

        Raises:
            ValueError: the template refuses the conversation, leaves out or moves a message, or cannot continue one.
        """
        if len(messages) > 1 and messages[-1]["role"] == "assistant" and _is_empty(messages[-1]):
            messages = messages[:-1]  # nothing to continue
        if messages[-1]["role"] == "assistant":
            return self._continue(messages[:-1], messages[-1], kwargs)
        text = self._apply(messages, kwargs)
        last = messages[-1]["content"].strip()
        if messages[-1]["role"] not in TOOL_ROLES and last not in text:
            raise _left_out(f"the last message, of role {messages[-1]['role']!r}", last)
        self._check_places(messages, kwargs)
        shown = self._apply(messages, kwargs, add_generation_prompt=False)
        return text, text[len(shown) :] if text.startswith(shown) else ""

    def _continue(
        self, before: Sequence[Mapping[str, Any]], last: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str]:
        begun = last["content"]
        odd = [name for name in NOT_CONTINUED if last.get(name)]
        if odd:
            raise ValueError(
                f"the last message, which the assistant is to continue, has {odd[0]!r}; only its content can be "
                "continued. Write everything into the content, or let the prompt end with a user or tool message."
            )
        shown = start = ""
        if before:
            self._check_places(before, kwargs)
            shown = self._apply(before, kwargs, add_generation_prompt=False)
            start = self._apply(before, kwargs)
        tag = TAG.match(begun)
        if tag and start.startswith(shown) and tag[1] in start[len(shown) :]:
            raise ValueError(
                f"the last message, which the assistant is to continue, begins with {tag[1]!r}, and so does the "
                f"template's generation prompt, {start[len(shown) :]!r}. Leave it out of the message."
            )
        if not tag and start[-1:].isalnum() and start != shown:  # gpt-oss: the model itself writes the channel first
            raise ValueError(
                f"the generation prompt ends with {start[-24:]!r}, the beginning of a header that the model completes, "
                "so the last message cannot follow it. Begin the message with what the model writes there, such as "
                "'<|channel|>final<|message|>'."
            )
        if start == shown:  # no generation prompt: what the template writes between them and a past answer opens one
            past = self._apply([*before, {"role": "assistant", "content": MARK}], kwargs, add_generation_prompt=False)
            opening = past[len(shown) : past.find(MARK)] if past.startswith(shown) and MARK in past else ""
            if "</think>" in opening:
                raise ValueError(
                    f"the chat template has no generation prompt, and writes {opening[-60:]!r} before past answers, so "
                    "there is no form for the last message, which the assistant is to continue."
                )
            start += opening
        text = start + begun
        return text, text[len(shown) :] if shown and text.startswith(shown) else begun

    def _check_places(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> None:
        """Refuse a conversation of which the template leaves out or moves a message.

        Marks replace the contents, so one rendering decides for all conversations of the same roles and settings.
        """
        marked, marks = [], []
        for number, message in enumerate(messages):
            own = dict(message)
            if message["content"].strip():
                own["content"] = f"rlkit{number}message"
                marks.append((number, own["content"], message["content"].strip()))
            if calls := message.get("tool_calls"):
                own["tool_calls"], found = _mark_calls(calls, number)
                marks += [(number, mark, name) for mark, name in found.items()]
            marked.append(own)
        key = hash(repr((marked, kwargs)))
        if key in self._known:
            return
        text = self._apply(marked, kwargs)
        before, end = 0, -1
        for number, mark, meant in marks:
            role, place, is_call = messages[number]["role"], text.find(mark), mark.endswith("call")
            if place < 0:
                raise _left_out(f"{'a tool call of ' * is_call}message {number}, of role {role!r}", meant)
            if is_call or (number == 0 and role in SYSTEM_ROLES):
                continue  # Mistral writes the system message at the beginning into the last user message
            if place < end:
                moved = before if messages[before]["role"] in SYSTEM_ROLES or role in TOOL_ROLES else number
                raise ValueError(
                    f"the chat template moves message {moved}, of role {messages[moved]['role']!r}, to another place "
                    "in the conversation. Put it where the model expects such messages, or give it another role."
                )
            before, end = number, place
        self._known.add(key)

    def _apply(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], **how: bool) -> str:
        from jinja2 import TemplateError

        settings = {"add_generation_prompt": True, "strftime_now": self.date.strftime} | how | dict(kwargs)
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **settings)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        check_unicode(text)
        return text


def _left_out(which: str, text: str) -> ValueError:
    return ValueError(
        f"the chat template leaves out {which}: {text[:60]!r}. Is the role, or the form of the message, one "
        "that this model's template knows?"
    )


def _is_empty(message: Mapping[str, Any]) -> bool:
    return not message["content"] and not message.get("tool_calls")


def _mark_calls(calls: Any, number: int) -> tuple[Any, dict[str, str]]:
    """Tool calls with marks in place of the functions' names, in either form that templates read; name by mark."""
    marked, names = [], {}
    for place, call in enumerate(calls if isinstance(calls, (list, tuple)) else []):
        mark, own = f"rlkit{number}x{place}call", call
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
            own = call["function"]
        if isinstance(own, Mapping) and "name" in own:
            names[mark] = str(own["name"])
            call = {**call, "name": mark} if own is call else {**call, "function": {**own, "name": mark}}
        marked.append(call)
    return marked or calls, names


def check_unicode(text: str) -> None:
    """Refuse a text with a lone surrogate."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not Unicode: it has a lone surrogate, U+{ord(text[error.start]):04X}, at character "
            f"{error.start}. Mend the data: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
        ) from error


def plain_message(message: Any, number: int) -> dict[str, Any]:
    """A message as chat templates want it: one text as content, and no key that is None, at any depth."""
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or not role:
        raise TypeError(f"message {number}: the role must be a text such as 'user', got {role!r}.")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in content}
        if kinds - {"text"} or not all(isinstance(part.get("text"), str) for part in content):
            raise ValueError(
                f"message {number} holds parts of type {', '.join(sorted(kinds))}; this policy reads text only: "
                "[{'type': 'text', 'text': ...}]."
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError(f"message {number} ({role}): the content must be text, got {type(content).__name__}.")
    return without_none(message) | {"role": role, "content": content}
