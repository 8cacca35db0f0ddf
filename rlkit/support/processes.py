"""Child processes: a free port for one, and its end with its parent. Standard library only: it runs in vLLM's workers.

environment[DIES_WITH_PARENT] = str(os.getpid())       # for a child that calls `die_with_parent` at its start
"""

import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
DIES_WITH_PARENT = "RLKIT_DIES_WITH_PARENT"
"""Environment variable of the processes of a vLLM server that rlkit has started: process id of the supervisor."""


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process (SIGKILL) when the parent thread that started it ends. Linux only.

    Args:
        parent: expected process id of the parent; if it has ended already, this process ends at once, on any system.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
