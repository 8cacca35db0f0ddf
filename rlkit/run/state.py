"""RunState: everything that `Run` and `Loop` share. `Run` is its public face, `Loop` advances it."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlkit.distributed import collectives
from rlkit.run.background import Background, loop_in_background
from rlkit.run.checkpointer import Checkpointer, cut_back
from rlkit.run.knob_changes import Changes
from rlkit.run.knobs import Numbers
from rlkit.run.location import Home
from rlkit.run.manifest import newest_of
from rlkit.run.rollouts import RolloutWriter
from rlkit.run.signals import StopFlag
from rlkit.run.status import StopReason
from rlkit.run.step_log import Counters, StepLog
from rlkit.support.process_state import current
from rlkit.support.text import say


class Console:
    """Lines and the progress bar of one run."""

    def __init__(self) -> None:
        self._bar: Any = None

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._bar is None:
            say(text, flush=True)
        else:
            self._bar.write(text)

    def advance(self) -> None:
        """Advance the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    @contextlib.contextmanager
    def progress(self, name: str, step: int, max_steps: int, show: bool | None) -> Iterator[None]:
        """Show a progress bar, on the main process.

        None shows it in notebooks and terminals, not in log files, and only from the main thread: where a front end
        puts a widget that another thread displays is not defined.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if show is None:
            show = in_main_thread and ("ipykernel" in sys.modules or sys.stderr.isatty())
        if not show or collectives.rank():
            yield
            return
        import tqdm
        import tqdm.auto

        kind = tqdm.auto.tqdm if in_main_thread else tqdm.tqdm
        with kind(total=max_steps, initial=step, desc=name, unit="step", file=sys.stderr) as self._bar:
            try:
                yield
            finally:
                self._bar = None


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
        self.checkpointer.require("run.save")
        self.resume_if_asked()  # a save before the loop would become the newest checkpoint, of a policy that has none
        log = self.log
        counters = {
            "step": self.step + 1 if log.step == self.step else self.step,
            "logged_step": log.step,
            "tokens": log.counters.tokens,
            "reward_calls": log.counters.reward_calls,
            "numbers": self.numbers.state(),
        }
        return self.checkpointer.save(self.path, counters, log.last)

    def resume_if_asked(self) -> None:
        """Resume before the first save or step if a script's flags ask for it."""
        if current.resume and not self.resumed and not self.step:
            self.resume("auto")

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
        found = collectives.from_main(Path(os.path.abspath(source)) if named else newest_of(self.home.wanted))
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
