"""Row ids: a hash of the row's content, since a position means another row after a filter or shuffle."""

import datetime
import decimal
import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any


def content_id(row: Mapping[str, Any]) -> int:
    """A 63-bit id of a row's content (prompt and every column): the same in every process, dataset and run.

    A key that is None counts as absent, and 2.0 as 2: tables fill the one and widen the other.

    Example:
        >>> content_id({"prompt": "a", "answer": 1}) == content_id({"answer": 1, "prompt": "a"})
        True
        >>> content_id({"prompt": "a", "answer": 1}) == content_id({"prompt": "a", "answer": 2})
        False
    """
    try:
        text = json.dumps(_canonical(row), sort_keys=True, ensure_ascii=False, default=_plain)
    except TypeError as error:
        raise TypeError(
            f"A dataset row cannot be identified by its content: {error}. Expected plain data in every column "
            "(numbers, texts, lists, dicts with text keys, dates, bytes, arrays, images); the row has "
            f"{sorted(map(str, row))}."
        ) from error
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def without_none(value: Any) -> Any:
    """A value without the keys that are None, at every depth; the items of lists keep their places, None included.

    A table gives each nested dict the keys of all rows and fills them with None, so None there means "no such key".

    Example:
        >>> without_none({"a": None, "b": [None, {"c": 1, "d": None}]})
        {'b': [None, {'c': 1}]}
    """
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return type(value)(map(without_none, value)) if type(value) in (list, tuple) else value


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the None keys inside its columns; a column itself may be None."""
    return {name: without_none(value) for name, value in row.items()}


def _canonical(value: Any) -> Any:
    """The form of a value that is hashed, the same for every table that it went through."""
    if isinstance(value, Mapping):
        return {key: form for key, item in value.items() if (form := _canonical(item)) is not None}
    if hasattr(value, "tolist"):  # arrays and tensors
        return _canonical(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and math.isnan(value):  # how pandas writes None
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: object) -> object:
    """What json cannot write, in a form that is the same in every process; TypeError if there is none."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(item, sort_keys=True, default=_plain) for item in value)
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, os.PathLike)):
        return str(value)
    if hasattr(value, "tobytes"):  # images
        return [str(getattr(value, "size", "")), hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()]
    raise TypeError(f"{type(value).__name__} is not plain data")
