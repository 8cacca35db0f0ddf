"""What runs in any case: which parts of a statement, and which functions of the notebook.

A name that is missing there ends the script for certain (E109); anywhere else it may (W209). Left out, and so not
certain: what decorated functions, generators and methods other than `__init__` do.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlkit.export.analysis import Program
from rlkit.export.awaits import SCRIPT
from rlkit.export.handed import HOLDS, names_of_runs
from rlkit.export.syntax import dotted, root

CALLS_IT = frozenset({"rlkit.score", "rlkit.evaluate", "rlkit.estimate_vstar"})  # with functions as arguments
AWAIT = "await "  # before the name of a coroutine function: calling it alone runs nothing
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def always(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Of statements what runs in any case; the body of a loop counts as such, that of a function does not."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, Function):
            todo += getattr(node, "decorator_list", [])
            todo += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif isinstance(node, ast.If) and is_main_guard(node.test):
            todo += node.body
        elif isinstance(node, ast.If | ast.IfExp | ast.Assert):
            todo.append(node.test)
        elif isinstance(node, ast.BoolOp):
            todo.append(node.values[0])
        elif isinstance(node, ast.Match):
            todo.append(node.subject)
        else:
            todo += ast.iter_child_nodes(node)


def is_main_guard(test: ast.expr) -> bool:
    """True for `__name__ == "__main__"`."""
    parts = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return {getattr(part, "id", getattr(part, "value", None)) for part in parts} == {"__name__", "__main__"}


def may_catch(nodes: Iterable[ast.AST]) -> bool:
    """True if an error inside may be caught inside."""
    for node in (part for top in nodes for part in ast.walk(top)):
        if isinstance(node, ast.Try | getattr(ast, "TryStar", ast.Try)) and node.handlers:
            return True
        if isinstance(node, ast.With) and any("suppress" in ast.dump(item.context_expr) for item in node.items):
            return True
    return False


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """The names among nodes, wherever they stand in a statement."""
    return {node.id for node in nodes if isinstance(node, ast.Name)}


@dataclass(frozen=True)
class _Body:
    """What a call of a function runs in any case, and the names that are the function's own."""

    parts: list[ast.AST]
    own: frozenset[str] = frozenset()


def surely_called(program: Program) -> dict[str, set[str]]:
    """For each function or class of the notebook that is surely called: the names that it surely reads then."""
    bound = Counter(name for unit in program.units for name in unit.gives)
    bodies = {name: body for unit in program.units for node in unit.nodes for name, body in _bodies(node)}
    known = {name: body for name, body in bodies.items() if bound[name.removeprefix(AWAIT)] == 1}
    runs = names_of_runs(program)
    found: dict[str, set[str]] = {}
    todo = [_Body(list(always(unit.nodes))) for unit in program.units if not may_catch(unit.nodes)]
    while todo:
        body = todo.pop()
        names = {name for node in body.parts for name in _called(node, program, runs)} - body.own
        for name in names & known.keys() - found.keys():
            found[name] = names_read(known[name].parts)
            todo.append(known[name])
    return {name.removeprefix(AWAIT): reads for name, reads in found.items()}


def _called(node: ast.AST, program: Program, runs: set[str]) -> Iterator[str]:
    """Names of what a node calls: itself, and functions that it is given; `await f` where a coroutine runs too."""
    if isinstance(node, ast.Await | ast.Call):
        inner = node.value if isinstance(node, ast.Await) else next(iter(node.args), None)
        waits = isinstance(node, ast.Await) or dotted(node.func) == f"{SCRIPT}.run_async"
        if waits and isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
            yield AWAIT + inner.func.id
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name):
        yield node.func.id
    starts = isinstance(node.func, ast.Attribute) and node.func.attr == "start" and root(node.func) in runs
    if starts or (program.full_name(node.func) in CALLS_IT and not any(k.arg == "on_error" for k in node.keywords)):
        todo: list[ast.AST] = [*node.args, *node.keywords]
        while todo:
            value = todo.pop()
            if isinstance(value, ast.Name):
                yield value.id
            elif isinstance(value, HOLDS):
                todo += ast.iter_child_nodes(value)


def _bodies(node: ast.stmt) -> Iterator[tuple[str, _Body]]:
    """The functions that a statement makes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        yield AWAIT * isinstance(node, ast.AsyncFunctionDef) + node.name, _runs(node, node.body)
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, _runs(node.value, [node.value.body])
    elif isinstance(node, ast.ClassDef) and not (node.decorator_list or node.keywords):
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == "__init__" and not one.decorator_list:
                yield node.name, _runs(one, one.body)


def _runs(function: Function, body: Sequence[ast.AST]) -> _Body:
    """What runs of a function whenever it is called: up to the first statement that may leave it."""
    parts = [part for statement in body for part in ast.walk(statement)]
    if may_catch(body) or any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts):
        return _Body([])
    found: list[ast.AST] = []
    for statement in body:
        found += always([statement])
        if any(isinstance(part, LEAVES) for part in ast.walk(statement)):
            break
    own = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    own |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return _Body(found, frozenset(own))
