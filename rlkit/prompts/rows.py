"""Read datasets of any form as one of two:

- rows with a length, by number (`as_rows`): a `datasets.Dataset`, a list of dicts, a pandas frame, a JSON, JSON Lines,
  Parquet or CSV file, or a folder of them;
- a stream: a `datasets.IterableDataset`, or a function that returns a new iterator at each call.

A generator or another one-time iterator is refused: a second epoch or a resumed run could not read it again.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@runtime_checkable
class Rows(Protocol):
    """Rows with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


def is_stream(dataset: Any) -> bool:
    """True for a `datasets.IterableDataset` or a function."""
    if callable(dataset) and not hasattr(dataset, "__getitem__"):
        return not isinstance(dataset, type)
    # Its base class, torch's Dataset, has a __getitem__ that only raises.
    return hasattr(dataset, "take") and hasattr(dataset, "set_epoch") and not hasattr(dataset, "__len__")


def as_rows(dataset: Any, where: str) -> Rows:
    """The rows of a dataset with a length and a `prompt` column, as a `datasets.Dataset` or a list.

    Args:
        dataset: a `datasets.Dataset`, a list of dicts, a pandas frame, or the path of a file or folder.
        where: name of the caller, for the errors.

    Raises:
        TypeError, ValueError, FileNotFoundError: no such dataset, or one without rows or prompts.

    Example:
        >>> as_rows([{"prompt": "1+1=", "answer": "2"}], "example")[0]["answer"]
        '2'
    """
    rows = any_rows(dataset, where)
    check_columns(rows[0], where)
    return rows


def any_rows(dataset: Any, where: str) -> Rows:
    """As `as_rows`, with any columns."""
    if isinstance(dataset, (str, os.PathLike)):
        dataset = _read(Path(dataset), where)
    elif type(dataset).__module__.startswith("pandas"):
        dataset = _rows_of_frame(dataset, where)
    if isinstance(dataset, Mapping):
        raise TypeError(f"{where}: got a dict with {list(dataset)[:5]}; pass one split, or a list of rows.")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{where}: expected a dataset with a length (datasets.Dataset, a list of rows, a pandas frame, or the path "
            f"of a file), got {type(dataset).__name__}. {_advice(dataset)}"
        )
    if not len(dataset):
        raise ValueError(f"{where}: the dataset is empty.")
    dataset = plain_format(dataset)
    if isinstance(dataset, (list, tuple)) and all(isinstance(row, Mapping) for row in dataset):
        columns = dict.fromkeys(name for row in dataset for name in row if name != "prompt")
        if any(not columns.keys() <= row.keys() for row in dataset):  # as in a table: None where a row lacks a column
            dataset = [dict.fromkeys(columns) | dict(row) for row in dataset]
    return dataset


def plain_format(dataset: Any) -> Any:
    """A dataset without `set_format("torch")` and its like: rows as the other sources give them; transforms stay."""
    plain = not hasattr(dataset, "with_format") or getattr(dataset, "format", {}).get("type") == "custom"
    return dataset if plain else dataset.with_format(None)


def check_columns(row: Any, where: str) -> None:
    """Refuse a first row that has no prompt."""
    columns = list(row) if isinstance(row, Mapping) else [type(row).__name__]
    if "prompt" not in columns:
        raise ValueError(
            f"{where}: the dataset has no 'prompt' column; it has {columns}. Rename it: "
            "dataset.rename_column('question', 'prompt'), or make prompts with rlkit.tasks.prepare."
        )


def iterate(stream: Any, where: str, *, seed: int | None, epoch: int) -> Iterator[Mapping[str, Any]]:
    """The rows of a stream from its beginning, shuffled by seed and epoch; a seed of None keeps its order."""
    if callable(stream) and not hasattr(stream, "take"):
        if seed is not None:
            raise ValueError(f"{where}: a function's rows come in its own order; pass shuffle=False.")
        rows = stream()
        if not hasattr(rows, "__iter__"):
            raise TypeError(f"{where}: the function must return an iterator of rows, got {type(rows).__name__}.")
    elif seed is not None:
        rows = plain_format(stream).shuffle(seed=seed)
        rows.set_epoch(epoch)
    else:
        rows = plain_format(stream)
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"{where}: expected rows that are dicts, got {type(row).__name__}: {str(row)[:60]!r}.")
        yield row


def _advice(dataset: Any) -> str:
    if is_stream(dataset):
        return "Take the rows you need first, e.g. datasets.Dataset.from_list(list(stream.take(1000)))."
    if isinstance(dataset, Iterator):
        return (
            "It can be read only once. Pass a list of its rows, or for PromptLoader the function that makes it "
            "(lambda: read_rows(path)): such a stream can be read again in the next epoch and after a restart."
        )
    return "Take the rows you need first, as a list of dicts."


def _rows_of_frame(frame: Any, where: str) -> list[dict[str, Any]]:
    """The rows of a pandas frame as plain data; a missing cell is None."""
    if not hasattr(frame, "columns"):
        raise TypeError(f"{where}: got a pandas {type(frame).__name__}; pass a frame with a 'prompt' column.")
    if not frame.columns.is_unique:
        raise ValueError(f"{where}: the frame has a column twice: {list(frame.columns)}.")
    plain = frame.astype(object).where(frame.notna(), None)
    return [{str(name): _plain_cell(cell) for name, cell in row.items()} for row in plain.to_dict("records")]


def _plain_cell(value: Any) -> Any:
    """A cell with lists in place of arrays and None for NaN, at every depth: so pandas reads nested columns back."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain_cell(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_cell(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _read(path: Path, where: str) -> Any:
    """A file or folder of rows, read by `datasets`."""
    import datasets

    if not path.exists():
        raise FileNotFoundError(
            f"{where}: there is no file or folder {str(path)!r}. A dataset on the hub is loaded by its own library: "
            f"datasets.load_dataset({str(path)!r}, split='train')."
        )
    if path.is_dir():
        if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(path))
            return _one_split(found, path, where)
        files = sorted(file for file in path.rglob("*") if file.suffix in READERS)
        kinds = {READERS[file.suffix] for file in files}
    else:
        files, kinds = [path], {READERS.get(path.suffix, "")}
    if len(kinds) != 1 or "" in kinds:
        raise ValueError(
            f"{where}: {str(path)!r} must be a {', '.join(READERS)} file, or a folder of files of one such kind or of "
            f"Dataset.save_to_disk; found {sorted({file.suffix for file in files}) or 'no such file'}."
        )
    place = {"data_dir": str(path)} if path.is_dir() else {"data_files": {"train": str(path)}}
    kind = kinds.pop()
    try:
        found = datasets.load_dataset(kind, **place)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, StopIteration) as error:
        why = str(error.__cause__ or error)
        if not why or "corresponds to no data" in why:
            why = "there is no row in it."
        raise ValueError(f"{where}: {str(path)!r} could not be read: {why}") from error
    found = _one_split(found, path, where)
    if kind == "json" and "timestamp[" in str(found.features):  # JSON has no dates: texts that look like one stay texts
        return [row for file in files for row in _json_rows(file.read_text(encoding="utf-8-sig"))]
    return found


def _json_rows(text: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except ValueError:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    return rows if isinstance(rows, list) else [rows]


def _one_split(found: Any, path: Path, where: str) -> Any:
    if not isinstance(found, Mapping):
        return found
    if len(found) > 1:
        raise ValueError(f"{where}: {str(path)!r} has the splits {list(found)}; load it with datasets and pass one.")
    return next(iter(found.values()))
