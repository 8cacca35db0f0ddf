"""The options of `rlkit export --slurm` and `--launch`."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args

from rlkit.export.slurm.job import SlurmSettings, check_word

Launcher = Literal["torchrun", "local"]
FLAGS = {option.metadata["flag"] or f"--{option.name.replace('_', '-')}": option for option in fields(SlurmSettings)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--slurm FILE`, the options of the job, and `--launch` to a parser; `from_arguments` reads them."""
    group = parser.add_argument_group("SLURM job", "also write a batch file for the script (docs/slurm.md)")
    group.add_argument("--slurm", metavar="FILE", help="the batch file to write")
    for flag, option in FLAGS.items():
        kind = int if option.type in (int, int | None) else str
        shown = {"metavar": option.metadata["metavar"], "help": option.metadata["help"]}
        group.add_argument(flag, dest=f"slurm_{option.name}", type=kind, **shown)
    parser.add_argument("--launch", choices=get_args(Launcher), help="print the command that runs the script here")


def from_arguments(namespace: argparse.Namespace) -> SlurmSettings | None:
    """The job that the command line describes; None without `--slurm`."""
    given: dict[str, Any] = {
        option.name: split_words(option.name, value) if option.type == tuple[str, ...] else value
        for option in FLAGS.values()
        if (value := getattr(namespace, f"slurm_{option.name}")) is not None
    }
    if namespace.slurm is not None:
        return SlurmSettings(**given)
    used_by_launch = {"gpus_per_node", "script_args"} if namespace.launch else set()
    if lost := [flag for flag, option in FLAGS.items() if option.name in given.keys() - used_by_launch]:
        raise ValueError(f"rlkit export: {', '.join(lost)} describe a SLURM job. Add --slurm FILE.")
    return None


def split_words(name: str, text: str) -> tuple[str, ...]:
    """Split a command-line value into words by the shell's quoting rules; nothing in it is run."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"rlkit export: --{name.replace('_', '-')} {text!r}: {error}.") from None


def launch_command(script: str, kind: str, *, processes: int | None = None, arguments: Sequence[str] = ()) -> str:
    """The command that runs an exported script on this machine, quoted for a shell.

    "torchrun" starts one process for each GPU unless `processes` says how many, "local" one in all.

    Example:
        >>> launch_command("my run.py", "torchrun", processes=2, arguments=["--lr", "3e-6"])
        "torchrun --standalone --nproc-per-node=2 'my run.py' --lr 3e-6"
    """
    check_word("script", script)
    if kind not in get_args(Launcher):
        raise ValueError(f"launch_command: expected one of {get_args(Launcher)}, got {kind!r}.")
    if processes is not None and processes < 1:
        raise ValueError(f"launch_command: processes must be at least 1, got {processes}.")
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes or 'gpu'}"]
    return shlex.join([*(["python"] if kind == "local" else torchrun), script, *arguments])
