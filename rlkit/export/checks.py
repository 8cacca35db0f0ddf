"""What can be seen in the code: E codes, with which no script is written.

One function a code; each yields `Problem`s. E100, E101 and E103 come from reading, E104 to E106 from the parameters.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlkit.export.analysis import Program, Unit, analyse_cell, postpones
from rlkit.export.awaits import SCRIPT
from rlkit.export.functions import always, may_catch, names_read, surely_called
from rlkit.export.magics import plain_python
from rlkit.export.parameters import Parameters
from rlkit.export.placement import PROVIDED, Placement
from rlkit.export.problems import Problem
from rlkit.export.syntax import BUILTINS, dotted, walk

ASKING = {"input", "breakpoint", "exit", "quit", "getpass.getpass", "rl.export", "rlkit.export"}
ASKING_ANYWHERE = {"get_ipython", "set_trace", "notebook_login"}  # of pdb and ipdb, of huggingface_hub ...
PARSERS = {"ArgumentParser", "HfArgumentParser", "TrlParser", "Fire", "SimpleParser"}
KERNEL_ONLY = {"In", "Out", "_", "__", "___", "_i", "_ii", "_iii", "_ih", "_oh", "_dh"}
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Assert, ast.Delete)


@dataclass(frozen=True)
class Facts:
    """What the checks read."""

    program: Program
    parameters: Parameters
    placement: Placement


Check = Callable[[Facts], Iterable[Problem]]


def asks_a_person(facts: Facts) -> Iterator[Problem]:
    """E102: input(), getpass, breakpoint(), exit(), get_ipython(), logging in by hand, export() itself."""
    bound = {name for unit in facts.program.units for name in unit.binds if not unit.is_import}
    for call in facts.program.calls:
        asks = call.name in ASKING or call.last in ASKING_ANYWHERE
        asks |= call.name == "huggingface_hub.login" and not (call.node.args or call.node.keywords)
        if asks and call.name.split(".")[0] not in bound:
            what = "the export belongs to the notebook" if call.last == "export" else "a batch job has no keyboard"
            yield call.problem("E102", f"`{call.name}()`: {what}.", "Tag the cell notebook-only, or take it out.")


def nothing_to_run(facts: Facts) -> Iterator[Problem]:
    """E107: no code is left, or a loop that never joins the other processes."""
    if not any(unit.nodes for unit in facts.program.units):
        if not facts.program.unread:
            yield Problem("E107", 0, 0, "no cell is left to export.", "Take notebook-only off the cells to export.")
        return
    calls = {call.last: call for call in reversed(facts.program.calls)}  # the first of each name
    if "loss_step" in calls and "setup" not in calls.keys() | facts.program.unread:
        reason = "`loss_step` without `rl.setup()`: N processes would train N unconnected models."
        yield calls["loss_step"].problem("E107", reason, "Add `world = rl.setup(seed=seed)` before it.")


def reads_the_command_line(facts: Facts) -> Iterator[Problem]:
    """E108: sys.argv and argument parsers; flags come from the parameters cell."""
    fix = "Make a parameters cell; its names become the flags."
    for cell, node in facts.program.nodes(ast.Attribute, ast.Name):
        if facts.program.full_name(node) == "sys.argv":
            yield Problem("E108", cell, node.lineno, "`sys.argv` in a cell.", fix)
    for call in facts.program.calls:
        if call.last in PARSERS or call.name == "tyro.cli":
            yield call.problem("E108", f"`{call.name}` in a cell.", fix)


def undefined(facts: Facts) -> Iterator[Problem]:
    """E109: a name is read before any exported cell gives it a value; W209 where that is not certain.

    Hidden state of the kernel, a cell that is notebook-only, or cells that were run in another order. Not certain is a
    name that only a branch reads, that its statement may catch, that `exec` or `globals()` may have made, or that a
    function reads which is not surely called.
    """
    units = facts.program.units
    seen = set(BUILTINS | PROVIDED | {SCRIPT} | facts.program.unread)
    everywhere = seen.union(*(unit.gives for unit in units))
    called = surely_called(facts.program)
    left_out = _names_of_left_out(facts)
    dynamic = False
    for unit in units:
        if unit.star:
            return  # any name may come from there
        dynamic |= any(map(_makes_names, walk(unit.nodes)))
        is_simple = len(unit.nodes) == 1 and isinstance(unit.nodes[0], SIMPLE)  # reads before it gives
        read_now = set[str]() if dynamic or may_catch(unit.nodes) else names_read(always(unit.nodes))
        read_later = set[str]() if dynamic else set().union(*(called.get(name, ()) for name in unit.binds))
        for missing, certain in (
            (unit.now - seen - (set() if is_simple else unit.gives) - _walruses(unit), read_now),
            (unit.later - everywhere, read_later),
        ):
            for name in sorted(missing - seen):
                seen.add(name)  # reported once
                code = "E109" if name in certain else "W209"
                reason, fix = _explain(name, unit, units, left_out)
                yield Problem(code, unit.cell, line_of(unit, name), reason, fix)
        seen |= unit.gives


def later_future(facts: Facts) -> Iterator[Problem]:
    """E110: `from __future__ import annotations` where the script would mean something else by it than the notebook.

    In a notebook it holds for what runs after it; in a script it stands at the top and holds for all cells.
    """
    nodes = facts.program.nodes(ast.arg, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef)
    annotated = {cell for cell, node in nodes if getattr(node, "annotation", None) or getattr(node, "returns", None)}
    annotated.discard(facts.parameters.cell or 0)  # their types are kinds of flags
    where = [cell for cell in facts.program.notebook.cells if cell.kind != "markdown" and postpones(cell.source)]
    exported = [cell.number for cell in where if cell.is_code]
    if where and not where[0].is_code and any(other > where[0].number and other not in exported for other in annotated):
        reason = "`from __future__ import annotations` of a notebook-only cell holds for the cells after it."
        yield Problem("E110", where[0].number, 0, reason, "Put it into the first cell that is exported.")
    for number in exported[:1]:
        before = [other for other in annotated if other < number]
        if before:
            reason = f"`from __future__ import annotations` would hold for cell {min(before)} too, which ran before it."
            yield Problem("E110", number, 0, reason, f"Put it into cell {min(before)}, or into a cell before that.")


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


def _explain(name: str, unit: Unit, units: list[Unit], left_out: dict[str, int]) -> tuple[str, str]:
    """Reason and fix."""
    if name in KERNEL_ONLY or (name.startswith("_") and name[1:].isdigit()):
        return f"`{name}` exists only in a kernel.", "Give the value a name in the cell that makes it."
    if cell := left_out.get(name):
        fix = f"Export cell {cell}, or define it here too."
        return f"`{name}` comes from cell {cell}, which is notebook-only.", fix
    later = next((other.cell for other in units if name in other.binds and other is not unit), None)
    if later is not None:
        return f"`{name}` gets its value later, in cell {later}.", "Put the cells into the order in which they run."
    return f"no cell gives `{name}` a value: it exists only in the kernel.", "Add the cell that defines it."


def _names_of_left_out(facts: Facts) -> dict[str, int]:
    found: dict[str, int] = {}
    for cell in facts.program.notebook.cells:
        if cell.is_left_out:
            code, _ = analyse_cell(cell, plain_python(cell.source, cell.number)[0])
            for unit in code.units if code is not None else ():
                found = dict.fromkeys(unit.binds, cell.number) | found
    return found


def _walruses(unit: Unit) -> set[str]:
    return {node.target.id for node in walk(unit.nodes) if isinstance(node, ast.NamedExpr)}


def _makes_names(node: ast.AST) -> bool:
    """True for `exec(...)`, `globals()[...] = ...` and `globals().update(...)`."""
    if isinstance(node, ast.Call):
        return dotted(node.func) == "exec"
    changes = isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
    names = getattr(node, "value", None)
    return changes and isinstance(names, ast.Call) and dotted(names.func) in ("globals", "locals", "vars")


def line_of(unit: Unit, name: str) -> int:
    """The first line on which a unit names something."""
    places = [node.lineno for node in walk(unit.nodes) if isinstance(node, ast.Name) and node.id == name]
    return min(places, default=unit.line)


ERRORS: tuple[Check, ...] = (
    asks_a_person,
    nothing_to_run,
    reads_the_command_line,
    undefined,
    later_future,
    script_names,
)
