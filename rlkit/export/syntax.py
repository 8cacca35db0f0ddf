"""Small questions to the syntax tree: what is called, what is imported, what only prepares."""

import ast
import sys

SETTINGS = frozenset(
    {"os.environ.setdefault", "os.environ.update", "os.environ.pop", "os.putenv", "sys.path.append", "sys.path.insert"}
    | {"warnings.filterwarnings", "warnings.simplefilter"}
)


def root(node: ast.expr) -> str:
    """The first name of `a.b.c`; empty for what does not begin with a name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; empty for anything else.

    Example:
        >>> dotted(ast.parse("a.b.c(1)", mode="eval").body.func)
        'a.b.c'
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def roots(node: ast.stmt) -> list[str]:
    """The top-level packages that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").split(".")[0]] if not node.level else [""]
    return [name for part in _parts(node) for name in roots(part)]


def is_standard(node: ast.stmt) -> bool:
    """True for an import of the standard library."""
    return isinstance(node, ast.Import | ast.ImportFrom) and all(
        name in sys.stdlib_module_names for name in roots(node)
    )


def is_import(node: ast.stmt) -> bool:
    """True for imports, and for `try` and `if` that hold imports and simple stand-ins."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Try):
        parts = _parts(node)
    elif isinstance(node, ast.If) and not any(
        isinstance(part, ast.Call | ast.NamedExpr) for part in ast.walk(node.test)
    ):
        parts = _parts(node)
    else:
        return False
    simple = all(is_import(part) or _stand_in(part) for part in parts)
    return simple and any(is_import(part) for part in parts)


def _parts(node: ast.stmt) -> list[ast.stmt]:
    if isinstance(node, ast.Try):
        handled = [part for handler in node.handlers for part in handler.body]
        return [*node.body, *handled, *node.orelse, *node.finalbody]
    return [*node.body, *node.orelse] if isinstance(node, ast.If) else []


def _stand_in(node: ast.stmt) -> bool:
    plain = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    return plain or isinstance(node, ast.Pass)


def is_setting(node: ast.stmt) -> bool:
    """True for `os.environ[...] = ...`, `sys.path.append(...)`, `warnings.filterwarnings(...)`: before imports."""
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Subscript) and dotted(t.value) == "os.environ" for t in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) in SETTINGS
