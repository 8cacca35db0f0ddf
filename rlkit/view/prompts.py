"""One prompt over time for the panel: its answers in every stored step, or in two steps side by side.

Prompts are matched by `row_id`, their row in the dataset. In a comparison the texts must agree as well: two runs on
different data have row ids in common that mean nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.run.reader import RunReader
from rlkit.view.json_values import number, plain, short, text_of
from rlkit.view.rollout_frame import load, pick, pick_step

if TYPE_CHECKING:
    import pandas as pd

# Limits of one answer
PINNED_STEPS = 24  # of a pinned prompt
PROMPTS = 30  # of a comparison
SIDE_ROWS = 16  # completions of a prompt in one step
ANSWER = ("row", "row_id", "prompt", "completion", "reward", "length", "truncated")  # the columns that are read


def pin(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
    """The answers to one prompt over the steps, the newest first. Takes run, row_id, before (a step, to go on).

    Reads the newest `PINNED_STEPS` stored steps before `before`; "older" is where to go on if there are more.
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
    about = {"run": index, "row_id": plain(wanted), "prompt": prompt}
    return {**about, "steps": steps, "looked": len(looked), "older": older}


def compare(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
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


def _side(rows: "pd.DataFrame") -> dict[str, Any]:
    """The answers to one prompt in one step."""
    return {
        "mean": number(_mean_reward(rows)),
        "total": len(rows),
        "rows": [
            {name: plain(row.get(name)) for name in ("row", "reward", "length", "truncated")}
            | {"completion": short(text_of(row.get("completion")), 300)}
            for row in rows.head(SIDE_ROWS).to_dict("records")
        ],
    }


def _mean_reward(rows: "pd.DataFrame") -> float:
    return float(rows["reward"].astype(float).mean()) if "reward" in rows.columns else float("nan")


def _prompt(rows: "pd.DataFrame") -> str:
    return text_of(rows.iloc[0].get("prompt"))
