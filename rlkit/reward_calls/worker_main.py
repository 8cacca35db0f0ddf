"""The program of the process in which a reward function runs under a time or memory limit.

Started by `rlkit.reward_calls.worker` as a file, never imported: it needs the standard library only, so that it starts
in a tenth of a second and leaves the memory to the function. A message is a line: a pickled tuple that begins with a
word, in base64 (a function of a notebook is pickled by `dill`).
"""

import asyncio
import base64
import importlib.util
import inspect
import os
import pickle
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# As a file: `import rlkit` would import torch. Where there is no such signal, the end of the input ends this process.
die_with_parent = runpy.run_path(str(Path(__file__).parents[1] / "support" / "processes.py"))["die_with_parent"]


def own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Input and output, for us alone: the function has no input, and what it prints goes to the error stream."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return pipes


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
    """The result of an awaitable."""
    return await value


def described(error: BaseException) -> tuple[str, str]:
    """Text and traceback of an error, whose __str__ may itself fail."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    return text, "".join(traceback.format_exception(type(error), error, error.__traceback__))


def copied(values: Any) -> Any:
    """A logged column as a list; other values stay as they are, and the parent refuses them."""
    if values is None or isinstance(values, str | bytes | dict | int | float):
        return values
    return values.tolist() if hasattr(values, "tolist") else list(values)


def number(name: str, value: Any) -> Any:
    """A number that a function logs, as a float; None and text stay, and the parent skips or refuses them."""
    try:
        return value if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"log_metric({name!r}): expected a number, got {type(value).__name__}.") from None


def call(
    function: Callable[..., Any], positional: list[Any], named: dict[str, Any], logs: list[str]
) -> tuple[Any, ...]:
    """Call the function; returns its value and what it logged."""
    logged: list[tuple[str, str, Any]] = []
    writers = {
        "log_extra": lambda column, values: logged.append(("log_extra", column, copied(values))),
        "log_metric": lambda name, value: logged.append(("log_metric", name, number(name, value))),
    }
    returned = function(*positional, **named, **{name: writers[name] for name in logs})
    if inspect.isawaitable(returned):
        returned = asyncio.run(awaited(returned))
    return ("returned", returned, logged)


def answer(state: dict[str, Any], word: str, rest: list[Any]) -> tuple[Any, ...]:
    """Load a function, or call it."""
    memory = state.get("memory")
    try:
        if word == "load":
            state["function"], state["memory"] = pickle.loads(rest[0]), rest[1]
            return ("loaded", limit_memory(None) if rest[1] is not None else True)
        payload = pickle.loads(rest[0])
        if memory is not None:
            limit_memory(memory)
        return call(state["function"], *payload)
    except BaseException as error:  # sys.exit() and the like too: they are the function's failure, not ours
        limit_memory(None)
        return ("raised", type(error).__name__, *described(error))
    finally:
        limit_memory(None)


def main() -> None:
    """Load functions and call them until the parent closes the input."""
    given, out = own_pipes()
    state: dict[str, Any] = {}
    for line in given:
        word, *rest = pickle.loads(base64.b64decode(line))
        found = answer(state, word, rest)
        try:
            message = pickle.dumps(found)
        except Exception:  # a generator, an object of a class that only the notebook has
            message = pickle.dumps(("odd", type(found[1]).__name__, str(found[1])[:80]))
        out.write(base64.b64encode(message) + b"\n")
        out.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main()
