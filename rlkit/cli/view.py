"""`rlkit view`: runs in a browser tab; the server is in rlkit/view/serve.py."""

import argparse
import sys

from rlkit.cli.arguments import Subparsers


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser(
        "view",
        help="show runs in a browser tab",
        description="Show runs, also those that are going on, in a browser tab: on this machine only, behind a token.",
    )
    parser.add_argument("run", nargs="+", help="folder of a run; several are drawn over each other")
    parser.add_argument("--port", type=int, help="on 127.0.0.1 (a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from rlkit.view.serve import serve

    try:
        return serve(arguments.run, port=arguments.port, browser=not arguments.no_browser)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
