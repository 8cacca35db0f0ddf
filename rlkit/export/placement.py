"""Which statements stand at module level, where worker processes see them, and which in the guarded block.

At module level, in the order of the notebook: imports while nothing has run yet; settings of the environment and
constants among them; the parameters; functions and classes whose names are bound once and whose definition needs
nothing from run cells; and what such functions need in turn: imports of the standard library and constants from later
cells. Everything else runs in order under `if __name__ == "__main__":`. A block, not a function: names stay module
globals, with the meaning that they have in the notebook.

A definition moves up only if that cannot be noticed: no call in it whose result depends on when it is made.
"""

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rlkit.export.analysis import Program, Unit, words
from rlkit.export.awaits import SCRIPT
from rlkit.export.handed import BUILTINS, Definition, handed_on, is_definition
from rlkit.export.syntax import is_import, is_setting, is_standard, root, roots

PROVIDED = frozenset(
    {"__name__", "__doc__", "__file__", "__builtins__", "__annotations__", "display", "get_ipython"}
    | {"__module__", "__qualname__"}  # in the body of a class
)
LOOKS_UP = frozenset({"globals", "locals", "vars", "dir", "eval", "exec"})  # names that stand in a text
TIMED = frozenset(
    {"datetime", "getpass", "inspect", "locale", "os", "platform", "random", "secrets", "socket", "sys", "tempfile"}
    | {"threading", "time", "uuid", "warnings"}
)  # modules of the standard library whose answers depend on when they are asked


@dataclass(frozen=True)
class Placement:
    """Where each unit goes.

    Attributes:
        module: units at module level.
        reasons: for each function or class in the guarded block: why it is there.
    """

    module: frozenset[Unit]
    reasons: dict[str, str]


class _Placer:
    def __init__(self, program: Program, parameters: int | None) -> None:
        self.program, self.parameters = program, parameters
        self.bound = Counter(name for unit in program.units for name in unit.binds)
        self.module: set[Unit] = set()
        self.optional: set[Unit] = set()  # at module level only if something there needs it
        self.names: set[str] = set()  # bound at module level
        self.imported: set[str] = set()
        self.steady: set[str] = set()  # names from modules whose answers do not depend on when they are asked
        self.below: set[str] = set()  # bound in the guarded block
        self.read: set[str] = set()  # by what has run
        self.later: dict[str, set[str]] = {}  # what a name reads when it is called
        self.hooked: set[str] = set()  # classes that notice it when others are made from them
        self.running = self.star = False
        self.reasons: dict[str, str] = {}

    def place(self) -> Placement:
        roles = {cell.number: cell.cell.roles for cell in self.program.cells}
        for unit in self.program.units:
            for name in unit.binds:
                self.later.setdefault(name, set()).update(unit.later)
            if "setup" in roles[unit.cell] or unit.cell == self.parameters:
                self._up(unit)
            elif not unit.nodes:
                if not self.running:
                    self._up(unit)
            elif all(is_import(node) for node in unit.nodes):
                self._import(unit)
            elif isinstance(unit.nodes[0], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._definition(unit)
            elif all(self._constant(node) for node in unit.nodes) and not (unit.binds & BUILTINS):
                self._movable(unit)
            elif not self.running and all(is_setting(node) for node in unit.nodes) and self._known(unit.now):
                self._up(unit)
            else:
                self._run(unit)
        self._put_back()
        self._drop_unneeded()
        return Placement(frozenset(self.module), self.reasons)

    def _known(self, names: Iterable[str]) -> bool:
        return all(name in self.names or name in BUILTINS or name in PROVIDED for name in names)

    def _up(self, unit: Unit) -> None:
        self.module.add(unit)
        named = {node.name for node in unit.nodes if isinstance(node, Definition)}
        self.names |= named or unit.binds  # what a function declares global it binds when it is called

    def _run(self, unit: Unit) -> None:
        self.running = True
        self.star |= unit.star
        self.below |= unit.binds
        self.read |= self._reads(unit)

    def _reads(self, unit: Unit) -> set[str]:
        """Names that a unit may read when it runs, and so may the functions that it can call."""
        found: set[str] = set()
        todo = set(unit.now | unit.later)
        if todo & LOOKS_UP:
            parts = (part for node in unit.nodes for part in ast.walk(node) if isinstance(part, ast.Constant))
            todo |= {word for part in parts if isinstance(part.value, str) for word in words(part.value)}
        while todo:
            found |= todo
            todo = set().union(*(self.later.get(name, ()) for name in todo)) - found
        return found

    def _once(self, unit: Unit) -> bool:
        return all(self.bound[name] == 1 and name not in self.read for name in unit.binds) and not self.star

    def _nothing_before(self, unit: Unit) -> bool:
        """True if nothing has run that a unit could be needed after, and no function that it replaces stays below."""
        return not (self.running or unit.binds & self.below or (unit.star and self.below))

    def _movable(self, unit: Unit) -> None:
        if self._nothing_before(unit):
            self._up(unit)
        elif self._once(unit) and self._known(unit.now):
            self.optional.add(unit)
            self._up(unit)
        else:
            self._run(unit)

    def _import(self, unit: Unit) -> None:
        standard = all(is_standard(node) for node in unit.nodes)
        if self._nothing_before(unit) or (standard and not unit.star):
            self._movable(unit)
            if unit in self.module:
                self.imported |= unit.binds
                if standard and not any(root in TIMED for node in unit.nodes for root in roots(node)):
                    self.steady |= unit.binds
        else:
            self._run(unit)

    def _definition(self, unit: Unit) -> None:
        node = unit.nodes[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        missing = sorted(name for name in unit.now - unit.binds if not self._known([name]))
        steady = self._steady_definition(node)
        reason = ""
        if len(unit.nodes) > 1:
            reason = "it shares its line with another statement"
        elif SCRIPT in missing:
            reason = "its definition awaits something"
        elif missing:
            reason = f"its definition reads {missing[0]!r}, which run cells make"
        elif self.bound[node.name] > 1:
            reason = "its name is bound more than once"
        elif self.running and (self.star or node.name in BUILTINS or node.name in self.read):
            reason = "what runs before it reads its name"
        elif self.running and not steady:
            reason = "its definition calls something whose result depends on when it is called"
        if isinstance(node, ast.ClassDef) and self._is_hooked(node):
            self.hooked.add(node.name)
        if reason:
            self.reasons[node.name] = reason
            self.read |= unit.now
            self.below |= unit.binds
            if not steady:
                self._run(unit)
        else:
            self._up(unit)

    def _is_hooked(self, node: ast.ClassDef) -> bool:
        given = {root(base) for base in [*node.bases, *(keyword.value for keyword in node.keywords)]}
        return bool(given & (self.hooked | {"type"})) or any(
            getattr(part, "name", "") == "__init_subclass__" for part in node.body
        )

    def _constant(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return all(isinstance(target, ast.Name) for target in node.targets) and self._steady(node.value)
        if isinstance(node, ast.AnnAssign):
            return isinstance(node.target, ast.Name) and node.value is not None and self._steady(node.value)
        return isinstance(node, ast.Pass)

    def _steady(self, node: ast.expr) -> bool:
        """True if the value does not depend on when it is computed."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return all(self._steady(one) for one in node.elts)
        if isinstance(node, ast.Dict):
            return all(key is not None and self._steady(key) for key in node.keys) and all(
                map(self._steady, node.values)
            )
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.operand, ast.Constant)
        if isinstance(node, ast.BinOp):
            return isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            return root(node.func) in self.steady and all(self._steady(one) for one in arguments)
        if isinstance(node, ast.Name):
            return node.id in BUILTINS and not self.bound[node.id]
        return isinstance(node, ast.Attribute) and root(node) in self.steady

    def _steady_definition(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return all(map(self._decorator, node.decorator_list)) and all(map(self._reference, defaults))
        if isinstance(node, ast.ClassDef):
            given = [*node.bases, *(keyword.value for keyword in node.keywords)]
            return (
                all(map(self._decorator, node.decorator_list))
                and all(self._reference(base) and root(base) not in self.hooked for base in given)
                and all(map(self._steady_definition, node.body))
            )
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return node.value is None or self._reference(node.value)
        return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    def _reference(self, node: ast.expr) -> bool:
        """A steady value, or a name or attribute: no call, and nothing of a module like `os` or `time`."""
        if isinstance(node, ast.Subscript):
            return self._reference(node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            return root(node) not in TIMED
        return isinstance(node, ast.Lambda) or self._steady(node)

    def _decorator(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            return self._decorator(node.func) and all(map(self._reference, arguments))
        return root(node) in self.imported or root(node) in BUILTINS

    def _put_back(self) -> None:
        """Functions that need something from run cells stay where they are, unless they are handed on: then a worker
        process finds them and ends with a NameError, where it would otherwise look for them for ever.
        """
        kept = set(handed_on(self.program))
        while True:
            below = {name for unit in self.program.units if unit not in self.module for name in unit.binds}
            below -= {name for unit in self.module for name in unit.binds}
            back = {
                unit
                for unit in self.module
                if is_definition(unit) and (unit.now & below or (unit.later & below and not unit.binds & kept))
            }
            if not back:
                break
            for unit in back & {unit for unit in back if unit.binds & kept}:
                self.reasons |= dict.fromkeys(unit.binds, f"its definition reads {min(unit.now & below)!r}")
            self.module -= back

    def _drop_unneeded(self) -> None:
        needed: set[str] = set()
        kept = self.module - self.optional
        while True:
            needed = {name for unit in kept for name in unit.now | unit.later}
            more = {unit for unit in self.optional - kept if unit.binds & needed}
            if not more:
                break
            kept |= more
        self.module = kept


def place(program: Program, parameters: int | None) -> Placement:
    """Decide for every unit.

    Args:
        program: the cells.
        parameters: number of the parameters cell, or None.
    """
    return _Placer(program, parameters).place()
