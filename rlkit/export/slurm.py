"""`rlkit export --slurm`: a SLURM batch file that trains on some nodes, serves vLLM on others, and survives preemption.

The file is data and program apart: the `#SBATCH` lines and one block of assignments hold every value of the user's,
quoted with shlex; what follows is the same text for every job and reads them as variables only. docs/slurm.md says how
the job behaves. Left out: a server over several nodes (each serving node runs a whole server), and restarts of single
processes by torchrun (--max-restarts=0: a weight transfer group cannot be joined again half-way).
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Literal, get_args

from rlkit.export.slurm_shell import COMMON, HEAD, INTRODUCTION, SERVER, TRAINER

Launcher = Literal["torchrun", "local"]
WORDS = ("sbatch", "script_args", "srun_args", "vllm_args")  # fields that one string of the command line fills
OURS = re.compile(r"nodes|ntasks(-per-node)?|gpus-per-node|signal|requeue|open-mode|output")
SAVING_SECONDS = 20  # what SLURM and the job need of the notice, after torchrun's workers have ended
LEAST_NOTICE, MOST_NOTICE = 60, 65535  # the latter is SLURM's limit


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What a job asks for, and what it runs.

    Attributes:
        nodes: training nodes; the job asks for `nodes + vllm_nodes`.
        gpus_per_node: GPUs of every node, and training processes on each training node.
        time: time limit as sbatch reads it: "90" minutes, "4:00:00", "1-12".
        partition: partition.
        account: account.
        job_name: name of the job; None takes the script's.
        cpus_per_node: CPUs of every node; None asks for whole nodes.
        mem: memory of every node, "200G"; None asks for all of it, or for the cluster's default with `cpus_per_node`.
        notice: seconds before the time limit at which the run is told to save and stop.
        sbatch: further options of sbatch, each one word: "--qos=high".
        srun_args: further options of both sruns: "--container-image=...".
        setup: a shell file that the job reads first, for `module load` and `source activate`.
        run_folder: folder of the job's runs; None takes runs/NAME-JOBID. The script's --out is `run` in it.
        script_args: further arguments of the script.
        vllm_nodes: nodes that serve, each one server.
        vllm_tp: GPUs of one server; None takes all of its node.
        model: what the servers serve, a name or a path.
        port: the servers' port; None takes one from the job's number, so that two jobs do not meet.
        vllm_args: further arguments of `vllm serve`.

    Raises:
        ValueError: a value that cannot be meant; says which, and what was expected.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str | None = None
    cpus_per_node: int | None = None
    mem: str | None = None
    notice: int = 300
    sbatch: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    setup: str | None = None
    run_folder: str | None = None
    script_args: tuple[str, ...] = ()
    vllm_nodes: int = 0
    vllm_tp: int | None = None
    model: str | None = None
    port: int | None = None
    vllm_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in {"nodes": 1, "gpus_per_node": 1, "cpus_per_node": 1, "vllm_nodes": 0, "vllm_tp": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"SlurmSettings: {name} must be at least {least}, got {value}.")
        if not LEAST_NOTICE <= self.notice <= MOST_NOTICE:
            raise ValueError(
                f"SlurmSettings: notice must be {LEAST_NOTICE} to {MOST_NOTICE} seconds, got {self.notice}."
            )
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise ValueError(f"SlurmSettings: port must be 1024 to 65535, got {self.port}.")
        for name in ("setup", "run_folder", "model"):
            _check_word(name, getattr(self, name))
        for name in WORDS:
            for word in getattr(self, name):
                if "\0" in word:
                    raise ValueError(f"SlurmSettings: {name} holds a NUL character in {word!r}.")
        for name in ("time", "partition", "account", "job_name", "mem"):
            _check_directive(name, getattr(self, name))
        for option in self.sbatch:
            _check_directive("sbatch", option)
            found = re.fullmatch(r"--([a-z][a-z-]*)(=.*)?", option)
            if not found:
                raise ValueError(f"SlurmSettings: sbatch expects options like --qos=high, got {option!r}.")
            if OURS.fullmatch(found[1]):
                raise ValueError(f"SlurmSettings: the job sets --{found[1]} itself; leave {option!r} out of sbatch.")
        self._check_servers()

    def _check_servers(self) -> None:
        if not self.vllm_nodes:
            for name in ("vllm_tp", "model", "port", "vllm_args"):
                if getattr(self, name) not in (None, ()):
                    raise ValueError(
                        f"SlurmSettings: {name} is set, but no node serves. Set vllm_nodes too (--vllm-nodes)."
                    )
            return
        if self.model is None:
            raise ValueError(
                "SlurmSettings: vllm_nodes is set, but not the model that they serve. Set model too (--vllm-model)."
            )
        if self.vllm_tp is not None and self.vllm_tp > self.gpus_per_node:
            raise ValueError(
                f"SlurmSettings: a server lies on one node, which has {self.gpus_per_node} GPUs; got vllm_tp "
                f"{self.vllm_tp}."
            )


def slurm_job(script: str, settings: SlurmSettings) -> str:
    """The text of a batch file that runs an exported script; the same arguments give the same text.

    Args:
        script: the script, absolute or as seen from the folder in which sbatch is called.
        settings: the job.

    Raises:
        ValueError: a script whose name cannot be passed on.

    Example:
        >>> text = slurm_job("rloo.py", SlurmSettings(nodes=4, gpus_per_node=8, time="4:00:00"))
        >>> [line for line in text.splitlines() if "nodes=" in line]
        ['#SBATCH --nodes=4', ...]
    """
    _check_word("script", script)
    name = settings.job_name or PurePath(script).stem
    _check_directive("job_name", name)
    return "\n".join(
        [
            "#!/bin/bash",
            HEAD,
            *_directives(name, settings),
            INTRODUCTION,
            *_assignments(script, name, settings),
            COMMON + (SERVER if settings.vllm_nodes else "") + TRAINER,
        ]
    )


def launch_command(script: str, kind: str, *, processes: int | None = None, arguments: Sequence[str] = ()) -> str:
    """The command that runs an exported script on this machine, quoted for a shell.

    Args:
        script: the script.
        kind: "torchrun", or "local" for one process.
        processes: processes of torchrun; None starts one for each GPU.
        arguments: arguments of the script.

    Raises:
        ValueError: another kind, or processes below 1.

    Example:
        >>> launch_command("my run.py", "torchrun", processes=2, arguments=["--lr", "3e-6"])
        "torchrun --standalone --nproc-per-node=2 'my run.py' --lr 3e-6"
    """
    _check_word("script", script)
    if kind not in get_args(Launcher):
        raise ValueError(f"launch_command: expected one of {get_args(Launcher)}, got {kind!r}.")
    if processes is not None and processes < 1:
        raise ValueError(f"launch_command: processes must be at least 1, got {processes}.")
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes or 'gpu'}"]
    return shlex.join([*(["python"] if kind == "local" else torchrun), script, *arguments])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--slurm FILE`, the options of the job, and `--launch` to a parser; `from_arguments` reads them.

    The names in the namespace begin with `slurm`, apart from `launch`.
    """
    group = parser.add_argument_group("SLURM job", "also write a batch file for the script (docs/slurm.md)")
    group.add_argument("--slurm", metavar="FILE", help="the batch file to write")
    for flag, (field, kind, metavar, text) in FLAGS.items():
        group.add_argument(flag, dest=f"slurm_{field}", type=kind, metavar=metavar, help=text)
    parser.add_argument("--launch", choices=get_args(Launcher), help="print the command that runs the script here")


def from_arguments(namespace: argparse.Namespace) -> SlurmSettings | None:
    """The job that the command line describes; None without `--slurm`.

    Raises:
        ValueError: options of a job without `--slurm`, or values that cannot be meant.
    """
    given: dict[str, Any] = {
        field.name: value
        for field in fields(SlurmSettings)
        if (value := getattr(namespace, f"slurm_{field.name}", None)) is not None
    }
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
    """A string of the command line as words, by the shell's rules of quoting; nothing in it is run.

    Raises:
        ValueError: a quotation mark without its partner.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"rlkit export: --{name.replace('_', '-')} {text!r}: {error}.") from None


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
    "--run-folder": (
        "run_folder",
        str,
        "DIR",
        "folder of the runs (runs/NAME-JOBID); the script's --out is `run` in it",
    ),
    "--script-args": ("script_args", str, "WORDS", "further flags of the script: --script-args='--lr 3e-6'"),
    "--vllm-nodes": ("vllm_nodes", int, "V", "nodes that serve vLLM, one server each (0)"),
    "--vllm-tp": ("vllm_tp", int, "T", "GPUs of one server (all of its node)"),
    "--vllm-model": ("model", str, "MODEL", "what the servers serve, a name or a path"),
    "--vllm-port": ("port", int, "P", "the servers' port (from the job's number)"),
    "--vllm-args": ("vllm_args", str, "WORDS", "further arguments of vllm serve: --vllm-args='--dtype bfloat16'"),
}


def _check_word(name: str, value: str | None) -> None:
    if value is not None and (not value or value.startswith("-") or "\0" in value):
        raise ValueError(f"SLURM job: {name} must not be empty, begin with '-' or hold a NUL, got {value!r}.")


def _check_directive(name: str, value: str | None) -> None:
    """A value in a `#SBATCH` line, which is a comment to the shell: a line end would let what follows run."""
    if value is not None and (not value or not value.isprintable()):
        raise ValueError(f"SLURM job: {name} must be one line of printable characters, got {value!r}.")


def _directives(name: str, settings: SlurmSettings) -> list[str]:
    own_memory = settings.cpus_per_node or any(option.startswith("--mem") for option in settings.sbatch)
    options: dict[str, str | int | None] = {
        "job-name": name,
        "nodes": settings.nodes + settings.vllm_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": settings.gpus_per_node,
        "cpus-per-task": settings.cpus_per_node,
        "mem": settings.mem or (None if own_memory else "0"),
        "time": settings.time,
        "partition": settings.partition,
        "account": settings.account,
        "signal": f"B:USR1@{settings.notice}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{option}={_quote(str(value))}" for option, value in options.items() if value is not None]
    if settings.cpus_per_node is None:
        lines.append("#SBATCH --exclusive")
    lines.append("#SBATCH --requeue")
    for option in settings.sbatch:
        key, equals, value = option.partition("=")
        lines.append(f"#SBATCH {key}{equals}{_quote(value) if equals else ''}")
    return lines


def _assignments(script: str, name: str, settings: SlurmSettings) -> list[str]:
    srun = ["--cpu-bind=none", *settings.srun_args]
    if settings.cpus_per_node is not None:
        srun.insert(0, f"--cpus-per-task={settings.cpus_per_node}")
    lines = [
        f"JOB_NAME={shlex.quote(name)}",
        f"SCRIPT={shlex.quote(script)}",
        f"SCRIPT_ARGS=({shlex.join(settings.script_args)})",
        f"RUN_FOLDER={shlex.quote(settings.run_folder or '')}",
        f"SETUP={shlex.quote(settings.setup or '')}",
        f"SRUN_ARGS=({shlex.join(srun)})",
        f"TRAIN_NODES={settings.nodes}",
        f"PROCESSES_PER_NODE={settings.gpus_per_node}",
        f"SHUTDOWN_SECONDS={settings.notice - SAVING_SECONDS}",
        f"VLLM_NODES={settings.vllm_nodes}",
    ]
    if settings.vllm_nodes:
        assert settings.model is not None
        lines += [
            f"VLLM_MODEL={shlex.quote(settings.model)}",
            f"VLLM_TP={settings.vllm_tp or settings.gpus_per_node}",
            f"VLLM_PORT={settings.port or ''}",
            f"VLLM_ARGS=({shlex.join(settings.vllm_args)})",
        ]
    return lines


def _quote(value: str) -> str:
    """Quoted as sbatch reads its lines: like a shell, but with backslash an escape inside every kind of quotes."""
    if re.fullmatch(r"[\w%@:+./,=-]+", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
