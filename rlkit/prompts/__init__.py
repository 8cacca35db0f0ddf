"""Prompts: from dataset rows to token ids, once, in an order that a seed fixes and a checkpoint can continue.

    any dataset -> `as_rows` -> rows -> `PromptTokenizer` -> token ids -> `PromptLoader` -> `PromptBatch`

A prompt is plain text or a list of chat messages. It is tokenised here and nowhere else, with exactly one
beginning-of-sequence token; engines get token ids. A row's id is a hash of its content, so that it stays the same
through filters, shuffles and restarts.
"""

from rlkit.prompts.identity import content_id
from rlkit.prompts.loader import PromptLoader, make_batch
from rlkit.prompts.rows import as_rows
from rlkit.prompts.tokens import PromptTokenizer

__all__ = [
    "PromptLoader",
    "PromptTokenizer",
    "as_rows",
    "content_id",
    "make_batch",
]
