"""`rlkit serve`: a vLLM server that takes weights; the server is in rlkit/engines/vllm/server.py."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from rlkit.cli.arguments import Subparsers, positive, seed


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model with vLLM, for rl.VLLMServer",
        description="Run a vLLM server that takes weights from rl.VLLMServer, until Ctrl-C. Arguments after -- are "
        "vLLM's own: rlkit serve MODEL -- --enable-prefix-caching. Clients need the secret in VLLM_API_KEY, or else a "
        "random one, which those of the same user on this machine find by themselves.",
    )
    parser.add_argument("model", help="folder, hub id, tiny-add or smollm2")
    parser.add_argument("--host", default="127.0.0.1", help="address (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="(float32)")
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="most tokens of prompt and completion")
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of a GPU's memory, in (0, 1]")
    parser.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="memory of the cache (on a CPU 1)")
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N", help="GPUs of the server (1)")
    parser.add_argument("--max-num-seqs", type=positive, metavar="N", help="most completions at a time")
    parser.add_argument("--lora-rank", type=positive, metavar="R", help="take adapters up to this rank")
    parser.add_argument("--seed", type=seed, default=0, help="of vLLM itself (0)")
    parser.add_argument("--log", metavar="FILE", help="file for what vLLM prints, instead of standard error")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="after --: further arguments of vllm serve")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from rlkit.engines.vllm.server import run_server
    from rlkit.engines.vllm.server_settings import ServerSettings
    from rlkit.support.processes import free_port

    given = {field.name: getattr(arguments, field.name) for field in fields(ServerSettings) if field.name != "token"}
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
