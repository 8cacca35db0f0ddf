"""The rollout table of one step as the view needs it: which columns are numbers, flags or texts, and in which order.

A frame may lack columns: each step has what its loop logged.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.run.reader import RunReader
from rlkit.run.rollout_rows import PER_TOKEN_ALL

if TYPE_CHECKING:
    import pandas as pd

FIRST = ("row", "group_id", "prompt", "completion", "reward")
"""Columns that open the table; the parts of the reward follow, then these:"""
NEXT = ("advantage", "kl", "length", "ratio")
HIDDEN = (
    "row_id", "truncated", "clipped", "prompt_length", "epsilon", "epsilon_high", "step", "prompt_messages",
    "completion_messages",
)  # fmt: skip
"""Shown when a reader asks for them; `truncated` and `clipped` are marks beside length and ratio."""

HINTS = {
    "row": "Position of the completion in the step.",
    "group_id": "Completions of one prompt share a group.",
    "reward": "Weighted sum of the reward parts; NaN where every reward function abstained.",
    "rewards/": "One part of the reward; NaN where its function abstained.",
    "advantage": "What the update multiplies the log-probability with.",
    "kl": "Log-ratio of policy and reference, summed over the tokens, in nats; an estimate, may be negative.",
    "length": "Tokens of the completion, the end token included.",
    "truncated": "The length limit cut the completion off.",
    "ratio": "Probability of the completion after the update over before it.",
    "clipped": "-1: clipped below 1 - epsilon, 1: above 1 + epsilon, 0: not clipped.",
    "row_id": "Row of the dataset that the prompt comes from.",
}


def pick(readers: Sequence[RunReader], request: dict[str, Any]) -> tuple[int, RunReader]:
    """The run that a request names by its number; ValueError if there is none."""
    index = request.get("run", 0)
    if not isinstance(index, int) or not 0 <= index < len(readers):
        raise ValueError(f"view: there is no run {index!r}; expected a number from 0 to {len(readers) - 1}.")
    return index, readers[index]


def pick_step(reader: RunReader, wanted: Any) -> tuple[int | None, str | None]:
    """The stored step to show, None if nothing is stored, and a note if it is not the wanted one: old steps are thinned
    out. None wants the newest.
    """
    stored = reader.rollout_steps
    if not stored:
        return None, None
    if wanted is None:
        return stored[-1], None
    if not isinstance(wanted, int):
        raise ValueError(f"view: expected a step number, got {wanted!r}.")
    if wanted in stored:
        return wanted, None
    nearest = min(stored, key=lambda step: (abs(step - wanted), step))
    return nearest, f"The completions of step {wanted} are not stored; this is step {nearest}."


def load(reader: RunReader, step: int, columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """The rollouts of a step (only some columns of them), with a `row` column and a fresh index."""
    frame = reader.rollouts(step, columns=columns).reset_index(drop=True)
    if "row" not in frame.columns:
        frame.insert(0, "row", range(len(frame)))
    return frame


def one_row(frame: "pd.DataFrame", row: Any) -> "pd.Series":
    """The completion that a request names; ValueError if it is not in this step."""
    found = frame[frame["row"] == row] if isinstance(row, int) else frame[:0]
    if not len(found):
        raise ValueError(f"view: there is no row {row!r} in this step.")
    return found.iloc[0]


def kind_of(column: "pd.Series") -> str:
    """What a column holds: "number", "flag", "text", or "list" if it has one value a token.

    Example:
        >>> import pandas as pd
        >>> [kind_of(pd.Series(values)) for values in ([0.5], [True], ["a"], [[1, 2]])]
        ['number', 'flag', 'text', 'list']
    """
    import pandas as pd

    if pd.api.types.is_bool_dtype(column):
        return "flag"
    if pd.api.types.is_numeric_dtype(column):
        return "number"
    known = column.dropna()
    if len(known) and isinstance(known.iloc[0], list | tuple | np.ndarray):
        return "list"
    return "number" if not len(known) else "text"


def table_columns(frame: "pd.DataFrame") -> list[tuple[str, str]]:
    """(name, kind) of the columns that have one value a completion, the telling ones first."""
    kinds = {str(name): kind_of(frame[name]) for name in frame.columns}
    rewards = [name for name in kinds if name.startswith("rewards/")]
    front = [*FIRST, *rewards, *NEXT]
    rest = [name for name in kinds if name not in front and name not in HIDDEN]
    order = [*front, *rest, *HIDDEN]
    return [
        (name, kinds[name])
        for name in order
        if kinds.get(name, "list") != "list"
        and name not in PER_TOKEN_ALL  # where a step has none of them, their type does not tell
    ]
