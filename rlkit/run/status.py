"""The status of a run: whether its loop goes on, and if not, why it ended. `state.json` holds it under `status`."""

from collections.abc import Mapping
from typing import Any, Literal

SignalReason = Literal["interrupted", "preempted"]
StopReason = Literal[SignalReason, "done", "stopped", "exhausted", "left"]
"""Why a loop ended:

- "done": all steps are done.
- "interrupted": Ctrl-C or the notebook's interrupt button.
- "stopped": the command stop.
- "preempted": SIGTERM or SIGUSR1.
- "exhausted": the iterable of prompts ended.
- "left": `break` or an exception in the body of the loop.
"""
Status = Literal[StopReason, "running", "paused"]
UNFINISHED: tuple[Status, ...] = ("running", "paused")


def status_of(state: Mapping[str, Any]) -> Any:
    """The status that a state.json holds, None if it holds none. A damaged file may hold anything."""
    return state.get("status") or state.get("stopped")
