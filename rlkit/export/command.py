"""`rlkit export`: several notebooks at once, and `--check` for CI."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlkit.export.export import export_text, script_path, write_safely
from rlkit.export.problems import ExportError
from rlkit.export.slurm import slurm_job
from rlkit.export.slurm.options import from_arguments, launch_command, split_words


def export_all(notebooks: Sequence[str], output: str | None, *, check: bool = False, strict: bool = False) -> int:
    """Export notebooks, or check that their scripts are fresh; warnings and errors go to standard error.

    Args:
        notebooks: paths.
        output: file, or folder if there are several; None writes beside each notebook.
        check: write nothing.
        strict: warnings are errors.

    Returns:
        Exit status: 0, or 1 if a notebook cannot be exported or a script is stale.
    """
    try:
        targets = _targets(notebooks, output)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    failed = False
    for notebook, target in targets.items():
        try:
            exported = export_text(notebook, name=target.name, strict=strict)
            for problem in exported.problems:
                print(problem.text(exported.notebook), file=sys.stderr)
            if check:
                failed |= not _is_fresh(target, exported.text, notebook)
            else:
                write_safely(target, exported.text)
                print(f"{notebook} -> {target}")
        except (ExportError, OSError, ImportError) as error:
            print(error, file=sys.stderr)
            failed = True
    return int(failed)


def _targets(notebooks: Sequence[str], output: str | None) -> dict[str, Path]:
    """Where each notebook's script goes.

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


def _is_fresh(target: Path, text: str, notebook: str) -> bool:
    if target.is_file() and target.read_bytes() == text.encode():
        return True
    state = "stale" if target.exists() else "missing"
    command = shlex.join(["rlkit", "export", notebook, "-o", str(target)])
    print(f"export: {target} is {state}. Write it anew: {command}", file=sys.stderr)
    return False


def export_and_launch(arguments: argparse.Namespace) -> int:
    """The whole command: scripts, then the batch file of `--slurm`, then the command of `--launch`.

    What the options of a job say is looked at first, so that a wrong one leaves nothing behind.

    Returns:
        Exit status: that of `export_all`, or 2 with an error for a job that cannot be meant or written.
    """
    try:
        job, command = _job(arguments)
        status = export_all(arguments.notebook, arguments.output, check=arguments.check, strict=arguments.strict)
        if status:
            return status
        if job is not None:
            write_safely(Path(arguments.slurm), job)
            submit = f"sbatch {shlex.quote(arguments.slurm)}"
            print(f"{_script(arguments)} -> {arguments.slurm}; submit it with: {submit}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if command is not None:
        print(command)
    return 0


def _job(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """The texts of the batch file and of the command, where they are asked for."""
    settings = from_arguments(arguments)
    if settings is None and arguments.launch is None:
        return None, None
    if len(arguments.notebook) != 1 or arguments.check:
        raise ValueError("rlkit export: --slurm and --launch take one notebook, and go without --check.")
    script, command = _script(arguments), None
    if arguments.launch is not None:
        words = split_words("script_args", arguments.slurm_script_args or "")
        processes = arguments.slurm_gpus_per_node
        command = launch_command(script, arguments.launch, processes=processes, arguments=words)
    return slurm_job(script, settings) if settings is not None else None, command


def _script(arguments: argparse.Namespace) -> str:
    (target,) = _targets(arguments.notebook, arguments.output).values()
    return str(target)
