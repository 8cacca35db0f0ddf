"""Functions of the notebook that are handed on: what a reward pool or a data loader may send to a worker process."""

import ast
import builtins

from rlkit.export.analysis import Program, Unit
from rlkit.export.syntax import dotted, root

BUILTINS = frozenset(dir(builtins))
IN_PLACE = frozenset({"accumulate", "prepare"})  # rl.accumulate(draw, ...), world.prepare(policy, make), tasks.prepare


def is_definition(unit: Unit) -> bool:
    """True if a unit defines a function or class."""
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in unit.nodes)


def handed_on(program: Program) -> dict[str, tuple[int, int]]:
    """Functions of the notebook that are given to something else than its own functions: first cell and line."""
    own = {node.name for unit in program.units for node in unit.nodes if hasattr(node, "name")}
    runs = names_of_runs(program)
    found: dict[str, tuple[int, int]] = {}
    for unit in program.units:
        for statement in unit.nodes:
            parents = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in own:
                    if _leaves(node, parents, own, runs):
                        found.setdefault(node.id, (unit.cell, node.lineno))
    return found


def names_of_runs(program: Program) -> set[str]:
    """The names that the notebook gives to what `rl.Run(...)` makes."""
    return {
        target.id
        for _, node in program.nodes(ast.Assign)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and dotted(node.value.func).endswith("Run")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _leaves(node: ast.AST, parents: dict[ast.AST, ast.AST], own: set[str], runs: set[str]) -> bool:
    displayed = False
    above: ast.AST | None = parents.get(node)
    while isinstance(above, ast.List | ast.Tuple | ast.Dict | ast.Set | ast.keyword | ast.Starred):
        displayed |= not isinstance(above, ast.keyword | ast.Starred)
        node, above = above, parents.get(above)
    if isinstance(above, ast.Call):
        if isinstance(above.func, ast.Attribute) and above.func.attr == "start" and root(above.func) in runs:
            return False  # run.start(loop) runs it in place
        if dotted(above.func).rsplit(".", 1)[-1] in IN_PLACE:
            return False
        return above.func is not node and root(above.func) not in own | BUILTINS
    return displayed and isinstance(above, ast.Assign | ast.AnnAssign | ast.Return)
