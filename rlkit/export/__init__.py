"""`rlkit export`: the notebook is the source, the script is written from it, readable, and the same program.

    reading -> magics, awaits, analysis (facts) -> parameters, placement (rules) -> checks, lint -> writing

Built on nbformat (jupytext for percent scripts and MyST), IPython's own input transformer, ast, symtable and tokenize:
no regular expressions over code. Left out: script to notebook (jupytext does that), and repair: what cannot be a script
is an error that says what to change; nothing is commented out silently.
"""

from rlkit.export.export import Exported, export, export_text
from rlkit.export.problems import ExportError, Problem

__all__ = ["ExportError", "Exported", "Problem", "export", "export_text"]
