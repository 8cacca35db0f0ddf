"""The completions of one step for the panel: the table, a group with its arithmetic, the token lens, a whole text.

Each function answers one kind of request (panel_data.py). An old step may have been thinned out: the nearest one that
is stored is shown instead, and "said" tells so.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.record import printable
from rlkit.run.reader import RunReader
from rlkit.view.arithmetic import Group, explain, known_beta, leave_one_out
from rlkit.view.json_values import number, plain, short, text_of
from rlkit.view.lens import lens
from rlkit.view.rollout_frame import HIDDEN, HINTS, load, one_row, pick, pick_step, table_columns
from rlkit.view.table_query import select

if TYPE_CHECKING:
    import pandas as pd

# Limits of one answer
ROWS = 400  # of a table
COLUMNS = 60  # of a table; those of the dataset come last
CELLS = 6000  # of a table
CELL = 240  # characters of a cell's text; fewer where the table is large
TABLE_TEXT = 80_000  # characters of all texts of a table
TEXT = 20_000  # characters of a page of a text that was opened
GROUP_ROWS = 64  # completions of a group


def table(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
    """Completions of a step. Takes run, step (None: the newest), sort, descending, where, text, offset, limit.

    Returns {"run", "step", "said", "columns", "rows", "total" (in the step), "found" (after the filter), "offset",
    "cut" (a text is not whole)}; a row is {"row", "cells"} with a cell for each column.
    """
    index, reader = pick(readers, request)
    step, said = pick_step(reader, request.get("step"))
    if step is None:
        nothing = {"columns": [], "rows": [], "total": 0, "found": 0, "offset": 0, "cut": False}
        return {"run": index, "step": None, "said": None, **nothing}
    frame = load(reader, step)
    if not len(frame.columns) or not len(frame):
        said = f"The completions of step {step} cannot be read: their file was thinned out or is damaged."
    chosen = select(
        frame,
        sort=request.get("sort"),
        descending=bool(request.get("descending")),
        where=request.get("where") or [],
        text=str(request.get("text") or ""),
    )
    columns = table_columns(frame)[:COLUMNS]
    most = min(ROWS, CELLS // max(1, len(columns)))
    offset, limit = max(0, int(request.get("offset") or 0)), min(most, max(1, int(request.get("limit") or most)))
    page = chosen.iloc[offset : offset + limit]
    rows, cut = _cells(page, columns)
    empty = frame.isna().all() if len(frame) else frame.isna().any()
    heads = [
        {
            "name": printable(name),
            "kind": kind,
            "hint": HINTS.get("rewards/" if name.startswith("rewards/") else name, ""),
            "hidden": name in HIDDEN or bool(empty[name]),
        }
        for name, kind in columns
    ]
    return {
        "run": index,
        "step": step,
        "said": said,
        "columns": heads,
        "rows": rows,
        "total": len(frame),
        "found": len(chosen),
        "offset": offset,
        "cut": cut,
    }


def group(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
    """All completions of the prompt of a row, with the arithmetic of their advantages. Takes run, step, row."""
    where, reader, frame = _stored(readers, request)
    row = one_row(frame, request.get("row"))
    if "group_id" in frame.columns:
        members = frame[frame["group_id"] == row["group_id"]]
    else:
        members = frame[frame["row"] == row["row"]]
    beta, source = known_beta(reader, _metrics_of(reader, where["step"]))
    whole = _numbers(frame)
    own = whole.reward if beta is None or whole.kl is None else whole.reward - beta * whole.kl
    told = explain(_numbers(members), step=whole, loo_of_step=_loo_by_group(frame, own), beta=beta, where=source)
    parts = [str(name) for name in members.columns if str(name).startswith("rewards/")]
    rows = []
    for member, numbers in zip(members.head(GROUP_ROWS).to_dict("records"), told["rows"], strict=False):
        named = {name: plain(member.get(name)) for name in ("row", "reward", "kl", "length", "truncated")}
        extra = {"parts": [number(member[name]) for name in parts]}
        rows.append(named | extra | numbers | {"completion": short(text_of(member.get("completion")), 600)})
    return {
        **where,
        "group": plain(row.get("group_id")),
        "row_id": plain(row.get("row_id")),
        "prompt": short(text_of(row.get("prompt")), 1500),
        "rule": told["rule"],
        "explained": told["said"],
        "beta": told["beta"],
        "parts": [printable(name.removeprefix("rewards/")) for name in parts],
        "rows": rows,
        "total": len(members),
    }


def token_lens(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
    """One page of the tokens of a completion (`rlkit.view.lens`). Takes run, step, row, page."""
    where, _, frame = _stored(readers, request)
    row = one_row(frame, request.get("row"))
    return {**where, "row": plain(row["row"]), **lens(row, page=int(request.get("page") or 0))}


def whole_text(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
    """A page of a text that a cell shows only in part. Takes run, step, row, column, offset."""
    where, _, frame = _stored(readers, request)
    row, column = one_row(frame, request.get("row")), request.get("column")
    if not isinstance(column, str) or column not in row.index:
        raise ValueError(f"view: there is no column {column!r}.")
    text = text_of(row[column])
    offset = max(0, int(request.get("offset") or 0))
    part = {"text": printable(text[offset : offset + TEXT]), "offset": offset, "length": len(text), "page": TEXT}
    return {**where, "row": plain(row["row"]), "column": column, **part}


def _stored(readers: Sequence[RunReader], request: dict[str, Any]) -> tuple[dict[str, Any], RunReader, "pd.DataFrame"]:
    """The run and the stored step that a request means: what the answer says of them, reader, completions."""
    index, reader = pick(readers, request)
    step, said = pick_step(reader, request.get("step"))
    if step is None:
        raise ValueError("view: no completions are stored yet.")
    return {"run": index, "step": step, "said": said}, reader, load(reader, step)


def _cells(page: "pd.DataFrame", columns: Sequence[tuple[str, str]]) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a page, with as much of every text as the table has room for, and whether a text was cut."""
    texts = sum(kind == "text" for _, kind in columns)
    room = max(24, min(CELL, TABLE_TEXT // max(1, len(page) * texts)))
    shown = []
    for name, kind in columns:
        values = page[name].tolist()
        if kind == "text":
            shown.append([None if _missing(value) else short(text_of(value), room) for value in values])
        else:
            shown.append([plain(value) for value in values])
    cut = any(isinstance(cell, dict) for cells in shown for cell in cells)
    lines = zip(*shown, strict=True) if shown else []
    return [{"row": row, "cells": list(cells)} for row, cells in zip(page["row"].tolist(), lines, strict=True)], cut


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _numbers(frame: "pd.DataFrame") -> Group:
    def column(name: str) -> np.ndarray | None:
        if name not in frame.columns:
            return None
        values = frame[name].to_numpy(dtype=float, na_value=np.nan)
        return None if len(values) and np.isnan(values).all() else values

    reward = column("reward")
    return Group(np.full(len(frame), np.nan) if reward is None else reward, column("kl"), column("advantage"))


def _loo_by_group(frame: "pd.DataFrame", own: np.ndarray) -> np.ndarray:
    if "group_id" not in frame.columns:
        return leave_one_out(own)
    result = np.zeros(len(own))
    for places in frame.groupby("group_id", sort=False).indices.values():
        result[places] = leave_one_out(own[places])
    return result


def _metrics_of(reader: RunReader, step: int) -> dict[str, Any]:
    metrics = reader.metrics
    line = metrics[metrics["step"] == step] if "step" in metrics else metrics[:0]
    return {} if not len(line) else {str(name): value for name, value in line.iloc[-1].items()}
