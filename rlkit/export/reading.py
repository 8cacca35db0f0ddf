"""Notebooks as a list of cells: `.ipynb` of any format version, jupytext percent scripts and MyST Markdown.

Outputs, execution times and ids are not read: running the notebook does not change its script. Execution counts are
kept for one warning (cells run out of order).
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.export.problems import ExportError, Problem
from rlkit.export.tags import known_tags

GENERATED = "Written by `rlkit export`"  # stands in the first lines of every script
SUFFIXES = (".ipynb", ".py", ".md")
SAVE_ANEW = "Open it in Jupyter and save it."


@dataclass(frozen=True)
class Cell:
    """A cell: its number counted from 1 over all cells, kind, text, roles, and all tags as written."""

    number: int
    kind: str
    source: str
    roles: frozenset[str]
    tags: tuple[str, ...]
    executed: int | None

    @property
    def is_code(self) -> bool:
        """True if its text goes into the script as code."""
        if "notebook-only" in self.roles or not self.source.strip():
            return False
        return self.kind == "code" or (self.kind == "raw" and "script-only" in self.roles)


@dataclass(frozen=True)
class Notebook:
    """A notebook's file name and cells."""

    name: str
    cells: tuple[Cell, ...]


def read_notebook(path: str | os.PathLike[str]) -> Notebook:
    """Read a notebook.

    Args:
        path: an `.ipynb` file, a percent script (`.py`) or MyST Markdown (`.md`); the last two need jupytext.

    Raises:
        FileNotFoundError: no such file.
        ExportError: not a notebook, not Python, or a script that `rlkit export` wrote.
        ImportError: the package that reads the format is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"export: there is no file {path}.")
    if path.suffix not in SUFFIXES:
        raise ExportError(path.name, [Problem("E100", 0, 0, f"expected one of {', '.join(SUFFIXES)}.")])
    node = _read_ipynb(path) if path.suffix == ".ipynb" else _read_text(path)
    language = node.metadata.get("kernelspec", {}).get("language") or node.metadata.get("language_info", {}).get("name")
    if language and str(language).lower() not in ("python", "ipython", "python3"):
        raise ExportError(path.name, [Problem("E100", 0, 0, f"the notebook's language is {language}, not Python.")])
    return Notebook(path.name, tuple(_cells(path.name, node.cells)))


def _cells(name: str, cells: Any) -> Iterator[Cell]:
    for number, cell in enumerate(cells, start=1):
        try:
            yield _cell(number, cell)
        except (AttributeError, TypeError) as error:
            reason = f"not a cell of a notebook: {error}."
            raise ExportError(name, [Problem("E100", number, 0, reason, SAVE_ANEW)]) from error


def _cell(number: int, cell: Any) -> Cell:
    source = "".join(cell.source) if isinstance(cell.source, list) else cell.source
    source = source.replace("\r\n", "\n").replace("\r", "\n").rstrip()
    written = cell.get("metadata", {}).get("tags") or []
    tags = tuple(str(tag) for tag in ([written] if isinstance(written, str) else written))
    roles = known_tags(tags, source if cell.cell_type != "markdown" else "")
    return Cell(number, cell.cell_type, source, roles, tags, cell.get("execution_count"))


def _read_ipynb(path: Path) -> Any:
    try:
        import nbformat
    except ImportError as error:
        raise ImportError('export: reading .ipynb needs nbformat: pip install "rlkit-llm[notebook]".') from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cells without ids, as nbformat 4.0 to 4.4 have them
            return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat, jsonschema and json each have their own
        reason = f"not a notebook: {_short(error)}."
        raise ExportError(path.name, [Problem("E100", 0, 0, reason, SAVE_ANEW)]) from error


def _read_text(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(path.name, [Problem("E100", 0, 0, f"not UTF-8: {error}.", "Save it as UTF-8.")]) from error
    if GENERATED in text[:2000]:
        fix = "Export the notebook that is named there."
        raise ExportError(path.name, [Problem("E100", 0, 0, "this script was itself written by `rlkit export`.", fix)])
    try:
        import jupytext
    except ImportError as error:
        raise ImportError(f"export: reading {path.suffix} notebooks needs jupytext: pip install jupytext.") from error
    try:
        return jupytext.reads(text, fmt=path.suffix[1:])  # jupytext sees which of its formats it is
    except Exception as error:
        reason = f"jupytext cannot read it: {_short(error)}."
        raise ExportError(path.name, [Problem("E100", 0, 0, reason, "Open it in Jupyter with jupytext.")]) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
