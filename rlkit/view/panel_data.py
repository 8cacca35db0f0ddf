"""Answers to the requests of the panel, as plain JSON of bounded size.

`answer` is a pure function of the run folders and the request. So one script (`js/`) serves in a notebook, in a browser
tab, and, with answers that were written into it (`bundle`), in a report. An answer says what it leaves out.
"""

import copy
import functools
import json
from collections.abc import Sequence
from typing import Any

from rlkit.record import printable
from rlkit.run.reader import RunReader
from rlkit.view.completions import group, table, token_lens, whole_text
from rlkit.view.json_values import SAFE_INTEGER, plain, short
from rlkit.view.prompts import compare, pin

NUMBERS = 20
"""Declared numbers of a run, at most."""


def answer(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request of the panel.

    Args:
        readers: the runs, in the order in which requests number them.
        request: {"kind": "overview" | "table" | "group" | "lens" | "text" | "pin" | "compare", ...}; the function of
            each kind documents its other fields.

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


def overview(readers: Sequence[RunReader], request: dict[str, Any]) -> dict[str, Any]:
    """Where every run stands: {"runs": [{"run", "name", "path", "step", "max_steps", "status", "taken", "time",
    "numbers", "steps" (whose completions are stored), "notes"}]}.
    """
    runs = []
    for index, reader in enumerate(readers):
        state = reader.state if isinstance(reader.state, dict) else {}
        numbers = state.get("numbers")
        declared = list(numbers.items())[:NUMBERS] if isinstance(numbers, dict) else []
        runs.append(
            {
                "run": index,
                "name": printable(str(reader.name)),
                "path": printable(str(reader.path)),
                "step": plain(state.get("step")),
                "max_steps": plain(state.get("max_steps")),
                "status": plain(state.get("status") or ""),
                "taken": plain(state.get("taken")),
                "time": _whole(state.get("time")),
                "numbers": {printable(str(name)): plain(value) for name, value in declared},
                "steps": [int(step) for step in reader.rollout_steps],
                "notes": [short(str(note), 300) for note in list(reader.notes)[-5:]],
            }
        )
    return {"runs": runs}


def bundle(readers: Sequence[RunReader], *, max_bytes: int = 3_000_000) -> dict[str, Any]:
    """Answers for a page without a kernel, for `bundled` of js/panel.js: overview, and per step tables, groups, lenses.

    The newest steps of every run come first; what no longer fits into `max_bytes` is left out, and "left_out" says how
    many steps that are.
    """
    readers = [_caching(reader) for reader in readers]
    found: dict[str, Any] = {"overview": answer(readers, {"kind": "overview"}), "answers": {}, "left_out": 0}
    budget = max_bytes - len(json.dumps(found))
    stored = {run: list(entry["steps"]) for run, entry in enumerate(found["overview"]["runs"])}
    shown: dict[int, list[int]] = {run: [] for run in stored}
    while any(stored.values()):
        for run, steps in stored.items():
            if not steps:
                continue
            step = steps.pop()
            pieces = _step_answers(readers, run, step)
            cost = len(json.dumps(pieces))
            if cost > budget:  # older steps of this run are not read: a report must not take minutes
                found["left_out"] += 1 + len(steps)
                steps.clear()
                continue
            budget -= cost
            found["answers"] |= pieces
            shown[run].insert(0, step)
    for run, entry in enumerate(found["overview"]["runs"]):
        entry["steps"] = shown[run]
    return found


def _caching(reader: RunReader) -> RunReader:
    """A reader that keeps the frame it read last: a bundle asks for each row of a step."""
    copied = copy.copy(reader)
    copied.rollouts = functools.lru_cache(maxsize=1)(reader.rollouts)  # type: ignore[method-assign]
    return copied


def _step_answers(readers: Sequence[RunReader], run: int, step: int) -> dict[str, Any]:
    shown = answer(readers, {"kind": "table", "run": run, "step": step})
    pieces = {f"table {run} {step}": shown}
    names = [column["name"] for column in shown["columns"]]
    place = names.index("group_id") if "group_id" in names else names.index("row") if names else 0
    for entry in shown["rows"]:
        request = {"run": run, "step": step, "row": entry["row"]}
        pieces[f"lens {run} {step} {entry['row']}"] = answer(readers, {"kind": "lens", **request})
        key = f"group {run} {step} {entry['cells'][place]}"
        if key not in pieces:
            pieces[key] = answer(readers, {"kind": "group", **request})
    return pieces


def _whole(value: Any) -> int | None:
    """A wall time in whole seconds."""
    return int(value) if isinstance(value, int | float) and abs(value) < SAFE_INTEGER else None
