"""Values and definitions whose result does not depend on when they are evaluated: only these may move up."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from rlkit.export.syntax import BUILTINS, arguments, defaults, root

TIMED = frozenset(
    {"datetime", "getpass", "inspect", "locale", "os", "platform", "random", "secrets", "socket", "sys", "tempfile"}
    | {"threading", "time", "uuid", "warnings"}
)  # modules of the standard library whose answers depend on when they are asked


@dataclass(frozen=True)
class Names:
    """What is known of names."""

    bound: Mapping[str, int]  # how many statements of the notebook bind each name
    imported: frozenset[str] = frozenset()  # names that imports at module level bind
    steady: frozenset[str] = frozenset()  # those of `imported` whose answers do not depend on when they are asked
    hooked: frozenset[str] = frozenset()  # classes that run code when a subclass of them is made

    def is_constant(self, node: ast.stmt) -> bool:
        """True for `name = value` with a steady value, and for `pass`."""
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = all(isinstance(target, ast.Name) for target in targets)
            return named and node.value is not None and self._is_steady(node.value)
        return isinstance(node, ast.Pass)

    def is_steady_definition(self, node: ast.stmt) -> bool:
        """True if a function or class can be defined at any time; for the statements of a class's body too."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return all(map(self._decorator, node.decorator_list)) and all(map(self._reference, defaults(node)))
        if isinstance(node, ast.ClassDef):
            return (
                all(map(self._decorator, node.decorator_list))
                and all(self._reference(base) and root(base) not in self.hooked for base in _bases(node))
                and all(map(self.is_steady_definition, node.body))
            )
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return node.value is None or self._reference(node.value)
        return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    def is_hooked(self, node: ast.ClassDef) -> bool:
        """True for a class that runs code when a subclass is made: a metaclass, or `__init_subclass__`."""
        return any(root(base) in self.hooked | {"type"} for base in _bases(node)) or any(
            getattr(part, "name", "") == "__init_subclass__" for part in node.body
        )

    def _is_steady(self, node: ast.expr | None) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return all(map(self._is_steady, node.elts))
        if isinstance(node, ast.Dict):
            return all(map(self._is_steady, [*node.keys, *node.values]))  # the key of `**x` is None
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.operand, ast.Constant)
        if isinstance(node, ast.BinOp):
            return isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
        if isinstance(node, ast.Call):
            return root(node.func) in self.steady and all(map(self._is_steady, arguments(node)))
        if isinstance(node, ast.Name):
            return node.id in BUILTINS and not self.bound.get(node.id)
        return isinstance(node, ast.Constant) or (isinstance(node, ast.Attribute) and root(node) in self.steady)

    def _reference(self, node: ast.expr) -> bool:
        """A steady value, a lambda, or a name or attribute that is not of a module like `os` or `time`; no call."""
        if isinstance(node, ast.Subscript):
            return self._reference(node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            return root(node) not in TIMED
        return isinstance(node, ast.Lambda) or self._is_steady(node)

    def _decorator(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return self._decorator(node.func) and all(map(self._reference, arguments(node)))
        return root(node) in self.imported or root(node) in BUILTINS


def _bases(node: ast.ClassDef) -> list[ast.expr]:
    return [*node.bases, *(keyword.value for keyword in node.keywords)]
