"""Functions of the notebook that are handed on: what a reward pool or a data loader may send to a worker process.

A name is followed through lists, dicts, other names, instances and loops. Left out: what the notebook's own functions
do with their arguments.
"""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Iterator

from rlkit.export.analysis import Program, Unit
from rlkit.export.syntax import dotted, root

BUILTINS = frozenset(dir(builtins))
IN_PLACE = frozenset({"accumulate", "prepare"})  # rl.accumulate(draw, ...), world.prepare(policy, make), tasks.prepare
HOLDS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.keyword, ast.Starred)
COPIES = frozenset({"list", "tuple", "dict", "set"})
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Parents = dict[ast.AST, ast.AST]


def is_definition(unit: Unit) -> bool:
    """True if a unit defines a function or class."""
    return any(isinstance(node, Definition) for node in unit.nodes)


def handed_on(program: Program) -> dict[str, tuple[int, int]]:
    """Functions of the notebook that are given to something else than its own functions: first cell and line."""
    own = {node.name: node for unit in program.units for node in definitions(unit.nodes)}
    runs = names_of_runs(program)
    given: dict[str, tuple[int, int]] = {}
    holders: dict[str, set[str]] = defaultdict(set)  # names that hold another name's value
    for unit in program.units:
        for statement in unit.nodes:
            parents = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    value = _whole(node, parents, own)
                    holder = _holder(value, parents)
                    if holder is not None:
                        holders[node.id].add(holder)
                    elif _leaves(value, value is not node, parents, set(own), runs):
                        given.setdefault(node.id, (unit.cell, node.lineno))
    found = {}
    for name in own:
        names = _all_holders(name, holders)
        places = [given[one] for one in names if one in given]
        if places:
            found[name] = min(places)
    return found


def definitions(nodes: Iterable[ast.AST]) -> Iterator[Definition]:
    """Functions and classes that statements define at the level of the cell, in an `if` or a `try` too."""
    for node in nodes:
        if isinstance(node, Definition):
            yield node
        else:
            yield from definitions(ast.iter_child_nodes(node))


def names_of_runs(program: Program) -> set[str]:
    """The names that the notebook gives to what `rl.Run(...)` makes."""
    return {
        target.id
        for _, node in program.nodes(ast.Assign)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and dotted(node.value.func).endswith("Run")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _whole(node: ast.expr, parents: Parents, own: dict[str, Definition]) -> ast.AST:
    """The outermost value that holds a name: a list of it, one of two, an instance of the class."""
    whole: ast.AST = node
    while True:
        above = parents.get(whole)
        if isinstance(above, ast.Call):
            name = dotted(above.func)
            instance = above.func is whole and isinstance(own.get(name), ast.ClassDef)
            if not instance and (above.func is whole or name not in COPIES):
                return whole
        elif not isinstance(above, HOLDS) and not (isinstance(above, ast.IfExp) and whole is not above.test):
            return whole
        whole = above


def _holder(value: ast.AST, parents: Parents) -> str | None:
    """The name that is given a value, or that goes through it in a loop."""
    above = parents.get(value)
    target = None
    if isinstance(above, ast.Assign) and len(above.targets) == 1:
        target = above.targets[0]
    elif isinstance(above, ast.AnnAssign):
        target = above.target
    elif isinstance(above, ast.For | ast.comprehension) and value is above.iter:
        target = above.target
    return target.id if isinstance(target, ast.Name) else None


def _all_holders(name: str, holders: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = {name}
    while todo:
        found |= todo
        todo = set().union(*(holders.get(one, set()) for one in todo)) - found
    return found


def _leaves(value: ast.AST, is_held: bool, parents: Parents, own: set[str], runs: set[str]) -> bool:
    above = parents.get(value)
    if isinstance(above, ast.Call):
        if isinstance(above.func, ast.Attribute) and above.func.attr == "start" and root(above.func) in runs:
            return False  # run.start(loop) runs it in place
        if dotted(above.func).rsplit(".", 1)[-1] in IN_PLACE:
            return False
        return above.func is not value and root(above.func) not in own | BUILTINS
    return is_held and isinstance(above, ast.Assign | ast.AnnAssign | ast.Return)
