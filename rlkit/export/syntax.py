"""Questions to the syntax tree: what is called, what is imported, what runs at the level of a cell."""

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator

BUILTINS = frozenset(dir(builtins))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Import = ast.Import | ast.ImportFrom
SETTINGS = frozenset(
    {"os.environ.setdefault", "os.environ.update", "os.environ.pop", "os.putenv", "sys.path.append", "sys.path.insert"}
    | {"warnings.filterwarnings", "warnings.simplefilter"}
)


def walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of several trees."""
    for node in nodes:
        yield from ast.walk(node)


def at_cell_level(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What runs with the cell: all nodes but those in the bodies of functions and lambdas."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        todo += run_when_defined(node) if isinstance(node, Function) else ast.iter_child_nodes(node)


def run_when_defined(node: Function) -> list[ast.expr]:
    """Decorators and defaults of a function."""
    return [*getattr(node, "decorator_list", []), *defaults(node)]


def defaults(node: Function) -> list[ast.expr]:
    """Defaults of a function's parameters."""
    return [*node.args.defaults, *filter(None, node.args.kw_defaults)]


def arguments(node: ast.Call) -> list[ast.expr]:
    """What a call is given."""
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; empty for anything else.

    Example:
        >>> dotted(ast.parse("a.b.c(1)", mode="eval").body.func)
        'a.b.c'
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def mentions(node: ast.AST, word: str) -> bool:
    """True if a word is part of a name or an attribute somewhere in a tree."""
    return any(word in getattr(part, "id", getattr(part, "attr", "")).lower() for part in ast.walk(node))


def root(node: ast.AST) -> str:
    """The first name of `a.b.c`; empty for what does not begin with a name."""
    return dotted(node).split(".")[0]


def roots(node: ast.stmt) -> list[str]:
    """The top-level packages that an import names, "" for this one; nothing for another statement."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["" if node.level else (node.module or "").split(".")[0]]
    return []


def is_standard(node: ast.stmt) -> bool:
    """True for an import of the standard library."""
    return isinstance(node, Import) and sys.stdlib_module_names.issuperset(roots(node))


def is_import(node: ast.stmt) -> bool:
    """True for imports, and for `try` and `if` that hold imports and simple stand-ins."""
    found, todo = False, [node]
    while todo:
        part = todo.pop()
        if isinstance(part, Import):
            found = True
        elif isinstance(part, ast.Try):
            todo += [*part.body, *part.orelse, *part.finalbody]
            todo += [inner for handler in part.handlers for inner in handler.body]
        elif isinstance(part, ast.If) and not any(isinstance(p, ast.Call | ast.NamedExpr) for p in ast.walk(part.test)):
            todo += [*part.body, *part.orelse]
        elif not isinstance(part, ast.Pass):
            if not (isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant)):
                return False
    return found


def is_setting(node: ast.stmt) -> bool:
    """True for `os.environ[...] = ...`, `sys.path.append(...)`, `warnings.filterwarnings(...)`: before imports."""
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Subscript) and dotted(t.value) == "os.environ" for t in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) in SETTINGS


def is_main_guard(test: ast.expr) -> bool:
    """True for `__name__ == "__main__"`."""
    parts = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return {getattr(part, "id", getattr(part, "value", None)) for part in parts} == {"__name__", "__main__"}
