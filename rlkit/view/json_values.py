"""Values on their way to a browser: plain JSON, bounded, and nothing lost without a word.

JSON has no NaN and no infinity, and a browser has no lone surrogates: the former go as the texts "NaN", "inf" and
"-inf", the latter as U+FFFD. A text that is cut says its full length. Numbers keep seven digits, which is what float32
holds.
"""

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

SAFE_INTEGER = 2**53
"""Largest integer that a browser's numbers hold exactly; larger ones go as text."""


def number(value: Any) -> int | float | str | None:
    """A number for JSON.

    Example:
        >>> number(0.1234567891), number(float("nan")), number(float("-inf")), number(None), number(2**60)
        (0.1234568, 'NaN', '-inf', None, '1152921504606846976')
    """
    if value is None:
        return None
    if isinstance(value, numbers.Integral):
        return int(value) if abs(int(value)) <= SAFE_INTEGER else str(int(value))
    value = float(value)
    if math.isfinite(value):
        return float(f"{value:.7g}")
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


def clean(text: str) -> str:
    """The text as UTF-8 can carry it: a lone surrogate becomes U+FFFD.

    Example:
        >>> clean("a" + chr(0xD800) + "b") == "a" + chr(0xFFFD) + "b"
        True
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def short(text: str, limit: int) -> str | dict[str, Any]:
    """The text, or its beginning with its full length.

    Example:
        >>> short("four", 4), short("fives", 4)
        ('four', {'text': 'five', 'length': 5})
    """
    if len(text) <= limit:
        return clean(text)
    return {"text": clean(text[:limit]), "length": len(text)}


def plain(value: Any) -> Any:
    """Any value of a table as JSON: numbers by `number`, missing as None, all that is not plain as text.

    Example:
        >>> plain(np.float32(0.5)), plain(True), plain({"a": [1]})
        (0.5, True, '{"a": [1]}')
    """
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, numbers.Real):
        return number(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping | list | tuple):
        return clean(json.dumps(value, ensure_ascii=False, default=str))
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return clean(str(value))


def text_of(value: Any) -> str:
    """What a person reads of a table's value; empty where there is none."""
    found = plain(value)
    return "" if found is None else found if isinstance(found, str) else str(found)
