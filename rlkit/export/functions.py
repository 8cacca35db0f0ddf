"""What becomes of the notebook's functions: which are handed on, and which are surely called.

Handed on: what a reward pool or a data loader may send to a worker process. A name is followed through lists, dicts,
other names, instances and loops, not into the notebook's own functions. Surely called: a name that is missing there
ends the script for certain (E109); anywhere else it may (W209). What decorated functions, generators and methods other
than `__init__` do is not certain.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from rlkit.export.analysis import Program
from rlkit.export.awaits import SCRIPT
from rlkit.export.syntax import (
    BUILTINS,
    Definition,
    Function,
    arguments,
    dotted,
    is_main_guard,
    mentions,
    root,
    run_when_defined,
    walk,
)

IN_PLACE = frozenset({"accumulate", "prepare"})  # rl.accumulate(draw, ...), world.prepare(policy, make), tasks.prepare
COPIES = frozenset({"list", "tuple", "dict", "set"})
CALLS_IT = frozenset({"rlkit.score", "rlkit.evaluate", "rlkit.estimate_vstar"})  # with functions as arguments
LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def handed_on(program: Program) -> dict[str, tuple[int, int]]:
    """Functions of the notebook that are given to something else than its own functions: first cell and line."""
    own = {node.name: node for unit in program.units for node in _definitions(unit.nodes)}
    classes = {name for name, node in own.items() if isinstance(node, ast.ClassDef)}
    given: dict[str, tuple[int, int]] = {}
    holders: dict[str, set[str]] = defaultdict(set)  # names that hold another name's value
    for unit in program.units:
        for node in walk(unit.nodes):
            targets, values = _goes_to(node, program, {*own, *BUILTINS})
            for name in (name for value in values for name in _held(value, classes)):
                if targets:
                    holders[name.id] |= targets
                elif name not in values or isinstance(node, ast.Call):  # `a.b = f` and `return f` hand nothing on
                    place = (unit.cell, name.lineno)
                    given[name.id] = min(place, given.get(name.id, place))
    found = {}
    for function in own:
        names, todo = set[str](), {function}
        while todo:
            names |= todo
            todo = set().union(*(holders.get(one, ()) for one in todo)) - names
        if places := [given[one] for one in names if one in given]:
            found[function] = min(places)
    return found


def _definitions(nodes: Iterable[ast.AST]) -> Iterator[Definition]:
    """Functions and classes that statements define at the level of the cell, in an `if` or a `try` too."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, Definition):
            yield node
        else:
            todo += ast.iter_child_nodes(node)


def _goes_to(node: ast.AST, program: Program, own: Collection[str]) -> tuple[set[str], list[ast.expr]]:
    """Values that a node passes on, and the name that they go to; no name: to code outside the notebook."""
    target: ast.expr | None = None
    if isinstance(node, ast.Call):
        in_place = dotted(node.func).rsplit(".", 1)[-1] in IN_PLACE or _starts(node, program)
        return set(), [] if in_place or root(node.func) in own else arguments(node)
    if isinstance(node, ast.Return):
        return set(), [node.value] if node.value else []
    if isinstance(node, ast.Assign):
        target, value = node.targets[0] if len(node.targets) == 1 else None, node.value
    elif isinstance(node, ast.AnnAssign) and node.value:
        target, value = node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
        target, value = node.target, node.iter
    else:
        return set(), []
    return {target.id} if isinstance(target, ast.Name) else set(), [value]


def _starts(node: ast.Call, program: Program) -> bool:
    """True for `run.start(loop)`, which calls `loop` in this process."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "start" and root(node.func) in program.runs


def _held(node: ast.AST, classes: Collection[str] | None = None) -> Iterator[ast.Name]:
    """The names whose values a value surely holds; with `classes` also a choice, a copy, or an instance."""
    if isinstance(node, ast.Name):
        yield node
    elif isinstance(node, ast.List | ast.Tuple | ast.Dict | ast.Set | ast.Starred):
        for part in ast.iter_child_nodes(node):
            yield from _held(part, classes)
    elif classes is not None and isinstance(node, ast.IfExp):
        yield from _held(node.body, classes)
        yield from _held(node.orelse, classes)
    elif classes is not None and isinstance(node, ast.Call) and dotted(node.func) in COPIES:
        for part in arguments(node):
            yield from _held(part, classes)
    elif classes is not None and isinstance(node, ast.Call) and dotted(node.func) in classes:
        yield from _held(node.func, classes)


def always(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Of statements what runs in any case; the body of a loop counts as such, that of a function does not."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, Function):
            todo += run_when_defined(node)
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


def may_catch(nodes: Iterable[ast.AST]) -> bool:
    """True if an error inside may be caught inside."""
    for node in walk(nodes):
        if isinstance(node, ast.Try | getattr(ast, "TryStar", ast.Try)) and node.handlers:
            return True
        if isinstance(node, ast.With) and any(mentions(item.context_expr, "suppress") for item in node.items):
            return True
    return False


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """The names among nodes, wherever they stand in a statement."""
    return {node.id for node in nodes if isinstance(node, ast.Name)}


@dataclass(frozen=True)
class _Body:
    """What a call of a function runs in any case, the function's own names, and whether it must be awaited."""

    parts: list[ast.AST]
    own: frozenset[str] = frozenset()
    is_async: bool = False


def surely_called(program: Program) -> dict[str, set[str]]:
    """For each function or class of the notebook that is surely called: the names that it surely reads then."""
    bound = Counter(name for unit in program.units for name in unit.gives)
    bodies = {name: body for unit in program.units for node in unit.nodes for name, body in _bodies(node)}
    found: dict[str, set[str]] = {}
    todo = [_Body(list(always(unit.nodes))) for unit in program.units if not may_catch(unit.nodes)]
    while todo:
        body = todo.pop()
        for name, awaited in {call for node in body.parts for call in _called(node, program)}:
            called = bodies.get(name)
            if called and called.is_async == awaited and bound[name] == 1 and name not in {*body.own, *found}:
                found[name] = names_read(called.parts)
                todo.append(called)
    return found


def _called(node: ast.AST, program: Program) -> Iterator[tuple[str, bool]]:
    """Names of the functions that a node calls: itself, or because it is given them; and whether it awaits them."""
    if isinstance(node, ast.Await):
        yield dotted(getattr(node.value, "func", node)), True
    elif isinstance(node, ast.Call):
        name = dotted(node.func)
        yield name, False
        if name == f"{SCRIPT}.run_async":
            yield dotted(getattr(node.args[0], "func", node)), True
        handles_errors = any(keyword.arg == "on_error" for keyword in node.keywords)
        if _starts(node, program) or (program.full_name(node.func) in CALLS_IT and not handles_errors):
            yield from ((held.id, False) for value in arguments(node) for held in _held(value))


def _bodies(node: ast.stmt) -> Iterator[tuple[str, _Body]]:
    """The functions that a statement makes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        yield node.name, _body(node, node.body)
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, _body(node.value, [node.value.body])
    elif isinstance(node, ast.ClassDef) and not (node.decorator_list or node.keywords):
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == "__init__" and not one.decorator_list:
                yield node.name, _body(one, one.body)


def _body(function: Function, body: Iterable[ast.AST]) -> _Body:
    """What runs of a function whenever it is called: up to the first statement that may leave it."""
    parts = list(walk(body))
    if may_catch(body) or any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts):
        return _Body([])
    found: list[ast.AST] = []
    for statement in body:
        found += always([statement])
        if any(isinstance(part, LEAVES) for part in ast.walk(statement)):
            break
    own = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    own |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return _Body(found, frozenset(own), isinstance(function, ast.AsyncFunctionDef))
