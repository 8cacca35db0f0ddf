"""Prompts: from dataset rows to token ids, once, in an order that a seed fixes and a checkpoint can continue.

A prompt is plain text or a list of chat messages. It is tokenised here and nowhere else, with exactly one
beginning-of-sequence token (known_faults B53); engines get token ids. Row ids are hashes of the row's content, so that
a row keeps its id through filters, shuffles and restarts (known_faults B35, B46).
"""

import datetime
import decimal
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlkit import collectives
from rlkit.rollout import Prompt, PromptBatch

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

OnLong = Literal["error", "skip"]


def content_id(row: Mapping[str, Any]) -> int:
    """A 63-bit id of a row's content (prompt and every column): the same in every process, dataset and run.

    Example:
        >>> content_id({"prompt": "a", "answer": 1}) == content_id({"answer": 1, "prompt": "a"})
        True
        >>> content_id({"prompt": "a", "answer": 1}) == content_id({"prompt": "a", "answer": 2})
        False
    """
    try:
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=_plain)
    except TypeError as error:
        raise TypeError(
            f"A dataset row cannot be identified by its content: {error}. Expected plain data in every column "
            "(numbers, texts, lists, dicts with text keys, dates, bytes, arrays, images); the row has "
            f"{sorted(map(str, row))}."
        ) from error
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _plain(value: object) -> object:
    """What json cannot write itself, in a form that is the same in every process.

    Raises:
        TypeError: an object that has no such form.
    """
    if hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(item, sort_keys=True, default=_plain) for item in value)
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, os.PathLike)):
        return str(value)
    if hasattr(value, "tobytes"):  # images
        return [str(getattr(value, "size", "")), hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()]
    raise TypeError(f"{type(value).__name__} is not plain data")


def tokenize_prompt(tokenizer: Any, prompt: Prompt, **chat_template_kwargs: Any) -> list[int]:
    """Token ids of a prompt, with one beginning-of-sequence token if the tokenizer uses one.

    A conversation goes through the chat template: with the generation prompt if a user or tool spoke last, continuing
    the last message if the assistant did.

    Raises:
        TypeError: neither text nor a list of messages.
        ValueError: a conversation without a chat template, or a prompt without any token.
    """
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        templated = bool(bos) and prompt.startswith(bos)
        ids = tokenizer(prompt, add_special_tokens=not templated)["input_ids"]
        # A tokenizer may close every text with an end token; a prompt must stay open.
        if (
            ids
            and ids[-1] == tokenizer.eos_token_id
            and not prompt.endswith(tokenizer.eos_token or "\0")
            and len(ids) > 1
        ):
            ids = ids[:-1]
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the prompt is a conversation but the tokenizer has no chat template. Use plain text "
                "prompts, a chat model's tokenizer, or set tokenizer.chat_template."
            )
        messages = [dict(message) for message in prompt if isinstance(message, Mapping)]
        prefill = messages[-1]["role"] == "assistant"
        ids = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            **chat_template_kwargs,
        )["input_ids"]
    else:
        raise TypeError(
            "a prompt must be text or a list of messages [{'role': ..., 'content': ...}], got "
            f"{type(prompt).__name__}: {str(prompt)[:80]!r}."
        )
    if not ids:
        raise ValueError("the prompt has no token: it is empty and the tokenizer adds none.")
    return list(ids)


def _tokenize_row(
    tokenizer: Any, row: Mapping[str, Any], where: str, chat_template_kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """Token ids of a row's prompt; an error names the row."""
    if "prompt" not in row:
        raise ValueError(f"{where} has no 'prompt'; its columns are {sorted(row)}.")
    try:
        return tuple(tokenize_prompt(tokenizer, row["prompt"], **chat_template_kwargs))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def make_batch(
    policy: "Policy",
    rows: Sequence[Prompt | Mapping[str, Any]],
    *,
    first_group_id: int = 0,
    **chat_template_kwargs: Any,
) -> PromptBatch:
    """A PromptBatch from prompts or dataset rows, numbered from `first_group_id`.

    Example: `rl.make_batch(policy, ["12+34=", {"prompt": "1+1=", "answer": "2"}])`
    """
    if isinstance(rows, str):
        raise TypeError("make_batch: expected a list of prompts or rows, got one string; write [prompt].")
    full = [dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in rows]
    return PromptBatch(
        rows=tuple(full),
        token_ids=tuple(
            _tokenize_row(policy.tokenizer, row, f"make_batch: row {place}", chat_template_kwargs)
            for place, row in enumerate(full)
        ),
        row_id=torch.tensor([content_id(row) for row in full], dtype=torch.int64),
        group_id=torch.arange(first_group_id, first_group_id + len(full), dtype=torch.int64),
    )


def check_prompt_column(dataset: Any, where: str) -> None:
    """Refuse a dataset that is empty, has no length, or has no prompt column.

    Raises:
        TypeError, ValueError: say what came and what to do.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{where}: expected a dataset with a length (datasets.Dataset or a list of rows), got "
            f"{type(dataset).__name__}. Take the rows you need first, e.g. Dataset.from_list(list(stream.take(1000)))."
        )
    if not len(dataset):
        raise ValueError(f"{where}: the dataset is empty.")
    if type(dataset).__module__.startswith("pandas"):
        raise TypeError(f"{where}: got a pandas frame; pass its rows: frame.to_dict('records').")
    if isinstance(dataset, Mapping):
        raise TypeError(f"{where}: got a dict with {list(dataset)[:5]}; pass one split, or a list of rows.")
    row = dataset[0]
    columns = list(row) if isinstance(row, Mapping) else [type(row).__name__]
    if "prompt" not in columns:
        raise ValueError(
            f"{where}: the dataset has no 'prompt' column; it has {columns}. "
            "Rename it: dataset.rename_column('question', 'prompt'), or build it with dataset.map."
        )


class PromptLoader:
    """Serves the prompts of each step, epoch after epoch, as `PromptBatch`es.

    `batch_size` counts prompts of the whole step, whatever the number of processes: each gets a contiguous share of
    whole groups, and a share may be empty. The order is a function of the seed and the epoch. The last batch of an
    epoch may be smaller. Iterating never ends; `run.steps` says when.

    Args:
        dataset: a `datasets.Dataset` or a list of rows, with a `prompt` column (text or messages).
        policy: whose tokenizer is used.
        batch_size: P, prompts per step.
        seed: of the order.
        shuffle: False serves the rows in the dataset's order.
        drop_last: leave out the last batch of an epoch if it is smaller.
        max_prompt_length: most tokens of a prompt; None takes the model's context.
        on_long: "error" names the rows that are longer; "skip" leaves them out and says how many.
        chat_template_kwargs: for the chat template, e.g. {"enable_thinking": False}.

    Attributes:
        epoch: the epoch that the next batch belongs to.
        served: prompts served so far, over all epochs; also the next group id.

    Raises:
        ValueError: empty dataset, no prompt column, batch size below 1, prompts too long.
    """

    def __init__(
        self,
        dataset: Any,
        policy: "Policy",
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        max_prompt_length: int | None = None,
        on_long: OnLong = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_prompt_column(dataset, "PromptLoader")
        if not isinstance(batch_size, int):
            raise TypeError(f"PromptLoader: batch_size must be a whole number, got {batch_size!r}.")
        if batch_size < 1:
            raise ValueError(f"PromptLoader: batch_size must be at least 1, got {batch_size}.")
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ValueError(f"PromptLoader: max_prompt_length must be at least 1 or None, got {max_prompt_length}.")
        if on_long not in ("error", "skip"):
            raise ValueError(f"PromptLoader: on_long must be 'error' or 'skip', got {on_long!r}.")
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self._tokens = [
            _tokenize_row(policy.tokenizer, row, f"PromptLoader: row {place}", chat_template_kwargs or {})
            for place, row in enumerate(dataset)
        ]
        self._rows = self._fitting_rows(max_prompt_length or policy.max_context, on_long)
        if drop_last and len(self._rows) < batch_size:
            raise ValueError(
                f"PromptLoader: drop_last with {len(self._rows)} rows and batch_size={batch_size} leaves no batch."
            )
        self._row_ids = {place: content_id(dataset[place]) for place in self._rows}
        self.epoch = 0
        self.served = 0
        self._position = 0  # rows of this epoch that were served
        self._shuffled: tuple[int, list[int]] | None = None  # epoch and its order

    def _fitting_rows(self, limit: int | None, on_long: OnLong) -> list[int]:
        if limit is None:
            return list(range(len(self._tokens)))
        too_long = [place for place, ids in enumerate(self._tokens) if len(ids) > limit]
        if not too_long:
            return list(range(len(self._tokens)))
        shown = ", ".join(f"row {place} ({len(self._tokens[place])} tokens)" for place in too_long[:5])
        more = f" and {len(too_long) - 5} more" if len(too_long) > 5 else ""
        if on_long == "error":
            raise ValueError(
                f"PromptLoader: {len(too_long)} prompt(s) are longer than {limit} tokens: {shown}{more}. "
                "Raise max_prompt_length, shorten them, or leave them out with on_long='skip'."
            )
        if len(too_long) == len(self._tokens):
            raise ValueError(f"PromptLoader: every prompt is longer than {limit} tokens: {shown}{more}.")
        logger.warning(
            "PromptLoader: left out %d prompt(s) longer than %d tokens: %s%s.", len(too_long), limit, shown, more
        )
        skipped = set(too_long)
        return [place for place in range(len(self._tokens)) if place not in skipped]

    def __len__(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(len(self._rows), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[PromptBatch]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> PromptBatch:
        """The next batch; the position moves on."""
        order = self._order(self.epoch)
        places = order[self._position : self._position + self.batch_size]
        mine = collectives.share(len(places))  # whole groups; all of them with one process
        groups = torch.arange(self.served, self.served + len(places), dtype=torch.int64)
        batch = PromptBatch(
            rows=tuple(dict(self.dataset[place]) for place in places[mine]),
            token_ids=tuple(self._tokens[place] for place in places[mine]),
            row_id=torch.tensor([self._row_ids[place] for place in places[mine]], dtype=torch.int64),
            group_id=groups[mine],
        )
        self.served += len(places)
        self._position += len(places)
        left = len(order) - self._position
        if left == 0 or (self.drop_last and left < self.batch_size):
            self.epoch += 1
            self._position = 0
        return batch

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return self._rows
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed(content_id({"prompt": [self.seed, epoch]}))
            order = torch.randperm(len(self._rows), generator=generator).tolist()
            self._shuffled = (epoch, [self._rows[i] for i in order])
        return self._shuffled[1]

    def state_dict(self) -> dict[str, int]:
        """The position, counted in prompts that were served; a plain dict for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "served": self.served,
            "seed": self.seed,
            "rows": len(self._rows),
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved position.

        Raises:
            ValueError: the state belongs to another dataset size, seed or order: its position would mean other prompts.
        """
        for name, own in (("seed", self.seed), ("rows", len(self._rows)), ("shuffle", self.shuffle)):
            if state[name] != own:
                raise ValueError(
                    f"PromptLoader.load_state_dict: the saved position was made with {name}={state[name]}, this loader "
                    f"has {name}={own}; the same position would be other prompts."
                )
        self.epoch, self._position, self.served = state["epoch"], state["position"], state["served"]

    def __repr__(self) -> str:
        return (
            f"PromptLoader({len(self._rows)} prompts, batch_size={self.batch_size}, epoch {self.epoch}, "
            f"{self._position} served in it)"
        )
