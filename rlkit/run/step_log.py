"""StepLog: writes what was measured in a step to metrics.jsonl, rollouts/, the trackers and the console."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlkit.distributed import collectives
from rlkit.metrics import for_json
from rlkit.reward_calls.monitor import Monitor
from rlkit.run.folder import append_line
from rlkit.run.location import Home
from rlkit.run.measurements import Counters, format_line, measure
from rlkit.run.rollouts import RolloutWriter
from rlkit.run.trackers import Trackers
from rlkit.types import Rollout, Scores, Update, check_pairing


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

    def write(
        self,
        step: int,
        rollout: Rollout | None,
        scores: Scores | None,
        advantages: Tensor | None,
        update: Update | None,
        ref_logps: Tensor | None,
        new_logps: Tensor | None,
        extra: Mapping[str, Any],
    ) -> dict[str, int | float | None]:
        """Log a step; see `Run.log`. Every process calls it."""
        try:
            step = operator.index(step)  # numpy's and torch's integers too
        except TypeError:
            raise TypeError(f"run.log: step must be a whole number, as run.steps yields it, got {step!r}.") from None
        if self.step is not None and step <= self.step:
            raise ValueError(f"run.log: step {step} comes after step {self.step} was logged; log each step once.")
        check_pairing("run.log", rollout, scores, advantages, update, ref_logps=ref_logps, new_logps=new_logps)
        metrics, counters = measure(self.counters, rollout, scores, advantages, update, ref_logps, extra)
        line = {"step": step, **for_json(metrics)}
        folder, is_main = self._home.path, collectives.rank() == 0
        if is_main:
            append_line(folder / "metrics.jsonl", line)
        self.step, self.last, self.counters = step, line, counters
        table = None
        if rollout is not None:
            table = self._rollouts.write(folder, step, rollout, scores, advantages, update, ref_logps, new_logps)
        self.trackers.log(folder, line, table)
        if is_main:
            self._monitor.update(line)
            if self.print_every is not None and step % self.print_every == 0:
                self._say(format_line(line))
        return line
