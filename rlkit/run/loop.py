"""Loop: one pass of `Run.steps`, the only place that waits, stops and saves.

A step ends when the body of the user's loop asks for the next one. Between two steps all processes agree on what to do:
a signal may have reached only one of them, and only the main one reads commands.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from rlkit.distributed import collectives
from rlkit.run.commands import Command, Inbox
from rlkit.run.folder import append_line, write_json
from rlkit.run.knob_changes import Change
from rlkit.run.state import RunState
from rlkit.run.status import SignalReason, Status, StopReason
from rlkit.support import process_state, timing
from rlkit.support.process_state import current
from rlkit.support.text import say

POLL_SECONDS = 0.2  # while paused; each poll is one small exchange, so that no collective of the others times out
ENDED_EARLY: tuple[StopReason, ...] = ("interrupted", "preempted", "stopped")


def loop_over(
    state: RunState, prompts: Any, max_steps: int, save_every: int | None, progress: bool | None
) -> Iterator[tuple[int, Any]]:
    """Check the arguments of `Run.steps`, resume if a script's flags ask for it, and return the iterator."""
    checkpointer, background = state.checkpointer, state.background
    if background is not None and background.alive and not background.is_current:
        raise RuntimeError("run.steps: a loop of this run is going in the background; run.wait() waits for it.")
    max_steps, save_every = current.max_steps or max_steps, current.save_every or save_every
    if max_steps < 1:
        raise ValueError(f"run.steps: max_steps must be at least 1, got {max_steps}.")
    if save_every is not None:
        if save_every < 1:
            raise ValueError(f"run.steps: save_every must be at least 1 or None, got {save_every}.")
        checkpointer.require("run.steps(save_every=...)")
    checkpointer.follow(prompts)
    state.resume_if_asked()
    if state.step >= max_steps:
        state.say(f"rlkit: all {max_steps} steps are done; raise max_steps, or make a new Run, for more")
    return Loop(state, prompts, save_every).steps(max_steps, progress)


class Loop:
    """One pass over the steps of a run."""

    def __init__(self, state: RunState, prompts: Any, save_every: int | None) -> None:
        self._state, self._prompts, self._save_every = state, prompts, save_every
        folder = state.path  # chosen together
        self._inbox = Inbox(folder) if collectives.rank() == 0 else None
        self._paused = False
        self._changes: dict[str, tuple[float, float, str]] = {}
        self._started = 0.0

    def steps(self, max_steps: int, progress: bool | None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch); see `Run.steps`."""
        state = self._state
        state.max_steps, state.stopped, state.thread = max_steps, None, threading.get_ident()
        process_state.loop.max_steps = max_steps
        try:
            with state.flag.listening(), state.console.progress(state.path.name, state.step, max_steps, progress):
                self._save_state()
                yield from self._each(max_steps)
                state.stopped = state.stopped or "done"
                self._save_state()
                state.log.trackers.close()
                if state.checkpointer.tracked is not None:
                    state.save()
        except BaseException:  # also a GeneratorExit: the loop was left by break or by an error
            if state.stopped is None:
                state.stopped = "left"
                with contextlib.suppress(OSError):  # folder gone or disk full; the first error is raised
                    self._save_state()
            raise
        finally:
            state.flag.reason = state.thread = None
            process_state.loop.max_steps = None
        self._end(max_steps)

    def _each(self, max_steps: int) -> Iterator[tuple[int, Any]]:
        state, prompts = self._state, self._prompts
        stream = iter(prompts)
        while state.step < max_steps:
            self._between()
            if state.stopped is not None:
                return
            position = prompts.state_dict() if hasattr(prompts, "state_dict") else None
            try:
                batch = next(stream)
            except StopIteration:
                state.stopped = "exhausted"
                return
            timing.take()
            self._started = time.perf_counter()
            try:
                yield state.step, batch
            except GeneratorExit:
                state.stopped = "left"
                with contextlib.suppress(OSError):
                    if state.log.step == state.step:  # all of the step was done
                        self._finish_step()
                    elif position is not None:  # the step will be repeated, with its own prompts
                        prompts.load_state_dict(position)
                    self._save_state()
                raise
            self._finish_step()
            if self._save_every and state.step % self._save_every == 0 and state.step < max_steps:
                state.save()

    def _end(self, max_steps: int) -> None:
        state = self._state
        if state.stopped in ENDED_EARLY:
            what = (
                "everything is" if state.checkpointer.tracked else "the log is (weights were not saved: no run.track)"
            )
            where = f"after step {state.step - 1}" if state.step else "before the first step"
            say(f"rlkit: stopped {where} of {max_steps}; {what} in {state.path}")
        if state.stopped == "preempted":
            if collectives.rank() == 0:
                (state.path / "STOPPED").write_text(f"{state.step}\n", encoding="utf-8")
            collectives.barrier()
            raise SystemExit(0)

    def _between(self) -> None:
        """Carry out commands and signals; while paused, wait for more. Sets `state.stopped` to end the loop here."""
        state = self._state
        self._repeat_changes()
        while True:
            commands, reasons = self._receive()
            for command in commands:
                self._execute(command)
            self._say_changes()
            if reasons:
                state.stopped = "preempted" if "preempted" in reasons else "interrupted"
            if commands:
                self._save_state()
            if state.stopped is not None or not self._paused:
                return
            time.sleep(POLL_SECONDS)

    def _receive(self) -> tuple[list[Command], set[SignalReason]]:
        """Commands and signals since the last call, the same on every process."""
        commands, notes = self._inbox.take() if self._inbox is not None else ([], [])
        for note in notes:
            self._state.console.say(note)
        if notes and not commands:
            self._save_state()
        answers = collectives.gather((commands, self._state.flag.reason))
        return answers[0][0], {reason for _, reason in answers if reason}

    def _execute(self, command: Command) -> None:
        state, by = self._state, f" (by {command.by})" if command.by else ""
        done = None
        if command.order == "pause" and not self._paused:
            self._paused, done = True, f"paused before step {state.step}{by}; go on with: rlkit ctl {state.path} resume"
        elif command.order == "resume" and self._paused:
            self._paused, done = False, f"going on with step {state.step}{by}"
        elif command.order == "stop":
            state.stopped = "stopped"
        elif command.order == "save":
            if state.checkpointer.tracked is None:
                done = f"nothing is saved{by}: no run.track"
            else:
                done = f"saved {state.save()}{by}"
        elif command.order == "set":
            done = self._set(command, by)
        if done:
            state.console.say(f"rlkit: {done}")

    def _set(self, command: Command, by: str) -> str | None:
        name = str(command.name)
        try:
            before, after = self._state.numbers.set(name, command.value, where="set")
        except (ValueError, TypeError) as error:  # the sender's fault
            return f"a command is skipped{by}: {error}"
        first, _, _ = self._changes.get(name, (before, after, by))
        self._changes[name] = (first, after, by)
        state = self._state
        state.changes.note(state.path, Change(state.step, name, after, state.numbers.declared(name)))
        return None

    def _repeat_changes(self) -> None:
        """Repeat what was changed at this step before the run went back to an earlier one; see knob_changes.py."""
        state = self._state
        for change in state.changes.before(state.step):
            declared = state.numbers.declared(change.name)
            try:
                if declared != change.declared:
                    raise ValueError(f"declared now as {declared}, then as {change.declared}")
                before, after = state.numbers.set(change.name, change.value, where="set")
            except ValueError as error:  # the notebook has changed since, and takes precedence
                state.changes.forget(state.path, change.name, change.step)
                state.console.say(f"rlkit: {change.name} is not set to {change.value} again: {error}")
            else:
                state.console.say(f"rlkit: {change.name} {before} -> {after} again, from step {state.step} on")

    def _say_changes(self) -> None:
        """Print one line per number, however often a slider moved it."""
        for name, (before, after, by) in self._changes.items():
            self._state.console.say(f"rlkit: {name} {before} -> {after}{by}, from step {self._state.step} on")
        self._changes.clear()

    def _finish_step(self) -> None:
        state, seconds = self._state, time.perf_counter() - self._started
        state.step += 1  # first: the step is done even if the disk is full
        if collectives.rank() == 0:
            phases = timing.with_rest(timing.take(), seconds)
            append_line(state.path / "timings.jsonl", {"step": state.step - 1, "step_time": seconds, "phases": phases})
        self._save_state()
        state.console.advance()

    def _save_state(self) -> None:
        if self._inbox is None:
            return
        state = self._state
        status: Status = state.stopped or ("paused" if self._paused else "running")
        values: dict[str, Any] = {
            "step": state.step,
            "max_steps": state.max_steps,
            "stopped": state.stopped,
            "status": status,
            "numbers": state.numbers.values(),
            "bounds": state.numbers.bounds,
            "taken": self._inbox.taken,
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        if hasattr(self._prompts, "state_dict"):
            values["prompts"] = self._prompts.state_dict()
        write_json(state.path / "state.json", values)
