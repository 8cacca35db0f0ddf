"""The status of a run: whether its loop goes on, and if not, why it ended. `state.json` holds it under `status`."""

from typing import Literal

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
