"""`rlkit report`: runs as one HTML file, see rlkit/view/report.py."""

import argparse
import sys

from rlkit.cli.arguments import Subparsers, megabytes


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser(
        "report",
        help="write runs as one HTML file",
        description="Write charts, completions and token lens of runs as one HTML file that needs no network.",
    )
    parser.add_argument("run", nargs="+", help="folder of a run; several are drawn over each other")
    parser.add_argument("-o", "--output", default="report.html", help="the file (report.html)")
    parser.add_argument("--max-mb", type=megabytes, default=8.0, help="megabytes of completions, the newest first (8)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the file."""
    from rlkit.view.report import write_report

    try:
        file = write_report(arguments.run, arguments.output, max_bytes=int(arguments.max_mb * 1e6))
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"rlkit: wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
    return 0
