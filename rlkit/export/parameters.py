"""The parameters cell: literal assignments, read from the syntax tree, with the comments behind them as help."""

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlkit.export.analysis import CodeCell, Program
from rlkit.export.problems import Problem
from rlkit.export.runtime.flags import RESERVED, all_flags, run_flags
from rlkit.export.runtime.kinds import accept, kind_of, normalise

TYPES = "bool, int, float, str, list, dict, tuple, set, Literal[...], or one of them `| None`"
COMPUTE = "Compute it in the next cell, from a parameter."


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
    """Read the parameters of a notebook; E104 to E106 for what no flag can be made of."""
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
    comments = _comments("\n".join(cell.lines))
    declared: dict[str, Declared] = {}
    problems = []
    for unit in cell.units:
        for node in unit.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass) or (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ):
                continue
            one = _declare(node, cell.number, comments.get(node.end_lineno or 0) or comments.get(node.lineno, ""))
            if isinstance(one, Declared) and one.name in declared:
                one = Problem("E106", cell.number, node.lineno, f"{one.name!r} is given a value twice.", "Keep one.")
            if isinstance(one, Problem):
                problems.append(one)
            else:
                declared[one.name] = one
    return list(declared.values()), problems


def _declare(node: ast.stmt, cell: int, text: str) -> Declared | Problem:
    def problem(code: str, reason: str, fix: str) -> Problem:
        return Problem(code, cell, node.lineno, reason, fix)

    shown = ast.unparse(node).split("\n")[0][:60]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        target, value, annotation = node.target, node.value, node.annotation
        if value is None:
            return problem("E106", f"`{shown}` has a type but no value.", f"Write `{shown} = ...` with a default.")
    elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        target, value, annotation = node.targets[0], node.value, None
    else:
        return problem(
            "E104", f"`{shown}` is no `name = literal`.", "One parameter a line; code goes into the next cell."
        )
    name = target.id
    if name in RESERVED:
        return problem("E105", f"the script has a flag {name!r} of its own.", "Give the parameter another name.")
    try:
        default = _literal(value)
    except ValueError:
        return problem("E104", f"the default of {name!r} is no literal: `{shown}`.", COMPUTE)
    kind = normalise(annotation) if annotation is not None else kind_of(default)
    if kind is None and (annotation is not None or default is not None):
        written = ast.unparse(annotation) if annotation is not None else type(default).__name__
        reason = f"no flag can have the type `{written}` of {name!r}."
        return problem("E104", reason, f"Use {TYPES}.")
    if kind is None:
        return problem("E104", f"{name!r} has no type: the default says none.", f"Write `{name}: int | None = None`.")
    try:
        accept(default, kind)
    except ValueError as error:
        return problem("E104", f"the default of {name!r} does not fit its type: {error}.", "Mend one of them.")
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
    except (ArithmeticError, TypeError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _comments(source: str) -> dict[int, str]:
    """The comment behind the code of each line; without the marks of other tools (`@param` of Colab)."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            text = token.string.lstrip("#").strip()
            if not text.startswith(("@", "rlkit:", "noqa", "type:")):
                found[token.start[0]] = text
    return found
