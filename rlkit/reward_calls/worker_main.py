"""The program of the process in which a reward function runs under a time or memory limit.

Started by `rlkit.reward_calls.worker` as a file, never imported: it needs the standard library only, so that it starts
in a tenth of a second and leaves the memory to the function. What it is sent is pickled (by `dill` where the function
lives in a notebook); what it answers are tuples that begin with a word.
"""

import asyncio
import importlib.util
import inspect
import os
import pickle
import runpy
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# As a file: `import rlkit` would import torch. Where there is no such signal, the closed socket ends this process.
die_with_parent = runpy.run_path(str(Path(__file__).parents[1] / "support" / "processes.py"))["die_with_parent"]


def keep_streams(fd: int) -> Connection:
    """The connection to the parent; prints of the function go to the error stream, and it has no input."""
    os.set_inheritable(fd, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return Connection(fd)


def limit_memory(extra: int | None) -> bool:
    """Allow `extra` bytes of address space beyond what is used now; None lifts the limit. False where there is none."""
    if importlib.util.find_spec("resource") is None or not os.path.exists("/proc/self/statm"):
        return False
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard
    if extra is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        soft = used + extra if hard == resource.RLIM_INFINITY else min(used + extra, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return True


async def awaited(value: Any) -> Any:
    """What an awaitable gives."""
    return await value


def described(error: BaseException) -> tuple[str, str]:
    """Text and traceback of an error, which may be of a class of the function's own that cannot say what it is."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    return text, "".join(traceback.format_exception(type(error), error, error.__traceback__))


def copied(values: Any) -> Any:
    """A list of what a function logs; what is refused later, with the column's name, stays."""
    if values is None or isinstance(values, str | bytes | dict | int | float):
        return values
    return values.tolist() if hasattr(values, "tolist") else list(values)


def number(name: str, value: Any) -> Any:
    """A plain number of what a function logs; None and text stay, for the parent to skip or to refuse."""
    try:
        return value if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"log_metric({name!r}): expected a number, got {type(value).__name__}.") from None


def call(
    function: Callable[..., Any], positional: list[Any], named: dict[str, Any], logs: list[str]
) -> tuple[Any, ...]:
    """Call the function; its logged columns and numbers come back as they were logged."""
    logged: list[tuple[str, str, Any]] = []
    writers = {
        "log_extra": lambda column, values: logged.append(("log_extra", column, copied(values))),
        "log_metric": lambda name, value: logged.append(("log_metric", name, number(name, value))),
    }
    returned = function(*positional, **named, **{name: writers[name] for name in logs})
    if inspect.isawaitable(returned):
        returned = asyncio.run(awaited(returned))
    return ("returned", returned, logged)


def serve(connection: Connection) -> None:
    """Load functions and call them until the parent closes the connection."""
    function: Callable[..., Any] = print
    memory: int | None = None
    while True:
        try:
            word, *rest = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        answer: tuple[Any, ...]
        try:
            if word == "load":
                function, memory = pickle.loads(rest[0]), rest[1]
                answer = ("loaded", limit_memory(None) if memory is not None else True)
            else:
                payload = pickle.loads(rest[0])
                if memory is not None:
                    limit_memory(memory)
                answer = call(function, *payload)
        except BaseException as error:  # sys.exit() and the like too: they are the function's failure, not ours
            limit_memory(None)
            answer = ("raised", type(error).__name__, *described(error))
        limit_memory(None)
        try:
            message = pickle.dumps(answer)
        except Exception:  # a generator, an object of a class that only the notebook has
            message = pickle.dumps(("odd", type(answer[1]).__name__, str(answer[1])[:80]))
        connection.send_bytes(message)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(keep_streams(int(sys.argv[1])))
