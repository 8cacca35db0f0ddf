"""One reward call and its outcome."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.record import printable
from rlkit.reward_calls.arguments import Accepted, Offer, RewardLog, StepState
from rlkit.reward_calls.child import TimedOut
from rlkit.reward_calls.return_values import as_list, as_number
from rlkit.reward_calls.settings import Limits

logger = logging.getLogger(__name__)

LOGS = ("log_extra", "log_metric")


class Failed(Exception):
    """A reward function raised, or its process died. `kind` and `text` are those of what it raised."""

    def __init__(self, kind: str, text: str, trace: str | None = None) -> None:
        self.kind, self.text, self.trace = kind, printable(text[:500]), trace
        super().__init__(trace or f"{kind}: {self.text}")

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """From an exception of this process, which stays its cause."""
        try:
            text = str(error)
        except Exception:  # of the function's own class, with a broken __str__
            text = "(its text cannot be had)"
        failed = cls(type(error).__name__, text)
        failed.__cause__ = error
        return failed


@dataclass(frozen=True)
class Job:
    """A reward function, what it is offered, and its limits."""

    function: Any
    name: str
    accepted: Accepted
    offer: Offer
    limits: Limits

    def arguments(self, rows: Sequence[int], log: RewardLog | None) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments for some of the rows; without a log, those that log are left out."""
        writers = {"log_extra": log.extra, "log_metric": log.metric} if log is not None else {}
        names = [name for name in self.accepted.named if name not in LOGS or log is not None]
        named = {name: writers[name] if name in LOGS else self.offer.value(name, rows) for name in names}
        return [self.offer.value(name, rows) for name in self.accepted.positional], named

    def error(self, failed: Failed, row: int | None = None) -> RuntimeError:
        """The error for the user: function, what it raised, and the completion if it is known."""
        what = f"{failed.kind}: {failed.text}".rstrip(".: ")
        text = f"score: reward function {self.name!r} failed with {what}."
        state = self.offer.state
        if "NoneType" in failed.text and isinstance(state, StepState) and state.max_steps is None:
            text += (
                " trainer_state.max_steps is None, since score is called outside run.steps; if that is why, "
                "pass state=rl.rewards.StepState(step, max_steps)."
            )
        if row is not None:
            text += f" It fails on {self.offer.show(row)}."
        error = RuntimeError(text)
        error.__cause__ = failed if failed.trace or failed.__cause__ is None else failed.__cause__
        return error


@dataclass
class Outcome:
    """Rewards and failures of a job."""

    job: Job
    values: list[float] = field(init=False)  # one per row, NaN where there is none
    log: RewardLog = field(init=False)
    errors: dict[int, str] = field(default_factory=dict)  # by row
    late: list[int] = field(default_factory=list)  # rows that were lost to the timeout

    def __post_init__(self) -> None:
        self.values = [math.nan] * len(self.job.offer)
        self.log = RewardLog(len(self.job.offer))

    def put(self, rows: Sequence[int], returned: Any, log: RewardLog) -> None:
        """Store the rewards of some rows; a TypeError or ValueError if they are not one number per row."""
        for row, value in zip(rows, as_list(returned, self.job.name, len(rows)), strict=True):
            try:
                self.values[row] = as_number(value, self.job.name, row)
            except (TypeError, ValueError) as error:
                if self.job.limits.on_error == "raise":
                    raise
                self.errors[row] = str(error)
        self.log.merge(rows, log)

    def lose(self, rows: Sequence[int], why: Failed | TimedOut) -> None:
        """Record that some rows got no reward; a RuntimeError if the function failed and `on_error="raise"`."""
        if isinstance(why, TimedOut):
            self.late += rows
            value = self.job.limits.on_timeout
            for row in rows:
                self.values[row] = math.nan if value is None else value
        elif self.job.limits.on_error == "raise":
            raise self.job.error(why, rows[0] if len(rows) == 1 else None)
        else:
            self.errors |= dict.fromkeys(rows, f"{why.kind}: {why.text}")

    def failures(self) -> list[str | None]:
        """Per row what went wrong, or None."""
        late = dict.fromkeys(self.late, f"no reward within {self.job.limits.timeout} s")
        return [(self.errors | late).get(row) for row in range(len(self.values))]

    def metrics(self) -> dict[str, float]:
        """Shares of the rows that failed and that were too slow, where that is tolerated."""
        name, count, limits = self.job.name, max(1, len(self.values)), self.job.limits
        shares = {}
        if limits.on_error == "none":
            shares[f"rewards/{name}/errors"] = len(self.errors) / count
        if limits.timeout is not None:
            shares[f"rewards/{name}/timeouts"] = len(self.late) / count
        return shares

    def report(self) -> None:
        """One warning for all the rows that were lost, with the first of them."""
        name, count, limits = self.job.name, len(self.values), self.job.limits
        if self.errors:
            row, why = min(self.errors.items())
            logger.warning(
                "score: reward function %r failed on %d of %d completions, which get None from it. First: %s on %s",
                name,
                len(self.errors),
                count,
                why,
                self.job.offer.show(row),
            )
        if self.late:
            logger.warning(
                "score: reward function %r gave no reward for %d of %d completions within its limits (timeout=%s s), "
                "which get %s from it. First: %s",
                name,
                len(self.late),
                count,
                limits.timeout,
                limits.on_timeout,
                self.job.offer.show(min(self.late)),
            )
