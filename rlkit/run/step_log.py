"""StepLog: measures a step over the rows of all processes, and writes the numbers to metrics.jsonl, rollouts/, the
trackers and the console.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.kl import compute_kl
from rlkit.metrics import advantage_metrics, for_json, kl_row_metrics, length_metrics, reward_metrics
from rlkit.reward_calls.monitor import Monitor
from rlkit.run.folder import append_line
from rlkit.run.location import Home
from rlkit.run.rollout_rows import StepRecords
from rlkit.run.rollouts import RolloutWriter
from rlkit.run.trackers import Trackers
from rlkit.step_checks import check_pairing
from rlkit.support.scalars import number_of
from rlkit.types import Scores

LINE = ("reward", "kl", "clip_ratio/region_mean", "entropy", "completions/mean_length", "loss", "grad_norm")


@dataclass(frozen=True)
class Counters:
    """Totals of a run: tokens of prompts and completions, completions scored."""

    tokens: int = 0
    reward_calls: int = 0


class StepLog:
    """The log of one run. `say` prints a line."""

    def __init__(self, home: Home, rollouts: RolloutWriter, say: Callable[[str], None]) -> None:
        self._home, self._rollouts, self._say = home, rollouts, say
        self._monitor = Monitor()
        self.step: int | None = None  # the step that was logged last
        self.last: dict[str, Any] = {}  # its line of metrics.jsonl
        self.counters = Counters()
        self.print_every: int | None = None  # print a line every this many steps
        self.trackers = Trackers()

    def write(self, step: int, given: StepRecords, extra: Mapping[str, Any]) -> dict[str, int | float | None]:
        """Log a step; see `Run.log`. Every process calls it."""
        try:
            step = operator.index(step)  # numpy's and torch's integers too
        except TypeError:
            raise TypeError(f"run.log: step must be a whole number, as run.steps yields it, got {step!r}.") from None
        if self.step is not None and step <= self.step:
            raise ValueError(f"run.log: step {step} comes after step {self.step} was logged; log each step once.")
        check_pairing("run.log", **vars(given))
        metrics, counters = measure(self.counters, given, extra)
        line = {"step": step, **for_json(metrics)}
        folder, is_main = self._home.path, collectives.rank() == 0
        if is_main:
            append_line(folder / "metrics.jsonl", line)
        self.step, self.last, self.counters = step, line, counters
        self.trackers.log(folder, line, self._rollouts.write(folder, step, given))
        if is_main:
            self._monitor.update(line)
            if self.print_every is not None and step % self.print_every == 0:
                self._say(format_line(line))
        return line


def measure(counters: Counters, given: StepRecords, extra: Mapping[str, Any]) -> tuple[dict[str, float], Counters]:
    """Return the metrics of one step and the counters after it; see `Run.log`."""
    rollout, scores, ref_logps = given.rollout, given.scores, given.ref_logps
    metrics: dict[str, float] = {}
    tokens, calls = counters.tokens, counters.reward_calls
    if rollout is not None:
        rows = {"prompt": rollout.prompt_mask.sum(-1), "lengths": rollout.lengths, "truncated": rollout.truncated}
        if ref_logps is not None:
            rows["kl"] = compute_kl(rollout, ref_logps.to(rollout.sampler_logp.device))
        rows = collectives.gather_rows(rows)
        tokens += int(rows["prompt"].sum()) + int(rows["lengths"].sum())
        metrics |= {"num_tokens": float(tokens)} | length_metrics(rows["lengths"], rows["truncated"])
        if rollout.logp_recomputed:
            metrics["sampler_logp/recomputed"] = 1.0
        if ref_logps is not None:
            metrics |= kl_row_metrics(rows["kl"], rows["lengths"])
    if scores is not None:
        scores = Scores.join(collectives.gather(scores.cpu())) if collectives.is_many() else scores
        calls += len(scores)
        metrics |= {"reward_calls": float(calls)} | dict(scores.metrics)
        metrics |= reward_metrics(scores.reward, scores.parts, scores.names, scores.group_id)
    if given.advantages is not None:
        metrics |= advantage_metrics(collectives.gather_rows({"advantages": given.advantages})["advantages"])
    if given.update is not None:
        metrics |= dict(given.update.metrics)
    for name, value in extra.items():
        if name in metrics:
            raise ValueError(f"run.log: {name!r} is measured already; choose another name for the extra number.")
        metrics[name] = _mean_of(name, value)
    return metrics, Counters(tokens, calls)


def format_line(line: Mapping[str, Any]) -> str:
    """Return one step as a line of text.

    Example:
        >>> format_line({"step": 3, "reward": 0.5, "kl": None})
        'step 3 | reward 0.500 | kl -'
    """
    parts = [f"step {line['step']}"]
    for name in LINE:
        # The value of RLOO's loss has no meaning beyond its gradient; that of a regression has.
        if name in line and (name != "loss" or "implicit_reward" in line):
            value = line[name]
            short = name.removeprefix("completions/").removesuffix("/region_mean")
            parts.append(f"{short} -" if value is None else f"{short} {value:.3f}")
    return " | ".join(parts)


def _mean_of(name: str, value: Any) -> float:
    """Return the number to log for an extra value; of a tensor or array, which has one value per row, the mean."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ma.filled(value.astype(np.float64), np.nan))  # any byte order, strides or mask
    if isinstance(value, Tensor) and not value.is_complex():
        known = collectives.gather_rows({name: value.detach().double().reshape(-1)})[name]
        known = known[~known.isnan()]
        return float(known.mean()) if known.numel() else float("nan")
    return number_of("run.log", name, value)
