"""Small notebooks, their scripts, and running both."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
from waiting import LONG

from rlkit.export import Exported, ExportError, export_text

ROOT = Path(__file__).parents[2]


def cell(source, *tags, kind="code"):
    """A cell of nbformat."""
    make = {
        "code": nbformat.v4.new_code_cell,
        "raw": nbformat.v4.new_raw_cell,
        "markdown": nbformat.v4.new_markdown_cell,
    }
    return make[kind](source, metadata={"tags": list(tags)} if tags else {})


def write(folder, *cells, name="n.ipynb") -> Path:
    """Write a notebook of cells (text, or from `cell`)."""
    path = Path(folder) / name
    made = [cell(one) if isinstance(one, str) else one for one in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


def exported(folder, *cells, **options) -> Exported:
    """Export a notebook of cells."""
    return export_text(write(folder, *cells), **options)


def problems(folder, *cells, strict=False) -> list[str]:
    """What the export of a notebook reports: `E101 cell 1 line 2`, in order."""
    try:
        found = exported(folder, *cells, strict=strict).problems
    except ExportError as error:
        found = error.problems
    return [f"{p.code} cell {p.cell} line {p.line}" for p in found]


def environment() -> dict[str, str]:
    """This process's environment without what a launcher or a kernel may have left in it."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RLKIT_STRATEGY", "RLKIT_PRECISION")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "Agg",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def python(*arguments, cwd, timeout=4 * LONG, torchrun=0) -> subprocess.CompletedProcess[str]:
    """Run a script by python, or by torchrun on some processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"] if torchrun else []
    command = [sys.executable, *launcher, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)


def run_text(text: str, *arguments: str, name: str = "__main__") -> dict:
    """Execute a script's text in this process as `name`; returns its names."""
    names: dict = {"__name__": name, "__file__": "script.py", "__doc__": None}
    before, hook = sys.argv, sys.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    sys.argv = ["script.py", *arguments]
    try:
        exec(compile(text, "script.py", "exec", dont_inherit=True), names)
    finally:
        sys.argv, sys.excepthook = before, hook
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return names


def plain(names: dict) -> dict:
    """The plain values among names, comparable as JSON."""
    return {
        key: json.loads(json.dumps(value))
        for key, value in names.items()
        if not key.startswith("__") and isinstance(value, int | float | str | list | dict | tuple | type(None))
    }
