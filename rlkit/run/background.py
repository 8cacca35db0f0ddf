"""A loop in a background thread, so that the cell returns and the notebook's buttons and other cells work meanwhile.

The loop is the user's own function. It gets the starting thread's context variables (by which a kernel finds the cell
of an output) and torch's per-thread settings. In a script the function runs in place, in the main thread, where signals
arrive. A thread cannot be killed, so the loop always ends between two steps.
"""

import atexit
import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from rlkit.distributed import collectives
from rlkit.run.signals import StopFlag
from rlkit.support.notebook import shell
from rlkit.support.process_state import current
from rlkit.support.text import say

POLL_SECONDS = 0.2
_alive: "list[Background]" = []  # at most one: two loops would draw from one random state in no fixed order


def runs_in_place() -> bool:
    """True in scripts and under torchrun; False in a kernel."""
    return shell() is None or bool(current.script) or collectives.is_many()


class Background:
    """A loop that runs in its own thread; `name` and `flag` are those of its run. RuntimeError if another one does."""

    def __init__(self, function: Callable[[], object], name: str, flag: StopFlag) -> None:
        if _alive:
            raise RuntimeError(
                f"run.start: the loop of {_alive[0].name} is going in the background. Wait for it with run.wait(), "
                f'or end it with run.control("stop"), or in a shell: rlkit ctl {_alive[0].name} stop'
            )
        self.name: str = name
        self._function, self._flag = function, flag
        self._ended = threading.Event()
        self._waiting = False
        self._error: BaseException | None = None
        state = same_torch_state()

        def work() -> None:
            try:
                with state():
                    self._function()
            except BaseException as error:  # wait() raises it
                self._error = error
                if not self._waiting:
                    say(f"rlkit: the loop ended with {type(error).__name__}: {error}; run.wait() shows where")
            finally:
                _alive.remove(self)
                self._ended.set()

        # A daemon: the interpreter would join any other thread before `_stop_at_exit` runs.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name="rlkit-loop", daemon=True
        )

    def start(self) -> None:
        """Start the thread, with the context in which the object was made."""
        self._flag.reason = None
        _alive.append(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop goes on."""
        return not self._ended.is_set()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs inside the function."""
        return threading.current_thread() is self._thread

    def wait(self) -> None:
        """Block until the function has returned, and raise what it raised; see `Run.wait`.

        Not by `Thread.join`: after an interrupt it takes a running thread for ended (CPython 3.9 to 3.12).
        """
        if self.is_current:
            raise RuntimeError("run.wait: called inside the loop that it would wait for.")
        self._waiting = True
        try:
            with self._flag.listening():
                while not self._ended.wait(POLL_SECONDS):
                    pass
        finally:
            self._waiting = False
            if not self.alive:  # an interrupt that came too late for a step
                self._flag.reason = None
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the loop after its step, and wait for that."""
        self._flag.reason = "interrupted"
        while not self._ended.wait(POLL_SECONDS):
            pass


def loop_in_background() -> str | None:
    """Return the name of the run whose loop runs in the background; None inside that loop."""
    return next((one.name for one in _alive if not one.is_current), None)


def same_torch_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that sets this thread's torch settings in another thread: grad mode, default device,
    autocast, current GPU.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    kinds = [kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(kind)]
    autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    cache = torch.is_autocast_cache_enabled()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def same() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            if device.type != "cpu":  # as a mode it costs a little at every call of torch
                stack.enter_context(device)
            for kind, dtype in autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield

    return same


def _stop_at_exit() -> None:
    """Finish the step and save before the interpreter ends."""
    for one in list(_alive):
        print(f"rlkit: Python ends; the loop of {one.name} stops after this step", file=sys.stderr, flush=True)
        one.stop()


# Runs before the thread pools close, which a step may need; atexit runs after. It is undocumented, hence the fallback.
getattr(threading, "_register_atexit", atexit.register)(_stop_at_exit)
