"""Values for a browser: plain JSON of bounded size.

JSON has neither NaN nor infinity, and UTF-8 no lone surrogates: they become the texts "NaN", "inf" and "-inf", and
U+FFFD. A text that is cut comes with its full length. Numbers keep seven digits, the precision of float32.
"""

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlkit.record import printable

SAFE_INTEGER = 2**53
"""Largest integer that a browser's numbers hold exactly; larger ones become text."""


def number(value: Any) -> int | float | str | None:
    """Return a number for JSON.

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


def short(text: str, limit: int) -> str | dict[str, Any]:
    """Return the text, or its beginning with its full length.

    Example:
        >>> short("four", 4), short("fives", 4)
        ('four', {'text': 'five', 'length': 5})
    """
    if len(text) <= limit:
        return printable(text)
    return {"text": printable(text[:limit]), "length": len(text)}


def plain(value: Any) -> Any:
    """Return a value of a table as JSON: numbers by `number`, missing as None, other objects as text.

    Example:
        >>> plain(np.float32(0.5)), plain(True), plain({"a": [1]})
        (0.5, True, '{"a": [1]}')
    """
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, numbers.Real):
        return number(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping | list | tuple):
        return printable(json.dumps(value, ensure_ascii=False, default=str))
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return printable(str(value))


def text_of(value: Any) -> str:
    """Return a table's value as text, "" for a missing one."""
    found = plain(value)
    return "" if found is None else found if isinstance(found, str) else str(found)
