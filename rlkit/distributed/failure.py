"""An exception on one process ends all of them within seconds, with the traceback of where it began (known_faults B31).

Without this the others wait in their next collective until its timeout, half an hour by default. The process that fails
writes its traceback to the rendezvous store; a thread in every process looks there once a second.
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
    """Report this process's uncaught exception to the others, and end with them when one reports theirs.

    Args:
        store: the store of the process group.
        rank: this process.
    """
    mine = store.clone() if hasattr(store, "clone") else store
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        try:
            if mine.compare_set(KEY, "", f"{rank}\n{text}").decode().startswith(f"{rank}\n"):
                previous(kind, error, trace)
        except RuntimeError:  # the store is gone: the main process has ended already
            previous(kind, error, trace)
        sys.stderr.flush()
        # Not sys.exit: the destructors of a process group may wait for the others.
        threading.Timer(GRACE_SECONDS, os._exit, (1,)).start()

    sys.excepthook = report
    ended = threading.Event()
    thread = threading.Thread(target=_look, args=(mine, rank, ended), name="rlkit-watch", daemon=True)
    thread.start()

    def end() -> None:
        """Before the interpreter goes: a thread that comes back from the store after that aborts the process."""
        ended.set()
        thread.join(timeout=10 * POLL_SECONDS)

    atexit.register(end)


def _look(store: Any, rank: int, ended: threading.Event) -> None:
    while not ended.wait(POLL_SECONDS):
        try:
            if not store.check([KEY]):
                continue
            origin, _, text = store.get(KEY).decode().partition("\n")
        except RuntimeError:
            return  # the main process has ended; whoever waits for it gets a connection error
        if int(origin) == rank:
            return
        print(f"rlkit: rank {rank} stops because rank {origin} failed:\n{text}", file=sys.stderr, flush=True)
        os._exit(1)
