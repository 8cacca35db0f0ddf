"""Where a run comes from, for its config.json: the notebook or script, its parameters, and the commit of its code.

Not every front end says which notebook runs. What is unknown is left out; nothing here fails, prints or waits long.
Left out: a diff of the changed files, which may hold secrets.
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

PATIENCE = 5.0  # seconds that git gets


def origin() -> dict[str, Any]:
    """Return what is known of `git` (commit, dirty), `notebook` or `script` (file, arguments), and `parameters`."""
    found: dict[str, Any] = {}
    notebook, script = notebook_path(), _script_path()
    if notebook is not None:
        found |= {"notebook": str(notebook.resolve()), "parameters": notebook_parameters(notebook, variables())}
    elif script is not None:
        found["script"] = {"file": str(script.resolve()), "arguments": sys.argv[1:]}
    commit = git_commit((notebook or script or Path.cwd() / "x").resolve().parent)
    return found | ({"git": commit} if commit else {})


def notebook_parameters(notebook: Path, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that cells tagged `parameters` assign, with their values in `names`, the kernel's variables:
    papermill or the user may have changed them.
    """
    found = {}
    try:
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code" and "parameters" in cell["metadata"].get("tags", []):
                for node in ast.walk(ast.parse("".join(cell["source"]))):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
                        found[node.id] = names[node.id]
    except (OSError, ValueError, KeyError, TypeError, SyntaxError):  # not a version 4 notebook, or magics in the cell
        return {}
    return found


def for_config(value: Any) -> Any:
    """Return a parameter as config.json can hold it: numbers, texts, lists and dicts stay; the rest becomes text.

    Example:
        >>> for_config({"weights": {("a", 1): 0.5}, "limit": float("inf"), "path": Path("x")})
        {'weights': {"('a', 1)": 0.5}, 'limit': 'inf', 'path': 'x'}
    """
    try:
        if isinstance(value, Mapping):
            return {str(key): for_config(cell) for key, cell in value.items()}
        if isinstance(value, list | tuple):
            return [for_config(cell) for cell in value]
    except RecursionError:  # a container that contains itself
        return "..."
    value = scalar(value)
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def git_commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a folder, and whether tracked files differ from it; None without git or repository."""
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
            cwd=folder,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # or it would write the index
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    dirty = any(not line.startswith("#") for line in lines)
    return None if commit == "(initial)" else {"commit": commit, "dirty": dirty}


def _script_path() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    is_script = file is not None and "ipykernel" not in sys.modules and Path(file).is_file()  # not a kernel's launcher
    return Path(file) if file is not None and is_script else None
