"""`make_batch`: a PromptBatch from prompts or rows that are at hand, without a loader."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkit.prompts.identity import content_id, plain_row
from rlkit.prompts.tokens import PromptTokenizer
from rlkit.types import Prompt, PromptBatch

if TYPE_CHECKING:
    from rlkit.policy import Policy


def make_batch(
    policy: "Policy",
    rows: Sequence[Prompt | Mapping[str, Any]],
    *,
    first_group_id: int = 0,
    **chat_template_kwargs: Any,
) -> PromptBatch:
    """A PromptBatch from prompts or dataset rows, numbered from `first_group_id`.

    Raises:
        TypeError, ValueError: a prompt that cannot be tokenised; the error names the row.

    Example: `rl.make_batch(policy, ["12+34=", {"prompt": "1+1=", "answer": "2"}])`
    """
    if isinstance(rows, str):
        raise TypeError("make_batch: expected a list of prompts or rows, got one string; write [prompt].")
    full = [dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in rows]
    tokenizer = PromptTokenizer(policy.tokenizer, chat_template_kwargs, date=policy.date)
    ids = tokenizer.encode_rows(full, [f"make_batch: row {place}" for place in range(len(full))])
    return batch_of(full, ids, range(first_group_id, first_group_id + len(full)))


def batch_of(rows: Sequence[dict[str, Any]], token_ids: Sequence[Sequence[int]], groups: Sequence[int]) -> PromptBatch:
    """The batch of rows whose prompts are tokenised."""
    return PromptBatch(
        rows=tuple(plain_row(row) for row in rows),
        token_ids=tuple(tuple(ids) for ids in token_ids),
        row_id=torch.tensor([content_id(row) for row in rows], dtype=torch.int64),
        group_id=torch.tensor(list(groups), dtype=torch.int64),
    )
