"""Detect the front end: a page that draws widgets, a notebook without a viewer, or a terminal.

A kernel does not know its clients. Interactive servers (Jupyter's, Colab's, VS Code's, Voila) leave traces in the
environment; nbclient and papermill leave none, and there a widget would add five megabytes of JavaScript to a file that
cannot run it. An unknown front end gets the static picture, which is updated during the run.
"""

import importlib.util
import os
import sys
from typing import Literal

from rlkit.support.notebook import shell

FrontEnd = Literal["live", "static", "text"]
NEEDED = ("ipywidgets", "anywidget", "plotly")
TRACES = ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "DATABRICKS_RUNTIME_VERSION")


def front_end() -> FrontEnd:
    """Return the kind of view that works here."""
    if shell() is None:
        return "text"
    known = any(name in os.environ for name in TRACES) or any(name.startswith("VSCODE_") for name in os.environ)
    known = known or os.environ.get("SERVER_SOFTWARE", "").startswith("voila") or "google.colab" in sys.modules
    return "live" if known and not missing() else "static"


def missing() -> list[str]:
    """Return the libraries of the live view that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]
