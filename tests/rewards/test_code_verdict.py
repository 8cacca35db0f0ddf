# ruff: noqa: E501 - an attack a line reads as a table
"""Outputs and values are judged in our process: what the code's process does to its own cannot change the judgement."""

import pytest

from rlkit.rewards import PythonTests
from rlkit.rewards.code_verdict import longest_output, verdicts, without_answers

LONG = 60
PRINTS, CALLS = {"inputs": ["2\n"], "outputs": ["4.5\n"]}, {"fn_name": "f", "inputs": [[2]], "outputs": [[4]]}
FIND = "import os, sys\nframe = sys._getframe()\nwhile 'job' not in frame.f_locals: frame = frame.f_back\njob = frame.f_locals['job']\n"
EQUAL = "class S({0}):\n    __eq__ = lambda *a: True\n    __len__ = lambda *a: 0\nf = lambda x: S({1})\nprint('5')"
CHEATS = {
    "what is expected": "print(sys._getframe(1).f_locals['case']['stdout'])\nf = lambda x: sys._getframe(1).f_locals['case']['returns']",
    "what is expected, anywhere": "import gc\nprint([o for o in gc.get_objects() if isinstance(o, dict) and 'stdout' in o and 'stdin' in o][0]['stdout'])",
    "the comparison": "m = sys.modules['__main__']\nfor name in ('prints', 'returns', 'run', 'passes'): setattr(m, name, lambda *a: True)\nf = lambda x: True",
    "json": "import json\njson.dumps = lambda *a, **k: '[true]'\nf = lambda x: 5",
    "a forged report": FIND + "os.write(3, (job['token'] + '[true]').encode()); os._exit(0)",
    "equal to all, a text": EQUAL.format("str", "'5'"),
    "equal to all, a number": EQUAL.format("int", "5"),
    "equal to all, a list": EQUAL.format("list", "[5]"),
}


@pytest.mark.parametrize("tests", [PRINTS, CALLS], ids=["prints", "calls"])
def test_the_answer_cannot_be_found_and_the_judgement_not_replaced(tests):
    codes = [f"import sys\n{cheat}" for cheat in CHEATS.values()]
    assert PythonTests(timeout=LONG)(codes, tests=[tests] * len(codes)) == [0.0] * len(codes)


@pytest.mark.parametrize("tests", [PRINTS, CALLS, "assert f(2)"], ids=["prints", "calls", "Python"])
def test_no_report_ends_the_run(tests):
    for text in (
        "'[' * 200000",
        "'[null]'",
        "'[' + '1' * 9000 + ']'",
        "'[{}]'",
        "'[\"' + '[' * 200000 + '\"]'",
        "'[1]'",
        "'[NaN]'",
    ):
        forged = FIND + f"os.write(3, (job['token'] + {text}).encode()); os._exit(0)"
        assert PythonTests(timeout=LONG)([forged], tests=[tests]) == [0.0], text


def test_right_answers_of_every_kind_are_right():
    cases = [
        ("print(' 4.50 \\n\\n')", PRINTS, 1.0),
        ("print('4.5 5')", PRINTS, 0.0),
        ("print('4.5')\nraise ValueError", PRINTS, 0.0),
        ("print('4.5' + 'x' * 100000)", PRINTS, 0.0),
        ("f = lambda x: (4,)", CALLS, 1.0),
        ("f = lambda x: 4", CALLS, 1.0),
        ("f = lambda x: [5]", CALLS, 0.0),
        ("f = lambda x: '[4]'", CALLS, 0.0),
        ("f = lambda x: {1: 'ü\\ud800'}", {"fn_name": "f", "inputs": [[2]], "outputs": [{"1": "ü\ud800"}]}, 1.0),
        ("f = lambda x: 'ü' * x", {"fn_name": "f", "inputs": [[300000]], "outputs": ["ü" * 300000]}, 1.0),
        ("print('ü\\n' * 300000)", {"inputs": ["\n"], "outputs": ["ü\n" * 300000]}, 1.0),
    ]  # fmt: skip
    codes, tests, wanted = zip(*cases, strict=True)
    assert PythonTests(timeout=LONG)(list(codes), tests=list(tests)) == list(wanted)


def test_what_the_process_is_told():
    tests = [{"stdin": "2", "stdout": "4"}, {"call": "f", "arguments": [2], "returns": [4]}, {"source": "assert f(2)"}]
    assert without_answers(tests) == [{"stdin": "2"}, {"call": "f", "arguments": [2]}, {"source": "assert f(2)"}]
    assert longest_output(tests) > 4000 and longest_output(tests[2:]) == 0
    assert verdicts('["4", "[4]", true]', tests) == [True, True, True]
    assert verdicts("[true, true, null]", tests) == [False, False, None]
