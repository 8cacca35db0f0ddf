"""Sort, filter and page the completions of a step.

`js/table.js` has the same rules in its `select`, for tables that are whole in the browser; a test compares the two.
Missing values and NaN come last in either direction. Texts are compared without regard to case.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.view.json_values import text_of
from rlkit.view.rollout_frame import kind_of

if TYPE_CHECKING:
    import pandas as pd

OPERATORS = (">=", "<=", "=", "!=", "contains", "missing")


def select(
    frame: "pd.DataFrame", *, sort: str | None, descending: bool, where: Sequence[dict[str, Any]], text: str
) -> "pd.DataFrame":
    """The rows that meet every condition {"column", "op", "value"} and hold the text in prompt or completion, in order
    of the column `sort`.

    Raises:
        ValueError: unknown column or operator, or a value that is not a number where one is needed.
    """
    keep = np.ones(len(frame), dtype=bool)
    if text:
        found = np.zeros(len(frame), dtype=bool)
        for name in ("prompt", "completion"):
            if name in frame.columns:
                found |= _contains(frame[name], text)
        keep &= found
    for condition in where:
        keep &= meets(_column(frame, condition.get("column")), condition.get("op"), condition.get("value"))
    frame = frame[keep]
    if sort is None:
        return frame
    column = _column(frame, sort)
    if kind_of(column) == "text":
        column = column.map(lambda value: text_of(value).casefold()).where(column.notna())
    order = column.reset_index(drop=True).sort_values(ascending=not descending, kind="stable", na_position="last").index
    return frame.iloc[order]


def meets(column: "pd.Series", op: Any, value: Any) -> np.ndarray:
    """True for each row that meets a condition; a missing value meets only "missing" and "!=".

    Example:
        >>> import pandas as pd
        >>> meets(pd.Series([0.0, 1.0, float("nan")]), ">=", "0.5").tolist()
        [False, True, False]
    """
    if op not in OPERATORS:
        raise ValueError(f"view: unknown operator {op!r}; expected one of {', '.join(OPERATORS)}.")
    missing = column.isna().to_numpy()
    if op == "missing":
        return missing
    if op == "contains":
        return _contains(column, str(value))
    if kind_of(column) == "text":
        texts = column.map(lambda cell: text_of(cell).casefold()).to_numpy()
        wanted: Any = str(value).casefold()
        values: Any = texts
    else:
        values, wanted = column.to_numpy(dtype=float, na_value=np.nan), _number(value)
    if op == "!=":
        return (values != wanted) | missing
    hits = values == wanted if op == "=" else values >= wanted if op == ">=" else values <= wanted
    return hits & ~missing


def _contains(column: "pd.Series", part: str) -> np.ndarray:
    part = part.casefold()
    return column.map(lambda value: part in text_of(value).casefold()).to_numpy(dtype=bool)


def _column(frame: "pd.DataFrame", name: Any) -> "pd.Series":
    if name not in frame.columns:
        raise ValueError(f"view: there is no column {name!r}.")
    return frame[name]


def _number(value: Any) -> float:
    if value in (True, "true", "True"):
        return 1.0
    if value in (False, "false", "False"):
        return 0.0
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"view: expected a number to compare with, got {value!r}.") from error
