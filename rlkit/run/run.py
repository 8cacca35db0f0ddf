"""Run: `steps` drives the loop, `log` measures and writes, `dashboard` shows.

`steps` is the only place that waits, stops or saves. Ctrl-C (the notebook's interrupt button) lets the current step
finish and then ends the loop with everything on disk and the kernel usable; a second Ctrl-C stops at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.metrics import advantage_metrics, for_json, kl_metrics, rollout_metrics, score_metrics
from rlkit.rollout import Rollout, Scores, Update
from rlkit.run.folder import append_line, fresh_folder, read_lines, versions, write_json

if TYPE_CHECKING:
    import pandas as pd

LINE = ("reward", "kl", "clip_ratio/region_mean", "entropy", "completions/mean_length", "loss", "grad_norm")


class Run:
    """A run and its folder.

    Args:
        path: folder, made if needed. If it holds anything already, a number is added to the name: nothing is written
            over.
        config: parameters to keep in `config.json`.

    Attributes:
        path: the folder that is written to.
        step: the step that the loop is in, or the number of finished steps.
        stopped: why the loop ended: "done", "interrupted", "exhausted" (no prompts), "left" (break or an error), or
            None while it runs.
    """

    def __init__(self, path: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None) -> None:
        self.path: Path = fresh_folder(path)
        if self.path != Path(path):
            print(f"rlkit: {path} is not empty, writing to {self.path}")
        self.step = 0
        self.max_steps: int | None = None
        self.stopped: str | None = None
        self._interrupted = False
        self._tokens = 0
        self._reward_calls = 0
        self._every: int | None = None
        self._bar: Any = None
        self._started = 0.0
        self._logged_step: int | None = None
        write_json(self.path / "config.json", {"parameters": dict(config or {}), "versions": versions()})
        (self.path / "metrics.jsonl").touch()

    def dashboard(self, *, every: int = 1) -> None:
        """Show the run while it goes: one line per step, every `every` steps."""
        if every < 1:
            raise ValueError(f"run.dashboard: every must be at least 1, got {every}.")
        self._every = every

    def steps(self, prompts: Any, max_steps: int, *, progress: bool | None = None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) until `max_steps` steps are done in all, the prompts end, or the user interrupts.

        Steps count on over several loops on one run: a loop that was interrupted at step 7 goes on with step 7 when its
        cell is run again, and a loop with a larger `max_steps` adds the missing ones.

        Args:
            prompts: a `PromptLoader`, or any iterable of batches.
            max_steps: steps of the whole run.
            progress: show a progress bar; None shows it in notebooks and terminals, and not in log files.

        Raises:
            ValueError: max_steps below 1.
            KeyboardInterrupt: on a second Ctrl-C within one step.
        """
        if max_steps < 1:
            raise ValueError(f"run.steps: max_steps must be at least 1, got {max_steps}.")
        self.max_steps, self.stopped, self._interrupted = max_steps, None, False
        stream = iter(prompts)
        with self._interruptible(), self._progress_bar(max_steps, progress):
            while self.step < max_steps and not self._interrupted:
                position = prompts.state_dict() if hasattr(prompts, "state_dict") else None
                try:
                    batch = next(stream)
                except StopIteration:
                    self.stopped = "exhausted"
                    break
                self._started = time.perf_counter()
                try:
                    yield self.step, batch
                except GeneratorExit:  # the loop was left by break or by an error
                    self.stopped = "left"
                    if self._logged_step == self.step:  # all of the step was done
                        self._finish_step(prompts)
                    elif position is not None:  # the step will be repeated, with its own prompts
                        prompts.load_state_dict(position)
                    self._save_state(prompts)
                    raise
                self._finish_step(prompts)
            if self.stopped is None:
                self.stopped = "interrupted" if self.step < max_steps else "done"
            self._save_state(prompts)
        if self.stopped == "interrupted":
            print(f"rlkit: stopped after step {self.step - 1} of {max_steps}; everything is in {self.path}")

    def _finish_step(self, prompts: Any) -> None:
        seconds = time.perf_counter() - self._started
        append_line(self.path / "timings.jsonl", {"step": self.step, "step_time": seconds})
        self.step += 1
        self._save_state(prompts)
        if self._bar is not None:
            self._bar.update()

    def _save_state(self, prompts: Any) -> None:
        state: dict[str, Any] = {"step": self.step, "max_steps": self.max_steps, "stopped": self.stopped}
        if hasattr(prompts, "state_dict"):
            state["prompts"] = prompts.state_dict()
        write_json(self.path / "state.json", state)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Inside, the first Ctrl-C of a step only sets a flag. Signals reach the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self._say("rlkit: stopping after this step; interrupt again to stop at once")

        before = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def _progress_bar(self, max_steps: int, show: bool | None) -> Iterator[None]:
        if show is None:
            show = "ipykernel" in sys.modules or sys.stderr.isatty()
        if not show:
            yield
            return
        from tqdm.auto import tqdm

        with tqdm(total=max_steps, initial=self.step, desc=self.path.name, unit="step", file=sys.stderr) as self._bar:
            try:
                yield
            finally:
                self._bar = None

    def log(
        self,
        step: int,
        rollout: Rollout | None = None,
        scores: Scores | None = None,
        advantages: Tensor | None = None,
        update: Update | None = None,
        *,
        ref_logps: Tensor | None = None,
        **extra: float | Tensor,
    ) -> dict[str, int | float | None]:
        """Measure a step and append the numbers to `metrics.jsonl`.

        Give what the step has; every record is optional. A step may be logged once.

        Args:
            step: the step, as `steps` yielded it.
            rollout: lengths, truncation, tokens.
            scores: rewards.
            advantages: their mean and spread.
            update: the update's metrics; of several updates on one rollout give the last one.
            ref_logps: log-probabilities of the reference, for the KL.
            **extra: further numbers by name; of a tensor the mean over what is not NaN.

        Returns:
            The numbers that were written; None where a number is not finite.

        Raises:
            ValueError: the step was logged before, `ref_logps` without a rollout, or an extra name that is taken.
            TypeError: an extra value that is not a number.
        """
        if self._logged_step is not None and step <= self._logged_step:
            raise ValueError(
                f"run.log: step {step} comes after step {self._logged_step} was logged; log each step once."
            )
        if ref_logps is not None and rollout is None:
            raise ValueError("run.log: ref_logps needs the rollout that they belong to.")
        metrics: dict[str, float] = {}
        tokens, calls = self._tokens, self._reward_calls  # counted only once everything is known to be right
        if rollout is not None:
            tokens += int(rollout.prompt_mask.sum()) + int(rollout.completion_mask.sum())
            metrics |= {"num_tokens": float(tokens)} | rollout_metrics(rollout)
            if ref_logps is not None:
                metrics |= kl_metrics(rollout, ref_logps)
        if scores is not None:
            calls += len(scores)
            metrics |= {"reward_calls": float(calls)} | score_metrics(scores)
        if advantages is not None:
            metrics |= advantage_metrics(advantages)
        if update is not None:
            metrics |= dict(update.metrics)
        for name, value in extra.items():
            if name in metrics:
                raise ValueError(f"run.log: {name!r} is measured already; choose another name for the extra number.")
            metrics[name] = _mean_of(name, value)
        line = {"step": step, **for_json(metrics)}
        append_line(self.path / "metrics.jsonl", line)
        self._logged_step, self._tokens, self._reward_calls = step, tokens, calls
        if self._every is not None and step % self._every == 0:
            self._say(format_line(line))
        return line

    def count_reward_calls(self, calls: int) -> None:
        """Add completions that were scored outside the loop (stage 1 of A*-PO), so that methods compare fairly."""
        self._reward_calls += calls

    def _say(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per logged step, read from the folder."""
        import pandas as pd

        return pd.DataFrame(read_lines(self.path / "metrics.jsonl"))

    def plot(self, *names: str) -> Any:
        """A plotly figure of metrics over the steps; the reward by default."""
        import plotly.graph_objects as go

        from rlkit.metrics import describe

        frame = self.metrics
        figure = go.Figure()
        for name in names or ("reward",):
            if name not in frame:
                raise KeyError(f"run.plot: no metric {name!r} was logged; there are {sorted(frame.columns)}.")
            figure.add_scatter(x=frame["step"], y=frame[name], name=name, mode="lines")
        title = ", ".join(names or ("reward",))
        with contextlib.suppress(KeyError):
            if len(names) <= 1:
                title = describe(title).sentence
        return figure.update_layout(title=title, xaxis_title="step", height=360, margin={"t": 48, "b": 40})

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.step} steps done, {self.stopped or 'open'})"


def format_line(line: Mapping[str, Any]) -> str:
    """One step as a line of text: the numbers that say how it goes.

    Example:
        >>> format_line({"step": 3, "reward": 0.5, "kl": None})
        'step 3 | reward 0.500 | kl -'
    """
    parts = [f"step {line['step']}"]
    for name in LINE:
        if name in line:
            value = line[name]
            short = name.removeprefix("completions/").removesuffix("/region_mean")
            parts.append(f"{short} -" if value is None else f"{short} {value:.3f}")
    return " | ".join(parts)


def _mean_of(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        known = value.detach().float()
        known = known[~known.isnan()]
        return float(known.mean()) if known.numel() else float("nan")
    if isinstance(value, (int, float)) or torch.is_tensor(value):
        return float(value)
    raise TypeError(f"run.log: {name!r} must be a number or a tensor, got {type(value).__name__}.")
