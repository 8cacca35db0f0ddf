"""`rlkit ctl runs/x pause`: the controls of a running loop, from a shell. The commands are those of run/commands.py."""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from rlkit.cli.arguments import Subparsers
from rlkit.run.commands import ORDERS, send, why_over
from rlkit.run.line_files import read_json
from rlkit.run.status import UNFINISHED
from rlkit.support.text import visible


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser(
        "ctl",
        help="pause, resume, stop or save a run, or change a number of it, while it runs",
        description="Tell the loop of a run what to do when its step is done, or look where it stands.",
    )
    parser.add_argument("folder", help="of the run")
    parser.add_argument("order", choices=[*ORDERS, "status"], help="taken when the step is done; status only looks")
    # All that follows, or argparse takes the number -1e-3 for an option.
    parser.add_argument(
        "number", nargs=argparse.REMAINDER, metavar="NAME VALUE", help="with set: a number of run.knobs, its new value"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status: 0, 1 if the run cannot take it, 2 for a wrong line."""
    wanted = 2 if arguments.order == "set" else 0
    given = arguments.number
    if len(given) != wanted:
        usage = "set NAME VALUE" if wanted else f"{arguments.order}, and nothing after it"
        print(f"rlkit ctl: expected {usage}, got {' '.join([arguments.order, *given])}", file=sys.stderr)
        return 2
    try:
        if arguments.order == "status":
            print(describe(Path(arguments.folder)))
        elif arguments.order == "set":
            name, value = given
            send(arguments.folder, "set", name=name, value=_number(value), by="rlkit ctl")
            print(f"{name} will be {value} when the step is done")
        else:
            send(arguments.folder, arguments.order, by="rlkit ctl")
            print(f"{arguments.order}: taken when the step is done")
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        print(f"rlkit ctl: {error}", file=sys.stderr)
        return 1
    return 0


def describe(folder: Path) -> str:
    """Where a run stands, for people.

    Raises:
        FileNotFoundError: no loop has begun there.
    """
    state = read_json(folder / "state.json")
    if state is None:
        raise FileNotFoundError(f"no loop has begun in {folder} (there is no state.json)")
    lines = [f"{folder}: {state.get('status')}, {state.get('step')} of {state.get('max_steps')} steps done"]
    why = why_over(state)
    if why is None:
        lines.append(f"process {state.get('pid')} on {state.get('host')}, last heard of {_ago(state.get('time'))}")
    elif state.get("status") in UNFINISHED:
        lines.append(why)
    numbers, bounds = (found if isinstance(found := state.get(key), dict) else {} for key in ("numbers", "bounds"))
    lines += [f"{name} = {value}{_range(bounds.get(name))}" for name, value in numbers.items()]
    return "\n".join(visible(line) for line in lines)


def _range(bounds: Any) -> str:
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (None, None)
    if low is None and high is None:
        return ""
    return f"  (from {'anything' if low is None else low} to {'anything' if high is None else high})"


def _ago(then: Any) -> str:
    if not isinstance(then, int | float) or not abs(then) < 2**53:
        return "at a time that it does not say"
    return f"{max(0.0, time.time() - then):.0f} s ago"


def _number(text: str) -> float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise ValueError(f"{text!r} is no number; write it like 0.1 or 3e-4")
