"""What each statement of each cell binds and reads: `ast` for the places, `symtable` for the scopes.

A unit is what can be placed: a top-level statement with the comments above it, or several that share a line. `now` are
the notebook's names that running it reads, `later` those that only its functions read when they are called.
"""

import ast
import contextlib
import io
import itertools
import symtable
import sys
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlkit.export.awaits import rewrite_awaits
from rlkit.export.magics import plain_python
from rlkit.export.problems import Problem
from rlkit.export.reading import Cell, Notebook
from rlkit.export.syntax import dotted, is_import
from rlkit.support.text import visible

MOST_NESTED = 1000  # levels of a syntax tree; a chain of as many additions
SPLIT = "Write it in several statements."


@dataclass(frozen=True)
class Unit:
    """One or more statements on lines `first` to `last` of a cell, the comments above included.

    Attributes:
        cell: number of the cell.
        first: first line, counted from 1.
        last: last line.
        nodes: the statements; none for comments alone.
        binds: names that it gives a value to.
        now: names of other units that it reads when it runs.
        later: names that its functions read when they are called.
        star: True for `from x import *`.
        changes: those of `binds` that it needs a value of and only changes or deletes: `x += 1`, `del x`.
    """

    cell: int
    first: int
    last: int
    nodes: tuple[ast.stmt, ...]
    binds: frozenset[str]
    now: frozenset[str]
    later: frozenset[str]
    star: bool = False
    changes: frozenset[str] = frozenset()

    @property
    def gives(self) -> frozenset[str]:
        """Names that it gives a value to, whether they had one or not."""
        return self.binds - self.changes

    @property
    def line(self) -> int:
        """The line of the first statement."""
        return self.nodes[0].lineno if self.nodes else self.first


@dataclass(frozen=True)
class CodeCell:
    """A cell as plain Python: its lines, units, the lines that may not be indented, and what lines allow."""

    cell: Cell
    lines: tuple[str, ...]
    units: tuple[Unit, ...]
    inside_strings: frozenset[int]
    allowed: dict[int, frozenset[str]]

    @property
    def number(self) -> int:
        """Number of the cell."""
        return self.cell.number


@dataclass(frozen=True)
class Program:
    """The exported cells in the order of the script, and what reading them found.

    Attributes:
        notebook: where they come from.
        cells: those that could be read as Python.
        problems: what was found on the way.
        unread: every word of the cells that could not be read: names that they may define.
    """

    notebook: Notebook
    cells: tuple[CodeCell, ...]
    problems: tuple[Problem, ...]
    unread: frozenset[str]

    @property
    def units(self) -> list[Unit]:
        """All units in the order of the notebook; cells tagged setup come first."""
        return [unit for cell in self.cells for unit in cell.units]

    @cached_property
    def imported(self) -> dict[str, str]:
        """What imported names stand for: `np` is `numpy`, `show` is `matplotlib.pyplot.show`.

        Left out are names to which something else gives a value too.
        """
        found, otherwise = {}, set[str]()
        for unit in self.units:
            if not all(is_import(node) for node in unit.nodes):
                otherwise |= unit.binds
        for _, node in self.nodes((ast.Import, ast.ImportFrom)):
            for alias in getattr(node, "names", []):
                if isinstance(node, ast.ImportFrom):
                    found[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
                elif alias.asname:
                    found[alias.asname] = alias.name
                else:
                    first = alias.name.split(".")[0]
                    found[first] = first
        return {name: path for name, path in found.items() if name not in otherwise}

    def full_name(self, node: ast.AST) -> str:
        """`a.b.c` as text, as if everything were imported under its own name; empty for anything else."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return self.imported.get(first, first) + dot + rest

    def nodes(self, kind: type | tuple[type, ...] = ast.AST) -> Iterator[tuple[CodeCell, ast.AST]]:
        """Every syntax node of a kind, with its cell."""
        for cell in self.cells:
            for unit in cell.units:
                for statement in unit.nodes:
                    for node in ast.walk(statement):
                        if isinstance(node, kind):
                            yield cell, node


def analyse(notebook: Notebook) -> Program:
    """Turn the cells that belong into the script into plain Python and find what their statements bind and read."""
    problems: list[Problem] = []
    cells = []
    unread: set[str] = set()
    postponed = any(postpones(cell.source) for cell in notebook.cells if cell.is_code)
    for cell in sorted((cell for cell in notebook.cells if cell.is_code), key=lambda cell: "setup" not in cell.roles):
        plain = plain_python(cell.source, cell.number)
        problems += plain.problems
        code, found = analyse_cell(cell, plain.source, postponed)
        problems += found
        if code is not None:
            cells.append(code)
        if code is None or any(problem.is_error for problem in plain.problems):
            unread |= words(cell.source)
    return Program(notebook, tuple(cells), tuple(problems), frozenset(unread))


def words(source: str) -> set[str]:
    """Everything in a text that could be a name."""
    return set("".join(letter if letter.isalnum() or letter == "_" else " " for letter in source).split())


def postpones(source: str) -> bool:
    """True for `from __future__ import annotations`: it stands at the top of the script, and holds for all of it."""
    for before, after in itertools.pairwise(source.replace("\\\n", " ").split("from __future__ import")):
        names = after.split(")")[0] if after.lstrip().startswith("(") else after.split("\n")[0]
        if not before.split("\n")[-1].strip() and "annotations" in words(names):
            return True
    return False


def analyse_cell(cell: Cell, source: str, postponed: bool = False) -> tuple[CodeCell | None, list[Problem]]:
    """One cell that is free of IPython syntax; None with E103 if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a string is the notebook's affair
            compile(source, f"cell {cell.number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            with deeper():
                return _analyse(cell, source, postponed)
    except RecursionError:
        return None, [Problem("E103", cell.number, 0, "nested too deeply for Python's compiler.", SPLIT)]
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        line = getattr(error, "lineno", 0) or 0
        shown = source.split("\n")[line - 1].strip() if 0 < line <= source.count("\n") + 1 else ""
        shown = visible(shown, 80)
        reason = f"not Python: {getattr(error, 'msg', error)}" + (f": `{shown}`." if shown else ".")
        return None, [Problem("E103", cell.number, line, reason, "Mend it, or tag the cell notebook-only.")]


def _analyse(cell: Cell, source: str, postponed: bool) -> tuple[CodeCell | None, list[Problem]]:
    tree = ast.parse(source)
    depth = _depth(tree)
    if depth > MOST_NESTED:
        reason = f"an expression or block of {depth} levels; {MOST_NESTED} can be exported."
        return None, [Problem("E103", cell.number, 0, reason, SPLIT)]
    source, problems = rewrite_awaits(source, tree, cell.number)
    if problems:
        return None, problems
    tree = ast.parse(source)
    lines = tuple(source.split("\n"))
    units = tuple(_units(cell.number, lines, tree, postponed))
    return CodeCell(cell, lines, units, _inside_strings(source), _allowed(source)), []


def _depth(tree: ast.AST) -> int:
    depth, level = 0, [tree]
    while level:
        depth, level = depth + 1, [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


@contextlib.contextmanager
def deeper() -> Iterator[None]:
    """Room for visiting syntax trees of `MOST_NESTED` levels, up to six calls a level."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 6 * MOST_NESTED + 1000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _units(cell: int, lines: tuple[str, ...], tree: ast.Module, postponed: bool) -> Iterator[Unit]:
    groups: list[list[ast.stmt]] = []
    ends = _logical_ends("\n".join(lines))
    for node in tree.body:
        if groups and _first_line(node) <= ends[groups[-1][-1].end_lineno or 0]:
            groups[-1].append(node)
        else:
            groups.append([node])
    if not groups:
        if any(line.strip() for line in lines):
            yield Unit(cell, 1, len(lines), (), frozenset(), frozenset(), frozenset())
        return
    first = 1
    for place, group in enumerate(groups):
        last = ends[group[-1].end_lineno or 0] if place < len(groups) - 1 else len(lines)
        text = "\n".join([""] * (_first_line(group[0]) - 1) + list(lines[_first_line(group[0]) - 1 : last]))
        binds, now, later = names_of(text, postponed)
        star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in group)
        changes = binds & (_changed(group) - _given(group))
        yield Unit(cell, first, last, tuple(group), binds, now, later, star, changes)
        first = last + 1


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def names_of(source: str, postponed: bool = False) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names that code binds, reads when it runs, and reads when its functions are called.

    Annotations that are not evaluated (`postponed`, and all from Python 3.14 on) count for nothing.

    Example:
        >>> binds, now, later = names_of("def f(x=a): return x + b")
        >>> sorted(binds), sorted(now), sorted(later)
        (['f'], ['a'], ['b'])
    """
    binds: set[str] = set()
    now: set[str] = set()
    later: set[str] = set()

    def visit(table: symtable.SymbolTable, deferred: bool) -> None:
        kind = table.get_type()
        inner = str(getattr(kind, "value", kind))
        if inner == "annotation":
            return
        if inner not in ("module", "class", "function"):  # scopes of type parameters, Python 3.12
            deferred = True
        elif inner == "function" and table.get_name() not in ("listcomp", "setcomp", "dictcomp", "genexpr"):
            deferred = True
        for symbol in table.get_symbols():
            name = symbol.get_name()
            if inner == "module":
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    binds.add(name)
                if symbol.is_referenced():
                    now.add(name)
            elif symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    binds.add(name)
                if symbol.is_referenced():
                    (later if deferred else now).add(name)
        for child in table.get_children():
            visit(child, deferred)

    first = "from __future__ import annotations\n" if postponed else ""
    visit(symtable.symtable(f"{first}{source}\n\n", "cell", "exec"), False)
    if postponed and "annotations" not in words(source):
        binds.discard("annotations")
    tree = ast.parse(source + "\n\n")
    now |= _changed([tree], functions=False)
    later |= {name for name in _changed([tree]) & binds if name not in now}
    for private in [name for name in binds | now | later if name.startswith(".")]:  # comprehension arguments
        for group in (binds, now, later):
            group.discard(private)
    return frozenset(binds), frozenset(now), frozenset(later)


def _changed(nodes: Sequence[ast.AST], *, functions: bool = True) -> set[str]:
    """Names that `x += 1` and `del x` need a value of, which to symtable they only bind; in functions too, or not."""
    found = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            found.add(node.id)
        if functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


def _given(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that something in the statements gives a value to without needing the old one."""
    parts = [part for top in nodes for part in ast.walk(top)]
    changed = {id(part.target) for part in parts if isinstance(part, ast.AugAssign)}
    found = set()
    for part in parts:
        if isinstance(part, ast.Name):
            if isinstance(part.ctx, ast.Store) and id(part) not in changed:
                found.add(part.id)
        elif isinstance(part, ast.alias):
            found.add(part.asname or part.name.split(".")[0])
        else:  # def, class, except ... as, case ... as
            found.add(getattr(part, "name", None) or getattr(part, "rest", None) or "")
    return found


def _logical_ends(source: str) -> dict[int, int]:
    """The last line of the logical line that each line belongs to: a backslash joins the next one, an empty one too."""
    ends: dict[int, int] = {}
    first = 1
    for token in _tokens(source):
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER):
            ends |= dict.fromkeys(range(first, token.start[0] + 1), token.start[0])
            first = token.start[0] + 1
    return ends


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    yield from tokenize.generate_tokens(io.StringIO(source + "\n\n").readline)


def _inside_strings(source: str) -> frozenset[int]:
    """Lines that begin inside a string: indenting them would change it."""
    found: set[int] = set()
    opened: list[int] = []
    for token in _tokens(source):
        name = tokenize.tok_name[token.type]
        if name == "STRING":
            found.update(range(token.start[0] + 1, token.end[0] + 1))
        elif name in ("FSTRING_START", "TSTRING_START"):
            opened.append(token.start[0])
        elif name in ("FSTRING_END", "TSTRING_END"):
            found.update(range(opened.pop() + 1, token.end[0] + 1))
    return frozenset(found)


def _allowed(source: str) -> dict[int, frozenset[str]]:
    """Warnings that a comment `# rlkit: ok W203` silences, by line."""
    found = {}
    for token in _tokens(source):
        if token.type == tokenize.COMMENT and "rlkit: ok" in token.string:
            codes = token.string.split("rlkit: ok", 1)[1].replace(",", " ").split()
            found[token.start[0]] = frozenset(codes)
    return found
