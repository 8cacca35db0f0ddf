"""`rlkit export`: several notebooks at once, `--check` for CI, and what `--slurm` and `--launch` add."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlkit.export.export import export_text, script_path, write_safely
from rlkit.export.problems import ExportError
from rlkit.export.slurm import slurm_job
from rlkit.export.slurm.options import from_arguments, launch_command, split_words


def export_and_launch(arguments: argparse.Namespace) -> int:
    """The whole command: scripts, then the batch file of `--slurm`, then the command of `--launch`.

    The options of a job are read first, so that a wrong one leaves nothing behind.

    Returns:
        Exit status: 0; 1 if a notebook cannot be exported or a script is stale; 2 for a job that cannot be written.
    """
    try:
        settings = from_arguments(arguments)
        for_job = settings is not None or arguments.launch is not None
        if for_job and (len(arguments.notebook) != 1 or arguments.check):
            raise ValueError("rlkit export: --slurm and --launch take one notebook, and go without --check.")
        try:
            targets = _targets(arguments.notebook, arguments.output)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2 if for_job else 1
        script = str(next(iter(targets.values())))
        job = slurm_job(script, settings) if settings is not None else None
        command = None
        if arguments.launch is not None:
            words = split_words("script_args", arguments.slurm_script_args or "")
            processes = arguments.slurm_gpus_per_node
            command = launch_command(script, arguments.launch, processes=processes, arguments=words)
        done = [_export(*pair, check=arguments.check, strict=arguments.strict) for pair in targets.items()]
        if not all(done):
            return 1
        if job is not None:
            write_safely(Path(arguments.slurm), job)
            print(f"{script} -> {arguments.slurm}; submit it with: sbatch {shlex.quote(arguments.slurm)}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if command is not None:
        print(command)
    return 0


def _targets(notebooks: Sequence[str], output: str | None) -> dict[str, Path]:
    """Where each notebook's script goes: to the file `output`, into the folder `output`, or beside it.

    Raises:
        ValueError: several notebooks and no folder, or two of them with one script.
    """
    into_folder = output is not None and (len(notebooks) > 1 or output.endswith("/"))
    if output is not None and into_folder and Path(output).exists() and not Path(output).is_dir():
        raise ValueError(f"export: {output} is not a folder; several notebooks need one.")
    targets = {one: script_path(Path(one), output, into_folder=into_folder) for one in notebooks}
    sources: dict[Path, str] = {}
    for notebook, target in targets.items():
        other = sources.setdefault(target.resolve(), notebook)
        if other != notebook:
            raise ValueError(f"export: {other} and {notebook} would both be {target}; export them into two folders.")
    return targets


def _export(notebook: str, target: Path, *, check: bool, strict: bool) -> bool:
    """Write or check one script; problems go to standard error. False if it cannot be written, or is stale."""
    try:
        exported = export_text(notebook, name=target.name, strict=strict)
        for problem in exported.problems:
            print(problem.text(exported.notebook), file=sys.stderr)
        if not check:
            write_safely(target, exported.text)
            print(f"{notebook} -> {target}")
        elif not target.is_file() or target.read_bytes() != exported.text.encode():
            state = "stale" if target.exists() else "missing"
            command = shlex.join(["rlkit", "export", notebook, "-o", str(target)])
            print(f"export: {target} is {state}. Write it: {command}", file=sys.stderr)
            return False
    except (ExportError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return False
    return True
