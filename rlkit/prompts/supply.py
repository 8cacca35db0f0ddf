"""Where a loader takes its next rows from: rows with a length, or a stream.

Both answer one question: the rows after a position of an epoch. The position is a number, so a checkpoint holds it, and
a resumed stream skips to it. Every process asks the same question and gets the same answer; each then keeps its share.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rlkit.distributed import collectives
from rlkit.prompts.identity import content_id
from rlkit.prompts.lengths import LengthRule, report
from rlkit.prompts.rows import Rows, check_columns, iterate
from rlkit.prompts.tokens import NO_TOKEN, PromptTokenizer

CHUNK = 1024  # rows rendered and tokenised at once
SLOW = 2.0  # seconds after which a progress bar appears


class Taken(NamedTuple):
    """Rows that a supply gave.

    Attributes:
        rows: with every column.
        token_ids: of their prompts.
        total: how many were taken over all processes; the rows are this process's share of them.
        position: after them.
        ended: True if the epoch is over.
    """

    rows: list[dict[str, Any]]
    token_ids: list[list[int]]
    total: int
    position: int
    ended: bool


class MapSupply:
    """Rows with a length: each is looked at once, before the first step, so that no run fails on row 190,000.

    Tokens are made when a row is served: what can be seen to fit without them is not tokenised twice.
    """

    def __init__(
        self, rows: Rows, tokenizer: PromptTokenizer, rule: LengthRule, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        self.rows, self.tokenizer, self.rule = rows, tokenizer, rule
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.places = self._inspect()
        self._order: tuple[int, Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.places)

    def _inspect(self) -> Sequence[int]:
        """Places of the rows that are served, after a look at all of them."""
        from tqdm.auto import tqdm

        long: list[tuple[int, int]] = []
        starts = range(0, len(self.rows), CHUNK)
        with tqdm(
            total=len(self.rows), desc="PromptLoader", unit="row", delay=SLOW, leave=False, file=sys.stderr
        ) as bar:
            for start in starts:
                chunk = _chunk(self.rows, start, min(start + CHUNK, len(self.rows)))
                names = [self._name(start + number) for number in range(len(chunk))]
                shown = [self.tokenizer.render_row(row, name) for row, name in zip(chunk, names, strict=True)]
                unsure = [number for number, one in enumerate(shown) if not self.rule.surely_fits(one)]
                for number, ids in zip(unsure, self.tokenizer.encode([shown[n] for n in unsure]), strict=True):
                    if not ids:
                        raise ValueError(f"{names[number]}: {NO_TOKEN}")
                    if self.rule.limit is not None and len(ids) > self.rule.limit:
                        long.append((start + number, len(ids)))
                        if self.rule.on_long == "truncate-left":
                            self.rule.cut(ids, shown[number], self.tokenizer, names[number])  # it may be impossible
                if isinstance(self.rows, list):  # a Dataset holds plain data by nature, a list may hold anything
                    for row in chunk:
                        content_id(row)
                bar.update(len(chunk))
        report(long, len(self.rows), self.rule, "PromptLoader")
        if self.rule.on_long != "skip" or not long:
            return range(len(self.rows))
        left_out = {place for place, _ in long}
        return [place for place in range(len(self.rows)) if place not in left_out]

    @staticmethod
    def _name(place: int) -> str:
        return f"PromptLoader: row {place}"

    def order(self, epoch: int) -> Sequence[int]:
        """Places in the order of an epoch: a function of the seed and the epoch."""
        if not self.shuffle:
            return self.places
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(content_id({"prompt": [self.seed, epoch]}))
            drawn = torch.randperm(len(self.places), generator=generator).tolist()
            self._order = (epoch, [self.places[i] for i in drawn])
        return self._order[1]

    def take(self, epoch: int, position: int, count: int) -> Taken:
        """The next rows after a position of an epoch, at most `count`."""
        order = self.order(epoch)
        places = order[position : position + count]
        mine = places[collectives.share(len(places))]  # whole groups; all of them with one process
        rows = [dict(self.rows[place]) for place in mine]
        ids = _encode(self.tokenizer, self.rule, rows, [self._name(place) for place in mine])
        position += len(places)
        left = len(order) - position
        return Taken(rows, ids, len(places), position, left == 0 or (self.drop_last and left < count))


class StreamSupply:
    """Rows of a stream. Its position counts rows read, those that were left out for their length included."""

    def __init__(
        self, stream: Any, tokenizer: PromptTokenizer, rule: LengthRule, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        self.stream, self.tokenizer, self.rule, self.drop_last = stream, tokenizer, rule, drop_last
        self.seed = seed if shuffle else None
        self._at: tuple[int, int] | None = None
        self._left: Iterator[Mapping[str, Any]] = iter(())
        first = next(self._open(0, 0), None)
        if first is None:
            raise ValueError("PromptLoader: the stream is empty.")
        check_columns(first, "PromptLoader")
        self._at = None

    def _open(self, epoch: int, position: int) -> Iterator[Mapping[str, Any]]:
        """The rows after a position; where the last `take` did not end there, the stream is read from its beginning."""
        if self._at != (epoch, position):
            rows = iterate(self.stream, "PromptLoader", seed=self.seed, epoch=epoch)
            self._left = itertools.islice(rows, position, None)
        return self._left

    def take(self, epoch: int, position: int, count: int) -> Taken:
        """The next rows after a position of an epoch, at most `count`."""
        left = self._open(epoch, position)
        rows: list[dict[str, Any]] = []
        token_ids: list[list[int]] = []
        long: list[tuple[int, int]] = []
        ended = False
        while len(rows) < count and not ended:
            read = [dict(row) for row in itertools.islice(left, count - len(rows))]
            ended = len(read) < count - len(rows)
            names = [f"PromptLoader: row {position + number} of the stream" for number in range(len(read))]
            shown = [self.tokenizer.render_row(row, name) for row, name in zip(read, names, strict=True)]
            for number, ids in enumerate(self.tokenizer.encode(shown)):
                if not ids:
                    raise ValueError(f"{names[number]}: {NO_TOKEN}")
                if self.rule.limit is not None and len(ids) > self.rule.limit:
                    long.append((position + number, len(ids)))
                    if self.rule.on_long == "skip":
                        continue
                    if self.rule.on_long == "truncate-left":
                        ids = self.rule.cut(ids, shown[number], self.tokenizer, names[number])
                rows.append(read[number])
                token_ids.append(ids)
            position += len(read)
        report(long, -1, self.rule, "PromptLoader")
        self._at = (epoch, position)
        if not ended:  # a stream that ends with this very row ends the epoch
            following = next(left, None)
            ended = following is None
            self._left = left if following is None else itertools.chain([following], left)
        if self.drop_last and len(rows) < count:
            rows, token_ids = [], []
        mine = collectives.share(len(rows))
        return Taken(rows[mine], token_ids[mine], len(rows), position, ended)


def _encode(
    tokenizer: PromptTokenizer, rule: LengthRule, rows: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[list[int]]:
    """Token ids of rows that were inspected, cut where the rule says so."""
    shown = [tokenizer.render_row(row, name) for row, name in zip(rows, names, strict=True)]
    found = tokenizer.encode(shown)
    for number, ids in enumerate(found):
        if not ids:
            raise ValueError(f"{names[number]}: {NO_TOKEN}")
        if rule.limit is not None and len(ids) > rule.limit:
            found[number] = rule.cut(ids, shown[number], tokenizer, names[number])
    return found


def _chunk(rows: Any, start: int, stop: int) -> list[Any]:
    """Rows start to stop, read at once where the dataset can."""
    if hasattr(rows, "column_names"):
        columns = rows[start:stop]
        return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return [rows[place] for place in range(start, stop)]
