"""`rlkit demo`: train an offline model; the loops are in rlkit/cli/demo_loops.py."""

import argparse

from rlkit.cli.arguments import Subparsers, positive, seed


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="train an offline model and print what happens",
        description="Train an offline model with RLOO, A*-PO or both, and compare held-out answers before and after.",
    )
    parser.add_argument("--model", default="tiny-add", choices=["tiny-add", "smollm2"], help="offline model (tiny-add)")
    parser.add_argument(
        "--algorithm",
        choices=["rloo", "a2po", "both"],
        help="default: both for tiny-add, rloo for smollm2",
    )
    parser.add_argument("--max-steps", type=positive, help="updates per algorithm (default: the model's preset)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of data order and sampling (0)")
    parser.add_argument("--out", default="runs", help="folder for the runs (runs)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train; 130 after an interrupt."""
    from rlkit.cli.demo_loops import run_demo

    chosen = arguments.algorithm or ("both" if arguments.model == "tiny-add" else "rloo")
    for algorithm in ["rloo", "a2po"] if chosen == "both" else [chosen]:
        try:
            result = run_demo(
                arguments.model, algorithm, max_steps=arguments.max_steps, seed=arguments.seed, out=arguments.out
            )
        except KeyboardInterrupt:
            return 130
        if result.run.stopped == "interrupted":
            return 130
    return 0
