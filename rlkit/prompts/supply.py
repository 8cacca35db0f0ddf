"""Where a loader takes its rows from: rows with a length, or a stream.

Both return the rows after a position of an epoch. The position is a number, so a checkpoint can hold it, and a resumed
stream skips to it. Every process takes the same rows and keeps its share.
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
from rlkit.prompts.tokens import PromptTokenizer

CHUNK = 1024  # rows rendered and tokenised at once
SLOW = 2.0  # seconds after which a progress bar appears


class Taken(NamedTuple):
    """Rows that a supply gave: this process's share of `total`, the position after them, and if the epoch is over."""

    rows: list[dict[str, Any]]
    token_ids: list[list[int]]
    total: int
    position: int
    ended: bool


class MapSupply:
    """Rows with a length, all checked before the first step, so that no run fails on row 190,000.

    Tokens are made when a row is served; the check tokenises only what may be too long.
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
        """Check every row; return the places of those that are served."""
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
                fitted = self.rule.fit(
                    [shown[number] for number in unsure],
                    [names[number] for number in unsure],
                    self.tokenizer,
                    cut=self.rule.on_long == "truncate-left",
                )
                for number, (_, tokens) in zip(unsure, fitted, strict=True):
                    if self.rule.too_long(tokens):
                        long.append((start + number, tokens))
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
        names = [self._name(place) for place in mine]
        shown = [self.tokenizer.render_row(row, name) for row, name in zip(rows, names, strict=True)]
        ids = [one for one, _ in self.rule.fit(shown, names, self.tokenizer, cut=True)]
        position += len(places)
        left = len(order) - position
        return Taken(rows, ids, len(places), position, left == 0 or (self.drop_last and left < count))


class StreamSupply:
    """Rows of a stream. The position counts rows read, also those left out for their length."""

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
        """The rows after a position; the stream is read from its beginning unless the last `take` ended there."""
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
            fitted = self.rule.fit(shown, names, self.tokenizer, cut=self.rule.on_long == "truncate-left")
            for number, (ids, tokens) in enumerate(fitted):
                if self.rule.too_long(tokens):
                    long.append((position + number, tokens))
                    if self.rule.on_long == "skip":
                        continue
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


def _chunk(rows: Any, start: int, stop: int) -> list[Any]:
    """Rows start to stop, in one read if the dataset can."""
    if hasattr(rows, "column_names"):
        columns = rows[start:stop]
        return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return [rows[place] for place in range(start, stop)]
