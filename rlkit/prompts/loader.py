"""`PromptLoader` serves the prompts of each step, epoch after epoch; `make_batch` makes one batch of given rows."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkit.distributed import collectives
from rlkit.prompts.identity import content_id, plain_row
from rlkit.prompts.lengths import LengthRule, OnLong, check_rule
from rlkit.prompts.rows import as_rows, is_stream
from rlkit.prompts.supply import MapSupply, StreamSupply
from rlkit.prompts.tokens import PromptTokenizer
from rlkit.support.process_state import current
from rlkit.types import Prompt, PromptBatch

if TYPE_CHECKING:
    from rlkit.policy import Policy


class PromptLoader:
    """Serves the prompts of each step, epoch after epoch, as `PromptBatch`es.

    `batch_size` counts prompts of the whole step, whatever the number of processes: each gets a contiguous share of
    whole groups, and a share may be empty. The order is a function of the seed and the epoch. The last batch of an
    epoch may be smaller. Iterating never ends; `run.steps` says when.

    Args:
        dataset: rows with a `prompt` (text or messages): a `datasets.Dataset`, a list of dicts, a pandas frame, or the
            path of a JSON, JSON Lines, Parquet or CSV file or of a folder of them. Or a stream, which has no length: a
            `datasets.IterableDataset`, or a function that returns a fresh iterator of rows.
        policy: whose tokenizer is used.
        batch_size: P, prompts per step.
        seed: of the order; `--seed` of a script wins.
        shuffle: False serves the rows in the dataset's order. An `IterableDataset` is shuffled by its own buffer
            (`IterableDataset.shuffle`); a function's rows are not shuffled.
        drop_last: leave out the last batch of an epoch if it is smaller.
        max_prompt_length: most tokens of a prompt; None takes the model's context, or that of the engine in use
            (`policy.use`) if it is shorter, less one for a completion.
        on_long: "error" names the rows that are longer; "skip" leaves them out and says how many; "truncate-left" cuts
            their beginning, never the generation prompt or the beginning-of-sequence token, and says which.
        chat_template_kwargs: for the chat template, e.g. {"enable_thinking": False}. A row's own column
            `chat_template_kwargs` comes on top.

    Attributes:
        epoch: the epoch that the next batch belongs to.
        served: prompts served so far, over all epochs; also the next group id.

    Raises:
        ValueError: empty dataset, no prompt column, batch size below 1, prompts too long. The rows of a stream are
            looked at when they are served; all others before the first step.
        TypeError: no dataset, or an iterator that can be read only once.
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
        streams = is_stream(dataset)
        if not streams:
            dataset = as_rows(dataset, "PromptLoader")
        if not isinstance(batch_size, int):
            raise TypeError(f"PromptLoader: batch_size must be a whole number, got {batch_size!r}.")
        if batch_size < 1:
            raise ValueError(f"PromptLoader: batch_size must be at least 1, got {batch_size}.")
        check_rule(max_prompt_length, on_long, "PromptLoader")
        seed = seed if current.seed is None else current.seed
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        tokenizer = PromptTokenizer(policy.tokenizer, chat_template_kwargs, date=policy.date)
        rule = LengthRule(max_prompt_length or _longest(policy), on_long)
        supply = StreamSupply if streams else MapSupply
        self._policy, self._template = policy, tokenizer.template
        self._supply = supply(dataset, tokenizer, rule, seed=seed, shuffle=shuffle, drop_last=drop_last)
        if drop_last and self._rows is not None and self._rows < batch_size:
            raise ValueError(
                f"PromptLoader: drop_last with {self._rows} rows and batch_size={batch_size} leaves no batch."
            )
        self.epoch = 0
        self.served = 0
        self._position = 0  # rows of this epoch that were served (of a stream: read)

    @property
    def _rows(self) -> int | None:
        """Prompts of an epoch; None for a stream."""
        return len(self._supply) if isinstance(self._supply, MapSupply) else None

    def __len__(self) -> int:
        """Batches per epoch.

        Raises:
            TypeError: of a stream, which has no length.
        """
        if self._rows is None:
            raise TypeError("PromptLoader: a stream has no length; run.steps(prompts, max_steps) says when to stop.")
        whole, rest = divmod(self._rows, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[PromptBatch]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> PromptBatch:
        """The next batch; the position moves on.

        Raises:
            ValueError: a stream in which no prompt is short enough, or fewer than a batch with `drop_last`.
        """
        taken = self._supply.take(self.epoch, self._position, self.batch_size)
        if not taken.total:  # only a stream can tell so late
            self._begin_epoch()
            taken = self._supply.take(self.epoch, 0, self.batch_size)
            if not taken.total:
                raise ValueError(
                    "PromptLoader: the stream has no batch to serve: every prompt is longer than max_prompt_length, "
                    "or with drop_last there are fewer than batch_size rows."
                )
        mine = collectives.share(taken.total)
        groups = range(self.served, self.served + taken.total)[mine]
        batch = _batch(taken.rows, taken.token_ids, groups)
        self.served += taken.total
        self._position = taken.position
        if taken.ended:
            self._begin_epoch()
        return batch

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in prompts that were served, and the date in them; plain values for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "served": self.served,
            "seed": self.seed,
            "rows": self._rows,
            "shuffle": self.shuffle,
            "date": self._template.date.isoformat(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position; a stream is read up to it. The policy takes over the saved date.

        Raises:
            ValueError: the state was saved with another dataset size, seed or order.
        """
        for name, own in (("seed", self.seed), ("rows", self._rows), ("shuffle", self.shuffle)):
            if state[name] != own:
                raise ValueError(
                    f"PromptLoader.load_state_dict: the saved position was made with {name}={state[name]}, this loader "
                    f"has {name}={own}, so the saved position would select other prompts."
                )
        if "date" in state:
            self._template.date = self._policy.date = datetime.date.fromisoformat(state["date"])
        self.epoch, self._position, self.served = state["epoch"], state["position"], state["served"]

    def __repr__(self) -> str:
        many = "a stream of" if self._rows is None else f"{self._rows}"
        return f"PromptLoader({many} prompts, batch_size={self.batch_size}, epoch {self.epoch}, {self.served} served)"


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
    return _batch(full, ids, range(first_group_id, first_group_id + len(full)))


def _batch(rows: Sequence[dict[str, Any]], token_ids: Sequence[Sequence[int]], groups: Sequence[int]) -> PromptBatch:
    return PromptBatch(
        rows=tuple(plain_row(row) for row in rows),
        token_ids=tuple(tuple(ids) for ids in token_ids),
        row_id=torch.tensor([content_id(row) for row in rows], dtype=torch.int64),
        group_id=torch.tensor(list(groups), dtype=torch.int64),
    )


def _longest(policy: "Policy") -> int | None:
    """Most tokens of a prompt that the model and the engine in use can take."""
    engine = policy.engine.max_context if policy.engine is not None else None
    return min((limit for limit in (policy.max_context, engine and engine - 1) if limit is not None), default=None)
