"""`rlkit view` and `rlkit report` on the command line."""

import argparse
import sys
from typing import Any


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands."""
    view = commands.add_parser(
        "view",
        help="show runs in a browser tab",
        description="Show runs, also those that are going on, in a browser tab: on this machine only, behind a token.",
    )
    view.add_argument("run", nargs="+", help="folder of a run; several are drawn over each other")
    view.add_argument("--port", type=int, help="on 127.0.0.1 (a free one)")
    view.add_argument("--no-browser", action="store_true", help="only print the address")
    report = commands.add_parser(
        "report",
        help="write runs as one HTML file",
        description="Write charts, completions and token lens of runs as one HTML file that needs no network.",
    )
    report.add_argument("run", nargs="+", help="folder of a run; several are drawn over each other")
    report.add_argument("-o", "--output", default="report.html", help="the file (report.html)")
    report.add_argument("--max-mb", type=float, default=8.0, help="megabytes of completions, the newest first (8)")


def run_command(arguments: argparse.Namespace) -> int:
    """Run one of them; returns the exit status."""
    try:
        return _serve(arguments) if arguments.command == "view" else _report(arguments)
    except (FileNotFoundError, ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _serve(arguments: Any) -> int:
    from rlkit.view.serve import serve

    return serve(arguments.run, port=arguments.port, browser=not arguments.no_browser)


def _report(arguments: Any) -> int:
    from rlkit.view.report import write_report

    file = write_report(arguments.run, arguments.output, max_bytes=int(arguments.max_mb * 1e6))
    print(f"rlkit: wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
    return 0
