"""What can be seen in the code: E codes, with which no script is written.

One function a code; each yields `Problem`s. E100, E101 and E103 come from reading, E104 to E106 from the parameters.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlkit.export.analysis import CodeCell, Program, Unit
from rlkit.export.handed import BUILTINS
from rlkit.export.parameters import Parameters
from rlkit.export.placement import PROVIDED, Placement
from rlkit.export.problems import Problem
from rlkit.export.syntax import dotted

TAG = "Tag the cell notebook-only, or take it out."
ASKING = {"input", "breakpoint", "exit", "quit", "get_ipython", "getpass.getpass", "getpass", "pdb.set_trace"} | {
    "rl.export",
    "rlkit.export",
}
PARSERS = {"ArgumentParser", "HfArgumentParser", "TrlParser", "Fire", "SimpleParser"}
KERNEL_ONLY = {"In", "Out", "_", "__", "___", "_i", "_ii", "_iii", "_ih", "_oh", "_dh"}


@dataclass(frozen=True)
class Facts:
    """Everything that the checks look at."""

    program: Program
    parameters: Parameters
    placement: Placement


Check = Callable[[Facts], Iterable[Problem]]


def calls(program: Program) -> Iterator[tuple[CodeCell, ast.Call, str]]:
    """Every call with its cell and the dotted name of what is called; `.name` where it does not begin with a name."""
    for cell, node in program.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = dotted(node.func)
        if not name and isinstance(node.func, ast.Attribute):
            name = f".{node.func.attr}"
        yield cell, node, name


def asks_a_person(facts: Facts) -> Iterator[Problem]:
    """E102: input(), getpass, breakpoint(), exit(), get_ipython(), export() itself."""
    bound = {name for unit in facts.program.units for name in unit.binds if unit.nodes and not _imports(unit)}
    for cell, node, name in calls(facts.program):
        if name in ASKING and name.split(".")[0] not in bound:
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
    for cell, node in facts.program.nodes(ast.Attribute):
        if dotted(node) == "sys.argv":
            yield Problem("E108", cell.number, getattr(node, "lineno", 0), "`sys.argv` in a cell.", fix)
    for cell, call, name in calls(facts.program):
        if name.rsplit(".", 1)[-1] in PARSERS or name == "tyro.cli":
            yield Problem("E108", cell.number, call.lineno, f"`{name}` in a cell.", fix)


def undefined(facts: Facts) -> Iterator[Problem]:
    """E109: a name is read before any exported cell gives it a value; W209 where that is not certain.

    Hidden state of the kernel, a cell that is notebook-only, or cells that were run in another order.
    """
    units = facts.program.units
    known = BUILTINS | PROVIDED | facts.program.unread
    everywhere = known.union(*(unit.binds for unit in units)) if units else known
    left_out = _names_of_left_out(facts)
    seen = set(known)
    star = False
    reported = set()
    for unit in units:
        star |= unit.star
        wanted = unit.now - seen - (frozenset() if _is_simple(unit) else unit.binds)
        for name in sorted(wanted):
            if star or name in reported or _walrus(unit, name):
                continue
            reported.add(name)
            reason, fix = _explain(name, unit, units, left_out)
            certain = not _may_catch(unit)
            yield Problem("E109" if certain else "W209", unit.cell, _line_of(unit, name), reason, fix)
        for name in sorted(unit.later - everywhere - reported):
            if star:
                continue
            reported.add(name)
            reason, fix = _explain(name, unit, units, left_out)
            yield Problem("W209", unit.cell, _line_of(unit, name), reason, fix)
        if "__file__" in unit.now | unit.later:
            fix = "Use a path from the parameters."
            yield Problem(
                "W209", unit.cell, _line_of(unit, "__file__"), "`__file__` does not exist in a notebook.", fix
            )
        seen |= unit.binds


def script_names(facts: Facts) -> Iterator[Problem]:
    """E105: a name that the script needs for itself."""
    for unit in facts.program.units:
        if "rlkit_script" in unit.binds:
            reason = "the script needs the name `rlkit_script` for itself."
            yield Problem("E105", unit.cell, unit.line, reason, "Use another name.")


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
            try:
                tree = ast.parse(cell.source)
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.setdefault(node.id, cell.number)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    found.setdefault(node.name, cell.number)
                elif isinstance(node, ast.alias):
                    found.setdefault((node.asname or node.name).split(".")[0], cell.number)
    return found


def _is_simple(unit: Unit) -> bool:
    """One statement that reads everything before it gives anything a value."""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Assert, ast.Delete)
    return len(unit.nodes) == 1 and isinstance(unit.nodes[0], simple)


def _walrus(unit: Unit, name: str) -> bool:
    walruses = (node for top in unit.nodes for node in ast.walk(top) if isinstance(node, ast.NamedExpr))
    return any(node.target.id == name for node in walruses)


def _may_catch(unit: Unit) -> bool:
    return any(isinstance(node, ast.Try) and node.handlers for node in unit.nodes)


def _line_of(unit: Unit, name: str) -> int:
    places = [n.lineno for top in unit.nodes for n in ast.walk(top) if isinstance(n, ast.Name) and n.id == name]
    return min(places, default=unit.line)


ERRORS: tuple[Check, ...] = (asks_a_person, nothing_to_run, reads_the_command_line, undefined, script_names)
