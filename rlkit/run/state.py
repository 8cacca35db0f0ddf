"""RunState: everything that `Run` and `Loop` share. `Run` is its public face, `Loop` advances it."""

import os
from pathlib import Path

from rlkit.distributed import collectives
from rlkit.run.background import Background, loop_in_background
from rlkit.run.checkpointer import Checkpointer, cut_back
from rlkit.run.console import Console
from rlkit.run.knob_changes import Changes
from rlkit.run.knobs import Numbers
from rlkit.run.location import Home
from rlkit.run.manifest import newest_of
from rlkit.run.rollouts import RolloutWriter
from rlkit.run.signals import StopFlag
from rlkit.run.status import StopReason
from rlkit.run.step_log import Counters, StepLog
from rlkit.support.process_state import current


class RunState:
    """The state of one run in this process."""

    def __init__(self, home: Home, rollouts: RolloutWriter) -> None:
        self.home = home
        self.step = 0  # the step that the loop is in, or the number of finished steps
        self.max_steps: int | None = None  # of the loop that runs or ran last
        self.stopped: StopReason | None = None  # why the loop ended; None while it runs and before the first
        self.thread: int | None = None  # identifier of the thread that runs the loop
        self.started = False  # `Run.start` was called
        self.background: Background | None = None  # the loop in the background, if there was one
        self.resumed = False  # `resume` was called
        self.console = Console()
        self.flag = StopFlag(self.say)
        self.log = StepLog(home, rollouts, self.say)
        self.numbers = Numbers()
        self.changes = Changes()
        self.checkpointer = Checkpointer()

    @property
    def path(self) -> Path:
        """The run's folder, chosen now if it was not."""
        return self.home.path

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.say(text)

    def save(self) -> Path:
        """Write a checkpoint; see `Run.save`. Every process calls it."""
        log = self.log
        counters = {
            "step": self.step + 1 if log.step == self.step else self.step,
            "logged_step": log.step,
            "tokens": log.counters.tokens,
            "reward_calls": log.counters.reward_calls,
            "numbers": self.numbers.state(),
        }
        return self.checkpointer.save(self.path, counters, log.last)

    def resume(self, source: str | os.PathLike[str]) -> int:
        """Restore a checkpoint; see `Run.resume`. Every process calls it."""
        self.checkpointer.require("run.resume")
        if self.log.step is not None or self.step:
            raise RuntimeError("run.resume: this run has begun; call resume before the loop.")
        if (other := loop_in_background()) is not None:
            raise RuntimeError(
                f"run.resume: the loop of {other} is going in the background, on the same models and files. Wait for "
                'it with run.wait(), or end it: run.control("stop").'
            )
        self.resumed = True
        source = current.resume or source
        named = source != "auto"
        if source == "none":
            return 0
        found = collectives.from_main(Path(source) if named else newest_of(self.home.wanted))
        if found is None:
            return 0
        mine = self.home.go_on_in(found.parent.parent, wanted=not named)
        if not named and not mine:
            raise RuntimeError(
                f"run.resume: this run writes into {self.path} already, and the newest checkpoint is {found}. Call "
                "resume right after track, before anything is logged or run.path is asked for."
            )
        counters = self.checkpointer.load(found, named=named, mine=mine)
        for note in self.numbers.restore(counters.get("numbers") or {}):
            self.say(note)
        self.step, self.log.step = counters["step"], counters["logged_step"]
        self.log.counters = Counters(counters["tokens"], counters["reward_calls"])
        cut_back(self.path, self.step)
        if mine:
            self.changes.go_back(self.path, self.step)
        self.say(f"rlkit: resumed {self.path} at step {self.step}")
        return self.step
