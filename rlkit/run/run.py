"""Run: `steps` drives the loop, `log` measures and writes, `save` and `resume` carry it over a restart.

`steps` is the only place that waits, stops or saves. Ctrl-C (the notebook's interrupt button) lets the current step
finish and then ends the loop with everything on disk and the kernel usable; a second Ctrl-C stops at once. Other cells,
the view and `rlkit ctl` send commands. With several processes every one runs the same loop, and the main one writes.
"""

import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.metrics import for_json
from rlkit.reward_calls.monitor import Monitor
from rlkit.run import evaluations
from rlkit.run.background import Background, loop_in_background, runs_in_place
from rlkit.run.commands import Order, send
from rlkit.run.console import Console
from rlkit.run.folder import append_line
from rlkit.run.knob_changes import Changes
from rlkit.run.knobs import Bounds, Knobs, Numbers
from rlkit.run.location import Home
from rlkit.run.loop import Loop
from rlkit.run.measurements import Counters, format_line, measure
from rlkit.run.plot import plot_metrics
from rlkit.run.reader import RunReader
from rlkit.run.rollouts import RolloutWriter
from rlkit.run.saved_state import Keeper, cut_back
from rlkit.run.signals import StopFlag
from rlkit.run.trackers import Sinks, Target
from rlkit.support.process_state import current
from rlkit.types import Rollout, Scores, Update, check_pairing

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.evaluation.evaluate import Evaluation
    from rlkit.policy import Policy
    from rlkit.step import LRScheduler
    from rlkit.view.dashboard import Dashboard


class Run:
    """A run and its folder.

    The folder is chosen when something is first written or asked for. If it holds anything already, a number is added
    to the name: nothing is written over. `resume` before that opens the existing run instead.

    Args:
        path: folder, made if needed.
        config: parameters to keep in `config.json`.
        rollouts_every: keep the rollout of every so many steps in `rollouts/`; None keeps none.
        rollouts_limit: bytes that `rollouts/` may take. Beyond them steps are dropped: the first, the last and evenly
            spread ones between them stay.
        report_to: "wandb", "trackio" or both: where the numbers of each step go as well; `report_to` sets more.
        log_completions: send them a table of completions too.

    Attributes:
        step: the step that the loop is in, or the number of finished steps.
        stopped: why the loop ended: "done", "interrupted", "stopped" (a command), "preempted" (a signal), "exhausted"
            (no prompts), "left" (break or an error), or None while it runs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        rollouts_every: int | None = 1,
        rollouts_limit: int = 2**30,
        report_to: str | Sequence[str] = (),
        log_completions: bool = False,
    ) -> None:
        self._home = Home(Path(path), config or {})
        self.step = 0
        self.max_steps: int | None = None
        self.stopped: str | None = None
        self._console = Console()
        self._flag = StopFlag(self._console.say)
        self._keeper = Keeper()
        self._counters = Counters()
        self._every: int | None = None
        self._logged_step: int | None = None
        self._last: dict[str, Any] = {}
        self._resumed = False
        self._numbers = Numbers()
        self._changes = Changes()
        self._thread: int | None = None  # in which a loop runs
        self._started = False
        self._background: Background | None = None
        self._monitor = Monitor()
        self._rollouts = RolloutWriter(rollouts_every, rollouts_limit)
        self._reader: RunReader | None = None
        self._sinks = Sinks()
        for kind in (report_to,) if isinstance(report_to, str) else report_to:
            self.report_to(kind, log_completions=log_completions)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> RunReader:
        """Read the folder of a run, of this process or another, finished or not; see `RunReader`.

        Raises:
            FileNotFoundError: there is no run in that folder.
        """
        return RunReader(path)

    def report_to(
        self, kind: str, *, project: str | None = None, name: str | None = None, log_completions: bool = False
    ) -> None:
        """Send the numbers of each step on to a tracker too. A tracker that fails never stops the training.

        Args:
            kind: "wandb" or "trackio". Their own environment variables (WANDB_MODE, TRACKIO_DIR ...) are heeded.
            project: name of the project; else WANDB_PROJECT or TRACKIO_PROJECT, else "rlkit".
            name: of the run; else that of its folder.
            log_completions: send a table of the first completions too, with TRL's columns, for the steps whose rollout
                is kept.

        Raises:
            ValueError: no such tracker, or asked for twice.
            ImportError: its package is not installed.
        """
        self._sinks.add(Target(kind, project, name, log_completions))

    @property
    def path(self) -> Path:
        """The folder that is written to, the same on every process."""
        return self._home.path

    @property
    def folder(self) -> Path | None:
        """The folder that is written to, or None while it is not chosen yet; asking chooses nothing."""
        return self._home.folder

    @property
    def wanted(self) -> Path:
        """The folder that was asked for; `path` has a number behind it if that one was not empty."""
        return self._home.wanted

    def dashboard(self, *, every: int = 1) -> "Dashboard | None":
        """Show the run while it goes: the live view in a notebook, one line per step in a script or a terminal.

        Args:
            every: a line only at every so many steps.

        Returns:
            The view, or None where lines are printed and on processes other than the main one.

        Raises:
            ValueError: `every` below 1.
        """
        if every < 1:
            raise ValueError(f"run.dashboard: every must be at least 1, got {every}.")
        if collectives.rank():
            return None
        from rlkit.view.frontend import front_end

        if front_end() != "text":
            try:
                from rlkit.view.dashboard import Dashboard

                view = Dashboard(self)
                view.show()
            except Exception as error:  # a run does not fail because of its picture
                self._say(f"rlkit: no live view: {type(error).__name__}: {error}")
            else:
                return view
        self._every = every
        return None

    def track(
        self,
        policy: "Policy",
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: "LRScheduler | None" = None,
        prompts: Any = None,
        vstar: Any = None,
        keep: int = 2,
        best: str | None = None,
    ) -> None:
        """Say whose state belongs to the run, for `save` and `resume`.

        Args:
            policy: the policy, as `world.prepare` returned it.
            optimizer: its optimizer.
            scheduler: its learning-rate scheduler.
            prompts: the `PromptLoader` of the loop.
            vstar: the `ValueTable` of A*-PO. It is saved once, as `vstar.pt` in the run's folder (read it with
                `ValueTable.load`, instead of sampling it again), and a resumed run must have the same one.
            keep: newest checkpoints that stay, at least 1.
            best: name of a metric whose best checkpoint stays as well ("reward"); larger is better.
        """
        self._keeper.track(policy, optimizer, scheduler, prompts, vstar, keep, best)

    def save(self) -> Path:
        """Write a checkpoint of the finished steps; every process calls it. In the loop's body call it after `log`, by
        which the step is done.

        Raises:
            RuntimeError: nothing is tracked.
            OSError: it cannot be written, such as on a full disk. What was written of it is removed; earlier
                checkpoints stay.
            TypeError: optimizer or scheduler hold something other than plain data.
        """
        counters = {
            "step": self.step + 1 if self._logged_step == self.step else self.step,
            "logged_step": self._logged_step,
            "tokens": self._counters.tokens,
            "reward_calls": self._counters.reward_calls,
            "numbers": self._numbers.state(),
        }
        return self._keeper.save(self.path, counters, self._last)

    def resume(self, source: str | os.PathLike[str] = "auto") -> int:
        """Go on from a checkpoint: weights, optimizer, scheduler, random states, position in the data, step, log.

        Call it after `track` and before anything is logged. The log is cut back to the checkpoint; the steps after it
        are done again, with the same result: numbers of `knobs` that were changed there are changed again.

        Args:
            source: "auto" takes the newest whole checkpoint of the run's folder (of `x-2` before `x`, if a number was
                added) and says which damaged ones it passed over; it starts a new run if there is none. "none" starts a
                new run; a path names a checkpoint (`runs/x/ckpt/step-000100`) to go on from in this run's folder.

        Returns:
            The number of steps done.

        Raises:
            RuntimeError: nothing is tracked, the run has begun, another process works on the folder, or the checkpoint
                is damaged (the error names the file), or belongs to another model, optimizer or table of V*.
            FileNotFoundError: the checkpoint is not whole; the error names the file that is missing.
        """
        self._keeper.need("run.resume")
        if self._logged_step is not None or self.step:
            raise RuntimeError("run.resume: this run has begun; call resume before the loop.")
        if loop_in_background() is not None:
            raise RuntimeError(
                f"run.resume: the loop of {loop_in_background()} is going in the background, on the same models and "
                'files. Wait for it with run.wait(), or end it: run.control("stop").'
            )
        self._resumed = True
        source = current.resume or source
        found = self._keeper.find(self.wanted, source)
        if found is None:
            return 0
        named = source != "auto"
        mine = self._home.go_on_in(found.parent.parent, wanted=not named)
        if not named and not mine:
            raise RuntimeError(
                f"run.resume: this run writes into {self.path} already, and the newest checkpoint is {found}. Call "
                "resume right after track, before anything is logged or run.path is asked for."
            )
        counters = self._keeper.load(found, named=named, mine=mine)
        for note in self._numbers.restore(counters.get("numbers") or {}):
            self._say(note)
        self.step, self._logged_step = counters["step"], counters["logged_step"]
        self._counters = Counters(counters["tokens"], counters["reward_calls"])
        cut_back(self.path, self.step)
        if mine:
            self._changes.go_back(self.path, self.step)
        self._say(f"rlkit: resumed {self.path} at step {self.step}")
        return self.step

    def steps(
        self, prompts: Any, max_steps: int, *, save_every: int | None = None, progress: bool | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) until `max_steps` steps are done in all, the prompts end, or the user interrupts.

        Steps count on over several loops on one run: a loop that was interrupted at step 7 goes on with step 7 when its
        cell is run again, and a loop with a larger `max_steps` adds the missing ones. If something is tracked, a
        checkpoint is saved when the loop ends, whatever ended it between two steps. In an exported script the
        flags --max-steps, --save-every and --resume are above what the notebook says.

        Args:
            prompts: a `PromptLoader`, or any iterable of batches.
            max_steps: steps of the whole run.
            save_every: also save a checkpoint every so many steps; needs `track`.
            progress: show a progress bar; None shows it in notebooks and terminals, and not in log files.

        Raises:
            ValueError: max_steps or save_every below 1.
            RuntimeError: save_every, and nothing is tracked; or a loop of this run is going in the background.
            KeyboardInterrupt: on a second Ctrl-C within one step.
            SystemExit: after SIGTERM or SIGUSR1, when the step is done, the checkpoint saved and STOPPED written.
        """
        if self._background is not None and self._background.alive and not self._background.is_current:
            raise RuntimeError("run.steps: a loop of this run is going in the background; run.wait() waits for it.")
        max_steps, save_every = current.max_steps or max_steps, current.save_every or save_every
        if max_steps < 1:
            raise ValueError(f"run.steps: max_steps must be at least 1, got {max_steps}.")
        if save_every is not None:
            if save_every < 1:
                raise ValueError(f"run.steps: save_every must be at least 1 or None, got {save_every}.")
            self._keeper.need("run.steps(save_every=...)")
        if self._keeper.tracked is not None and self._keeper.prompts is None and hasattr(prompts, "state_dict"):
            self._keeper.prompts = prompts
        if current.resume and not self._resumed and not self.step:
            self.resume()
        if self.step >= max_steps:
            self._say(f"rlkit: all {max_steps} steps are done; raise max_steps, or make a new Run, for more")
        yield from Loop(self, prompts, save_every).steps(max_steps, progress)

    def knobs(self, *, bounds: Mapping[str, Bounds] | None = None, **declared: Any) -> Knobs:
        """Declare the numbers of the loop that may be changed while it runs.

        They are the attributes of what is returned. A change from outside (`control("set", ...)`, the view, `rlkit ctl
        runs/x set beta 0.1`) is taken between two steps. Each number is logged with every step as `knobs/NAME`; a
        changed one outlives save and resume, unless the loop that resumes declares another value than before.

        Args:
            bounds: lowest and highest value by name, each or both may be None: `{"beta": (0, 1)}`.
            **declared: names and values: a float, a whole number (which stays one), or an optimizer, whose learning
                rate it is then; where there is a scheduler give the scheduler, and the number is the rate that the
                schedule is built on.

        Returns:
            The numbers, as attributes.

        Raises:
            TypeError: a value that is neither.
            ValueError: not finite, out of bounds, bounds without a number, or an optimizer that has a scheduler.

        Example:
            knobs = run.knobs(beta=0.02, learning_rate=optimizer, bounds={"beta": (0, 1)})
            ... rl.compute_loo_advantage(scores, kl=kl, beta=knobs.beta)
        """
        for note in self._numbers.declare(declared, bounds or {}):
            self._say(note)
        return Knobs(self._numbers, self._turn)

    def _turn(self, name: str, value: Any) -> None:
        """Assigning a knob: from another thread than the loop's it waits for the end of the step, as a command."""
        if self._thread not in (None, threading.get_ident()):
            self.control("set", name=name, value=value)
        else:
            self._numbers.set(name, value)

    def control(self, order: Order, *, name: str | None = None, value: float | None = None) -> None:
        """Tell this run's loop what to do when its step is done: from another cell, or from the loop's own body.

        Args:
            order: "pause", "resume", "stop" (everything is saved, as by the interrupt button), "save" or "set".
            name: of a number of `knobs`, for "set".
            value: its new value.

        Raises:
            FileNotFoundError, RuntimeError, ValueError, TypeError: as `rlkit.run.commands.send`, which other processes
                use; the command line is `rlkit ctl`.
        """
        path = self.path
        if collectives.rank() == 0:
            send(path, order, name=name, value=value, by="run.control")

    def start(self, loop: Callable[[], object]) -> None:
        """Run a loop in the background: the cell returns, and buttons, sliders and other cells work meanwhile.

            def loop():
                for step, batch in run.steps(prompts, max_steps):
                    ...
            run.start(loop)

        In a script it runs in place instead, and `start` returns when it is done. Torch's grad mode, default device and
        autocast are those of the cell.

        Args:
            loop: the function; it takes no arguments.

        Raises:
            RuntimeError: a loop is going in the background already.
            TypeError: the result of a function instead of the function.
        """
        if not callable(loop):
            raise TypeError(f"run.start: expected a function without arguments, got {loop!r}. Write run.start(loop).")
        name = str(self.path)
        self._started = True
        if runs_in_place():
            loop()
        else:
            self._background = Background(loop, name, self._flag)
            self._background.start()

    def wait(self) -> None:
        """Wait until the loop of `start` is done. The interrupt button ends that loop after its step, with everything
        saved; a second time it gives the cell back at once, while the loop finishes its step.

        Raises:
            RuntimeError: nothing was started.
            BaseException: what the loop raised.
        """
        if not self._started:
            raise RuntimeError("run.wait: nothing was started; call run.start(loop) first.")
        if self._background is not None:
            self._background.wait()

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        path = self.path
        if collectives.rank() == 0:
            append_line(path / name, values)

    def log_evaluation(self, name: str, evaluation: "Evaluation") -> Path:
        """Save an evaluation with the run: whole in `evaluations/NAME-STEP.pt`, its numbers in `evaluations.jsonl`.

        The step is that of the run: the one that the loop is in, else the number of finished steps. An evaluation of
        the same name at the same step takes the place of the earlier one. Every process calls it.

        Args:
            name: what was measured: letters, digits, "_", "-" and ".".
            evaluation: from `rl.evaluate`.

        Returns:
            The file, which `rl.Evaluation.load` reads.

        Raises:
            ValueError: a name that is no name of a file.
            TypeError: something else than an evaluation, or one whose dataset columns are not plain data.

        Example: `run.log_evaluation("test", rl.evaluate(policy, task.test, task.rewards))`
        """
        evaluations.check(name, evaluation)
        path = self.path
        if collectives.rank() == 0:
            evaluations.write(path, self.step, name, evaluation)
        return evaluations.file_of(path, self.step, name)

    def log(
        self,
        step: int,
        rollout: Rollout | None = None,
        scores: Scores | None = None,
        advantages: Tensor | None = None,
        update: Update | None = None,
        *,
        ref_logps: Tensor | None = None,
        new_logps: Tensor | None = None,
        **extra: Any,
    ) -> dict[str, int | float | None]:
        """Measure a step, append the numbers to `metrics.jsonl` and keep its rollout in `rollouts/`.

        Give what the step has; every record is optional. A step may be logged once.

        Args:
            step: the step, as `steps` yielded it.
            rollout: lengths, truncation, tokens.
            scores: rewards.
            advantages: their mean and spread.
            update: the update's metrics; of several updates on one rollout give the last one.
            ref_logps: log-probabilities of the reference, for the KL.
            new_logps: (B,T) log-probabilities after the update, from `compute_logps(policy, rollout)`. They are kept
                with the rollout only, where the token lens shows what the update did.
            **extra: further numbers by name, also of numpy; of a tensor or array, one value per row, the mean over what
                is not NaN. None is written as null, as a number that is not finite is.

        Returns:
            The numbers that were written; None where a number is not finite.

        Raises:
            ValueError: the step was logged before, records of different rollouts, `ref_logps` without a rollout, or an
                extra name that is taken.
            TypeError: an extra value that is not a number (the message names it), or a step that is no whole
                number.
        """
        step = _whole(step)
        if self._logged_step is not None and step <= self._logged_step:
            raise ValueError(
                f"run.log: step {step} comes after step {self._logged_step} was logged; log each step once."
            )
        check_pairing("run.log", rollout, scores, advantages, update, ref_logps=ref_logps, new_logps=new_logps)
        extra |= self._numbers.metrics()
        metrics, counters = measure(self._counters, rollout, scores, advantages, update, ref_logps, extra)
        line = {"step": step, **for_json(metrics)}
        self._append("metrics.jsonl", line)
        self._last = line
        self._logged_step, self._counters = step, counters
        table = None
        if rollout is not None:
            table = self._rollouts.write(self.path, step, rollout, scores, advantages, update, ref_logps, new_logps)
        self._sinks.log(self.path, line, table)
        if collectives.rank() == 0:
            self._monitor.update(line)
        if self._every is not None and collectives.rank() == 0 and step % self._every == 0:
            self._say(format_line(line))
        return line

    def count_reward_calls(self, calls: int) -> None:
        """Add completions that were scored outside the loop (stage 1 of A*-PO), so that methods compare fairly."""
        self._counters = replace(self._counters, reward_calls=self._counters.reward_calls + calls)

    def _say(self, text: str) -> None:
        self._console.say(text)

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per logged step, read from the folder; NaN where a step did not have a number."""
        return self.reader.metrics

    @property
    def reader(self) -> RunReader:
        """The run's folder, for reading."""
        if self._reader is None or self._reader.path != self.path:
            self._reader = RunReader(self.path)
        self._reader.refresh()
        return self._reader

    def rollouts(self, step: int | None = None) -> "pd.DataFrame":
        """The completions of a step, or of all that were kept; see `RunReader.rollouts`."""
        return self.reader.rollouts(step)

    def plot(self, *names: str) -> Any:
        """A plotly figure of metrics over the steps; the reward by default."""
        return plot_metrics(self.metrics, names or ("reward",))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.step} steps done, {self.stopped or 'open'})"


def _whole(step: Any) -> int:
    """A step as an int, also one of numpy or torch."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"run.log: step must be a whole number, as run.steps yields it, got {step!r}.") from None
