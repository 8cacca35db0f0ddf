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


def write_script(program: Program, parameters: Parameters, placement: Placement, *, name: str, version: str) -> str:
    """The script of a notebook; `name` is its file name, `version` that of rlkit, for the header."""
    above: list[str] = []  # module level
    below: list[str] = []  # the guarded block
    by_number = {cell.number: cell for cell in program.cells}
    waiting: list[str] = []  # text cells, until the next code cell
    for cell in sorted(program.notebook.cells, key=lambda cell: "setup" not in cell.roles or not cell.is_code):
        code = by_number.get(cell.number)
        if cell.kind == "markdown":
            waiting += ["", *(f"# {line}".rstrip() for line in cell.source.split("\n"))]
        elif code is not None or cell.is_left_out:
            if below:  # once something has run, text stays with what runs
                below += _indented(waiting)
                waiting = []
            if code is None:
                where, indent = (below, INDENT) if below else (above, "")
                where += [*waiting, "", f"{indent}# cell {cell.number} is for the notebook only and left out"]
                waiting = []
                continue
            units = [unit for unit in code.units if not _is_future(unit)]
            if top := [unit for unit in units if unit in placement.module]:
                above += [*waiting, "", _marker(cell), *_block(code, top)]
                waiting = []
            if cell.number == parameters.cell:
                above += ["", *_flags(parameters.declared)]
            if rest := [unit for unit in units if unit not in placement.module]:
                below += [*_indented(waiting), "", INDENT + _marker(cell), *_block(code, rest, indent=INDENT)]
                waiting = []
    below += _indented(waiting)
    if parameters.cell is None:
        above += ["", *_flags(())]
    if any("display" in unit.reads for unit in program.units) and not any("display" in u.binds for u in program.units):
        above += ["", "from rlkit.script import display"]
    # Text cells and what a run leaves do not change the hash.
    hashed = json.dumps([[cell.cell.source, sorted(cell.cell.roles)] for cell in program.cells])
    notebook, digest = program.notebook.name, hashlib.sha256(hashed.encode()).hexdigest()
    start = f"rlkit_script.start(__file__, notebook={_quoted(notebook)}, sha256={_quoted(digest)})"
    head = _header(notebook, name, digest, version)
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
    call = ["rlkit_script.flags(__doc__)"]
    if rows:
        call = ["rlkit_script.flags(", *(INDENT + row for row in ["__doc__,", *rows]), ")"]
    return [
        "from rlkit import script as rlkit_script",
        "",
        'if __name__ in ("__main__", "__mp_main__"):  # the command line decides, in worker processes too',
        f"{INDENT}globals().update(",
        *(INDENT * 2 + line for line in call),
        f"{INDENT})",
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a Python string, in double quotes


def _future(program: Program) -> list[str]:
    imports = [node for unit in program.units if _is_future(unit) for node in unit.nodes]
    names = sorted({ast.unparse(alias) for node in imports for alias in getattr(node, "names", ())})
    return ["", f"from __future__ import {', '.join(names)}"] if names else []


def _is_future(unit: Unit) -> bool:
    return bool(unit.nodes) and all(getattr(node, "module", None) == "__future__" for node in unit.nodes)


def _marker(cell: Cell) -> str:
    tags = [" ".join(tag.split()) for tag in cell.tags] or sorted(cell.roles)
    return f"# %% cell {cell.number}" + (f" [{', '.join(tags)}]" if tags else "")


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
        if number not in code.layout.inside_strings:
            line = indent + line if line.strip() else ""
        kept.append(line)
    if kept and kept[-1].endswith("\\"):  # the empty line that it is continued by
        kept.append("")
    return kept
