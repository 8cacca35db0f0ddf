"""Notebooks as a list of cells: `.ipynb` of any format version, jupytext percent scripts and MyST Markdown.

Outputs, execution times and ids are not read: running the notebook does not change its script. Execution counts are
kept for one warning (cells run out of order).
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.export.problems import ExportError, Problem
from rlkit.export.tags import known_tags
from rlkit.record import printable

GENERATED = "Written by `rlkit export`"  # stands in the first lines of every script
SUFFIXES = (".ipynb", ".py", ".md")
SAVE_AGAIN = "Open it in Jupyter and save it."


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

    @property
    def is_left_out(self) -> bool:
        """True for code that is only for the notebook."""
        return self.kind == "code" and "notebook-only" in self.roles


@dataclass(frozen=True)
class Notebook:
    """A notebook's file name and cells."""

    name: str
    cells: tuple[Cell, ...]


def read_notebook(path: str | os.PathLike[str]) -> Notebook:
    """Read an `.ipynb` file, or with jupytext a percent script (`.py`) or MyST Markdown (`.md`).

    Raises:
        FileNotFoundError: no such file.
        ExportError: not a notebook, not Python, or a script that `rlkit export` wrote.
        ImportError: the package that reads the format is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"export: there is no file {path}.")
    if path.suffix not in SUFFIXES:
        raise _refused(path, f"expected one of {', '.join(SUFFIXES)}.", "")
    node = _read_ipynb(path) if path.suffix == ".ipynb" else _read_text(path)
    metadata = _mapping(node.get("metadata"))
    kernel, info = _mapping(metadata.get("kernelspec")), _mapping(metadata.get("language_info"))
    language = kernel.get("language") or info.get("name")
    if language and str(language).lower() not in ("python", "ipython", "python3"):
        raise _refused(path, f"the notebook's language is {language}, not Python.", "")
    cells = node.get("cells")
    if not isinstance(cells, list):
        raise _refused(path, f"not a notebook: expected a list of cells, got {type(cells).__name__}.")
    read = []
    for number, cell in enumerate(cells, start=1):
        try:
            read.append(_cell(number, cell))
        except ValueError as error:
            raise _refused(path, f"not a cell of a notebook: {error}.", cell=number) from error
    return Notebook(_writable(path.name), tuple(read))


def _refused(path: Path, reason: str, fix: str = SAVE_AGAIN, cell: int = 0) -> ExportError:
    return ExportError(_writable(path.name), [Problem("E100", cell, 0, _writable(reason), fix)])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _writable(text: str) -> str:
    """Text that can stand in a comment of a Python file: no half of a surrogate pair, and no NUL."""
    return str(printable(text)).replace("\0", "\u2400")


def _cell(number: int, cell: Any) -> Cell:
    """A cell; ValueError if something is missing or of another type. Metadata that is missing or null holds no tags."""
    if not isinstance(cell, Mapping):
        raise ValueError(f"expected an object, got {type(cell).__name__}")
    kind, source, metadata = cell.get("cell_type"), cell.get("source"), cell.get("metadata")
    if kind not in ("code", "markdown", "raw"):
        raise ValueError(f"cell_type must be code, markdown or raw, got {kind!r}")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise ValueError(f"source must be text or a list of lines, got {source!r:.60}")
    if not isinstance(metadata, Mapping | None):
        raise ValueError(f"metadata must be an object, got {metadata!r:.60}")
    written = _mapping(metadata).get("tags") or []
    if not isinstance(written, str | list):
        raise ValueError(f"tags must be a list of text, got {written!r:.60}")
    tags = tuple(_writable(str(tag)) for tag in ([written] if isinstance(written, str) else written))
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    if not source.rstrip().endswith("\\"):  # a continued line needs the empty ones after it
        source = source.rstrip()
    if kind == "markdown":
        source = _writable(source)
    roles = known_tags(tags, source if kind != "markdown" else "")
    executed = cell.get("execution_count")
    return Cell(number, kind, source, roles, tags, executed if isinstance(executed, int) else None)


def _read_ipynb(path: Path) -> Mapping[str, Any]:
    """The notebook in format 4: as it is, or translated from an older format by nbformat."""
    try:
        node = json.loads(path.read_text(encoding="utf-8-sig"))
        if _mapping(node).get("nbformat") != 4:
            import nbformat

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # cells without ids
                node = nbformat.reads(json.dumps(node), as_version=4)
    except OSError:
        raise
    except ImportError as error:
        raise ImportError('export: reading .ipynb needs nbformat: pip install "rlkit-llm[notebook]".') from error
    except Exception as error:  # of nbformat, jsonschema or json
        raise _refused(path, f"not a notebook: {_short(error)}.") from error
    return _mapping(node)


def _read_text(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(path, f"not UTF-8: {error}.", "Save it as UTF-8.") from error
    if GENERATED in text[:2000]:
        raise _refused(path, "this script was itself written by `rlkit export`.", "Export the notebook that it names.")
    try:
        import jupytext
    except ImportError as error:
        raise ImportError(f"export: reading {path.suffix} notebooks needs jupytext: pip install jupytext.") from error
    try:
        return _mapping(jupytext.reads(text, fmt=path.suffix[1:]))  # it recognises which of its formats it is
    except Exception as error:
        fix = "Open it in Jupyter with jupytext."
        raise _refused(path, f"jupytext cannot read it: {_short(error)}.", fix) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
