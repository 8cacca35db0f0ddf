"""What can be seen in the code: E codes, with which no script is written.

One function a code; each yields `Problem`s. E100, E101 and E103 come from reading, E104 to E106 from the parameters.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlkit.export.analysis import CodeCell, Program, Unit, analyse_cell, postpones
from rlkit.export.awaits import SCRIPT
from rlkit.export.certain import always, may_catch, names_read, surely_called
from rlkit.export.handed import BUILTINS
from rlkit.export.magics import plain_python
from rlkit.export.parameters import Parameters
from rlkit.export.placement import PROVIDED, Placement
from rlkit.export.problems import Problem
from rlkit.export.syntax import dotted

TAG = "Tag the cell notebook-only, or take it out."
ASKING = {"input", "breakpoint", "exit", "quit", "getpass.getpass", "rl.export", "rlkit.export"}
ASKING_ANYWHERE = {"get_ipython", "set_trace", "notebook_login"}  # of pdb and ipdb, of huggingface_hub ...
PARSERS = {"ArgumentParser", "HfArgumentParser", "TrlParser", "Fire", "SimpleParser"}
ANNOTATED = (ast.arg, ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign)
KERNEL_ONLY = {"In", "Out", "_", "__", "___", "_i", "_ii", "_iii", "_ih", "_oh", "_dh"}


@dataclass(frozen=True)
class Facts:
    """Everything that the checks look at."""

    program: Program
    parameters: Parameters
    placement: Placement


Check = Callable[[Facts], Iterable[Problem]]


def calls(program: Program) -> Iterator[tuple[CodeCell, ast.Call, str]]:
    """Every call with its cell and the full name of what is called; `.name` where it does not begin with a name."""
    for cell, node in program.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = program.full_name(node.func)
        if not name and isinstance(node.func, ast.Attribute):
            name = f".{node.func.attr}"
        yield cell, node, name


def asks_a_person(facts: Facts) -> Iterator[Problem]:
    """E102: input(), getpass, breakpoint(), exit(), get_ipython(), logging in by hand, export() itself."""
    bound = {name for unit in facts.program.units for name in unit.binds if unit.nodes and not _imports(unit)}
    for cell, node, name in calls(facts.program):
        asks = name in ASKING or name.rsplit(".", 1)[-1] in ASKING_ANYWHERE
        asks |= name == "huggingface_hub.login" and not (node.args or node.keywords)
        if asks and name.split(".")[0] not in bound:
            what = "the export belongs to the notebook" if name.endswith("export") else "a batch job has no keyboard"
            yield Problem("E102", cell.number, node.lineno, f"`{name}()`: {what}.", TAG)


def nothing_to_run(facts: Facts) -> Iterator[Problem]:
    """E107: no code is left, or a loop that never joins the other processes."""
    if not any(unit.nodes for unit in facts.program.units):
        if not facts.program.unread:
            yield Problem("E107", 0, 0, "no cell is left to export.", "Take notebook-only off the cells to export.")
        return
    names = [(cell, node, name.rsplit(".", 1)[-1]) for cell, node, name in calls(facts.program)]
    if "setup" not in {name for _, _, name in names} | facts.program.unread:
        for cell, node, name in names:
            if name == "loss_step":
                reason = "`loss_step` without `rl.setup()`: N processes would train N unconnected models."
                yield Problem("E107", cell.number, node.lineno, reason, "Add `world = rl.setup(seed=seed)` before it.")
                return


def reads_the_command_line(facts: Facts) -> Iterator[Problem]:
    """E108: sys.argv and argument parsers; flags come from the parameters cell."""
    fix = "Make a parameters cell; its names become the flags."
    for cell, node in facts.program.nodes((ast.Attribute, ast.Name)):
        if facts.program.full_name(node) == "sys.argv":
            yield Problem("E108", cell.number, getattr(node, "lineno", 0), "`sys.argv` in a cell.", fix)
    for cell, call, name in calls(facts.program):
        if name.rsplit(".", 1)[-1] in PARSERS or name == "tyro.cli":
            yield Problem("E108", cell.number, call.lineno, f"`{name}` in a cell.", fix)


def undefined(facts: Facts) -> Iterator[Problem]:
    """E109: a name is read before any exported cell gives it a value; W209 where that is not certain.

    Hidden state of the kernel, a cell that is notebook-only, or cells that were run in another order. Not certain is a
    name that only a branch reads, that its statement may catch, that `exec` or `globals()` may have made, or that a
    function reads which is not surely called.
    """
    units = facts.program.units
    known = BUILTINS | PROVIDED | {SCRIPT} | facts.program.unread
    everywhere = known.union(*(unit.gives for unit in units)) if units else known
    called = surely_called(facts.program)
    left_out = _names_of_left_out(facts)
    seen = set(known)
    star = dynamic = False
    reported = set()
    for unit in units:
        star |= unit.star
        dynamic |= _makes_names(unit)
        wanted = unit.now - seen - (frozenset() if _is_simple(unit) else unit.gives)
        for name in sorted(wanted):
            if star or name in reported or _walrus(unit, name):
                continue
            reported.add(name)
            reason, fix = _explain(name, unit, units, left_out)
            certain = not (dynamic or may_catch(unit.nodes)) and name in names_read(always(unit.nodes))
            yield Problem("E109" if certain else "W209", unit.cell, _line_of(unit, name), reason, fix)
        for name in sorted(unit.later - everywhere - reported):
            if star:
                continue
            reported.add(name)
            reason, fix = _explain(name, unit, units, left_out)
            certain = not dynamic and any(name in called.get(one, ()) for one in unit.binds)
            yield Problem("E109" if certain else "W209", unit.cell, _line_of(unit, name), reason, fix)
        if "__file__" in unit.now | unit.later:
            fix = "Use a path from the parameters."
            yield Problem(
                "W209", unit.cell, _line_of(unit, "__file__"), "`__file__` does not exist in a notebook.", fix
            )
        seen |= unit.gives


def later_future(facts: Facts) -> Iterator[Problem]:
    """E110: `from __future__ import annotations` where the script would mean something else by it than the notebook.

    In a notebook it holds for what runs after it; in a script it stands at the top and holds for all cells.
    """
    cells = facts.program.notebook.cells
    annotated = {cell.number for cell, node in facts.program.nodes(ANNOTATED) if _annotates(node)}
    annotated.discard(facts.parameters.cell or 0)  # their types are kinds of flags
    where = [cell.number for cell in cells if cell.kind != "markdown" and postpones(cell.source)]
    exported = [cell.number for cell in cells if cell.is_code and cell.number in where]
    for number in where[:1] if where[:1] != exported[:1] else ():
        if any(other > number and other not in exported for other in annotated):
            reason = "`from __future__ import annotations` of a notebook-only cell holds for the cells after it."
            yield Problem("E110", number, 0, reason, "Put it into the first cell that is exported.")
    for number in exported[:1]:
        before = [other for other in annotated if other < number]
        if before:
            reason = f"`from __future__ import annotations` would hold for cell {min(before)} too, which ran before it."
            yield Problem("E110", number, 0, reason, f"Put it into cell {min(before)}, or into a cell before that.")


def _annotates(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.returns is not None
    return getattr(node, "annotation", None) is not None


def script_names(facts: Facts) -> Iterator[Problem]:
    """E105: a name that the script needs for itself; E103 where it is used before the script has it."""
    setup = {cell.number for cell in facts.program.cells if "setup" in cell.cell.roles}
    for unit in facts.program.units:
        if SCRIPT in unit.binds:
            reason = f"the script needs the name `{SCRIPT}` for itself."
            yield Problem("E105", unit.cell, unit.line, reason, "Use another name.")
        if SCRIPT in unit.now and unit.cell in setup:
            reason = "`await` in a cell tagged setup, which runs before there is an event loop."
            yield Problem("E103", unit.cell, unit.line, reason, "Move it into a cell without that tag.")


def _imports(unit: Unit) -> bool:
    return all(isinstance(node, ast.Import | ast.ImportFrom) for node in unit.nodes)


def _explain(name: str, unit: Unit, units: list[Unit], left_out: dict[str, int]) -> tuple[str, str]:
    if name in KERNEL_ONLY or (name.startswith("_") and name[1:].isdigit()):
        return f"`{name}` exists only in a kernel.", "Give the value a name in the cell that makes it."
    if name in left_out:
        where = left_out[name]
        return (
            f"`{name}` comes from cell {where}, which is notebook-only.",
            f"Export cell {where}, or define it here too.",
        )
    later = next((other for other in units if name in other.binds and other is not unit), None)
    if later is not None:
        return (
            f"`{name}` gets its value later, in cell {later.cell}.",
            "Put the cells into the order in which they run.",
        )
    return f"no cell gives `{name}` a value: it exists only in the kernel.", "Add the cell that defines it."


def _names_of_left_out(facts: Facts) -> dict[str, int]:
    found: dict[str, int] = {}
    for cell in facts.program.notebook.cells:
        if cell.kind == "code" and "notebook-only" in cell.roles:
            code, _ = analyse_cell(cell, plain_python(cell.source, cell.number).source)
            for name in sorted(name for unit in code.units for name in unit.binds) if code is not None else ():
                found.setdefault(name, cell.number)
    return found


def _is_simple(unit: Unit) -> bool:
    """One statement that reads everything before it gives anything a value."""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Assert, ast.Delete)
    return len(unit.nodes) == 1 and isinstance(unit.nodes[0], simple)


def _walrus(unit: Unit, name: str) -> bool:
    walruses = (node for top in unit.nodes for node in ast.walk(top) if isinstance(node, ast.NamedExpr))
    return any(node.target.id == name for node in walruses)


def _makes_names(unit: Unit) -> bool:
    """True for `exec(...)`, `globals()[...] = ...` and `globals().update(...)`."""
    for node in (node for top in unit.nodes for node in ast.walk(top)):
        if isinstance(node, ast.Call) and dotted(node.func) == "exec":
            return True
        if (
            isinstance(node, ast.Attribute | ast.Subscript)
            and isinstance(node.value, ast.Call)
            and dotted(node.value.func) in ("globals", "locals", "vars")
            and (isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store))
        ):
            return True
    return False


def _line_of(unit: Unit, name: str) -> int:
    places = [n.lineno for top in unit.nodes for n in ast.walk(top) if isinstance(n, ast.Name) and n.id == name]
    return min(places, default=unit.line)


ERRORS: tuple[Check, ...] = (
    asks_a_person,
    nothing_to_run,
    reads_the_command_line,
    undefined,
    later_future,
    script_names,
)
