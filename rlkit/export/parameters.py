"""The parameters cell: literal assignments, read from the syntax tree, with the comments behind them as help."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlkit.export.analysis import CodeCell, Program
from rlkit.export.problems import Problem
from rlkit.export.runtime.flags import RESERVED, all_flags, run_flags
from rlkit.export.runtime.kinds import accept, kind_of, normalise


@dataclass(frozen=True)
class Declared:
    """A parameter as declared: name, kind, help and line in its cell."""

    name: str
    kind: str
    help: str
    line: int


@dataclass(frozen=True)
class Parameters:
    """The parameters of a notebook, their cell's number (None without such a cell), and what is wrong with them."""

    declared: tuple[Declared, ...]
    cell: int | None
    problems: tuple[Problem, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters."""
        return frozenset(one.name for one in self.declared)


def read_parameters(program: Program) -> Parameters:
    """Read the parameters of a notebook; E104 to E106 for statements of which no flag can be made."""
    tagged = [cell for cell in program.cells if "parameters" in cell.cell.roles]
    problems = [
        Problem("E106", cell.number, 0, "a second parameters cell.", f"Move it into cell {tagged[0].number}.")
        for cell in tagged[1:]
    ]
    for cell in program.notebook.cells:
        if "injected-parameters" in cell.roles:
            fix = "Export the notebook that papermill was given."
            problems.append(Problem("E106", cell.number, 0, "papermill wrote this cell (injected-parameters).", fix))
    if not tagged:
        return Parameters((), None, tuple(problems))
    declared, found = _read_cell(tagged[0])
    problems += [*found, *_clashes(declared, tagged[0].number)]
    return Parameters(tuple(declared), tagged[0].number, tuple(problems))


def _clashes(declared: Sequence[Declared], cell: int) -> Iterator[Problem]:
    """E105: `cache = True` has the flag --no-cache, and so has `no_cache = 3`."""
    names = {one.name for one in declared}
    taken = {flag: own.name for own in run_flags() if own.name not in names for flag in all_flags(own.name, own.kind)}
    for one in declared:
        for flag in all_flags(one.name, one.kind):
            other = taken.setdefault(flag, one.name)
            if other != one.name:
                reason = f"{other!r} and {one.name!r} would both have the flag {flag}."
                yield Problem("E105", cell, one.line, reason, "Give the parameter another name.")
                break


def _read_cell(cell: CodeCell) -> tuple[list[Declared], list[Problem]]:
    source = "\n".join(cell.lines)
    comments = {
        line: text
        for line, written in cell.layout.comments.items()
        if not cell.lines[line - 1].lstrip().startswith("#")  # it stands behind code
        and not (text := written.lstrip("#").strip()).startswith(("@", "rlkit:", "noqa", "type:"))  # of other tools
    }
    declared: dict[str, Declared] = {}
    problems = []
    for node in (node for unit in cell.units for node in unit.nodes):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
            continue
        try:
            one = _declare(node, source, comments.get(node.end_lineno or 0) or comments.get(node.lineno, ""))
            if one.name in declared:
                raise _NoFlagError("E106", f"{one.name!r} is given a value twice.", "Keep one.")
            declared[one.name] = one
        except _NoFlagError as error:
            problems.append(Problem(error.code, cell.number, node.lineno, error.reason, error.fix))
    return list(declared.values()), problems


class _NoFlagError(Exception):
    """No flag can be made of a statement."""

    def __init__(self, code: str, reason: str, fix: str) -> None:
        self.code, self.reason, self.fix = code, reason, fix


def _declare(node: ast.stmt, source: str, text: str) -> Declared:
    shown = (ast.get_source_segment(source, node) or "").split("\n")[0][:60]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    target, value, annotation = targets[0], getattr(node, "value", None), getattr(node, "annotation", None)
    if not isinstance(node, ast.Assign | ast.AnnAssign) or len(targets) > 1 or not isinstance(target, ast.Name):
        fix = "One parameter a line; code goes into the next cell."
        raise _NoFlagError("E104", f"`{shown}` is not `name = literal`.", fix)
    name = target.id
    if value is None:
        raise _NoFlagError("E106", f"`{shown}` has a type but no value.", f"Write `{shown} = ...` with a default.")
    if name in RESERVED:
        raise _NoFlagError("E105", f"the script has a flag {name!r} of its own.", "Give the parameter another name.")
    try:
        default = _literal(value)
    except ValueError:
        fix = "Compute it in the next cell, from a parameter."
        raise _NoFlagError("E104", f"the default of {name!r} is not a literal: `{shown}`.", fix) from None
    kind = normalise(annotation) if annotation is not None else kind_of(default)
    if kind is None and annotation is None and default is None:
        fix = f"Write `{name}: int | None = None`."
        raise _NoFlagError("E104", f"{name!r} has no type: the default does not tell it.", fix)
    if kind is None:
        written = ast.unparse(annotation) if annotation is not None else type(default).__name__
        fix = "Use bool, int, float, str, list, dict, tuple, set, Literal[...], or one of them `| None`."
        raise _NoFlagError("E104", f"no flag can have the type `{written}` of {name!r}.", fix)
    try:
        accept(default, kind)
    except ValueError as error:
        reason = f"the default of {name!r} does not fit its type: {error}."
        raise _NoFlagError("E104", reason, "Correct one of them.") from error
    return Declared(name, kind, text, node.lineno)


def _literal(node: ast.expr) -> object:
    """A literal, or arithmetic of numbers such as `64 * 8`."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        allowed = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
        if not all(isinstance(part, allowed) for part in ast.walk(node)) or any(
            isinstance(part, ast.Constant) and type(part.value) not in (int, float) for part in ast.walk(node)
        ):
            raise ValueError("not a literal") from None
    try:
        return eval(compile(ast.Expression(node), "default", "eval"), {"__builtins__": {}})
    except (ArithmeticError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error
