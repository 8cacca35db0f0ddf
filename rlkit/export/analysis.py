"""What each statement of each cell binds and reads: `ast` for the places, `symtable` for the scopes.

A unit is what can be placed: a top-level statement with the comments above it, or several that share a line. `now` are
the notebook's names that running it reads, `later` those that only its functions read when they are called.
"""

import ast
import itertools
import symtable
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlkit.export.awaits import rewrite_awaits
from rlkit.export.layout import Layout, read_layout
from rlkit.export.magics import plain_python
from rlkit.export.problems import Problem
from rlkit.export.reading import Cell, Notebook
from rlkit.export.syntax import at_cell_level, dotted, is_import, walk
from rlkit.support.text import visible

COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")  # scopes that run where they stand


@dataclass(frozen=True)
class Unit:
    """One or more statements on lines `first` to `last` of a cell, counted from 1, the comments above included."""

    cell: int
    first: int
    last: int
    nodes: tuple[ast.stmt, ...] = ()  # none for comments alone
    binds: frozenset[str] = frozenset()  # names that it gives a value to, changes or deletes
    gives: frozenset[str] = frozenset()  # those of `binds` that need no value before: not `x += 1`, `del x`
    now: frozenset[str] = frozenset()  # names of other units that it reads when it runs
    later: frozenset[str] = frozenset()  # names that its functions read when they are called

    @property
    def star(self) -> bool:
        """True for `from x import *`."""
        return any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in self.nodes)

    @property
    def reads(self) -> frozenset[str]:
        """Names that it reads, now or later."""
        return self.now | self.later

    @property
    def line(self) -> int:
        """The line of the first statement."""
        return self.nodes[0].lineno if self.nodes else self.first

    @property
    def is_import(self) -> bool:
        """True for imports, and for comments alone."""
        return all(map(is_import, self.nodes))


@dataclass(frozen=True)
class CodeCell:
    """A cell as plain Python."""

    cell: Cell
    lines: tuple[str, ...]
    units: tuple[Unit, ...]
    layout: Layout

    @property
    def number(self) -> int:
        """Number of the cell."""
        return self.cell.number


@dataclass(frozen=True)
class Call:
    """A call: number of its cell, and the full name of what is called, `.name` where it does not begin with a name."""

    cell: int
    node: ast.Call
    name: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rsplit(".", 1)[-1]

    @property
    def is_attribute(self) -> bool:
        """True if the name has several parts."""
        return "." in self.name

    def problem(self, code: str, reason: str, fix: str) -> Problem:
        """A problem at the call's place."""
        return Problem(code, self.cell, self.node.lineno, reason, fix)


@dataclass(frozen=True)
class Program:
    """The exported cells in the order of the script, and what reading them found."""

    notebook: Notebook
    cells: tuple[CodeCell, ...]  # those that could be read as Python; cells tagged setup come first
    problems: tuple[Problem, ...]
    unread: frozenset[str]  # every word of the cells that could not be read: names that they may define

    @cached_property
    def units(self) -> list[Unit]:
        """The units of all cells."""
        return [unit for cell in self.cells for unit in cell.units]

    @cached_property
    def imported(self) -> dict[str, str]:
        """What imported names stand for: `np` is `numpy`, `show` is `matplotlib.pyplot.show`.

        Left out are names to which something else gives a value too.
        """
        otherwise = {name for unit in self.units if not unit.is_import for name in unit.binds}
        found = {}
        for _, node in self.nodes(ast.Import, ast.ImportFrom):
            for alias in node.names:
                if isinstance(node, ast.ImportFrom):
                    found[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
                elif alias.asname:
                    found[alias.asname] = alias.name
                else:
                    first = alias.name.split(".")[0]
                    found[first] = first
        return {name: path for name, path in found.items() if name not in otherwise}

    @cached_property
    def calls(self) -> list[Call]:
        """Every call."""
        found = []
        for cell, node in self.nodes(ast.Call):
            attribute = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else ""
            found.append(Call(cell, node, self.full_name(node.func) or attribute))
        return found

    @cached_property
    def runs(self) -> set[str]:
        """Names that are given to what `rl.Run(...)` makes."""
        return {
            target.id
            for _, node in self.nodes(ast.Assign)
            if isinstance(node.value, ast.Call) and dotted(node.value.func).endswith("Run")
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def full_name(self, node: ast.AST) -> str:
        """`a.b.c` as text, as if everything were imported under its own name; empty for anything else."""
        first, dot, rest = dotted(node).partition(".")
        return self.imported.get(first, first) + dot + rest

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[int, Any]]:
        """Every syntax node of some kinds, with the number of its cell."""
        for unit in self.units:
            for node in walk(unit.nodes):
                if isinstance(node, kinds):
                    yield unit.cell, node


def analyse(notebook: Notebook) -> Program:
    """Turn the cells that belong into the script into plain Python and find what their statements bind and read."""
    problems: list[Problem] = []
    cells = []
    unread: set[str] = set()
    postponed = any(postpones(cell.source) for cell in notebook.cells if cell.is_code)
    for cell in sorted((cell for cell in notebook.cells if cell.is_code), key=lambda cell: "setup" not in cell.roles):
        source, magics = plain_python(cell.source, cell.number)
        code, found = analyse_cell(cell, source, postponed)
        problems += [*magics, *found]
        if code is not None:
            cells.append(code)
        if code is None or any(problem.is_error for problem in magics):
            unread |= words(cell.source)
    return Program(notebook, tuple(cells), tuple(problems), frozenset(unread))


def words(source: str) -> set[str]:
    """Everything in a text that could be a name."""
    return set("".join(letter if letter.isalnum() or letter == "_" else " " for letter in source).split())


def postpones(source: str) -> bool:
    """True for `from __future__ import annotations`, in a cell that need not be plain Python."""
    for before, after in itertools.pairwise(source.replace("\\\n", " ").split("from __future__ import")):
        names = after.split(")")[0] if after.lstrip().startswith("(") else after.split("\n")[0]
        if not before.split("\n")[-1].strip() and "annotations" in words(names):
            return True
    return False


def analyse_cell(cell: Cell, source: str, postponed: bool = False) -> tuple[CodeCell | None, list[Problem]]:
    """Analyse a cell whose text as plain Python is `source`: None with E103 if that is not Python.

    Annotations that are `postponed` are not evaluated.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for "\d" in a string
            compile(source, f"cell {cell.number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            source, problems = rewrite_awaits(source, ast.parse(source), cell.number)
            if problems:
                return None, problems
            lines, layout = tuple(source.split("\n")), read_layout(source)
            units = tuple(_units(cell.number, lines, ast.parse(source).body, layout.ends, postponed))
            return CodeCell(cell, lines, units, layout), []
    except (RecursionError, MemoryError):  # the compiler's, and its parser's
        fix = "Write it in several statements."
        return None, [Problem("E103", cell.number, 0, "nested too deeply for Python's compiler.", fix)]
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        line = getattr(error, "lineno", 0) or 0
        shown = visible(source.split("\n")[line - 1].strip(), 80) if 0 < line <= source.count("\n") + 1 else ""
        reason = f"not Python: {getattr(error, 'msg', error)}" + (f": `{shown}`." if shown else ".")
        return None, [Problem("E103", cell.number, line, reason, "Correct it, or tag the cell notebook-only.")]


def _units(
    cell: int, lines: Sequence[str], body: list[ast.stmt], ends: dict[int, int], postponed: bool
) -> Iterator[Unit]:
    groups: list[list[ast.stmt]] = []
    for node in body:
        if groups and _first_line(node) <= ends[groups[-1][-1].end_lineno or 0]:
            groups[-1].append(node)
        else:
            groups.append([node])
    if not groups and any(line.strip() for line in lines):
        yield Unit(cell, 1, len(lines))
    first = 1
    for group in groups:
        last = ends[group[-1].end_lineno or 0] if group is not groups[-1] else len(lines)
        binds, now, later = names_of("\n".join(lines[_first_line(group[0]) - 1 : last]), postponed)
        given, changed, changed_now = _values(group)
        now |= changed_now & binds
        later |= (changed & binds) - now
        names = (frozenset(found) for found in (binds, binds - (changed - given), now, later))
        yield Unit(cell, first, last, tuple(group), *names)
        first = last + 1


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def names_of(source: str, postponed: bool = False) -> tuple[set[str], set[str], set[str]]:
    """The names that code binds, reads when it runs, and reads when its functions are called.

    Annotations that are not evaluated (`postponed`, and all from Python 3.14 on) count for nothing.

    Example:
        >>> names_of("def f(x=a): return x + b")
        ({'f'}, {'a'}, {'b'})
    """
    binds: set[str] = set()
    now: set[str] = set()
    later: set[str] = set()
    first = "from __future__ import annotations\n" if postponed else ""
    todo = [(symtable.symtable(f"{first}{source}\n\n", "cell", "exec"), False)]
    while todo:
        table, deferred = todo.pop()
        kind = table.get_type()
        scope = str(getattr(kind, "value", kind))  # "module", "class", "function", or one of annotations and types
        if scope == "annotation":
            continue
        deferred |= scope not in ("module", "class") and table.get_name() not in COMPREHENSIONS
        for symbol in table.get_symbols():
            name = symbol.get_name()
            if (scope == "module" or symbol.is_global()) and not name.startswith("."):  # .0 of a comprehension
                if symbol.is_assigned() or symbol.is_imported():
                    binds.add(name)
                if symbol.is_referenced():
                    (later if deferred else now).add(name)
        todo += [(child, deferred) for child in table.get_children()]
    if postponed and "annotations" not in words(source):
        binds.discard("annotations")
    return binds, now, later


def _values(nodes: Sequence[ast.stmt]) -> tuple[set[str], set[str], set[str]]:
    """Names that are given a value, and names whose value `x += 1` and `del x` need, anywhere and at the cell's level.

    To symtable all of them are bound.
    """
    targets = {id(node.target) for node in walk(nodes) if isinstance(node, ast.AugAssign)}
    given: set[str] = set()
    changed: dict[int, str] = {}
    for node in walk(nodes):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Del) or id(node) in targets:
                changed[id(node)] = node.id
            elif isinstance(node.ctx, ast.Store):
                given.add(node.id)
        elif isinstance(node, ast.alias):
            given.add(node.asname or node.name.split(".")[0])
        else:  # def, class, except ... as, case ... as
            given.add(getattr(node, "name", None) or getattr(node, "rest", None) or "")
    at_level = {changed[id(node)] for node in at_cell_level(nodes) if id(node) in changed}
    return given, set(changed.values()), at_level
