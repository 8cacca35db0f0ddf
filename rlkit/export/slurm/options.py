"""The options of `rlkit export --slurm` and `--launch`."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, Literal, get_args

from rlkit.export.slurm.job import WORDS, SlurmSettings, check_word

Launcher = Literal["torchrun", "local"]
FLAGS: dict[str, tuple[str, type, str, str]] = {
    "--nodes": ("nodes", int, "N", "training nodes (1); the servers' nodes come on top"),
    "--gpus-per-node": ("gpus_per_node", int, "G", "GPUs of every node, and processes on each training node (1)"),
    "--time": ("time", str, "T", "time limit, as sbatch reads it: 4:00:00"),
    "--partition": ("partition", str, "NAME", "partition"),
    "--account": ("account", str, "NAME", "account"),
    "--job-name": ("job_name", str, "NAME", "name of the job (the script's)"),
    "--cpus-per-node": ("cpus_per_node", int, "C", "CPUs of every node (whole nodes)"),
    "--mem": ("mem", str, "SIZE", "memory of every node, as sbatch reads it: 200G"),
    "--notice": ("notice", int, "S", "seconds before the time limit at which the run saves and stops (300)"),
    "--sbatch": ("sbatch", str, "WORDS", "further sbatch options: --sbatch='--qos=high --constraint=h100'"),
    "--srun-args": ("srun_args", str, "WORDS", "further options of srun: --srun-args='--container-image=IMAGE'"),
    "--setup": ("setup", str, "FILE", "shell file that the job reads first: module load, source activate"),
    "--run-folder": ("run_folder", str, "DIR", "folder of the runs (runs/NAME-JOBID); the script gets --out DIR/run"),
    "--script-args": ("script_args", str, "WORDS", "further flags of the script: --script-args='--lr 3e-6'"),
    "--vllm-nodes": ("vllm_nodes", int, "V", "nodes that serve vLLM, one server each (0)"),
    "--vllm-tp": ("vllm_tp", int, "T", "GPUs of one server (all of its node)"),
    "--vllm-model": ("model", str, "MODEL", "what the servers serve, a name or a path"),
    "--vllm-port": ("port", int, "P", "the servers' port (from the job's number)"),
    "--vllm-args": ("vllm_args", str, "WORDS", "further arguments of vllm serve: --vllm-args='--dtype bfloat16'"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--slurm FILE`, the options of the job, and `--launch` to a parser; `from_arguments` reads them."""
    group = parser.add_argument_group("SLURM job", "also write a batch file for the script (docs/slurm.md)")
    group.add_argument("--slurm", metavar="FILE", help="the batch file to write")
    for flag, (field, kind, metavar, text) in FLAGS.items():
        group.add_argument(flag, dest=f"slurm_{field}", type=kind, metavar=metavar, help=text)
    parser.add_argument("--launch", choices=get_args(Launcher), help="print the command that runs the script here")


def from_arguments(namespace: argparse.Namespace) -> SlurmSettings | None:
    """The job that the command line describes; None without `--slurm`."""
    given: dict[str, Any] = {field: getattr(namespace, f"slurm_{field}") for field, *_ in FLAGS.values()}
    given = {field: value for field, value in given.items() if value is not None}
    if namespace.slurm is None:
        used_by_launch = {"gpus_per_node", "script_args"} if namespace.launch else set()
        lost = [flag for flag, (field, *_) in FLAGS.items() if field in given and field not in used_by_launch]
        if lost:
            raise ValueError(f"rlkit export: {', '.join(lost)} describe a SLURM job. Add --slurm FILE.")
        return None
    for field in WORDS:
        if field in given:
            given[field] = split_words(field, given[field])
    return SlurmSettings(**given)


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
