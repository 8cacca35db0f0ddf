# ruff: noqa: E501 - a form of tests a line reads as a table
"""Tests of a row: every form pays 1 to right code and 0 to wrong code, or says up front that it checks nothing."""

import json
import logging

import pytest
from builders import make_rollout

import rlkit as rl
from rlkit.rewards import PythonTests, python_tests
from rlkit.rewards.answers import code_of
from rlkit.rewards.code_cases import cases_of

pytestmark = pytest.mark.integration

RIGHT, WRONG = "def solve(x): return 2 * x", "def solve(x): return 0"
READS, READS_WRONG = "print(2 * int(input()))", "input()\nprint(0)"
ASSERT = "assert solve(2) == 4"
FUNCTION = {"inputs": [[2], [-3]], "outputs": [4, -6], "fn_name": "solve"}
STDIN = {"inputs": ["2\n", "-3"], "outputs": ["4\n", "-6"]}

# name: (columns, right code, wrong code). The right value is known by hand: 2 * 2 = 4.
FORMS = {
    "an assert": ({"tests": ASSERT}, RIGHT, WRONG),
    "a list, with an import among it": ({"tests": ["import math", f"{ASSERT} * math.pi / math.pi"]}, RIGHT, WRONG),
    "a list in JSON": ({"tests": json.dumps([ASSERT])}, RIGHT, WRONG),
    "a raise": ({"tests": "if solve(2) != 4:\n    raise ValueError('no')"}, RIGHT, WRONG),
    "assert False where it must not come": (
        {"tests": "try:\n    solve(-1)\n    assert False, 'no error'\nexcept ValueError:\n    pass"},
        "def solve(x): raise ValueError",
        RIGHT,
    ),
    "assert False under a condition": ({"tests": "if solve(2) != 4:\n    assert False"}, RIGHT, WRONG),
    "a method that a test calls": (
        {"tests": f"import unittest\nclass T(unittest.TestCase):\n    def check_it(self):\n        {ASSERT}\n    def test_a(self): self.check_it()"},
        RIGHT,
        WRONG,
    ),
    "an exit": ({"tests": "import sys\nif solve(2) != 4: sys.exit(1)"}, RIGHT, WRONG),
    "numpy": ({"tests": "import numpy as np\nnp.testing.assert_equal(solve(2), 4)"}, RIGHT, WRONG),
    "try, except, else": (
        {"tests": "try:\n    solve(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError"},
        "def solve(x): raise ValueError",
        RIGHT,
    ),
    "a helper": ({"tests": f"def helper():\n    {ASSERT}\nhelper()"}, RIGHT, WRONG),
    "test functions": ({"tests": f"def test_a():\n    {ASSERT}\ndef test_b(n=3):\n    assert solve(n) == 6"}, RIGHT, WRONG),
    "test functions that import": ({"tests": "from solution import solve as s\ndef test():\n    assert s(2) == 4"}, RIGHT, WRONG),
    "an async test function": ({"tests": "async def test_a():\n    assert await solve(2) == 4"}, f"async {RIGHT}", f"async {WRONG}"),
    "a class of tests": ({"tests": "class TestIt:\n    def test_a(self):\n        assert solve(2) == 4"}, RIGHT, WRONG),
    "a class with a setup": ({"tests": "class TestIt:\n    def setup_method(self): self.x = 2\n    def test_a(self):\n        assert solve(self.x) == 4"}, RIGHT, WRONG),
    "a thread": ({"tests": "import threading\ndef f():\n    assert solve(2) == 4\nt = threading.Thread(target=f); t.start(); t.join()"}, RIGHT, WRONG),
    "unittest": (
        {
            "tests": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(solve(2), 4)\n"
            "if __name__ == '__main__':\n    unittest.main()"
        },
        RIGHT,
        WRONG,
    ),
    "unittest that runs itself": (
        {
            "tests": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
            "        with self.assertRaises(ValueError):\n            solve(2)\nunittest.main()"
        },
        "def solve(x): raise ValueError",
        RIGHT,
    ),
    "HumanEval": (
        {"test": "METADATA = {}\ndef check(candidate):\n    assert True\n    assert candidate(2) == 4", "entry_point": "solve"},
        RIGHT,
        WRONG,
    ),
    "HumanEval, called already": ({"test": "def check(c):\n    assert c(2) == 4\ncheck(solve)"}, RIGHT, WRONG),
    "HumanEval of a method": (
        {"test": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "Solution().solve"},
        "class Solution:\n    def solve(self, x): return 2 * x",
        "class Solution:\n    def solve(self, x): return x",
    ),
    "MBPP": (
        {"test_list": ["assert solve(N(2)) == 4"], "test_setup_code": "class N(int): pass", "test_imports": ["import math"]},
        RIGHT,
        WRONG,
    ),
    "APPS with a function": ({"input_output": json.dumps(FUNCTION)}, RIGHT, WRONG),
    "APPS with a method": ({"input_output": FUNCTION}, "class Solution:\n    def solve(self, x): return 2 * x", WRONG),
    "APPS with what is returned in a list": ({"input_output": FUNCTION | {"outputs": [[4], [-6]]}}, RIGHT, WRONG),
    "APPS with a program": ({"input_output": json.dumps(STDIN)}, READS, READS_WRONG),
    "APPS as Python writes it": ({"tests": str(STDIN)}, READS, READS_WRONG),
    "APPS in lines": ({"tests": {"inputs": [["2", "x"]], "outputs": [["4", "x"]]}}, f"{READS}\nprint(input())", READS),
    "from Arrow": ({"tests": STDIN | {"fn_name": None}}, READS, READS_WRONG),
    "CodeContests": ({"tests": {"input": ["2"], "output": ["4"]}}, READS, READS_WRONG),
    "LiveCodeBench": ({"tests": [{"input": "2", "output": "4", "testtype": "stdin"}]}, READS, READS_WRONG),
    "LiveCodeBench with a function": ({"tests": [{"input": "2\n[1]", "output": "[4]"}], "fn_name": "f"},
        "class Solution:\n    def f(self, x, y): return [2 * x]", "def f(x, y): return y"),
    "a program in a function": ({"tests": STDIN}, f"if __name__ == '__main__':\n    {READS}", "print(0)"),
    "a program that reads all": ({"tests": STDIN}, "print(2 * int(open(0).read()))", "print(2)"),
    "a program that reads bytes": ({"tests": STDIN}, "import sys\nsys.stdout.buffer.write(b'%d' % (2 * int(sys.stdin.buffer.read())))", "import sys; sys.exit()"),
    "a program in a thread": ({"tests": STDIN}, f"import threading\nthreading.stack_size(1 << 26)\nthreading.Thread(target=lambda: {READS}).start()", READS_WRONG),
    "a program that exits": ({"tests": STDIN}, f"{READS}\nexit()", f"{READS}\nexit(1)"),
    "an inequality": ({"tests": "assert solve(2) != 0"}, RIGHT, WRONG),
    "a weak assert among others": ({"tests": ["assert callable(solve)", "random = 1", ASSERT]}, RIGHT, WRONG),
    "true or equal": ({"tests": "assert not solve(1) - 2 and (not solve(0) or solve(2) == 4)"}, RIGHT, WRONG),
    "not None": ({"tests": ["assert solve(2) is not None", "assert solve(2) == 4"]}, RIGHT, WRONG),
    "a result of its own": ({"tests": ["result = solve(2)", "assert result == 4"]}, RIGHT, WRONG),
    "tests in the main module": ({"tests": f"def test_a():\n    {ASSERT}\nif __name__ == '__main__':\n    test_a()"}, RIGHT, WRONG),
    "decimals": ({"tests": {"inputs": ["3"], "outputs": ["0.3333333333"]}}, "print(1 / int(input()))", "print(0.3334)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_right_code_passes_and_wrong_code_does_not(name):
    columns, right, wrong = FORMS[name]
    columns = {column: [value] * 3 for column, value in columns.items()}
    assert python_tests([right, wrong, "pass"], **columns) == [1.0, 0.0, 0.0]
    PythonTests().check([{key: values[0] for key, values in columns.items()} | {"prompt": "?"}])


# Whatever the completion does, these could not fail.
NOTHING = {
    "written values": "assert 2 + 2 == 4",
    "a thing and itself": "x = solve(2)\nassert x == x",
    "a call and itself": "assert solve(2) == solve(2)",
    "every object": "assert isinstance(solve(2), object)",
    "a length": "assert len(str(solve(2))) >= 0",
    "a name of its own": "ok = True\nassert ok",
    "a function of its own": f"{RIGHT}\n{ASSERT}",
    "after a return": f"def test_a():\n    return\n    {ASSERT}",
    "under False": f"if False:\n    {ASSERT}",
    "under not __debug__": f"if not __debug__:\n    {ASSERT}",
    "while 0": f"while 0:\n    {ASSERT}",
    "a loop over nothing": f"for x in []:\n    {ASSERT}",
    "assertTrue of True": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertTrue(True)",
    "a skipped test": f"import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('later')\n    def test_a(self):\n        {ASSERT}",
    "an expected failure": f"import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self):\n        {ASSERT}",
    "a method that unittest does not call": f"import unittest\nclass T(unittest.TestCase):\n    def check_it(self):\n        {ASSERT}",
    "a check that nobody calls": "def check(candidate):\n    assert candidate(2) == 4",
    "a function of another name": "def verify():\n    assert solve(2) == 4",
    "a comparison": "solve(2) == 4",
    "a comparison after a helper that can raise": "def ref(x):\n    if x < 0: raise ValueError\n    return 2 * x\nsolve(2) == ref(2)",
    "a call": "solve(2)",
    "a print": "print(solve(2) == 4)",
    "an assignment": "result = solve(2) == 4",
    "a constant": "assert True",
    "a pair": "assert (solve(2) == 4, 'wrong')",
    "nothing": "pass",
    "an import": "import math",
    "text": '"""assert solve(2) == 4"""',
    "a test with a fixture": "def test_it(tmp_path):\n    assert solve(2) == 4",
    "a nested test": "def test_it():\n    def inner():\n        assert solve(2) == 4",
    "an assert whose failure is caught": "try:\n    assert solve(2) == 4\nexcept AssertionError:\n    print('failed')",
    "a call whose failure is caught": "def f():\n    assert solve(2) == 4\ntry:\n    f()\nexcept Exception as e:\n    print(e)",
    "a list that is not empty": "assert [solve(2) == 4]",
    "text that is not empty": "assert f'{solve(2)} == 4'",
    "a function": "assert lambda: solve(2) == 4",
    "a generator": "assert (solve(x) == 2 * x for x in [1, 2])",
    "or True": "assert solve(2) == 4 or True",
    "not None": "assert not None",
    "a failure that is suppressed": "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert solve(2) == 4",
    "a failure that a return replaces": "def f():\n    try:\n        assert solve(2) == 4\n    finally:\n        return\nf()",
    "the main module's": "if __name__ == '__main__':\n    assert solve(2) == 4",
    "a comparison of an attribute": "solve(2).x == 4",
    "a return": "def test_a():\n    return solve(2) == 4",
    "a count": "wrong = 0\nif solve(2) != 4:\n    wrong += 1\nprint(wrong)",
    "a warning": "import warnings\nif solve(2) != 4:\n    warnings.warn('wrong')",
    "a list of comparisons": "[solve(x) == 2 * x for x in range(3)]",
    "doctest": ">>> solve(2)\n4",
    "no Python": "solve(2) should be 4",
    "a mapping": {"solve": 4},
    "a mapping in JSON": '{"a": 1}',
    "inputs without outputs": {"inputs": ["2"]},
    "more inputs than outputs": {"inputs": ["2", "3"], "outputs": ["4"]},
    "inputs of no known function": {"inputs": [[2]], "outputs": [4]},
    "one of several": ["assert solve(2) == 4", "solve(3) == 6"],
}


@pytest.mark.parametrize("name", NOTHING)
def test_tests_that_check_nothing_are_an_error_before_any_code_runs(name, monkeypatch):
    monkeypatch.setattr(PythonTests, "_reward", None)
    with pytest.raises(ValueError, match=r"^PythonTests: row 1, column 'tests': (?s:.*)Expected|entry_point|as many"):
        python_tests([WRONG] * 2, tests=[ASSERT, NOTHING[name]])
    with pytest.raises(ValueError, match="PythonTests: row 1, column 'tests'"):
        python_tests.check([{"tests": ASSERT}, {"tests": NOTHING[name]}])


def test_what_can_fail_is_no_error():
    tests = ["assert solve(2) is not None", "assert abs(solve(2) - 4) < 1e-6", "assert len(solve(2)) <= 5"]
    assert python_tests(["pass"] * 3, tests=tests) == [0.0] * 3
    forever = "while solve(2): pass\nassert False"
    assert PythonTests(timeout=1)(["def solve(x): return 0"], tests=[forever]) == [0.0]


def test_a_test_that_reaches_no_check_has_not_passed(caplog):
    loop = "for x, wanted in zip(solve([1, 2]), [2, 4]):\n    assert x == wanted"
    right = "def solve(xs): return [2 * x for x in xs]"
    assert python_tests([right, "def solve(xs): return []"], tests=[loop] * 2) == [1.0, 0.0]
    skipped = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        if solve(2): self.assertEqual(solve(2), 4)"
    assert python_tests([RIGHT, WRONG], tests=[skipped] * 2) == [1.0, 0.0]
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        assert python_tests([RIGHT] * 2, tests=["if not solve(2):\n    assert solve(2) == 4"] * 2) == [0.0] * 2
    assert (
        caplog.text.count("ended before any of its checks, which pays 0: 'if not solve(2):\\n    assert solve(2) == 4'")
        == 1
    )


def test_rows_without_cases_abstain():
    empty = [None, "", [], [None], '{"inputs": [], "outputs": []}']
    assert python_tests([RIGHT] * 5, tests=empty) == [None] * 5
    assert cases_of(None) == ("", [])


def test_a_share_of_the_cases():
    half = "def solve(x): return 4"
    assert (
        PythonTests(partial=True)([half] * 2, tests=[FUNCTION, ["import math", ASSERT, "assert solve(3) == 6"]])
        == [0.5] * 2
    )


HUMANEVAL = 'import math\n\n\ndef solve(x):\n    """Twice x."""\n'


@pytest.mark.parametrize(
    ("completion", "reward"),
    {
        "    return 2 * x\n": 1.0,
        "    return x\n": 0.0,
        "```python\n    return 2 * x\n```": 1.0,
        "    y = 2\n    return y * x\n\n\ndef other():\n    return 1\n": 1.0,
        "```python\ndef solve(x):\n    return math.floor(2 * x)\n```": 1.0,  # with the prompt's import
        "from __future__ import annotations\ndef solve(x): return 2 * x": 1.0,
        "solve = lambda x: 2 * x": 1.0,
        "": 0.0,
        "I cannot do that.": 0.0,
    }.items(),
)
def test_a_completion_of_humaneval_goes_on_where_the_prompt_ends(completion, reward):
    columns = {"test": ["def check(candidate):\n    assert candidate(2) == 4"], "entry_point": ["solve"]}
    assert python_tests([completion], prompts=[HUMANEVAL], **columns) == [reward]
    told = rl.score(
        make_rollout(
            (1,), prompts=[HUMANEVAL], completions=[completion], columns={k: tuple(v) for k, v in columns.items()}
        ),
        python_tests,
    )
    assert told.parts[0, 0] == reward


def test_a_dataclass_with_text_annotations_is_right_code():
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    assert python_tests([code], tests=["assert A(1).x == 1"]) == [1.0]


FENCES = {
    "tildes": "~~~python\nb\n~~~",
    "more tildes": "~~~~ py\nb\n~~~~",
    "four backticks": "````python\nb\n````",
    "in a list": "1. So:\n\n   ```python\n   b\n   ```\n",
    "further in": "- a\n  - b\n        ~~~ Python\n        b\n        ~~~",
    "with tabs": "\t```python\n\tb\n\t```",
    "after text": "Here it is: ```python\nb\n```",
    "closed after the code": "```python\nb```",
    "without a language": "~~~\nb\n~~~",
    "with attributes": '```python title="a.py"\nb\n```',
    "after one that was not closed": "```python\na\nNo, wait.\n```python\nb\n```",
    "other output after it": "~~~python\nb\n~~~\n```\n1\n```\n~~~text\n2\n~~~",
    "text after the end": "```python\nb\n```So it is.",
    "emphasised": "**```python\nb\n```**",
    "of R Markdown": "```{python}\nb\n```",
    "of Pandoc": "~~~ {.python}\nb\n~~~",
    "Python 3": "```py3\nb\n```",
    "a longer fence holds a shorter one": "````text\n```python\na\n```\n````\n~~~python\nb\n~~~",
}


@pytest.mark.parametrize("name", FENCES)
def test_code_stands_in_a_fence_of_any_kind(name):
    assert code_of(FENCES[name]).strip() == "b"


def test_the_code_of_a_fence_in_a_list_keeps_its_own_indentation():
    text = "1. So:\n   ~~~python\n   def f(x):\n       return x\n   ~~~"
    assert code_of(text) == "def f(x):\n    return x\n"


def test_a_warning_of_the_datasets_own_code_is_not_ours(recwarn):
    cases_of("import re\nassert re.match('\\d', str(solve(2)))")
    assert not list(recwarn)


def test_what_a_machine_cannot_protect_is_said_once(monkeypatch, caplog):
    """As on a machine without libseccomp."""
    from rlkit.rewards import code_tests

    monkeypatch.setattr(code_tests, "system_calls", lambda: b"")
    code_tests._warn_of.cache_clear()
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        assert python_tests([RIGHT, RIGHT], tests=[ASSERT] * 2) == [1.0] * 2
    assert caplog.text.count("THIS MACHINE IS NOT PROTECTED") == 1 and "seccomp" in caplog.text
    code_tests._warn_of.cache_clear()
