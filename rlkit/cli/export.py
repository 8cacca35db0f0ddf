"""`rlkit export`: a notebook's script, and with `--slurm` the job that runs it; the work is in rlkit/export/."""

import argparse

from rlkit.cli.arguments import Subparsers
from rlkit.export.slurm.options import add_arguments


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser(
        "export",
        help="write a notebook's script",
        description="Write the script of a notebook, or say what is in the way: cell, line, reason, fix.",
    )
    parser.add_argument("notebook", nargs="+", help=".ipynb; with jupytext also percent scripts (.py) and MyST (.md)")
    parser.add_argument("-o", "--output", help="file, or folder for several (beside the notebook)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a script is missing or stale")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    add_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write or check the scripts, then the job."""
    from rlkit.export.command import export_and_launch

    return export_and_launch(arguments)
