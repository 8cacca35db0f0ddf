"""From prompts to token ids, in batches.

A conversation goes through the tokenizer's chat template and becomes text. A text gets the tokenizer's special tokens
unless it begins with them already. So each prompt has exactly one beginning-of-sequence token if its tokenizer uses
one, and no end token. Several in front become one; one inside a message or later in a text is refused. A text that
begins with it is in the model's own format, which may repeat it (Llama 2).

rlkit does not run tools, so a `tools` column is left out of the prompt and goes to the reward functions, with one
warning. Images are an error.
"""

import datetime
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.prompts.conversations import ChatTemplate, check_unicode, plain_message
from rlkit.prompts.identity import without_none
from rlkit.types import Prompt

logger = logging.getLogger(__name__)

RESERVED = frozenset(
    {"conversation", "tokenize", "return_dict", "add_generation_prompt", "continue_final_message", "tools"}
)


@dataclass(frozen=True)
class Rendered:
    """A prompt as the text that is tokenised.

    Attributes:
        text: with the chat template applied.
        special: True where the tokenizer adds its own special tokens.
        tail: the last characters of a conversation, which no truncation may touch: the generation prompt, or the
            message that the assistant is to continue.
    """

    text: str
    special: bool
    tail: str = ""


class PromptTokenizer:
    """A tokenizer with the settings of its chat template.

    Args:
        tokenizer: a transformers tokenizer.
        chat_template_kwargs: for the chat template, e.g. {"enable_thinking": False}. A row's own column
            `chat_template_kwargs` comes on top (TRL's name and meaning).
        date: for a template that writes today's date; None takes the day on which this object is made.

    Raises:
        ValueError: a setting that rlkit decides (tokenize, add_generation_prompt ...).
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        date: datetime.date | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, date or datetime.date.today())
        self.kwargs = _checked_kwargs(chat_template_kwargs or {})
        self._told_of_tools = False
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and list(tokenizer("a", verbose=False)["input_ids"][:1]) == [bos]

    def render_row(self, row: Mapping[str, Any], where: str) -> Rendered:
        """The text of a row's prompt; a TypeError or ValueError names the row."""
        if not isinstance(row, Mapping):
            raise TypeError(f"{where} must be a dict with a 'prompt', got {type(row).__name__}: {str(row)[:60]!r}.")
        if "prompt" not in row:
            raise ValueError(f"{where} has no 'prompt'; its columns are {sorted(map(str, row))}.")
        if row.get("tools") and not self._told_of_tools:
            self._told_of_tools = True
            logger.warning(
                "%s has a 'tools' column: rlkit runs no tools, so they are left out of the prompt. Reward functions "
                "get the column.",
                where,
            )
        own = row.get("chat_template_kwargs") or {}
        try:
            if not isinstance(own, Mapping):
                raise TypeError(f"the column chat_template_kwargs must hold a dict, got {type(own).__name__}.")
            return self.render(row["prompt"], without_none(own))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error

    def render(self, prompt: Prompt, own_kwargs: Mapping[str, Any] | None = None) -> Rendered:
        """The text of a prompt; TypeError or ValueError if it has none."""
        if isinstance(prompt, str):
            check_unicode(prompt)
            bos = self.tokenizer.bos_token
            templated = bool(bos) and prompt.startswith(bos)
            if not templated:
                self._check_spelled(prompt)
            return Rendered(prompt, special=not templated)
        messages = prompt if isinstance(prompt, Sequence) else []
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise TypeError(
                "a prompt must be text or a list of messages [{'role': ..., 'content': ...}], got "
                f"{type(prompt).__name__}: {str(prompt)[:80]!r}."
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "the prompt is a conversation but the tokenizer has no chat template. Use plain text "
                "prompts, a chat model's tokenizer, or set tokenizer.chat_template."
            )
        plain = [plain_message(message, number) for number, message in enumerate(messages)]
        for message in plain:
            self._check_spelled(message["content"])
        text, tail = self.template.render(plain, self.kwargs | _checked_kwargs(own_kwargs or {}))
        return Rendered(text, special=False, tail=tail)

    def _check_spelled(self, text: str) -> None:
        """Refuse a text that spells out the beginning-of-sequence token which the tokenizer puts in front of it."""
        bos = self.tokenizer.bos_token
        if self._adds_bos and bos != self.tokenizer.eos_token and bos in text:
            raise ValueError(
                f"the text spells out the beginning-of-sequence token {bos!r} at character {text.index(bos)}, where "
                "the model would see a second beginning. Take it out. A prompt in the model's own format is one text "
                "that begins with it."
            )

    def encode(self, prompts: Sequence[Rendered]) -> list[list[int]]:
        """Token ids of rendered prompts: one call of the tokenizer with special tokens, one without."""
        ids: list[list[int]] = [[] for _ in prompts]
        for special in (True, False):
            places = [place for place, prompt in enumerate(prompts) if prompt.special is special]
            if places:
                texts = [prompts[place].text for place in places]
                found = self.tokenizer(  # verbose=False: LengthRule and `sample` report lengths
                    texts, add_special_tokens=special, return_attention_mask=False, verbose=False
                )["input_ids"]
                for place, one in zip(places, found, strict=True):
                    ids[place] = self._open(list(one), prompts[place].text)
        return ids

    def _open(self, ids: list[int], text: str) -> list[int]:
        """Drop all but one beginning-of-sequence token, and the end token that some tokenizers append."""
        bos, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        closed = len(ids) > 1 and ids[-1] == end and not text.endswith(self.tokenizer.eos_token or "\0")
        return ids[:-1] if closed else ids

    def encode_rows(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[int]]:
        """Token ids of the prompts of rows; an error names the row."""
        ids = self.encode([self.render_row(row, name) for row, name in zip(rows, names, strict=True)])
        for name, one in zip(names, ids, strict=True):
            if not one:
                raise ValueError(f"{name}: {NO_TOKEN}")
        return ids


NO_TOKEN = "the prompt has no token: it is empty and the tokenizer adds none."


def _checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    taken = sorted(RESERVED & set(kwargs))
    if taken:
        raise ValueError(f"chat_template_kwargs: {', '.join(taken)} cannot be set there; rlkit decides it itself.")
    return dict(kwargs)
