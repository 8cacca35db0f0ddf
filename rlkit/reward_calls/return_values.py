"""What a reward function may return: one number or None per completion. Nothing is broadcast, parsed or clipped."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def as_list(returned: Any, name: str, count: int) -> list[Any]:
    """The returned values as a list of `count`; a TypeError or ValueError that names the function if they are not."""
    expected = f"score: reward function {name!r} must return {count} rewards, one number or None per completion"
    if isinstance(returned, torch.Tensor) or type(returned).__module__ == "numpy":
        if returned.ndim != 1:
            raise ValueError(f"{expected}; got an array of shape {tuple(returned.shape)}. Flatten it to one axis.")
        try:
            returned = returned.tolist()
        except (RuntimeError, TypeError) as error:  # sparse, on the meta device, ...
            raise TypeError(
                f"{expected}; got {type(returned).__name__} that cannot be read as a list: {error}"
            ) from error
    if isinstance(returned, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(returned, Sequence):
        raise TypeError(f"{expected}; got {type(returned).__name__}: {str(returned)[:80]!r}.")
    if len(returned) != count:
        raise ValueError(f"{expected}; got {len(returned)}.")
    return list(returned)


def as_number(value: Any, name: str, row: int) -> float:
    """One reward as a finite float, or NaN for None and NaN; a TypeError or ValueError that names function and row.

    Example:
        >>> as_number(True, "f", 0), as_number(None, "f", 0)
        (1.0, nan)
    """
    if value is None:
        return math.nan
    if (isinstance(value, torch.Tensor) or type(value).__module__ == "numpy") and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"score: reward function {name!r} returned {type(value).__name__} {str(value)[:60]!r} for completion "
            f"{row}; expected a number, a bool or None."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if abs(number) > torch.finfo(torch.float32).max:
        raise ValueError(
            f"score: reward function {name!r} returned {number} for completion {row}; rewards must be finite."
        )
    return number
