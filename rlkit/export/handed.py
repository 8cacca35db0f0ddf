"""Functions of the notebook that are handed on: what a reward pool or a data loader may send to a worker process."""

import ast
import builtins

from rlkit.export.analysis import Program, Unit
from rlkit.export.syntax import root

BUILTINS = frozenset(dir(builtins))


def is_definition(unit: Unit) -> bool:
    """True if a unit defines a function or class."""
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in unit.nodes)


def handed_on(program: Program) -> dict[str, tuple[int, int]]:
    """Functions of the notebook that are given to something else than its own functions: first cell and line."""
    own = {node.name for unit in program.units for node in unit.nodes if hasattr(node, "name")}
    found: dict[str, tuple[int, int]] = {}
    for unit in program.units:
        for statement in unit.nodes:
            parents = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in own:
                    if _leaves(node, parents, own):
                        found.setdefault(node.id, (unit.cell, node.lineno))
    return found


def _leaves(node: ast.AST, parents: dict[ast.AST, ast.AST], own: set[str]) -> bool:
    displayed = False
    above: ast.AST | None = parents.get(node)
    while isinstance(above, ast.List | ast.Tuple | ast.Dict | ast.Set | ast.keyword | ast.Starred):
        displayed |= not isinstance(above, ast.keyword | ast.Starred)
        node, above = above, parents.get(above)
    if isinstance(above, ast.Call):
        return above.func is not node and root(above.func) not in own | BUILTINS
    return displayed and isinstance(above, ast.Assign | ast.AnnAssign | ast.Return)
