"""The tests of a row, in the forms that datasets have, as cases that `code_runner` understands.

- Python that raises if something is wrong: one text, or a list of them (MBPP: `test_list` with `test_setup_code`);
- functions that do so: `check(candidate)` with the column `entry_point` (HumanEval), `test_*()` (KodCode; `from
  solution import f` works), methods `test_*` of a class, `unittest.TestCase`. They are called;
- inputs and outputs: `{"inputs": [...], "outputs": [...]}`, as a dict or in JSON (APPS, TACO), `"input"` and `"output"`
  (CodeContests), or a list of such (LiveCodeBench). With `fn_name` they are arguments and what is returned, without it
  standard input and output.

Python that cannot fail would pay for every completion, so it is an error: `stub_job` runs it once with stubs in place
of the code, and `settle` reads the result. What can fail may still be skipped by a completion (`for x in solve():
assert ...`). So a call that counts is inserted before each check (an assert, a `raise` under a condition, a call such
as `np.testing.assert_equal` or `self.assertTrue`), and a test that reached none has not passed.
"""

import ast
import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.rewards.code_runner import CHECKED

Case = dict[str, Any]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CHECKING = re.compile("assert|check|ensure|expect|fail|raises|verify|warns", re.IGNORECASE)
_ENDS = ("exit", "quit", "fail")  # sys.exit, pytest.fail, self.fail
_DROPS, _PREPARES = "drops", "prepares"  # of `code_stubs.findings`
ADVICE = (
    "Expected Python that raises if something is wrong (`assert add(1, 2) == 3`), functions `test_*()`, "
    "`check(candidate)` with the function's name in a column `entry_point`, or inputs and outputs as in APPS."
)


def cases_of(tests: Any, *, entry: str | None = None, setup: str = "") -> tuple[str, list[Case]]:
    r"""Read the tests of a row.

    Args:
        tests: in one of the forms above; None, "" and [] mean that the row has none.
        entry: name of the function that is tested, for `check(candidate)` and for inputs that are arguments.
        setup: Python to run before the tests.

    Returns:
        Python to run before the tests, and the tests: {"source"}, {"stdin", "stdout"} or {"call", "arguments",
        "returns"}.

    Raises:
        TypeError, ValueError: they have no known form, or are not Python.

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


def stub_job(setup: str, sources: Sequence[str]) -> dict[str, Any]:
    """The job that runs tests with stubs in place of the code; `settle` reads what passes of it."""
    code = Path(__file__).with_name("code_stubs.py").read_text(encoding="utf-8")
    code += f"\nfinding = findings({setup!r}, {list(sources)!r}, {CHECKED!r}).__getitem__"
    tests = [
        {"call": "finding", "arguments": [place], "returns": kind}
        for kind in (_DROPS, _PREPARES)
        for place in range(len(sources))
    ]
    return {"before": "", "code": code, "after": "", "tests": tests}


def settle(setup: str, sources: Sequence[str], passed: Sequence[bool]) -> tuple[str, list[Case]]:
    """Python to run before the tests, and the tests that can fail.

    Args:
        setup, sources: as `cases_of` gave them.
        passed: which tests of `stub_job` passed. All False where its process was ended: then every test can fail.

    Raises:
        ValueError: a test uses the code and checks nothing, or no test is left.
    """
    prepared, cases = [setup], []
    for source, drops, prepares in zip(sources, passed[: len(sources)], passed[len(sources) :], strict=True):
        marked = f"{CHECKED}()" in source
        if drops and not marked:
            raise ValueError(f"a test checks nothing when it is run: {source!r:.120}. {ADVICE}")
        if drops or prepares:
            prepared.append(source)
        else:
            cases.append({"source": source if marked else f"{source}\n{CHECKED}()"})
    if not cases:
        shown = re.sub(rf" *{CHECKED}\(\)\n", "", sources[0])
        raise ValueError(f"the tests cannot fail, whatever the code does: {shown!r:.120}. {ADVICE}")
    return "\n".join(prepared), cases


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
            f"inputs and outputs that are not text need the function that takes them: a key `fn_name` or a column "
            f"`entry_point`. Got {given!r:.60} and {wanted!r:.60}."
        )
    return {"stdin": "\n".join(lines[0]), "stdout": "\n".join(lines[1])}


@functools.lru_cache(maxsize=4096)  # the completions of a prompt have the same tests
def _counted(sources: tuple[str, ...], setup: str, entry: str | None) -> tuple[str, tuple[str, ...]]:
    """Setup and tests with their checks counted, and calls of what is defined and not used."""
    before, trees = _parsed(setup), [_parsed(source) for source in sources]
    used = [(node, _names(node)) for tree in (before, *trees) for node in tree.body]

    def calls(tree: ast.Module) -> list[str]:
        defined = [node for node in tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef))]
        left = [node for node in defined if not any(node.name in names for other, names in used if other is not node)]
        return [call for node in left if (call := _call(node, entry))]

    return _marked(before), tuple("\n".join([_marked(tree), *calls(tree)]) for tree in trees)


def _parsed(source: str) -> ast.Module:
    """The syntax tree, without what only runs in the main module."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "invalid escape sequence" is the dataset's
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is not Python ({error}): {source!r:.120}. {ADVICE}") from None
    tree.body = [node for node in tree.body if not _is_main(node)]
    return tree


def _is_main(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == ...` or `unittest.main()`, which looks for tests in the main module."""
    if isinstance(node, ast.If):
        return "__name__" in _names(node.test)
    return isinstance(node, ast.Expr) and _called(node.value) in ("unittest.main", "pytest.main")


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _call(node: ast.stmt, entry: str | None) -> str:
    """Python that calls a test function or class; "" if it is not a test, or needs other arguments."""
    if isinstance(node, ast.ClassDef):
        if not any(_dotted(base).endswith("TestCase") for base in node.bases):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            plain = [one.name for one in methods if _needed(one) <= 1]
            tests = [one for one in methods if one.name.startswith("test")]
            setup = "".join(f"_t.{name}()\n" for name in ("setup_method", "setup") if name in plain)
            return "\n".join(f"_t = {node.name}()\n{setup}_t.{one.name}()" for one in tests if _needed(one) <= 1)
        suite = f"unittest.defaultTestLoader.loadTestsFromTestCase({node.name})"
        return f"import unittest\nassert not ({suite}.run(_r := unittest.TestResult()) and _r.errors + _r.failures)"
    assert isinstance(node, _FUNCTIONS)
    if node.name == "check" and _needed(node) == 1 and entry:
        call = f"check({entry})"
    elif node.name.startswith("test") and _needed(node) == 0:
        call = f"{node.name}()"
    else:
        return ""
    return call if isinstance(node, ast.FunctionDef) else f"import asyncio\nasyncio.run({call})"


def _needed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of required arguments."""
    return len(node.args.posonlyargs + node.args.args) - len(node.args.defaults) + node.args.kw_defaults.count(None)


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _called(node: ast.expr | None) -> str:
    """Name of the called function; "" for a node that is not a call."""
    return _dotted(node.func) if isinstance(node, ast.Call) else ""


def _marked(tree: ast.Module) -> str:
    """Python with a call that counts before each statement that fails if the code is wrong."""
    for node in list(ast.walk(tree)):
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                body[:] = [
                    new
                    for old in body
                    for new in ((ast.parse(f"{CHECKED}()").body[0], old) if _checks(old) else (old,))
                ]
    return ast.unparse(ast.fix_missing_locations(tree))


def _checks(node: ast.stmt) -> bool:
    """Whether it is an assert, a call whose name says that it checks, or a condition under which something raises."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    if isinstance(node, (ast.If, ast.Try, ast.Match)):
        return any(map(_raises, ast.walk(node)))
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(_CHECKING.search(_called(item.context_expr)) for item in node.items)
    value = node.value if isinstance(node, ast.Expr) else None
    return bool(_CHECKING.search(_called(value.value if isinstance(value, ast.Await) else value)))


def _raises(node: ast.AST) -> bool:
    """Whether it is `raise`, `assert False` or a call such as `sys.exit()`."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _called(node).split(".")[-1] in _ENDS)
