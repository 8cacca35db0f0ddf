"""Loop: one pass of `Run.steps`, the only place that waits, stops and saves.

A step ends when the body of the user's loop asks for the next one. Between two steps every process agrees on what comes
next: a signal may have reached one of them only.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlkit import collectives
from rlkit.run.folder import append_line, write_json

if TYPE_CHECKING:
    from rlkit.run.run import Run


class Loop:
    """One pass over the steps of a run.

    Args:
        run: whose steps.
        prompts: a `PromptLoader`, or any iterable of batches.
        save_every: also save a checkpoint every so many steps, or None.
    """

    def __init__(self, run: "Run", prompts: Any, save_every: int | None) -> None:
        self._run, self._prompts, self._save_every = run, prompts, save_every
        self._started = 0.0

    def steps(self, max_steps: int, progress: bool | None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch); see `Run.steps`."""
        run, prompts = self._run, self._prompts
        run.max_steps, run.stopped, run._flag.reason = max_steps, None, None
        _ = run.path  # chosen together: an error in the loop closes this generator on one process only
        stream = iter(prompts)
        with run._flag.listening(), run._console.progress(run.path.name, run.step, max_steps, progress):
            while run.step < max_steps and run.stopped is None:
                position = prompts.state_dict() if hasattr(prompts, "state_dict") else None
                try:
                    batch = next(stream)
                except StopIteration:
                    run.stopped = "exhausted"
                    break
                self._started = time.perf_counter()
                try:
                    yield run.step, batch
                except GeneratorExit:  # the loop was left by break or by an error
                    run.stopped = "left"
                    if run._logged_step == run.step:  # all of the step was done
                        self._finish_step()
                    elif position is not None:  # the step will be repeated, with its own prompts
                        prompts.load_state_dict(position)
                    self._save_state()
                    raise
                self._finish_step()
                if run.step < max_steps:
                    run.stopped = self._agreed_reason()
                    if run.stopped is None and self._save_every and run.step % self._save_every == 0:
                        run.save()
            run.stopped = run.stopped or "done"
            self._save_state()
            if run._keeper.tracked is not None:
                run.save()
        self._end(max_steps)

    def _end(self, max_steps: int) -> None:
        run = self._run
        if run.stopped in ("interrupted", "preempted"):
            what = "everything is" if run._keeper.tracked else "the log is (weights were not saved: no run.track)"
            print(f"rlkit: stopped after step {run.step - 1} of {max_steps}; {what} in {run.path}")
        if run.stopped == "preempted":
            if collectives.rank() == 0:
                (run.path / "STOPPED").write_text(f"{run.step}\n", encoding="utf-8")
            collectives.barrier()
            raise SystemExit(0)

    def _agreed_reason(self) -> str | None:
        """Why to stop now, the same on every process: a signal may have reached one of them only."""
        reasons = [reason for reason in collectives.gather(self._run._flag.reason) if reason]
        return "preempted" if "preempted" in reasons else reasons[0] if reasons else None

    def _finish_step(self) -> None:
        run, seconds = self._run, time.perf_counter() - self._started
        if collectives.rank() == 0:
            append_line(run.path / "timings.jsonl", {"step": run.step, "step_time": seconds})
        run.step += 1
        self._save_state()
        run._console.advance()

    def _save_state(self) -> None:
        run = self._run
        if collectives.rank():
            return
        state: dict[str, Any] = {"step": run.step, "max_steps": run.max_steps, "stopped": run.stopped}
        if hasattr(self._prompts, "state_dict"):
            state["prompts"] = self._prompts.state_dict()
        write_json(run.path / "state.json", state)
