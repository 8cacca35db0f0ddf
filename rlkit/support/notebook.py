"""The running notebook: the shell of its kernel, its variables and its file."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def shell() -> Any:
    """The IPython shell of a kernel, or None in a script and in a terminal."""
    found = _any_shell()
    return found if getattr(found, "kernel", None) is not None else None


def variables() -> Mapping[str, Any]:
    """The user's variables in IPython, in a terminal too; empty elsewhere."""
    found = _any_shell()
    return {} if found is None else found.user_ns


def notebook_path() -> Path | None:
    """The notebook's file, or None where the front end does not name it.

    Jupyter Server 2 names it in the environment, VS Code and PyCharm in a variable.
    """
    names = variables()
    for named in (os.environ.get("JPY_SESSION_NAME"), names.get("__vsc_ipynb_file__"), names.get("__session__")):
        if isinstance(named, str) and named.endswith(".ipynb") and Path(named).is_file():
            return Path(named)
    return None


def _any_shell() -> Any:
    return sys.modules["IPython"].get_ipython() if sys.modules.get("IPython") else None
