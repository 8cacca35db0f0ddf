"""`Record`: base of the step's records. A table in a notebook, and a file that is read without a model or pickle."""

import abc
import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlkit.support.files import regular, written_whole
from rlkit.support.text import table_html, visible

if TYPE_CHECKING:
    import pandas as pd

Prompt = str | list[dict[str, Any]]
"""A prompt or completion as a person sees it: plain text, or a list of chat messages."""

Selection = Int[Tensor, " n"] | Bool[Tensor, " B"] | Sequence[int] | slice
"""Rows, by number or by mask."""
FORMAT_VERSION = 1
R = TypeVar("R", bound="Record")


def text_of(value: Prompt) -> str:
    """The text of a prompt or completion: a message list becomes its contents, joined by line breaks.

    Example:
        >>> text_of([{"role": "user", "content": "2+2?"}])
        '2+2?'
    """
    if isinstance(value, str):
        return value
    parts = []
    for message in value:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        parts.append(content)
    return "\n".join(parts)


class Record(abc.ABC):
    """A dataclass that shows itself as a table and can be saved and loaded."""

    @abc.abstractmethod
    def to_pandas(self) -> "pd.DataFrame":
        """One row per prompt or completion."""

    @abc.abstractmethod
    def _headline(self) -> str:
        """Contents in one line."""

    def _repr_html_(self) -> str:
        return table_html(self._headline(), self.to_pandas().head(8))

    def __repr__(self) -> str:
        return f"<{self._headline()}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to one file, atomically.

        Raises:
            TypeError: a dataset column holds an object that is not plain data (numbers, text, lists, dicts, tensors).
        """
        state = {"kind": type(self).__name__, "format": FORMAT_VERSION, "fields": _to_plain(self)}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{type(self).__name__}.save: expected plain data (numbers, text, lists, dicts, tensors) in every "
                f"column; turn other objects into text first. torch says: {error}"
            ) from error
        with written_whole(Path(path)) as partial:
            partial.write_bytes(buffer.getvalue())

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read a record that `save` wrote. Nothing in the file is executed.

        Raises:
            ValueError: the file holds another kind of record, or none, or is damaged.
            OSError: it cannot be read, or is not a regular file.
        """
        try:
            with open(path, "rb", opener=regular) as file:
                if torn := zipfile.ZipFile(file).testzip():  # torch does not verify the checksums that it writes
                    raise RuntimeError(f"the checksum of {torn} is wrong")
                file.seek(0)
                state = torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # damage may raise anything; torch would advise to execute what is in it
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise ValueError(f"{cls.__name__}.load: {path} was not written by `save`, or is damaged.") from error
        if not isinstance(state, dict) or str(state.get("kind")) != cls.__name__:
            kind = state.get("kind") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"{cls.__name__}.load: {path} holds a {visible(str(kind), 80)}.")
        if type(state.get("format")) is not int or not isinstance(state.get("fields"), dict):
            raise ValueError(f"{cls.__name__}.load: {path} was not written by `save`: it has no format or no fields.")
        if state["format"] > FORMAT_VERSION:
            raise ValueError(
                f"{cls.__name__}.load: {path} has format {state['format']}, this rlkit reads up to {FORMAT_VERSION}; "
                "update rlkit."
            )
        try:
            return cls(**cls._from_plain(state["fields"]))
        except Exception as error:  # forged, or of another version: the constructor's words do not name the file
            said = visible(f"{type(error).__name__}: {error}", 300)
            raise ValueError(f"{cls.__name__}.load: {path} holds no whole {cls.__name__}: {said}") from error

    @classmethod
    def _from_plain(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fields for the constructor; nested records are rebuilt."""
        return values


def _to_plain(record: object) -> dict[str, Any]:
    """A dataclass, nested ones included, as a dict with tensors on the CPU."""
    plain: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]
        value = getattr(record, item.name)
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        elif is_dataclass(value):
            value = _to_plain(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        plain[item.name] = value
    return plain


def select_rows(record: R, rows: Selection, whole: Sequence[str] = ()) -> R:
    """The record of some rows; the fields named in `whole` do not have rows and stay as they are."""
    own: Any = record
    if not isinstance(rows, slice):
        rows = torch.as_tensor(rows).cpu()
        rows = rows if rows.dtype == torch.bool else rows.long()  # an empty list would be a float tensor
    index = torch.arange(len(own))[rows]
    order = index.tolist()

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[index.to(value.device)]
        if isinstance(value, Mapping):
            return {name: taken(cells) for name, cells in value.items()}
        return tuple(value[i] for i in order)

    names = [item.name for item in fields(own) if item.name not in whole]
    return replace(own, **{name: taken(getattr(own, name)) for name in names})


def frame(own: dict[str, Any], columns: Mapping[str, Any] = {}) -> "pd.DataFrame":
    """A pandas frame of a record's own columns and the user's."""
    import pandas as pd

    return pd.DataFrame(with_columns(own, columns))


def with_columns(own: dict[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """A table's own columns and the user's; a user's column of the same name gets a prefix.

    Example:
        >>> with_columns({"reward": [1]}, {"reward": [0], "answer": ["x"]})
        {'reward': [1], 'column:reward': [0], 'answer': ['x']}
    """
    table = own | {(f"column:{name}" if name in own else name): list(cells) for name, cells in columns.items()}
    return {printable(name): [printable(cell) for cell in cells] for name, cells in table.items()}


def printable(cell: Any) -> Any:
    r"""Valid Unicode: lone surrogates, which JSON may hold, become U+FFFD.

    Example:
        >>> printable("a\ud800b") == "a\ufffdb", printable(1)
        (True, 1)
    """
    if not isinstance(cell, str):
        return cell
    try:
        cell.encode("utf-8")
    except UnicodeEncodeError:
        return cell.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return cell


def check_lengths(where: str, expected: int, **values: Sequence[Any] | Tensor) -> None:
    """Refuse values of another length than expected."""
    for name, value in values.items():
        if len(value) != expected:
            raise ValueError(f"{where}: expected {expected} entries in {name}, got {len(value)}.")
