"""`rlkit export`: several notebooks at once, and `--check` for CI."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlkit.export import slurm
from rlkit.export.export import export_text, script_path, write_safely
from rlkit.export.problems import ExportError


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
    failed = False
    if output is not None and (len(notebooks) > 1 or output.endswith("/")):
        if Path(output).exists() and not Path(output).is_dir():
            print(f"export: {output} is not a folder; several notebooks need one.", file=sys.stderr)
            return 1
        Path(output).mkdir(parents=True, exist_ok=True)
    for notebook in notebooks:
        target = script_path(Path(notebook), output)
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


def _is_fresh(target: Path, text: str, notebook: str) -> bool:
    if target.is_file() and target.read_bytes() == text.encode():
        return True
    state = "stale" if target.exists() else "missing"
    command = shlex.join(["rlkit", "export", notebook, "-o", str(target)])
    print(f"export: {target} is {state}. Write it anew: {command}", file=sys.stderr)
    return False


def write_job(arguments: argparse.Namespace) -> int:
    """Write the batch file of `--slurm`, print the command of `--launch`; returns 0, or 2 with an error."""
    try:
        settings = slurm.from_arguments(arguments)
        if settings is None and arguments.launch is None:
            return 0
        if len(arguments.notebook) != 1 or arguments.check:
            raise ValueError("rlkit export: --slurm and --launch take one notebook, and go without --check.")
        script = str(script_path(Path(arguments.notebook[0]), arguments.output))
        if settings is not None:
            write_safely(Path(arguments.slurm), slurm.slurm_job(script, settings))
            print(f"{script} -> {arguments.slurm}; submit it with: sbatch {shlex.quote(arguments.slurm)}")
        if arguments.launch is not None:
            words = slurm.split_words("script_args", getattr(arguments, "slurm_script_args", None) or "")
            processes = getattr(arguments, "slurm_gpus_per_node", None)
            print(slurm.launch_command(script, arguments.launch, processes=processes, arguments=words))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
