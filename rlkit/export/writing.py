"""The text of the script. The same notebook gives the same bytes: no dates, outputs, execution counts or paths."""

import ast
import hashlib
import json
import shlex
from collections.abc import Sequence

from rlkit.export.analysis import CodeCell, Program, Unit
from rlkit.export.parameters import Declared, Parameters
from rlkit.export.placement import Placement
from rlkit.export.reading import GENERATED, Cell

INDENT = "    "


def code_hash(program: Program) -> str:
    """sha256 of the exported code and its tags; text cells and what a run leaves do not change it."""
    parts = [[cell.cell.source, sorted(cell.cell.roles)] for cell in program.cells]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_script(program: Program, parameters: Parameters, placement: Placement, *, name: str, version: str) -> str:
    """The script of a notebook.

    Args:
        program: its cells.
        parameters: its parameters.
        placement: where each statement goes.
        name: file name of the script, for the header.
        version: of rlkit.
    """
    digest = code_hash(program)
    above: list[str] = []  # module level
    below: list[str] = []  # the guarded block
    by_number = {cell.number: cell for cell in program.cells}
    waiting: list[str] = []  # text cells, until the next code cell
    setup_first = sorted(program.notebook.cells, key=lambda cell: "setup" not in cell.roles or not cell.is_code)
    for cell in setup_first:
        if cell.kind == "markdown":
            waiting += ["", *_comment(cell.source)]
        elif cell.number in by_number:
            code = by_number[cell.number]
            top = [unit for unit in code.units if unit in placement.module and not _is_future(unit)]
            rest = [unit for unit in code.units if unit not in placement.module and not _is_future(unit)]
            if below:  # once something has run, text stays with what runs
                below += _indented(waiting)
                waiting = []
            if top:
                above += [*waiting, "", _marker(cell), *_block(code, top)]
                waiting = []
            if cell.number == parameters.cell:
                above += ["", *_flags(parameters.declared)]
            if rest:
                below += [*_indented(waiting), "", INDENT + _marker(cell), *_block(code, rest, indent=INDENT)]
                waiting = []
        elif cell.kind == "code" and "notebook-only" in cell.roles:
            line = f"# cell {cell.number} is for the notebook only and left out"
            if below:
                below += [*_indented(waiting), "", INDENT + line]
            else:
                above += [*waiting, "", line]
            waiting = []
    below += _indented(waiting)
    if parameters.cell is None:
        above += ["", *_flags(())]
    reads = {name for unit in program.units for name in unit.now | unit.later}
    if "display" in reads and not any("display" in unit.binds for unit in program.units):
        above += ["", "from rlkit.script import display"]
    start = f"rlkit_script.start(__file__, notebook={_quoted(program.notebook.name)}, sha256={_quoted(digest)})"
    head = _header(program.notebook.name, name, digest, version)
    guard = ["", "", 'if __name__ == "__main__":', INDENT + start]
    return "\n".join([*head, *_future(program), *above, *guard, *below]) + "\n"


def _header(notebook: str, name: str, digest: str, version: str) -> list[str]:
    script, source = shlex.quote(name), shlex.quote(notebook)
    text = [
        f"{GENERATED} {version} from {notebook}: change the notebook, not this file.",
        "",
        f"{INDENT}python {script} --help",
        f"{INDENT}torchrun --nproc_per_node 8 {script} --strategy fsdp2 --out runs/a --resume auto",
        f"{INDENT}rlkit export {source} --slurm job.sbatch --nodes 4 --gpus-per-node 8",
        "",
        f"sha256 of the code: {digest}",
    ]
    plain = [line.replace("\\", "\\\\").replace('"', '\\"') for line in text]
    return [f'"""{plain[0]}', *plain[1:], '"""']


def _flags(declared: Sequence[Declared]) -> list[str]:
    rows = [f"({_quoted(d.name)}, {_quoted(d.kind)}, {d.name}, {_quoted(d.help)})," for d in declared]
    call = "rlkit_script.flags(__doc__)"
    if rows:
        call = "\n".join(
            ["rlkit_script.flags(", f"{INDENT * 3}__doc__,", *(INDENT * 3 + row for row in rows), f"{INDENT * 2})"]
        )
    lines = [
        "from rlkit import script as rlkit_script",
        "",
        'if __name__ in ("__main__", "__mp_main__"):  # the command line decides, in worker processes too',
        f"{INDENT}globals().update(",
        f"{INDENT * 2}{call}",
        f"{INDENT})",
    ]
    return "\n".join(lines).split("\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a Python string, in double quotes


def _future(program: Program) -> list[str]:
    names = sorted(
        {
            alias.name
            for unit in program.units
            if _is_future(unit)
            for node in unit.nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
    )
    return ["", f"from __future__ import {', '.join(names)}"] if names else []


def _is_future(unit: Unit) -> bool:
    return bool(unit.nodes) and all(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in unit.nodes
    )


def _marker(cell: Cell) -> str:
    tags = [" ".join(tag.split()) for tag in cell.tags] or sorted(cell.roles)
    return f"# %% cell {cell.number}" + (f" [{', '.join(tags)}]" if tags else "")


def _comment(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.split("\n")]


def _indented(lines: list[str]) -> list[str]:
    return [INDENT + line if line else "" for line in lines]


def _block(code: CodeCell, units: Sequence[Unit], indent: str = "") -> list[str]:
    """The lines of some units of a cell; what stands inside a string stays as it is."""
    numbers = [number for unit in units for number in range(unit.first, unit.last + 1)]
    while numbers and not code.lines[numbers[0] - 1].strip():
        numbers.pop(0)
    while numbers and not code.lines[numbers[-1] - 1].strip():
        numbers.pop()
    kept = []
    for number in numbers:
        line = code.lines[number - 1]
        if number not in code.inside_strings:
            line = indent + line if line.strip() else ""
        kept.append(line)
    if kept and kept[-1].endswith("\\"):  # the empty line that it is continued by
        kept.append("")
    return kept
