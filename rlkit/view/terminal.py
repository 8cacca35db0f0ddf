"""Completions of a run as a table in a terminal (rich, extra `view`), on request.

A completion may hold codes that repaint a terminal or rich's own markup: it is shown as text, letter by letter.
"""

import math
import os
from typing import TYPE_CHECKING, Any

from rlkit.run.reader import RunReader
from rlkit.support.text import fits, visible

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = ("reward", "advantage", "kl", "length")
TEXTS = ("prompt", "completion")


def show_completions(
    run: str | os.PathLike[str] | RunReader,
    step: int | None = None,
    *,
    limit: int = 10,
    sort: str | None = None,
    characters: int = 300,
) -> None:
    """Print completions of a step as a table.

    Args:
        run: the folder of a run, or what `Run.open` returned.
        step: a step whose rollout was kept; None takes the newest.
        limit: rows at most, at least 1.
        sort: a column, e.g. "reward" or "-reward" for the largest first; None keeps the order.
        characters: of a text, at least 1; what is cut is counted.

    Raises:
        ValueError: limit or characters below 1, or an unknown column.
        KeyError: the rollout of that step was not kept.
        ImportError: rich is not installed.
    """
    if limit < 1 or characters < 1:
        raise ValueError(f"show_completions: limit and characters must be at least 1, got {limit} and {characters}.")
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("show_completions: needs rich: pip install rich, or rlkit-llm[view].") from error
    reader = run if isinstance(run, RunReader) else RunReader(run)
    console = Console()
    reader.refresh()
    if step is None and not reader.rollout_steps:
        console.print(fits(f"{visible(reader.name)}: no rollout was kept yet"), markup=False, highlight=False)
        return
    step = reader.rollout_steps[-1] if step is None else step
    frame = reader.rollouts(step)
    if "completion" not in frame:  # its file is torn or gone
        why = reader.notes[-1] if reader.notes else "there are no completions in its rollout"
        console.print(fits(visible(f"{reader.name}, step {step}: {why}")), markup=False, highlight=False)
        return
    console.print(_table(frame, f"{reader.name}, step {step}", limit, sort, characters))


def _table(frame: "pd.DataFrame", name: str, limit: int, sort: str | None, characters: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    if sort is not None:
        column = sort.removeprefix("-")
        if column not in frame:
            raise ValueError(f"show_completions: no column {column!r} to sort by; there are {sorted(frame.columns)}.")
        frame = frame.sort_values(column, ascending=not sort.startswith("-"), kind="stable")
    names = [name for name in (*TEXTS, *NUMBERS) if name in frame]
    names += [name for name in map(str, frame.columns) if name.startswith("rewards/")]
    shown = min(limit, len(frame))
    title = f"{name}: {shown} of {len(frame)} completions"
    table = Table(title=Text(fits(visible(title))), show_lines=True)
    for name in names:
        right = name not in TEXTS
        table.add_column(
            Text(fits(visible(name.removeprefix("rewards/")))),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in frame.head(limit)[names].itertuples(index=False):
        table.add_row(*(Text(fits(_cell(value, characters))) for value in row))  # Text: no markup in it is followed
    return table


def _cell(value: Any, characters: int) -> str:
    if isinstance(value, str):
        return visible(value, characters)
    if isinstance(value, float):
        return f"{value:.3f}" if math.isfinite(value) else "-"
    return str(value)
