"""Numbers from callers: Python's, numpy's, arrays and tensors without an axis."""

import math
import numbers
from decimal import Decimal
from typing import Any


def scalar(value: Any) -> Any:
    """A number of numpy, or an array or tensor without an axis, as Python's own; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def number_of(where: str, name: str, value: Any) -> float:
    """A number as a float; NaN for None. `where` and `name` are for the messages.

    Raises:
        TypeError: not a real number.
        ValueError: too large for a float.

    Example:
        >>> number_of("run.log", "x", True), number_of("run.log", "x", None)
        (1.0, nan)
    """
    value = scalar(value)
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real | Decimal):
        raise TypeError(f"{where}: {name!r} must be a number, or None for none; got {type(value).__name__}.")
    try:
        return float(value)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{where}: {name!r} does not fit into a float: {error}.") from error
