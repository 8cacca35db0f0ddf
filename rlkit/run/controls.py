"""Controls: the methods of `Run` by which other cells steer its loop while it runs."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlkit.distributed import collectives
from rlkit.run.background import Background, runs_in_place
from rlkit.run.commands import Order, send
from rlkit.run.knobs import Bounds, Knobs
from rlkit.run.state import RunState


class Controls:
    """Numbers that may change, commands, and loops in the background; `Run` has these methods."""

    _state: RunState

    def knobs(self, *, bounds: Mapping[str, Bounds] | None = None, **declared: Any) -> Knobs:
        """Declare the numbers of the loop that may be changed while it runs.

        They become attributes of the result. A change from outside (`control("set", ...)`, the view, `rlkit ctl runs/x
        set beta 0.1`) takes effect between two steps. Each number is logged with every step as `knobs/NAME`; a changed
        one is saved and resumed, unless the loop that resumes declares another value than before.

        Args:
            bounds: lowest and highest value by name, each or both may be None: `{"beta": (0, 1)}`.
            **declared: names and values: a float, a whole number (which stays one), or an optimizer for its learning
                rate. If there is a scheduler give that instead: the number is the rate that the schedule is built on.

        Raises:
            TypeError: a value that is neither.
            ValueError: not finite, out of bounds, bounds without a number, or an optimizer that has a scheduler.

        Example:
            knobs = run.knobs(beta=0.02, learning_rate=optimizer, bounds={"beta": (0, 1)})
            ... rl.compute_loo_advantage(scores, kl=kl, beta=knobs.beta)
        """
        for note in self._state.numbers.declare(declared, bounds or {}):
            self._state.say(note)
        return Knobs(self._state.numbers, self._change_knob)

    def _change_knob(self, name: str, value: Any) -> None:
        """From a thread other than the loop's the change is sent as a command, which waits for the end of the step."""
        if self._state.thread not in (None, threading.get_ident()):
            self.control("set", name=name, value=value)
        else:
            self._state.numbers.set(name, value)

    def control(self, order: Order, *, name: str | None = None, value: float | None = None) -> None:
        """Tell this run's loop what to do after its step: from another cell, or from the body of the loop.

        Args:
            order: "pause", "resume", "stop" (everything is saved, as by the interrupt button), "save" or "set".
            name: of a number of `knobs`, for "set".
            value: its new value.

        Raises:
            FileNotFoundError, RuntimeError, ValueError, TypeError: as `rlkit.run.commands.send`, which other processes
                use; the command line is `rlkit ctl`.
        """
        path = self._state.path
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
        name = str(self._state.path)
        self._state.started = True
        if runs_in_place():
            loop()
        else:
            self._state.background = Background(loop, name, self._state.flag)
            self._state.background.start()

    def wait(self) -> None:
        """Wait until the loop of `start` is done. The interrupt button ends that loop after its step, with everything
        saved; a second interrupt returns from the cell at once, while the loop finishes its step.

        Raises:
            RuntimeError: nothing was started.
            BaseException: what the loop raised.
        """
        if not self._state.started:
            raise RuntimeError("run.wait: nothing was started; call run.start(loop) first.")
        if self._state.background is not None:
            self._state.background.wait()
