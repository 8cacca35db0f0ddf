"""The functions that an exported script calls: flags, start, `await` at the top level, `display`.

    globals().update(rlkit_script.flags(__doc__, ("max_steps", "int", max_steps, "steps")))   # at module level
    rlkit_script.start(__file__, notebook="01_rloo.ipynb", sha256="...")                      # in the guarded block

A spawned worker imports the script as `__mp_main__` with the same command line, so it sees the same values.
"""

import asyncio
import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Awaitable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rlkit.export.runtime.flags import Parameter, parse
from rlkit.run.signals import expect_preemption
from rlkit.support.files import written_whole
from rlkit.support.process_state import current
from rlkit.support.text import say, tolerate_encodings

SETTINGS = frozenset(
    {"seed", "max_steps", "save_every", "keep", "dist_timeout", "backend", "deterministic"}
    | {"vllm_url", "vllm_folder", "vllm_group_port", "vllm_deadline"}
)  # run flags that `current` holds under the same name
T = TypeVar("T")
_loop: asyncio.AbstractEventLoop | None = None


def flags(doc: str | None, *parameters: tuple[str, str, Any, str]) -> dict[str, Any]:
    """Read the command line of the script: the value of every parameter.

    Args:
        doc: description for --help.
        parameters: (name, kind, default, help) of each parameter of the notebook.

    Raises:
        SystemExit: a wrong flag (2), --help or --print-config (0).
    """
    tolerate_encodings()
    known = [Parameter(*parameter) for parameter in parameters]
    resolved = parse(known, sys.argv[1:], prog=os.path.basename(sys.argv[0]), description=doc or "")
    run = {name: value for name, value in resolved.run.items() if value is not None}
    current.parameters = resolved.parameters
    current.script = {"flags": dict(resolved.run), "arguments": sys.argv[1:]}
    current.out = Path(run["out"]) if run.get("out") else None
    current.resume = None if run.get("resume", "none") == "none" else run["resume"]
    for name in SETTINGS & run.keys():
        setattr(current, name, run[name])
    for flag, variable in (("strategy", "RLKIT_STRATEGY"), ("precision", "RLKIT_PRECISION")):
        if flag in run:
            os.environ[variable] = run[flag]
    if run.get("print_all_ranks"):
        os.environ["RLKIT_PRINT_ALL_RANKS"] = "1"
    current.script["changed"] = sorted(p.name for p in known if resolved.parameters[p.name] != p.default)
    return resolved.parameters


def start(file: str, *, notebook: str, sha256: str) -> None:
    """Begin a script: print which parameters were changed, and write the traceback of a failure beside the run.

    From here on a SIGTERM or SIGUSR1 takes effect in `run.steps`, which saves and marks the run as one to resume.

    Args:
        file: the script.
        notebook: where it comes from.
        sha256: of the notebook's code.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a standard error without a file below it
        faulthandler.enable()
    expect_preemption()
    _current_loop()
    current.script = {"file": os.path.basename(file), "notebook": notebook, "sha256": sha256, **current.script}
    if (changed := current.script.get("changed")) and _rank() == 0:
        shown = ", ".join(f"{name}={current.parameters[name]!r}" for name in changed)
        say(f"rlkit: {os.path.basename(file)} with {shown}", flush=True)
    before = sys.excepthook

    def keep(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        folder = current.folder or current.out
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                text = "".join(traceback.format_exception(kind, error, trace))
                with written_whole(folder / f"error_rank{_rank()}.txt") as file:
                    file.write_text(text, encoding="utf-8")
        before(kind, error, trace)

    sys.excepthook = keep


def run_async(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable on the script's event loop, which lives as long as the process, as a notebook's does.

    Example:
        >>> async def double(x):
        ...     return 2 * x
        >>> run_async(double(21))
        42
    """

    async def wait() -> T:
        return await awaitable

    return _current_loop().run_until_complete(wait())


def _current_loop() -> asyncio.AbstractEventLoop:
    """The script's loop, set as the thread's own: `asyncio.gather(...)` binds to that before it is awaited."""
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    asyncio.set_event_loop(_loop)
    return _loop


def display(*objects: Any, **options: Any) -> None:
    """`display` outside a notebook: text on the main process; IPython's options are ignored."""
    if _rank() == 0:
        for thing in objects:
            say(thing)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
