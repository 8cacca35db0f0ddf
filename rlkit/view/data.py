"""Answers to the questions of the panel, as plain JSON of bounded size.

`answer` is a function of the run folders and a request only: it writes nothing, keeps nothing, and does not know who asks.
So one file of JavaScript (`panel.js`) serves in a notebook, in a browser tab, and, with answers that were written into
it (`bundle`), in a report. What is cut says so: rows a page, characters a cell, tokens a lens page, steps a pin.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.view.arithmetic import Group, explain, known_beta, leave_one_out
from rlkit.view.frames import HIDDEN, HINTS, Reader, load, one_row, pick, pick_step, table_columns
from rlkit.view.lens import lens
from rlkit.view.select import select
from rlkit.view.values import clean, number, plain, short, text_of

if TYPE_CHECKING:
    import pandas as pd

ROWS = 400
"""Rows of a table in one answer, at most."""
CELL = 240
"""Characters of a cell's text, at most; fewer where the table is large."""
TABLE_TEXT = 80_000
"""Characters of all texts of one table."""
TEXT = 20_000
"""Characters of a page of a text that was opened."""
PINNED_STEPS = 24
"""Steps of a pinned prompt in one answer."""
GROUP_ROWS = 64
"""Completions of a group, or of a prompt on one side of a comparison."""
PROMPTS = 60
"""Prompts of a comparison in one answer."""
ANSWER = ("row", "row_id", "prompt", "completion", "reward", "length", "truncated")
"""Columns that a pin or a comparison reads."""


def answer(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request of the panel.

    Args:
        readers: the runs, in the order in which requests number them.
        request: {"kind": "overview" | "table" | "group" | "lens" | "text" | "pin" | "compare", ...}; what else each
            kind takes stands with its function below.

    Returns:
        A dict that `json.dumps(..., allow_nan=False)` takes; its "kind" is the request's.

    Raises:
        ValueError: unknown kind, run, row or column; the text is for the person at the panel.

    Example:
        >>> answer([], {"kind": "overview"})
        {'kind': 'overview', 'runs': []}
    """
    kinds = {
        "overview": overview,
        "table": table,
        "group": group,
        "lens": token_lens,
        "text": whole_text,
        "pin": pin,
        "compare": compare,
    }
    kind = request.get("kind")
    if kind not in kinds:
        raise ValueError(f"view: unknown request {kind!r}; expected one of {', '.join(kinds)}.")
    return {"kind": kind, **kinds[kind](readers, request)}


def overview(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """Where every run stands: {"runs": [{"run", "name", "path", "step", "max_steps", "status", "numbers", "steps"}]}."""
    runs = []
    for index, reader in enumerate(readers):
        state = reader.state if isinstance(reader.state, dict) else {}
        numbers = state.get("numbers") if isinstance(state.get("numbers"), dict) else {}
        runs.append(
            {
                "run": index,
                "name": clean(str(reader.name)),
                "path": clean(str(reader.path)),
                "step": plain(state.get("step")),
                "max_steps": plain(state.get("max_steps")),
                "status": plain(state.get("status") or state.get("stopped") or ""),
                "taken": plain(state.get("taken")),
                "time": _whole(state.get("time")),
                "numbers": {clean(str(name)): plain(value) for name, value in list(numbers.items())[:20]},
                "steps": [int(step) for step in reader.rollout_steps],
                "notes": [short(str(note), 300) for note in list(reader.notes)[-5:]],
            }
        )
    return {"runs": runs}


def table(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """Completions of a step. Takes run, step (None: the newest), sort, descending, where, text, offset, limit.

    Returns {"run", "step", "said", "columns", "rows", "total" (in the step), "found" (after the filter), "offset",
    "cut" (a text is not whole)}; a row is {"row", "cells"} with a cell for each column.
    """
    index, reader = pick(readers, request)
    step, said = pick_step(reader, request.get("step"))
    if step is None:
        return {"run": index, "step": None, "said": None, "columns": [], "rows": [], "total": 0, "found": 0, "offset": 0,
                "cut": False}  # fmt: skip
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
    offset, limit = max(0, int(request.get("offset") or 0)), min(ROWS, max(1, int(request.get("limit") or ROWS)))
    columns = table_columns(frame)
    page = chosen.iloc[offset : offset + limit]
    rows, cut = _cells(page, columns)
    return {
        "run": index,
        "step": step,
        "said": said,
        "columns": [
            {"name": clean(name), "kind": kind, "hint": _hint(name), "hidden": name in HIDDEN} for name, kind in columns
        ],
        "rows": rows,
        "total": len(frame),
        "found": len(chosen),
        "offset": offset,
        "cut": cut,
    }


def group(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """All completions of the prompt of a row, with the arithmetic of their advantages. Takes run, step, row."""
    index, reader = pick(readers, request)
    step, said = pick_step(reader, request.get("step"))
    if step is None:
        raise ValueError("view: no completions are stored yet.")
    frame = load(reader, step)
    row = one_row(frame, request.get("row"))
    if "group_id" in frame.columns:
        members = frame[frame["group_id"] == row["group_id"]]
    else:
        members = frame[frame["row"] == row["row"]]
    beta, where = known_beta(reader, _metrics_of(reader, step))
    whole = _numbers(frame)
    own = whole.reward if beta is None or whole.kl is None else whole.reward - beta * whole.kl
    told = explain(_numbers(members), step=whole, loo_of_step=_loo_by_group(frame, own), beta=beta, where=where)
    parts = [str(name) for name in members.columns if str(name).startswith("rewards/")]
    rows = []
    for (_, member), numbers in zip(members.iterrows(), told["rows"], strict=True):
        if len(rows) == GROUP_ROWS:
            break
        named = {name: plain(member.get(name)) for name in ("row", "reward", "kl", "length", "truncated")}
        extra = {"parts": [number(member[name]) for name in parts]}
        rows.append(named | extra | numbers | {"completion": short(text_of(member.get("completion")), 600)})
    return {
        "run": index,
        "step": step,
        "said": said,
        "group": plain(row.get("group_id")),
        "row_id": plain(row.get("row_id")),
        "prompt": short(text_of(row.get("prompt")), 1500),
        "rule": told["rule"],
        "explained": told["said"],
        "beta": told["beta"],
        "parts": [clean(name.removeprefix("rewards/")) for name in parts],
        "rows": rows,
        "total": len(members),
    }


def token_lens(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """One page of the tokens of a completion (`rlkit.view.lens`). Takes run, step, row, page."""
    index, reader = pick(readers, request)
    step, said = pick_step(reader, request.get("step"))
    if step is None:
        raise ValueError("view: no completions are stored yet.")
    row = one_row(load(reader, step), request.get("row"))
    found = lens(row, page=int(request.get("page") or 0))
    return {"run": index, "step": step, "said": said, "about": found.pop("row"), "row": plain(row["row"]), **found}


def whole_text(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """A page of a text that a cell shows only in part. Takes run, step, row, column, offset."""
    index, reader = pick(readers, request)
    step, said = pick_step(reader, request.get("step"))
    if step is None:
        raise ValueError("view: no completions are stored yet.")
    row, column = one_row(load(reader, step), request.get("row")), request.get("column")
    if column not in row.index:
        raise ValueError(f"view: there is no column {column!r}.")
    text = text_of(row[column])
    offset = max(0, int(request.get("offset") or 0))
    part = clean(text[offset : offset + TEXT])
    return {
        "run": index,
        "step": step,
        "said": said,
        "row": plain(row["row"]),
        "column": column,
        "text": part,
        "offset": offset,
        "length": len(text),
        "page": TEXT,
    }


def pin(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """The answers to one prompt over the steps, the newest first. Takes run, row_id, before (a step, to go on).

    Looks at the newest `PINNED_STEPS` stored steps before `before`, and says where to go on ("older") if there are more.
    """
    index, reader = pick(readers, request)
    wanted, before = request.get("row_id"), request.get("before")
    stored = [step for step in reader.rollout_steps if before is None or step < before]
    looked = stored[-PINNED_STEPS:]
    steps: list[dict[str, Any]] = []
    prompt: Any = ""
    for step in reversed(looked):
        frame = load(reader, step, ANSWER)
        rows = frame[frame["row_id"].map(plain) == wanted] if "row_id" in frame.columns else frame[:0]
        if len(rows):
            prompt = prompt or short(text_of(rows.iloc[0].get("prompt")), 1500)
            steps.append({"step": int(step), **_side(rows)})
    older = looked[0] if len(stored) > len(looked) else None
    return {
        "run": index,
        "row_id": plain(wanted),
        "prompt": prompt,
        "steps": steps,
        "looked": len(looked),
        "older": older,
    }


def compare(readers: Sequence[Reader], request: dict[str, Any]) -> dict[str, Any]:
    """The prompts that two steps (of one run or of two) have in common, by row_id, the largest change first.

    Takes left and right, each {"run", "step"}, and offset.
    """
    sides = []
    for key in ("left", "right"):
        wanted = request.get(key) or {}
        index, reader = pick(readers, wanted)
        step, said = pick_step(reader, wanted.get("step"))
        frame = None if step is None else load(reader, step, ANSWER)
        prompts = {} if frame is None or "row_id" not in frame else dict(list(frame.groupby("row_id", sort=False)))
        sides.append((index, step, said, prompts))
    (_, _, _, left), (_, _, _, right) = sides
    shared = [row_id for row_id in left if row_id in right and _prompt(left[row_id]) == _prompt(right[row_id])]
    changes = {row_id: _mean_reward(right[row_id]) - _mean_reward(left[row_id]) for row_id in shared}
    shared.sort(key=lambda row_id: -abs(changes[row_id]) if not np.isnan(changes[row_id]) else 1.0)
    offset = max(0, int(request.get("offset") or 0))
    return {
        "sides": [
            {"run": index, "step": step, "said": said, "prompts": len(prompts)} for index, step, said, prompts in sides
        ],
        "shared": len(shared),
        "offset": offset,
        "prompts": [
            {
                "row_id": plain(row_id),
                "prompt": short(_prompt(left[row_id]), 400),
                "change": number(changes[row_id]),
                "left": _side(left[row_id]),
                "right": _side(right[row_id]),
            }
            for row_id in shared[offset : offset + PROMPTS]
        ],
    }


def bundle(readers: Sequence[Reader], *, max_bytes: int = 3_000_000) -> dict[str, Any]:
    """Answers for a page without a kernel, for `bundled` of panel.js: overview, and per step tables, groups and lenses.

    The newest steps of every run come first; what no longer fits into `max_bytes` is left out, and "left_out" says how
    many steps that are.
    """
    import json

    found: dict[str, Any] = {"overview": answer(readers, {"kind": "overview"}), "answers": {}, "left_out": 0}
    budget = max_bytes - len(json.dumps(found))
    ages = max((len(reader.rollout_steps) for reader in readers), default=0)
    for age in range(1, ages + 1):
        for run, reader in enumerate(readers):
            if age > len(reader.rollout_steps):
                continue
            pieces = _step_answers(readers, run, reader.rollout_steps[-age])
            cost = len(json.dumps(pieces))
            if cost > budget:
                found["left_out"] += 1
                found["overview"]["runs"][run]["steps"].remove(reader.rollout_steps[-age])
                continue
            budget -= cost
            found["answers"] |= pieces
    return found


def _step_answers(readers: Sequence[Reader], run: int, step: int) -> dict[str, Any]:
    shown = answer(readers, {"kind": "table", "run": run, "step": step})
    pieces = {f"table {run} {step}": shown}
    for row in (entry["row"] for entry in shown["rows"]):
        request = {"run": run, "step": step, "row": row}
        lensed = answer(readers, {"kind": "lens", **request})
        grouped = answer(readers, {"kind": "group", **request})
        pieces[f"lens {run} {step} {row}"] = lensed
        pieces[f"group {run} {step} {grouped['group']}"] = grouped
    return pieces


def _cells(page: "pd.DataFrame", columns: Sequence[tuple[str, str]]) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a page, with as much of every text as the table has room for, and whether a text was cut."""
    texts = sum(kind == "text" for _, kind in columns)
    room = max(24, min(CELL, TABLE_TEXT // max(1, len(page) * texts)))
    rows, cut = [], False
    for _, row in page.iterrows():
        cells: list[Any] = []
        for name, kind in columns:
            cell = plain(row[name])
            if kind == "text":
                cell = None if _missing(row[name]) else short(text_of(row[name]), room)
                cut = cut or isinstance(cell, dict)
            cells.append(cell)
        rows.append({"row": plain(row["row"]), "cells": cells})
    return rows, cut


def _whole(value: Any) -> int | None:
    """A wall time in whole seconds."""
    return int(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _side(rows: "pd.DataFrame") -> dict[str, Any]:
    """The answers to one prompt in one step."""
    return {
        "mean": number(_mean_reward(rows)),
        "total": len(rows),
        "rows": [
            {
                "row": plain(row["row"]),
                "reward": plain(row.get("reward")),
                "length": plain(row.get("length")),
                "truncated": plain(row.get("truncated")),
                "completion": short(text_of(row.get("completion")), 300),
            }
            for _, row in rows.head(16).iterrows()
        ],
    }


def _mean_reward(rows: "pd.DataFrame") -> float:
    return float(rows["reward"].astype(float).mean()) if "reward" in rows.columns else float("nan")


def _prompt(rows: "pd.DataFrame") -> str:
    return text_of(rows.iloc[0].get("prompt"))


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


def _metrics_of(reader: Reader, step: int) -> dict[str, Any]:
    metrics = reader.metrics
    line = metrics[metrics["step"] == step] if "step" in metrics else metrics[:0]
    return {} if not len(line) else {str(name): value for name, value in line.iloc[-1].items()}


def _hint(name: str) -> str:
    if name.startswith("rewards/"):
        return "One part of the reward; NaN where its function abstained."
    return HINTS.get(name, "")
