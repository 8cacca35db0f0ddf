"""A process that ends with its parent: Linux sends it a signal when the parent's thread that started it is gone.

vLLM's processes outlive each other otherwise: the engine core was alive 19 s after its API server had been killed with
-9 (the shared study on vLLM). Without any import of rlkit's, because it runs inside vLLM's workers.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
VARIABLE = "RLKIT_DIES_WITH_PARENT"  # set for the processes of a server that rlkit has started


def die_with_parent(parent: int | None = None) -> None:
    """From now on this process gets SIGKILL when its parent is gone; on Linux only, elsewhere nothing happens.

    Args:
        parent: process id that the parent should have; if it is gone already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
