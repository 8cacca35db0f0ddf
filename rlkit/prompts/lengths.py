"""Prompts that are too long: an error that names them, left out, or cut on the left.

A cut removes the beginning of the text. The generation prompt of a conversation (or the answer to continue) and the
beginning-of-sequence token stay. A cut prompt keeps its row, its columns and its group.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlkit.prompts.tokens import NO_TOKEN, PromptTokenizer, Rendered

logger = logging.getLogger(__name__)

OnLong = Literal["error", "skip", "truncate-left"]
SPECIALS, EXPANSION = 16, 36  # tokens that a tokenizer may add, and the most that it makes of one character


@dataclass(frozen=True)
class LengthRule:
    """The most tokens that a prompt may have, and what happens to longer ones."""

    limit: int | None
    on_long: OnLong

    def surely_fits(self, prompt: Rendered) -> bool:
        """True if the prompt need not be tokenised to know that it fits.

        No tokenizer makes more tokens of a text than it has bytes, unless it rewrites characters first (NFKD turns one
        into up to 18, 33 bytes in all); ASCII is never rewritten. Text of white space alone may have no token at all.
        """
        if not prompt.text.strip():
            return False
        most = len(prompt.text) * (1 if prompt.text.isascii() else EXPANSION) + SPECIALS
        return self.limit is None or most <= self.limit

    def too_long(self, tokens: int) -> bool:
        """Whether a prompt has more tokens than the limit."""
        return self.limit is not None and tokens > self.limit

    def fit(
        self, prompts: Sequence[Rendered], names: Sequence[str], tokenizer: PromptTokenizer, *, cut: bool
    ) -> list[tuple[list[int], int]]:
        """Token ids of prompts, cut to the limit if asked, and the number of tokens before the cut.

        Raises:
            ValueError: a prompt without tokens, or one that cannot be cut.
        """
        found = []
        for prompt, ids, name in zip(prompts, tokenizer.encode(prompts), names, strict=True):
            if not ids:
                raise ValueError(f"{name}: {NO_TOKEN}")
            short = self.cut(ids, prompt, tokenizer, name) if cut and self.too_long(len(ids)) else ids
            found.append((short, len(ids)))
        return found

    def cut(self, ids: Sequence[int], prompt: Rendered, tokenizer: PromptTokenizer, where: str) -> list[int]:
        """The last tokens of a prompt that is too long, with its beginning-of-sequence token in front.

        Raises:
            ValueError: the limit leaves no room for the part that must stay.
        """
        assert self.limit is not None
        bos = tokenizer.tokenizer.bos_token_id
        front = [bos] if bos is not None and ids[0] == bos else []
        tail = len(tokenizer.encode([Rendered(prompt.tail, special=False)])[0]) if prompt.tail else 1
        if len(front) + tail > self.limit:
            raise ValueError(
                f"{where}: max_prompt_length={self.limit} cannot hold what must stay of the prompt: "
                f"{len(front) + tail} tokens of beginning-of-sequence and generation prompt."
            )
        return front + list(ids[len(ids) - (self.limit - len(front)) :])


def report(long: Sequence[tuple[int, int]], total: int, rule: LengthRule, where: str) -> None:
    """Log which prompts, as (row, tokens), are too long; a ValueError if the rule is "error" or no prompt is left."""
    if not long:
        return
    shown = ", ".join(f"row {place} ({tokens} tokens)" for place, tokens in long[:5])
    shown += f" and {len(long) - 5} more" if len(long) > 5 else ""
    if rule.on_long == "error":
        raise ValueError(
            f"{where}: {len(long)} prompt(s) are longer than {rule.limit} tokens: {shown}. Raise max_prompt_length, "
            "shorten them, leave them out with on_long='skip', or cut their beginning with on_long='truncate-left'."
        )
    if rule.on_long == "skip" and len(long) == total:
        raise ValueError(f"{where}: every prompt is longer than {rule.limit} tokens: {shown}.")
    what = "left out" if rule.on_long == "skip" else "cut the beginning of"
    logger.warning("%s: %s %d prompt(s) longer than %d tokens: %s.", where, what, len(long), rule.limit, shown)


def check_rule(max_prompt_length: Any, on_long: Any, where: str) -> None:
    """Raise ValueError for an invalid limit or an unknown `on_long`."""
    if max_prompt_length is not None and not (isinstance(max_prompt_length, int) and max_prompt_length >= 1):
        raise ValueError(
            f"{where}: max_prompt_length must be a whole number of at least 1, or None, got {max_prompt_length!r}."
        )
    if on_long not in ("error", "skip", "truncate-left"):
        raise ValueError(f"{where}: on_long must be 'error', 'skip' or 'truncate-left', got {on_long!r}.")
