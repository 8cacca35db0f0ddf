"""The `rlkit` command."""

import argparse
from collections.abc import Sequence

from rlkit.view import command


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
    command.add_arguments(commands)
    _add_serve(commands)
    arguments = parser.parse_args(argv)
    if arguments.command in ("view", "report"):
        return command.run_command(arguments)
    if arguments.command == "export":
        return _export(arguments)
    if arguments.command == "ctl":
        from rlkit import ctl

        return ctl.run(arguments)
    if arguments.command == "serve":
        return _serve(arguments)

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


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model with vLLM, for rl.VLLMServer",
        description="Run a vLLM server that takes weights from rl.VLLMServer, until Ctrl-C. Arguments after -- are "
        "vLLM's own: rlkit serve MODEL -- --enable-prefix-caching",
    )
    parser.add_argument("model", help="folder, hub id, tiny-add or smollm2")
    parser.add_argument("--host", default="127.0.0.1", help="address; whoever reaches it can change the weights")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="(float32)")
    parser.add_argument("--max-model-len", type=_positive, metavar="N", help="most tokens of prompt and completion")
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of a GPU's memory, in (0, 1]")
    parser.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="memory of the cache (on a CPU 1)")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1, metavar="N", help="GPUs of the server (1)")
    parser.add_argument("--max-num-seqs", type=_positive, metavar="N", help="most completions at a time")
    parser.add_argument("--lora-rank", type=_positive, metavar="R", help="take adapters up to this rank")
    parser.add_argument("--token", help="guards /v1; better in the environment variable VLLM_API_KEY")
    parser.add_argument("--seed", type=_seed, default=0, help="of vLLM itself (0)")
    parser.add_argument("--log", metavar="FILE", help="file for what vLLM prints, instead of standard error")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="after --: further arguments of vllm serve")


def _serve(arguments: argparse.Namespace) -> int:
    import sys
    from dataclasses import fields
    from pathlib import Path

    from rlkit.engines.server_settings import ServerSettings, free_port
    from rlkit.engines.serving import run_server

    given = {field.name: getattr(arguments, field.name) for field in fields(ServerSettings)}
    given["extra"] = tuple(arguments.extra)
    given["port"] = arguments.port or free_port()
    try:
        settings = ServerSettings(**given)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    log = Path(arguments.log) if arguments.log else None
    scratch = Path(arguments.scratch) if arguments.scratch else None
    return run_server(arguments.model, settings, log=log, parent=arguments.parent, scratch=scratch)


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


if __name__ == "__main__":
    raise SystemExit(main())
