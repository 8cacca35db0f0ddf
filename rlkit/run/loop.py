"""Loop: one pass of `Run.steps`, the only place that waits, stops and saves.

A step ends when the body of the user's loop asks for the next one. Between two steps every process agrees on what comes
next: a signal may have reached one of them only, and commands are read by the main one.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlkit.distributed import collectives
from rlkit.run.commands import Command, Inbox
from rlkit.run.folder import append_line, write_json
from rlkit.run.knob_changes import Change
from rlkit.support import process_state, timing
from rlkit.support.text import say

if TYPE_CHECKING:
    from rlkit.run.run import Run

POLL_SECONDS = 0.2  # while paused; each poll is one small exchange, so that no collective of the others times out
ENDED_EARLY = ("interrupted", "preempted", "stopped")


class Loop:
    """One pass over the steps of a run; the run's other half, which reads its private parts.

    Args:
        run: whose steps.
        prompts: a `PromptLoader`, or any iterable of batches.
        save_every: also save a checkpoint every so many steps, or None.
    """

    def __init__(self, run: "Run", prompts: Any, save_every: int | None) -> None:
        self._run, self._prompts, self._save_every = run, prompts, save_every
        folder = run.path  # chosen together
        self._inbox = Inbox(folder) if collectives.rank() == 0 else None
        self._paused = False
        self._changes: dict[str, tuple[float, float, str]] = {}
        self._started = 0.0

    def steps(self, max_steps: int, progress: bool | None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch); see `Run.steps`."""
        run = self._run
        run.max_steps, run.stopped, run._thread = max_steps, None, threading.get_ident()
        process_state.loop.max_steps = max_steps
        try:
            with run._flag.listening(), run._console.progress(run.path.name, run.step, max_steps, progress):
                self._save_state()
                yield from self._each(max_steps)
                run.stopped = run.stopped or "done"
                self._save_state()
                run._sinks.close()
                if run._keeper.tracked is not None:
                    run.save()
        except BaseException:  # also a GeneratorExit: the loop was left by break or by an error
            if run.stopped is None:
                run.stopped = "left"
                with contextlib.suppress(OSError):  # folder gone, disk full: what is raised says so
                    self._save_state()
            raise
        finally:
            run._flag.reason = run._thread = None
            process_state.loop.max_steps = None
        self._end(max_steps)

    def _each(self, max_steps: int) -> Iterator[tuple[int, Any]]:
        run, prompts = self._run, self._prompts
        stream = iter(prompts)
        while run.step < max_steps:
            self._between()
            if run.stopped is not None:
                return
            position = prompts.state_dict() if hasattr(prompts, "state_dict") else None
            try:
                batch = next(stream)
            except StopIteration:
                run.stopped = "exhausted"
                return
            timing.take()
            self._started = time.perf_counter()
            mine = threading.get_native_id()
            process_state.stepping.append(mine)
            try:
                yield run.step, batch
            except GeneratorExit:
                run.stopped = "left"
                with contextlib.suppress(OSError):  # likewise
                    if run._logged_step == run.step:  # all of the step was done
                        self._finish_step()
                    elif position is not None:  # the step will be repeated, with its own prompts
                        prompts.load_state_dict(position)
                    self._save_state()
                raise
            finally:
                process_state.stepping.remove(mine)
            self._finish_step()
            if self._save_every and run.step % self._save_every == 0 and run.step < max_steps:
                run.save()

    def _end(self, max_steps: int) -> None:
        run = self._run
        if run.stopped in ENDED_EARLY:
            what = "everything is" if run._keeper.tracked else "the log is (weights were not saved: no run.track)"
            where = f"after step {run.step - 1}" if run.step else "before the first step"
            say(f"rlkit: stopped {where} of {max_steps}; {what} in {run.path}")
        if run.stopped == "preempted":
            if collectives.rank() == 0:
                (run.path / "STOPPED").write_text(f"{run.step}\n", encoding="utf-8")
            collectives.barrier()
            raise SystemExit(0)

    def _between(self) -> None:
        """Obey commands and signals; while paused, wait for more. Sets `run.stopped` if the loop is to end here."""
        run = self._run
        self._repeat_changes()
        while True:
            commands, reasons = self._news()
            for command in commands:
                self._obey(command)
            self._say_changes()
            for reason in ("preempted", "interrupted"):
                if reason in reasons:
                    run.stopped = reason
                    break
            if commands:
                self._save_state()
            if run.stopped is not None or not self._paused:
                return
            time.sleep(POLL_SECONDS)

    def _news(self) -> tuple[list[Command], set[str]]:
        """What came since the last time, the same on every process."""
        commands, notes = self._inbox.take() if self._inbox is not None else ([], [])
        for note in notes:
            self._run._console.say(note)
        if notes and not commands:
            self._save_state()
        answers = collectives.gather((commands, self._run._flag.reason))
        return answers[0][0], {reason for _, reason in answers if reason}

    def _obey(self, command: Command) -> None:
        run, by = self._run, f" (by {command.by})" if command.by else ""
        done = None
        if command.order == "pause" and not self._paused:
            self._paused, done = True, f"paused before step {run.step}{by}; go on with: rlkit ctl {run.path} resume"
        elif command.order == "resume" and self._paused:
            self._paused, done = False, f"going on with step {run.step}{by}"
        elif command.order == "stop":
            run.stopped = "stopped"
        elif command.order == "save":
            if run._keeper.tracked is None:
                done = f"nothing is saved{by}: no run.track"
            else:
                done = f"saved {run.save()}{by}"
        elif command.order == "set":
            done = self._set(command, by)
        if done:
            run._console.say(f"rlkit: {done}")

    def _set(self, command: Command, by: str) -> str | None:
        name = str(command.name)
        try:
            before, after = self._run._numbers.set(name, command.value, where="set")
        except (ValueError, TypeError) as error:  # a fault of whoever sent it
            return f"a command is skipped{by}: {error}"
        first, _, _ = self._changes.get(name, (before, after, by))
        self._changes[name] = (first, after, by)
        run = self._run
        run._changes.note(run.path, Change(run.step, name, after, run._numbers.declared(name)))
        return None

    def _repeat_changes(self) -> None:
        """What was changed at this step before the run went back to an earlier one; see changes.py."""
        run = self._run
        for change in run._changes.before(run.step):
            declared = run._numbers.declared(change.name)
            try:
                if declared != change.declared:
                    raise ValueError(f"declared now as {declared}, then as {change.declared}")
                before, after = run._numbers.set(change.name, change.value, where="set")
            except ValueError as error:  # the notebook is another one by now, and newer
                run._changes.forget(run.path, change.name, change.step)
                run._console.say(f"rlkit: {change.name} is not set to {change.value} again: {error}")
            else:
                run._console.say(f"rlkit: {change.name} {before} -> {after} again, from step {run.step} on")

    def _say_changes(self) -> None:
        """One line a number, however often a slider moved it."""
        for name, (before, after, by) in self._changes.items():
            self._run._console.say(f"rlkit: {name} {before} -> {after}{by}, from step {self._run.step} on")
        self._changes.clear()

    def _finish_step(self) -> None:
        run, seconds = self._run, time.perf_counter() - self._started
        run.step += 1  # first: it is done, also if the disk is full
        if collectives.rank() == 0:
            phases = timing.with_rest(timing.take(), seconds)
            append_line(run.path / "timings.jsonl", {"step": run.step - 1, "step_time": seconds, "phases": phases})
        self._save_state()
        run._console.advance()

    def _save_state(self) -> None:
        if self._inbox is None:
            return
        run = self._run
        state: dict[str, Any] = {
            "step": run.step,
            "max_steps": run.max_steps,
            "stopped": run.stopped,
            "status": run.stopped or ("paused" if self._paused else "running"),
            "numbers": run._numbers.values(),
            "bounds": run._numbers.bounds,
            "taken": self._inbox.taken,
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        if hasattr(self._prompts, "state_dict"):
            state["prompts"] = self._prompts.state_dict()
        write_json(run.path / "state.json", state)
