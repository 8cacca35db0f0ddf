"""The `rlkit` command."""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="rlkit", description="Online RL of language models, in small steps.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train an offline model and print what happens",
        description="Train an offline model with RLOO, A*-PO or both, and compare held-out answers before and after.",
    )
    demo.add_argument("--model", default="tiny-add", choices=["tiny-add", "smollm2"], help="offline model (tiny-add)")
    demo.add_argument(
        "--algorithm",
        choices=["rloo", "a2po", "both"],
        help="default: both for tiny-add, rloo for smollm2",
    )
    demo.add_argument("--max-steps", type=_positive, help="updates per algorithm (default: the model's preset)")
    demo.add_argument("--seed", type=_seed, default=0, help="seed of data order and sampling (0)")
    demo.add_argument("--out", default="runs", help="folder for the runs (runs)")
    _add_export(commands)
    _add_ctl(commands)
    arguments = parser.parse_args(argv)
    if arguments.command == "export":
        return _export(arguments)
    if arguments.command == "ctl":
        from rlkit import ctl

        return ctl.run(arguments)

    from rlkit.demo import run_demo  # heavy imports only once the arguments are known to be right

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


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a notebook's script",
        description="Write the script of a notebook, or say what is in the way: cell, line, reason, fix.",
    )
    parser.add_argument("notebook", nargs="+", help=".ipynb; with jupytext also percent scripts (.py) and MyST (.md)")
    parser.add_argument("-o", "--output", help="file, or folder for several (beside the notebook)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a script is missing or stale")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    from rlkit.export import slurm

    slurm.add_arguments(parser)


def _add_ctl(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from rlkit import ctl

    parser = commands.add_parser(
        "ctl",
        help="pause, resume, stop or save a run, or change a number of it, while it runs",
        description="Tell the loop of a run what to do when its step is done, or look where it stands.",
    )
    ctl.add_arguments(parser)


def _export(arguments: argparse.Namespace) -> int:
    from rlkit.export.command import export_all, write_job

    status = export_all(arguments.notebook, arguments.output, check=arguments.check, strict=arguments.strict)
    return status or write_job(arguments)


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
