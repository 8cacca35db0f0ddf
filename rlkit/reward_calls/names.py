"""Readable, unique names of reward functions: they name metrics, columns and errors."""

import functools
from collections.abc import Sequence
from typing import Any


def own_name(function: Any) -> str:
    """The function's own name; a partial's is that of its function, an object's that of its class.

    Example:
        >>> own_name(len), own_name(lambda: 0)
        ('len', 'lambda')
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or not name:
        name = type(function).__name__
    return "lambda" if name == "<lambda>" else name


def unique_names(functions: Sequence[Any]) -> tuple[str, ...]:
    """The functions' own names, numbered where two are alike."""
    names: list[str] = []
    taken: set[str] = set()
    for function in functions:
        name = own_name(function)
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        taken.add(unique)
        names.append(unique)
    return tuple(names)
