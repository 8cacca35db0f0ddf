"""The Export button: the script of the notebook that runs, or the list of what is in the way."""

from pathlib import Path
from typing import Any


def export_notebook(path: str | None) -> dict[str, Any]:
    """Write the script of a notebook beside it.

    Args:
        path: the notebook; None for the one that runs.

    Returns:
        {"kind": "export", "script": path or None, "needs_path", "said", "problems": [{"code", "cell", "line", "reason",
        "fix"}]}. Where the front end does not tell which notebook runs, `needs_path` is true.
    """
    from rlkit.export.export import export_text, script_path, write_safely
    from rlkit.export.problems import ExportError
    from rlkit.support.notebook import notebook_path

    notebook = notebook_path() if path is None else Path(path)
    if notebook is None:
        said = "The front end does not say which notebook this is: give its path."
        return _result(None, said, (), needs_path=True)
    if not notebook.is_file():
        return _result(None, f"There is no file {notebook} (looked from {Path.cwd()}).", (), needs_path=True)
    target = script_path(notebook, None)
    try:
        exported = export_text(notebook, name=target.name)
    except ExportError as error:
        count = len(error.problems)
        said = f"{notebook} has {count} problem{'s' if count != 1 else ''}; no script was written."
        return _result(None, said, error.problems)
    write_safely(target, exported.text)
    return _result(target, f"Wrote {target}.", exported.problems)


def _result(script: Path | None, said: str, problems: Any, *, needs_path: bool = False) -> dict[str, Any]:
    listed = [
        {"code": one.code, "cell": one.cell, "line": one.line, "reason": one.reason, "fix": one.fix} for one in problems
    ]
    name = None if script is None else str(script)
    return {"kind": "export", "script": name, "said": said, "needs_path": needs_path, "problems": listed}
