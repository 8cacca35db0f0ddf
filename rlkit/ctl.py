"""`rlkit ctl runs/x pause`: the controls of a running loop, from a shell. The commands are those of run/controls.py."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rlkit.run.controls import ORDERS, send, why_over
from rlkit.run.lines import read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("folder", help="of the run")
    parser.add_argument("order", choices=[*ORDERS, "status"], help="taken when the step is done; status only looks")
    parser.add_argument("name", nargs="?", help="with set: name of a number that run.knobs declared")
    parser.add_argument("value", nargs="?", help="with set: its new value")


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status: 0, 1 if the run cannot take it, 2 for a wrong line."""
    wanted = 2 if arguments.order == "set" else 0
    given = [text for text in (arguments.name, arguments.value) if text is not None]
    if len(given) != wanted:
        usage = "set NAME VALUE" if wanted else f"{arguments.order}, and nothing after it"
        print(f"rlkit ctl: expected {usage}, got {' '.join([arguments.order, *given])}", file=sys.stderr)
        return 2
    try:
        if arguments.order == "status":
            print(describe(Path(arguments.folder)))
        elif arguments.order == "set":
            send(arguments.folder, "set", name=arguments.name, value=_number(arguments.value), by="rlkit ctl")
            print(f"{arguments.name} will be {arguments.value} when the step is done")
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
        lines.append(f"process {state['pid']} on {state['host']}, last heard of {_ago(state['time'])}")
    elif state.get("status") in ("running", "paused"):
        lines.append(why)
    bounds = state.get("bounds", {})
    lines += [f"{name} = {value}{_range(bounds.get(name))}" for name, value in state.get("numbers", {}).items()]
    return "\n".join(lines)


def _range(bounds: Any) -> str:
    low, high = bounds or (None, None)
    if low is None and high is None:
        return ""
    return f"  (from {'anything' if low is None else low} to {'anything' if high is None else high})"


def _ago(then: float) -> str:
    return f"{max(0.0, time.time() - then):.0f} s ago"


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)
