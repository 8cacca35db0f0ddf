"""Where a run comes from, for its config.json: the notebook or script, its parameters, and the commit of its code.

Front ends say in different places which notebook runs, and some do not say it. What is not known is left out: nothing
here fails, prints or waits for long. Left out: a diff of the changed files, which may hold what should not be copied.
"""

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.support.notebook import notebook_path, variables
from rlkit.support.scalars import scalar

PATIENCE = 5.0
"""Seconds that git gets; on a slow network file system it may need more, and then config.json says nothing of it."""


def origin() -> dict[str, Any]:
    """What is known of `git` (commit, dirty), `notebook` or `script` (file, arguments), and `parameters`."""
    found: dict[str, Any] = {}
    notebook, script = notebook_path(), _script_path()
    if notebook is not None:
        found |= {"notebook": str(notebook.resolve()), "parameters": notebook_parameters(notebook, variables())}
    elif script is not None:
        found["script"] = {"file": str(script.resolve()), "arguments": sys.argv[1:]}
    commit = git_commit((notebook or script or Path.cwd() / "x").resolve().parent)
    return found | ({"git": commit} if commit else {})


def notebook_parameters(notebook: Path, names: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the names of the cells tagged `parameters` have now: papermill or the user may have changed them.

    Args:
        notebook: the file, as it was saved last.
        names: the variables of the kernel.
    """
    found = {}
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            if cell["cell_type"] == "code" and "parameters" in cell["metadata"].get("tags", []):
                for node in ast.walk(ast.parse("".join(cell["source"]))):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
                        found[node.id] = names[node.id]
    except (OSError, ValueError, KeyError, TypeError, SyntaxError):  # no notebook of version 4, or magics in the cell
        return {}
    return found


def for_config(value: Any) -> Any:
    """A parameter as config.json can hold it: numbers, texts, lists and dicts stay; the rest becomes text.

    Example:
        >>> for_config({"weights": {("a", 1): 0.5}, "limit": float("inf"), "path": Path("x")})
        {'weights': {"('a', 1)": 0.5}, 'limit': 'inf', 'path': 'x'}
    """
    try:
        if isinstance(value, Mapping):
            return {str(key): for_config(cell) for key, cell in value.items()}
        if isinstance(value, list | tuple):
            return [for_config(cell) for cell in value]
    except RecursionError:  # something that holds itself
        return "..."
    value = scalar(value)
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def git_commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the code in a folder, and whether files that git knows differ from it; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # status would write the index
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def _script_path() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or "ipykernel" in sys.modules:  # a kernel's own launcher is no script of the user's
        return None
    return Path(file) if Path(file).is_file() else None
