"""Process-wide state of the trainer that vLLM changes, restored by context managers.

In vLLM 0.32 making an engine reseeds Python, numpy and torch and replaces `torch.set_num_threads` by a no-op; every
generation draws from torch's global generator, even with a seed for each request; closing an engine destroys the
default process group.
"""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch (all devices)."""
    own, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is what vLLM seeds
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(array)  # noqa: NPY002


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's number of threads, the function that sets it, its float32 matmul precision and current GPU."""
    count, function, precision = torch.get_num_threads(), torch.set_num_threads, torch.get_float32_matmul_precision()
    # vLLM's GPU worker sets the last two (read in its source, not run).
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads = function
        torch.set_num_threads(count)
        torch.set_float32_matmul_precision(precision)
        if device is not None:
            torch.cuda.set_device(device)


@contextlib.contextmanager
def default_group_kept(keep: bool) -> Iterator[None]:
    """With `keep`, `destroy_process_group` inside spares torch.distributed's default group."""
    original: Callable[..., None] = dist.destroy_process_group

    def spare(group: Any = None) -> None:
        if group is not None and group is not dist.GroupMember.WORLD:
            original(group)

    dist.destroy_process_group = spare if keep else original
    try:
        yield
    finally:
        dist.destroy_process_group = original


@contextlib.contextmanager
def environment(values: Mapping[str, str], *, force: Mapping[str, str]) -> Iterator[None]:
    """Temporarily set environment variables: `values` where they are unset, `force` always."""
    wanted = {name: value for name, value in values.items() if name not in os.environ} | dict(force)
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(before)


class DeferredInterrupt:
    """Holds back Ctrl-C until `deliver` is called: in the middle of a step it would leave an inconsistent state.

    The previous handler (of `run.steps`, of the notebook's kernel) then gets the signal. In a background thread there
    are no signals to defer.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, FrameType | None] | None = None
        self._handler: Any = None

    def __enter__(self) -> "DeferredInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if error[0] is None:
            self.deliver()

    def deliver(self) -> None:
        """Call the previous handler if a signal came; its exception is raised here."""
        if self._pending is not None:
            (number, frame), self._pending = self._pending, None
            if callable(self._handler):
                self._handler(number, frame)
            elif self._handler == signal.SIG_DFL:
                raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)
