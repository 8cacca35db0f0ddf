"""Run: `steps` drives the loop, `log` measures and writes, `save` and `resume` carry it over a restart.

`steps` is the only place that waits, stops or saves. Ctrl-C (the notebook's interrupt button) ends the loop after the
current step, with everything on disk and the kernel usable; a second Ctrl-C stops at once. Other cells, the view and
`rlkit ctl` send commands. With several processes each runs the same loop, and only the main one writes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.run import evaluations
from rlkit.run.checkpoint import Tracked
from rlkit.run.controls import Controls
from rlkit.run.location import Home
from rlkit.run.loop import loop_over
from rlkit.run.plot import plot_metrics
from rlkit.run.reader import RunReader
from rlkit.run.rollout_rows import StepRecords
from rlkit.run.rollouts import RolloutWriter
from rlkit.run.state import RunState
from rlkit.run.status import StopReason
from rlkit.run.trackers import Target
from rlkit.support.process_state import current
from rlkit.support.text import fits
from rlkit.types import Rollout, Scores, Update

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.evaluation.compare import Evaluation
    from rlkit.policy import Policy
    from rlkit.step import LRScheduler
    from rlkit.view.dashboard import Dashboard


class Run(Controls):
    """A run and its folder; `knobs`, `control`, `start` and `wait` are in controls.py.

    The folder is chosen when something is first written or `path` is read. A folder that is not empty is never written
    into: a number is added to the name. To go on with the existing run call `resume` before that.

    Args:
        path: folder, made if needed.
        config: parameters to keep in `config.json`.
        rollouts_every: interval of steps whose rollout is kept in `rollouts/`; None keeps none.
        rollouts_limit: bytes that `rollouts/` may take. Beyond them steps are dropped: the first, the last and evenly
            spread ones between them stay.
        report_to: "wandb", "trackio" or both: where the numbers of each step go as well; `report_to` sets more.
        log_completions: send them a table of completions too.
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
        self._state = RunState(Home(Path(path), config or {}), RolloutWriter(rollouts_every, rollouts_limit))
        self._reader: RunReader | None = None
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
        """Send the numbers of each step to a tracker too. A tracker that fails never stops the training.

        Args:
            kind: "wandb" or "trackio". Their own environment variables (WANDB_MODE, TRACKIO_DIR ...) apply.
            project: name of the project; else WANDB_PROJECT or TRACKIO_PROJECT, else "rlkit".
            name: of the run; else that of its folder.
            log_completions: send a table of the first completions too, with TRL's columns, for the steps whose rollout
                is kept.

        Raises:
            ValueError: unknown tracker, or one that was added already.
            ImportError: its package is not installed.
        """
        self._state.log.trackers.add(Target(kind, project, name, log_completions))

    @property
    def step(self) -> int:
        """The step that the loop is in, or the number of finished steps."""
        return self._state.step

    @step.setter
    def step(self, step: int) -> None:
        self._state.step = step

    @property
    def max_steps(self) -> int | None:
        """The length of the loop that runs or ran last."""
        return self._state.max_steps

    @property
    def stopped(self) -> StopReason | None:
        """Why the loop ended: "done", "interrupted", "stopped" (a command), "preempted" (a signal), "exhausted" (no
        prompts), "left" (break or an error), or None while it runs.
        """
        return self._state.stopped

    @property
    def path(self) -> Path:
        """The folder that is written to, the same on every process."""
        return self._state.path

    @property
    def folder(self) -> Path | None:
        """The folder that is written to, or None if it is not chosen yet; reading this does not choose it."""
        return self._state.home.folder

    @property
    def wanted(self) -> Path:
        """The folder that was asked for; `path` has a number added if that one was not empty."""
        return self._state.home.wanted

    def dashboard(self, *, every: int = 1) -> "Dashboard | None":
        """Show the run while it goes: the live view in a notebook, one line per step in a script or a terminal.

        Args:
            every: interval of the printed lines in steps.

        Returns:
            The view, or None where lines are printed and on processes other than the main one.

        Raises:
            ValueError: `every` below 1.
        """
        if every < 1:
            raise ValueError(f"run.dashboard: every must be at least 1, got {every}.")
        if collectives.rank():
            return None
        from rlkit.view.dashboard import dashboard_of

        view = dashboard_of(self, self._state.say)
        if view is None:
            self._state.log.print_every = every
        return view

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
        """Declare whose state `save` writes and `resume` restores.

        Args:
            policy: the policy, as `world.prepare` returned it.
            optimizer: its optimizer.
            scheduler: its learning-rate scheduler.
            prompts: the `PromptLoader` of the loop.
            vstar: the `ValueTable` of A*-PO. It is saved once, as `vstar.pt` in the run's folder (read it with
                `ValueTable.load`, instead of sampling it again), and a resumed run must have the same one.
            keep: number of newest checkpoints that stay, at least 1.
            best: name of a metric whose best checkpoint stays as well ("reward"); larger is better.
        """
        if keep < 1:
            raise ValueError(f"run.track: keep must be at least 1, got {keep}.")
        checkpointer = self._state.checkpointer
        checkpointer.tracked = Tracked(policy, optimizer, scheduler, current.keep or keep, best)
        checkpointer.prompts, checkpointer.vstar = prompts, vstar

    def save(self) -> Path:
        """Write a checkpoint of the finished steps; every process calls it. In the body of the loop call it after
        `log`, which completes the step.

        Raises:
            RuntimeError: nothing is tracked.
            OSError: it cannot be written, such as on a full disk. What was written of it is removed; earlier
                checkpoints stay.
            TypeError: optimizer or scheduler hold something other than plain data.
        """
        return self._state.save()

    def resume(self, source: str | os.PathLike[str] = "auto") -> int:
        """Go on from a checkpoint: weights, optimizer, scheduler, random states, position in the data, step, log.

        Call it after `track` and before anything is logged. The log is cut back to the checkpoint; the steps after it
        are done again, with the same result: changes of `knobs` after the checkpoint are repeated.

        Args:
            source: "auto" takes the newest whole checkpoint of the run's folder (of `x-2` before `x`, if a number was
                added), names the damaged ones that it skips, and starts a new run if there is none. "none" starts a new
                run; a path names a checkpoint (`runs/x/ckpt/step-000100`) to go on from in this run's folder.

        Returns:
            The number of steps done.

        Raises:
            RuntimeError: nothing is tracked, the run has begun, another process works on the folder, or the checkpoint
                is damaged (the error names the file), or belongs to another model, optimizer or table of V*.
            FileNotFoundError: the checkpoint is not whole; the error names the missing file.
        """
        return self._state.resume(source)

    def steps(
        self, prompts: Any, max_steps: int, *, save_every: int | None = None, progress: bool | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Iterate over (step, batch) until the run has `max_steps` steps, the prompts end, or the loop is stopped.

        Steps are counted over all loops of a run: a loop that was interrupted at step 7 goes on with step 7 when its
        cell is run again, and a loop with a larger `max_steps` adds the missing ones. If something is tracked, a
        checkpoint is saved when the loop ends between two steps. In an exported script the flags --max-steps,
        --save-every and --resume take precedence over the notebook's values.

        Args:
            prompts: a `PromptLoader`, or any iterable of batches.
            max_steps: steps of the whole run.
            save_every: interval of further checkpoints in steps; needs `track`.
            progress: show a progress bar; None shows it in notebooks and terminals, and not in log files.

        Raises:
            ValueError: max_steps or save_every below 1.
            RuntimeError: save_every, and nothing is tracked; or a loop of this run is going in the background.
            KeyboardInterrupt: on a second Ctrl-C within one step.
            SystemExit: after SIGTERM or SIGUSR1, when the step is done, the checkpoint saved and STOPPED written.
        """
        return loop_over(self._state, prompts, max_steps, save_every, progress)

    def log_evaluation(self, name: str, evaluation: "Evaluation") -> Path:
        """Save an evaluation: whole in `evaluations/NAME-STEP.pt`, its numbers in `evaluations.jsonl`.

        STEP is `run.step`. An evaluation of the same name at the same step replaces the earlier one. Every process
        calls it.

        Args:
            name: what was measured: letters, digits, "_", "-" and ".".
            evaluation: from `rl.evaluate`.

        Returns:
            The file, which `rl.Evaluation.load` reads.

        Raises:
            ValueError: a name that cannot be the name of a file.
            TypeError: not an evaluation, or one whose dataset columns are not plain data.

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
            new_logps: (B,T) log-probabilities after the update, from `compute_logps(policy, rollout)`. They are stored
                with the rollout, where the token lens shows what the update did.
            **extra: further numbers by name, numpy's too. A tensor or array has one value per row, and its mean over
                the values that are not NaN is logged. None and numbers that are not finite are written as null.

        Returns:
            The numbers that were written; None where a number is not finite.

        Raises:
            ValueError: the step was logged before, records of different rollouts, `ref_logps` without a rollout, or an
                extra name that is taken.
            TypeError: an extra value that is not a number (the message names it), or a step that is not a whole number.
        """
        extra |= {f"knobs/{name}": value for name, value in self._state.numbers.values().items()}
        given = StepRecords(rollout, scores, advantages, update, ref_logps, new_logps)
        return self._state.log.write(step, given, extra)

    def count_reward_calls(self, calls: int) -> None:
        """Add completions that were scored outside the loop (stage 1 of A*-PO), so that methods compare fairly."""
        log = self._state.log
        log.counters = replace(log.counters, reward_calls=log.counters.reward_calls + calls)

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
        return fits(f"Run({str(self.path)!r}, {self.step} steps done, {self.stopped or 'open'})")
