"""A job's settings, and the text of its batch file: job.sbatch with the settings written into it.

The `#SBATCH` lines and one block of assignments hold every value of the user, quoted; the rest of the file only reads
them as variables.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

TEMPLATE = Path(__file__).with_name("job.sbatch")
OURS = re.compile(r"nodes|ntasks(-per-node)?|gpus-per-node|signal|requeue|open-mode|output")
SAVING_SECONDS = 20  # what SLURM and the job need of the notice, after torchrun's workers have ended
LEAST_NOTICE, MOST_NOTICE = 60, 65535  # the latter is SLURM's limit


def _option(default: Any, metavar: str, text: str, *, flag: str = "") -> Any:
    """A field and the option of the command line that sets it, `--gpus-per-node` for `gpus_per_node`."""
    return field(default=default, metadata={"flag": flag, "metavar": metavar, "help": text})


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Resources and program of a job; each field is an option of `rlkit export`, whose help explains it.

    Raises:
        ValueError: an invalid value.
    """

    nodes: int = _option(1, "N", "training nodes (1); the servers' nodes come on top")
    gpus_per_node: int = _option(1, "G", "GPUs of every node, and processes on each training node (1)")
    time: str | None = _option(None, "T", "time limit, as sbatch reads it: 4:00:00")
    partition: str | None = _option(None, "NAME", "partition")
    account: str | None = _option(None, "NAME", "account")
    job_name: str | None = _option(None, "NAME", "name of the job (the script's)")
    cpus_per_node: int | None = _option(None, "C", "CPUs of every node (whole nodes)")
    mem: str | None = _option(None, "SIZE", "memory of every node, as sbatch reads it: 200G")
    notice: int = _option(300, "S", "seconds before the time limit at which the run saves and stops (300)")
    sbatch: tuple[str, ...] = _option((), "WORDS", "further sbatch options: --sbatch='--qos=high --constraint=h100'")
    srun_args: tuple[str, ...] = _option((), "WORDS", "further options of srun: --srun-args='--container-image=IMAGE'")
    setup: str | None = _option(None, "FILE", "shell file that the job reads first: module load, source activate")
    run_folder: str | None = _option(None, "DIR", "folder of the runs (runs/NAME-JOBID); the script gets --out DIR/run")
    script_args: tuple[str, ...] = _option((), "WORDS", "further flags of the script: --script-args='--lr 3e-6'")
    vllm_nodes: int = _option(0, "V", "nodes that serve vLLM, one server each (0)")
    vllm_tp: int | None = _option(None, "T", "GPUs of one server (all of its node)")
    model: str | None = _option(None, "MODEL", "what the servers serve, a name or a path", flag="--vllm-model")
    port: int | None = _option(None, "P", "the servers' port (from the job's number)", flag="--vllm-port")
    vllm_args: tuple[str, ...] = _option((), "WORDS", "further arguments of vllm serve: --vllm-args='--dtype bfloat16'")

    def __post_init__(self) -> None:
        for name, least in {"nodes": 1, "gpus_per_node": 1, "cpus_per_node": 1, "vllm_nodes": 0, "vllm_tp": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"SlurmSettings: {name} must be at least {least}, got {value}.")
        if not LEAST_NOTICE <= self.notice <= MOST_NOTICE:
            raise ValueError(f"SlurmSettings: notice must be {LEAST_NOTICE} to {MOST_NOTICE} s, got {self.notice}.")
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise ValueError(f"SlurmSettings: port must be 1024 to 65535, got {self.port}.")
        for name in ("setup", "run_folder", "model"):
            check_word(name, getattr(self, name))
        for name in ("sbatch", "script_args", "srun_args", "vllm_args"):
            if any("\0" in word for word in getattr(self, name)):
                raise ValueError(f"SlurmSettings: {name} holds a NUL character: {getattr(self, name)!r}.")
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
                    raise ValueError(f"SlurmSettings: {name} is set, but no node serves. Set --vllm-nodes.")
        elif self.model is None:
            raise ValueError("SlurmSettings: vllm_nodes is set, but no model to serve. Set model too (--vllm-model).")
        elif self.vllm_tp is not None and self.vllm_tp > self.gpus_per_node:
            gpus = self.gpus_per_node
            raise ValueError(
                f"SlurmSettings: a server runs on one node, which has {gpus} GPUs, got vllm_tp={self.vllm_tp}."
            )


def slurm_job(script: str, settings: SlurmSettings) -> str:
    """The text of a batch file that runs an exported script; the same arguments give the same text.

    Args:
        script: the script, absolute or as seen from the folder in which sbatch is called.
        settings: the job.

    Raises:
        ValueError: a script name or job name that cannot be passed on.

    Example:
        >>> text = slurm_job("rloo.py", SlurmSettings(nodes=4, gpus_per_node=8, time="4:00:00"))
        >>> [line for line in text.splitlines() if "nodes=" in line]
        ['#SBATCH --nodes=4', ...]
    """
    check_word("script", script)
    name = settings.job_name or PurePath(script).stem
    _check_directive("job_name", name)
    head, *parts = re.split(r"^# --- (\w+)\n", TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    sections["directives"] = "".join(f"{line}\n" for line in _directives(name, settings))
    sections["values"] = "".join(f"{line}\n" for line in _assignments(script, name, settings))
    if not settings.vllm_nodes:
        del sections["servers"]
    return head + "".join(sections.values())


def check_word(name: str, value: str | None) -> None:
    """Check that a value can be passed to a command as one argument."""
    if value is not None and (not value or value.startswith("-") or "\0" in value):
        raise ValueError(f"SLURM job: {name} must not be empty, begin with '-' or hold a NUL, got {value!r}.")


def _check_directive(name: str, value: str | None) -> None:
    """Check a value of a `#SBATCH` line: the line is a comment to the shell, and text after a line end would run."""
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
    values: dict[str, Any] = {
        "JOB_NAME": name,
        "SCRIPT": script,
        "SCRIPT_ARGS": settings.script_args,
        "RUN_FOLDER": settings.run_folder or "",
        "SETUP": settings.setup or "",
        "SRUN_ARGS": srun,
        "TRAIN_NODES": settings.nodes,
        "PROCESSES_PER_NODE": settings.gpus_per_node,
        "SHUTDOWN_SECONDS": settings.notice - SAVING_SECONDS,
        "VLLM_NODES": settings.vllm_nodes,
    }
    if settings.vllm_nodes:
        values["VLLM_MODEL"] = settings.model
        values["VLLM_TP"] = settings.vllm_tp or settings.gpus_per_node
        values["VLLM_PORT"] = settings.port or ""
        values["VLLM_ARGS"] = settings.vllm_args
    quoted = {
        key: f"({shlex.join(value)})" if isinstance(value, list | tuple) else shlex.quote(str(value))
        for key, value in values.items()
    }
    return [f"{key}={value}" for key, value in quoted.items()]


def _quote(value: str) -> str:
    """Quote for sbatch, which reads its lines like a shell, but takes a backslash as an escape inside all quotes."""
    if re.fullmatch(r"[\w%@:+./,=-]+", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
