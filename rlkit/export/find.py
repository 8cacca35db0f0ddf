"""Which notebook is this? Front ends say it in different places, and some do not say it at all."""

import os
import sys
from pathlib import Path


def this_notebook() -> Path:
    """The path of the notebook that runs, as far as its front end tells it.

    Raises:
        RuntimeError: it does not; the path must be given.
    """
    said: list[object] = [os.environ.get("JPY_SESSION_NAME")]  # Jupyter Server 2
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is not None:
            said += [shell.user_ns.get("__vsc_ipynb_file__"), shell.user_ns.get("__session__")]  # VS Code, PyCharm
    for path in said:
        if isinstance(path, str) and path.endswith(".ipynb") and Path(path).is_file():
            return Path(path)
    raise RuntimeError(
        'rl.export: the front end does not say which notebook this is. Give its path: rl.export("my.ipynb"), and save '
        "the notebook first."
    )
