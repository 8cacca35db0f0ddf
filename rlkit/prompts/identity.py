"""What a row is known by: a hash of its content, the same in every process, dataset and run (known_faults B35, B46)."""

import datetime
import decimal
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any


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
