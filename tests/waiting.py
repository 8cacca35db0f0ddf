"""Waiting for events instead of times. The limits only end a hang; a busy machine must not come near them."""

import contextlib
import os
import signal
import sys
import threading
import time

import psutil

LONG = 300  # seconds that something may take on a busy machine before it counts as lost


def until(true, what, pause=0.02):
    """Wait until something holds; its first true value."""
    deadline = time.monotonic() + LONG
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(pause)
    return found


def main_thread_is_in(*names):
    """True while each of these functions is on the main thread's stack."""
    frame, found = sys._current_frames()[threading.main_thread().ident], set()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return found.issuperset(names)


def interrupt_when(true, then=lambda: None):
    """Send this process a SIGINT, as the stop button does, once something holds; then do one thing more.

    The waiting is a thread's. If it is in vain nothing is sent, and the test that waits for the interrupt hangs no
    longer than what it does by itself.
    """

    def wait():
        until(true, "the moment of the interrupt")
        os.kill(os.getpid(), signal.SIGINT)
        then()

    thread = threading.Thread(target=wait, name="interrupts", daemon=True)
    thread.start()
    return thread


def alive(processes):
    """Of psutil's processes those that have not ended, zombies aside."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
