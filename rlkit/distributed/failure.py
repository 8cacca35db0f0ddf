"""Ends all processes within seconds of an uncaught exception on one, with its traceback.

Otherwise the others wait in their next collective until its timeout, half an hour by default. The failing process
writes its traceback to the rendezvous store, which a thread in every process polls. torchrun ends the processes of one
node only (docs/decisions.md, 2026-12-01).
"""

import atexit
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

KEY = "rlkit/failed"
POLL_SECONDS = 1.0
GRACE_SECONDS = 3.0


def start(store: Any, rank: int) -> None:
    """Report an uncaught exception of this process to the others, and end this process when another one reports."""
    mine = store.clone() if hasattr(store, "clone") else store
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        try:
            if mine.compare_set(KEY, "", f"{rank}\n{text}").decode().startswith(f"{rank}\n"):
                previous(kind, error, trace)
        except RuntimeError:  # the store ended with the main process
            previous(kind, error, trace)
        sys.stderr.flush()
        # Not sys.exit: destroying the process group may wait for the others.
        threading.Timer(GRACE_SECONDS, os._exit, (1,)).start()

    sys.excepthook = report
    ended = threading.Event()
    thread = threading.Thread(target=_poll, args=(mine, rank, ended), name="rlkit-watch", daemon=True)
    thread.start()

    def end() -> None:
        """Join the thread: one that returns from the store after the interpreter ended aborts the process."""
        ended.set()
        thread.join(timeout=10 * POLL_SECONDS)

    atexit.register(end)


def _poll(store: Any, rank: int, ended: threading.Event) -> None:
    while not ended.wait(POLL_SECONDS):
        try:
            if not store.check([KEY]):
                continue
            origin, _, text = store.get(KEY).decode().partition("\n")
        except RuntimeError:
            return  # the main process has ended; a collective with it raises
        if int(origin) == rank:
            return
        print(f"rlkit: rank {rank} stops because rank {origin} failed:\n{text}", file=sys.stderr, flush=True)
        os._exit(1)
