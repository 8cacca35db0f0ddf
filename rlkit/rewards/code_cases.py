"""The tests of a row, in the forms that datasets have, as cases that `code_runner` understands.

- Python that raises if something is wrong: one text, or a list of them (MBPP: `test_list` with `test_setup_code`);
- functions that do so: `check(candidate)` with the column `entry_point` (HumanEval), `test_*()` (KodCode; `from
  solution import f` works), methods `test_*` of a class, `unittest.TestCase`. They are called;
- inputs and outputs: `{"inputs": [...], "outputs": [...]}`, as a dict or in JSON (APPS, TACO), `"input"` and `"output"`
  (CodeContests), or a list of such (LiveCodeBench). With `fn_name` they are arguments and what is returned, without it
  standard input and output.

Python that checks nothing would pay for every completion, so it is an error. Before each check (an assert, a `raise`
under a condition, a call such as `np.testing.assert_equal` or `self.assertTrue`) a call is inserted that counts it: a
test that reached none has not passed. What stands after a `return`, under `if False`, in a test that unittest skips, or
asserts what does not depend on the code (`1 == 1`, `x == x`, names that the tests bind themselves), is no check. Not
seen: a check that cannot fail for another reason (`assert f(2) or not f(2)`).
"""

import ast
import builtins
import functools
import json
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from rlkit.rewards.code_runner import CHECKED

Case = dict[str, Any]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CHECKING = re.compile("assert|check|ensure|expect|fail|raises|verify|warns", re.IGNORECASE)
_ENDS = ("exit", "quit", "fail")  # sys.exit, pytest.fail, self.fail
_CATCHES_ALL = ("AssertionError", "Exception")
_HOOKS = ("setUp", "tearDown", "asyncSetUp", "asyncTearDown", "runTest", "setup")  # and setUpClass, setup_method
_NOT_RUN = ("skip", "expectedFailure")
_INDIRECT = {"eval", "exec", "globals", "locals", "vars", "__import__", "compile"}  # any name may come from there
_SETUP = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
ADVICE = (
    "Expected Python that raises if something is wrong (`assert add(1, 2) == 3`), functions `test_*()`, "
    "`check(candidate)` with the function's name in a column `entry_point`, or inputs and outputs as in APPS."
)


def cases_of(tests: Any, *, entry: str | None = None, setup: str = "") -> tuple[str, list[Case]]:
    r"""Read the tests of a row.

    Args:
        tests: in one of the forms above; None, "" and [] are no tests.
        entry: name of the function that is tested, for `check(candidate)` and for inputs that are arguments.
        setup: Python to run before the tests.

    Returns:
        Python to run before the tests, and the tests: {"source"}, {"stdin", "stdout"} or {"call", "arguments",
        "returns"}.

    Raises:
        TypeError, ValueError: they are of no known form, are no Python, or check nothing.

    Example:
        >>> cases_of('{"inputs": ["2"], "outputs": ["4"]}')
        ('', [{'stdin': '2', 'stdout': '4'}])
    """
    tests = _plain(tests)
    if isinstance(tests, str):
        tests = _data(tests)
    if isinstance(tests, Mapping):
        tests = [tests]
    items = [item for item in ([tests] if isinstance(tests, str) else tests or []) if item is not None]
    pairs = [item for item in items if isinstance(item, Mapping)]
    if items and len(pairs) == len(items):
        return setup, [case for item in pairs for case in _pairs(item, entry)]
    if not all(isinstance(item, str) for item in items):
        raise TypeError(f"expected tests as one text or a list of texts, got {tests!r:.80}. {ADVICE}")
    sources = tuple(item for item in items if item.strip())
    if not sources:
        return setup, []
    setup, counted = _counted(sources, setup, entry)
    return setup, [{"source": source} for source in counted]


def _plain(value: Any) -> Any:
    """A list where pandas gives an array."""
    return value.tolist() if hasattr(value, "tolist") else value


def _data(text: str) -> Any:
    """Data that stands in a text, as JSON or as Python writes it; the text itself where it is code."""
    if text.lstrip()[:1] in ("{", "["):
        for read in (json.loads, ast.literal_eval):
            try:
                found = read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(found, (dict, list)):
                return found
    return text


def _pairs(item: Mapping[str, Any], entry: str | None) -> Iterable[Case]:
    """The cases of one mapping with inputs and outputs."""
    name = item.get("fn_name") or item.get("func_name") or entry
    for given, wanted in (("inputs", "outputs"), ("input", "output")):
        if item.get(given) is None or item.get(wanted) is None:
            continue
        inputs, outputs = _plain(item[given]), _plain(item[wanted])
        if isinstance(inputs, str) and isinstance(outputs, str):
            inputs, outputs = [inputs], [outputs]
        if isinstance(inputs, str) or isinstance(outputs, str) or len(inputs) != len(outputs):
            raise ValueError(f"expected as many {given} as {wanted}, got {inputs!r:.60} and {outputs!r:.60}.")
        return [_pair(one, other, name) for one, other in zip(inputs, outputs, strict=True)]
    raise ValueError(f"expected a mapping with inputs and outputs, got {dict(item)!r:.80}. {ADVICE}")


def _pair(given: Any, wanted: Any, name: str | None) -> Case:
    if name:
        if isinstance(given, str) and isinstance(wanted, str):  # LiveCodeBench: JSON, one argument a line
            try:
                given, wanted = [json.loads(line) for line in given.strip().splitlines()], json.loads(wanted)
            except ValueError:
                given = [given]
        return {"call": name, "arguments": given if isinstance(given, list) else [given], "returns": wanted}
    lines = [[one] if isinstance(one, str) else one for one in (given, wanted)]  # APPS has texts, and lists of lines
    if not all(isinstance(one, list) and all(isinstance(line, str) for line in one) for one in lines):
        raise ValueError(
            f"inputs and outputs that are no texts need the function that takes them: a key `fn_name` or a column "
            f"`entry_point`. Got {given!r:.60} and {wanted!r:.60}."
        )
    return {"stdin": "\n".join(lines[0]), "stdout": "\n".join(lines[1])}


@functools.lru_cache(maxsize=4096)  # the completions of a prompt have the same tests
def _counted(sources: tuple[str, ...], setup: str, entry: str | None) -> tuple[str, tuple[str, ...]]:
    """Setup and tests with their checks counted, and calls of what is defined and never called."""
    before, trees = _parsed(setup), [_parsed(source) for source in sources]
    defined = {
        node.name: node
        for tree in (before, *trees)
        for node in ast.walk(tree)
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef))
    }
    marker = _Marker(_imported([before, *trees]))
    for tree in (before, *trees):
        marker.visit(tree)
    called = set().union(*(_reached(tree.body, defined) for tree in trees))
    prepared, tests = [before], []
    for source, tree in zip(sources, trees, strict=True):
        for node in list(tree.body):
            if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Compare, ast.BoolOp)):
                raise ValueError(f"a test compares and drops the result, write `assert {ast.unparse(node)}`. {ADVICE}")
            if isinstance(node, ast.Expr) and _called(node.value) in ("unittest.main", "pytest.main"):
                tree.body.remove(node)  # they look for tests in the main module
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name not in called:
                tree.body += ast.parse(_call(node, entry)).body
        if CHECKED in _reached(tree.body, defined):
            tests.append(ast.unparse(ast.fix_missing_locations(tree)))
        elif all(_only_prepares(node, marker.imported) for node in tree.body):
            prepared.append(tree)
        else:
            raise ValueError(f"a test checks nothing when it is run: {source!r:.120}. {ADVICE}")
    if tests and not _uses_code([before, *trees]):
        raise ValueError(f"the tests use nothing that the code defines: {sources[0]!r:.120}. {ADVICE}")
    if not tests:
        raise ValueError(f"the tests check nothing when they are run: {sources[0]!r:.120}. {ADVICE}")
    return "\n".join(ast.unparse(ast.fix_missing_locations(tree)) for tree in prepared), tuple(tests)


def _parsed(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "invalid escape sequence" is the dataset's
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is no Python ({error}): {source!r:.120}. {ADVICE}") from None


def _call(node: ast.stmt, entry: str | None) -> str:
    """The call of a test that is only defined; nothing for what is no test, or asks for more."""
    if isinstance(node, ast.ClassDef):
        if not any(_dotted(base).endswith("TestCase") for base in node.bases):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            plain = [one.name for one in methods if _needed(one) <= 1]
            tests = [one for one in methods if one.name.startswith("test")]
            setup = "".join(f"_t.{name}()\n" for name in ("setup_method", "setup") if name in plain)
            return "\n".join(f"_t = {node.name}()\n{setup}_t.{one.name}()" for one in tests if _needed(one) <= 1)
        suite = f"unittest.defaultTestLoader.loadTestsFromTestCase({node.name})"
        return f"import unittest\nassert {suite}.run(_r := unittest.TestResult()) and _r.wasSuccessful()"
    assert isinstance(node, _FUNCTIONS)
    if node.name == "check" and _needed(node) == 1 and entry:
        call = f"check({entry})"
    elif node.name.startswith("test") and _needed(node) == 0:
        call = f"{node.name}()"
    else:
        return ""
    return call if isinstance(node, ast.FunctionDef) else f"import asyncio\nasyncio.run({call})"


def _needed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a call must give."""
    return len(node.args.posonlyargs + node.args.args) - len(node.args.defaults) + node.args.kw_defaults.count(None)


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _called(node: ast.expr | None) -> str:
    """Name of what a call calls; nothing where it is no call."""
    return _dotted(node.func) if isinstance(node, ast.Call) else ""


def _imported(trees: list[ast.Module]) -> set[str]:
    """Names that the tests import, and `self`."""
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {"self"}.union((name.asname or name.name.split(".")[0]) for node in imports for name in node.names)


def _uses_code(trees: list[ast.Module]) -> bool:
    """Whether a name may come from the code: one that the tests neither bind nor import from Python's own library."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    if _INDIRECT & used or any(module.split(".")[0] not in sys.stdlib_module_names for module in modules):
        return True
    if {module.split(".")[0] for module in modules} & {"importlib", "inspect", "os", "runpy", "subprocess", "sys"}:
        return True
    return bool(used - bound - _imported(trees) - set(dir(builtins)) - {CHECKED, "__name__", "__file__"})


def _only_prepares(node: ast.stmt, imported: set[str]) -> bool:
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            return _called(node.value).split(".")[0] in imported
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, _SETUP)


def _inner(node: ast.AST) -> Iterable[ast.AST]:
    """What runs when a statement runs: not the bodies of definitions, nor what stands under `__name__ == ...`."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return node.decorator_list
    if isinstance(node, ast.If) and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test)):
        return _live(node.orelse)
    if isinstance(node, (ast.If, ast.While)) and _always_false(node.test):
        return _live(node.orelse)
    if isinstance(node, ast.If) and _always_true(node.test):
        return _live(node.body)
    if isinstance(node, ast.For) and isinstance(node.iter, (ast.List, ast.Tuple)) and not node.iter.elts:
        return _live(node.orelse)
    if isinstance(node, ast.Try) and _swallows(node):
        return [*node.handlers, *_live(node.orelse), *_live(node.finalbody)]
    if isinstance(node, ast.With) and any("suppress" in _called(item.context_expr) for item in node.items):
        return []
    return [
        inner
        for _, value in ast.iter_fields(node)
        for inner in (_live(value) if isinstance(value, list) else [value])
        if isinstance(inner, ast.AST)
    ]


def _live(body: list[Any]) -> list[Any]:
    """The statements that can be reached: none after a `return`, `raise`, `break` or `continue`."""
    ends = (ast.Return, ast.Raise, ast.Break, ast.Continue)
    end = next((place for place, node in enumerate(body) if isinstance(node, ends)), len(body))
    return body[: end + 1]


def _run(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    todo = list(nodes)
    while todo:
        yield (node := todo.pop())
        todo += _inner(node)


def _reached(body: list[ast.stmt], defined: Mapping[str, ast.AST]) -> set[str]:
    """Names that are used when these statements run, in the functions that they call too."""
    found: set[str] = set()
    todo: list[ast.AST] = _live(body)
    while todo:
        nodes, todo = todo, []
        for node in _run(nodes):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if name and name not in found:
                found.add(name)
                if name in defined:
                    todo += _everything(defined[name])
    return found


def _everything(node: ast.AST) -> list[ast.stmt]:
    """The body of a function, or of the methods of a class that run without being named."""
    body: list[ast.stmt] = getattr(node, "body", [])
    if not isinstance(node, ast.ClassDef):
        return [] if _is_skipped(node) else _live(body)
    methods = [one for one in body if not isinstance(one, _FUNCTIONS) or one.name.startswith(("test", "__", *_HOOKS))]
    return [inner for one in methods if not _is_skipped(node, one) for inner in _live(getattr(one, "body", []))]


def _is_skipped(*nodes: ast.AST) -> bool:
    """Whether unittest leaves it out, or pays for its failure."""
    marks = [mark for node in nodes for mark in getattr(node, "decorator_list", [])]
    names = [_called(mark) or _dotted(mark) for mark in marks]
    return any(not name.startswith("pytest.") and name.split(".")[-1] in _NOT_RUN for name in names)


def _swallows(node: ast.Try) -> bool:
    """Whether a failed assert of the body is caught, and goes unnoticed."""
    if any(isinstance(one, (ast.Return, ast.Break, ast.Continue)) for one in node.finalbody):
        return True
    return any(
        not _ends(handler) and (handler.type is None or any(name in ast.unparse(handler.type) for name in _CATCHES_ALL))
        for handler in node.handlers
    )


def _ends(node: ast.AST) -> bool:
    """Whether there is a way on which it raises or ends the process."""
    return any(
        isinstance(one, ast.Raise)
        or (isinstance(one, ast.Assert) and _always_false(one.test))
        or (isinstance(one, ast.Call) and _called(one).split(".")[-1] in _ENDS)
        for one in _run([node])
    )


class _Marker(ast.NodeTransformer):
    """Puts the call that counts before each statement that can fail on purpose."""

    def __init__(self, imported: set[str]) -> None:
        self.imported = imported

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Mark the statements of every body in it."""
        super().generic_visit(node)
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                body[:] = [new for old in body for new in ((_mark(), old) if self._checks(old) else (old,))]
        return node

    def _checks(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assert):
            return not _always_true(node.test)
        if isinstance(node, (ast.If, ast.Try, ast.Match)):
            return _ends(node)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return any(self._is_check(item.context_expr) for item in node.items)
        value = node.value if isinstance(node, ast.Expr) else None
        return self._is_check(value.value if isinstance(value, ast.Await) else value)

    def _is_check(self, node: ast.expr | None) -> bool:
        """A call of something imported whose name says that it checks."""
        name = _called(node)
        if not isinstance(node, ast.Call) or name.split(".")[0] not in self.imported or not _CHECKING.search(name):
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return name.split(".")[-1] in _ENDS or not given or not all(map(_is_fixed, given))


def _always_true(node: ast.expr) -> bool:
    """Whether what is asserted cannot be false, whatever the code does: `(solve(2) == 4, "wrong")`, `... or True`."""
    if isinstance(node, ast.Compare):
        return _always_holds(node)
    if isinstance(node, ast.Call) and _called(node) == "isinstance" and len(node.args) == 2:
        return _dotted(node.args[1]) == "object"
    if isinstance(node, ast.Name):
        return node.id == "__debug__"
    if isinstance(node, ast.BoolOp):
        return (any if isinstance(node.op, ast.Or) else all)(map(_always_true, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _always_false(node.operand)
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(part, ast.Constant) for part in node.values)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return bool(node.elts)
    if isinstance(node, ast.Constant):
        return bool(node.value)
    return isinstance(node, (ast.Lambda, ast.GeneratorExp)) or (isinstance(node, ast.Dict) and bool(node.keys))


def _always_false(node: ast.expr) -> bool:
    """Whether it is false whatever the code does: `False`, `0`, `not "reached"`, `not __debug__`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _always_true(node.operand)
    return isinstance(node, ast.Constant) and not node.value


def _always_holds(node: ast.Compare) -> bool:
    """Whether a comparison is one of fixed values, of a thing with itself, or of a length with 0."""
    if _is_fixed(node):
        return True
    if len(node.ops) > 1:
        return False
    left, operator, right = node.left, node.ops[0], node.comparators[0]
    if isinstance(operator, (ast.Eq, ast.Is, ast.LtE, ast.GtE)) and ast.dump(left) == ast.dump(right):
        return True
    return (
        isinstance(operator, ast.GtE)
        and _called(left) == "len"
        and isinstance(right, ast.Constant)
        and right.value == 0
    )


def _is_fixed(node: ast.expr) -> bool:
    """Whether it is made of written values only."""
    return not any(isinstance(one, (ast.Name, ast.Call, ast.Attribute)) for one in ast.walk(node))


def _mark() -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(CHECKED, ast.Load()), [], []))
