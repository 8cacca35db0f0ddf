"""The `rlkit` command; each module of this folder is a subcommand."""

import argparse
from collections.abc import Sequence

from rlkit.cli import ctl, demo, export, report, serve, view
from rlkit.support.text import tolerate_encodings

COMMANDS = (demo, export, ctl, view, report, serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerate_encodings()
    parser = argparse.ArgumentParser(prog="rlkit", description="Online RL of language models, in small steps.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_parser(commands).set_defaults(do=command.run)
    arguments = parser.parse_args(argv)
    status: int = arguments.do(arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
