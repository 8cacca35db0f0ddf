"""Export: from a notebook to the text of its script, or to the list of all problems."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlkit._version import __version__
from rlkit.export.analysis import analyse
from rlkit.export.checks import ERRORS, Facts
from rlkit.export.lint import WARNINGS
from rlkit.export.parameters import read_parameters
from rlkit.export.placement import place
from rlkit.export.problems import ExportError, Problem
from rlkit.export.reading import GENERATED, read_notebook
from rlkit.export.writing import write_script
from rlkit.record import printable
from rlkit.support.files import regular
from rlkit.support.notebook import notebook_path
from rlkit.support.text import say

FIX = "Indent it less, and give `from __future__` a line of its own; if that is not it, report it with the notebook."


@dataclass(frozen=True)
class Exported:
    """A script: the notebook's file name, the text, and warnings and notes."""

    notebook: str
    text: str
    problems: tuple[Problem, ...]


def export_text(notebook: str | os.PathLike[str], *, name: str | None = None, strict: bool = False) -> Exported:
    """The script of a notebook, without writing a file.

    Args:
        notebook: `.ipynb`, or a percent script or MyST Markdown through jupytext.
        name: file name of the script, for its header; by default that of `export`.
        strict: warnings are errors.

    Raises:
        ExportError: every reason why no script can be written.
        FileNotFoundError: no such file.
    """
    read = read_notebook(notebook)
    program = analyse(read)
    parameters = read_parameters(program)
    placement = place(program, parameters.cell)
    facts = Facts(program, parameters, placement)
    found = [*program.problems, *parameters.problems, *(one for check in (*ERRORS, *WARNINGS) for one in check(facts))]
    allowed = {(cell.number, line): codes for cell in program.cells for line, codes in cell.layout.allowed.items()}
    problems = sorted(
        (one for one in found if one.is_error or one.code not in allowed.get((one.cell, one.line), ())),
        key=lambda one: (one.cell, one.line, one.code),
    )
    serious = [one for one in problems if not one.code.startswith("N")]
    if any(one.is_error or strict for one in serious):
        raise ExportError(read.name, serious)
    script = name or script_path(Path(read.name), None).name
    text = write_script(program, parameters, placement, name=str(printable(script)), version=__version__)
    try:
        compile(text, "script", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = f"the cells are Python one by one, and not as one script: {error}."
        above = "\n".join(text.split("\n")[: getattr(error, "lineno", 0) or 0])
        cell = int(([0, *re.findall(r"^ *# %% cell (\d+)", above, re.MULTILINE)])[-1])
        raise ExportError(read.name, [Problem("E103", cell, 0, reason, FIX)]) from error
    return Exported(read.name, text, tuple(problems))


def export(
    notebook: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    strict: bool = False,
) -> Path:
    """Write the script of a notebook: `rlkit export` from Python.

    Args:
        notebook: path of the notebook, saved; None for the one that runs, if its front end tells which that is.
        out: file or existing folder to write to; by default beside the notebook, with `.py`.
        strict: warnings are errors.

    Returns:
        The script's path.

    Raises:
        ExportError: every reason why no script can be written: cell, line, reason, fix.
        FileNotFoundError: no such notebook.
        FileExistsError: a file at that place that `rlkit export` has not written.
        RuntimeError: no notebook is given, and the front end does not tell.

    Example:
        >>> rl.export("notebooks/01_rloo.ipynb", "01.py")  # doctest: +SKIP
        PosixPath('01.py')
    """
    source = Path(notebook) if notebook is not None else notebook_path()
    if source is None:
        raise RuntimeError(
            'rl.export: the front end does not say which notebook this is. Give its path: rl.export("my.ipynb"), and '
            "save the notebook first."
        )
    target = script_path(source, out)
    exported = export_text(source, name=target.name, strict=strict)
    for problem in exported.problems:
        say(problem.text(exported.notebook))
    write_safely(target, exported.text)
    return target


def script_path(notebook: Path, out: str | os.PathLike[str] | None, *, into_folder: bool = False) -> Path:
    """Where the script goes: to the file `out`, into the folder `out` (`into_folder`: also a new one), or beside."""
    if out is None:
        return notebook.with_name(f"{notebook.stem}{'_run' if notebook.suffix == '.py' else ''}.py")
    target = Path(out)
    return target / f"{notebook.stem}.py" if into_folder or target.is_dir() else target


def write_safely(target: Path, text: str) -> None:
    """Write a script; FileExistsError for a file that `rlkit export` has not written."""
    if target.exists():
        with open(target, encoding="utf-8", errors="replace", opener=regular) as written:
            if GENERATED not in written.read(2000):
                raise FileExistsError(
                    f"export: {target} was not written by `rlkit export`; choose another name or delete it."
                )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    os.replace(partial, target)
