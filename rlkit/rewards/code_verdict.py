"""What a completion's process reports, judged in ours.

A program's output and a call's value are compared with what is expected here, so that the code cannot find the expected
answer in its own process, nor replace the comparison. The report was written by untrusted code: it may hold
anything, and must not raise.
"""

import json
from collections.abc import Sequence
from typing import Any

Case = dict[str, Any]
HIDDEN = ("stdout", "returns")  # of a case: what the code must not see
SPARE = 4096


def without_answers(tests: Sequence[Case]) -> list[Case]:
    """The tests as the code's process may know them.

    Example:
        >>> without_answers([{"stdin": "2", "stdout": "4"}])
        [{'stdin': '2'}]
    """
    return [{name: value for name, value in test.items() if name not in HIDDEN} for test in tests]


def longest_output(tests: Sequence[Case]) -> int:
    """Characters that an output or a value may have: much more than expected is wrong; 0 if none is judged."""
    sizes = [len(json.dumps(test[name])) for test in tests for name in HIDDEN if name in test]
    return 16 * max(sizes) + SPARE if sizes else 0


def verdicts(report: str, tests: Sequence[Case]) -> list[bool | None]:
    """For each test whether it passed, None where it checked nothing; all False if the report is none.

    Example:
        >>> verdicts('["4", true, null]', [{"stdin": "2", "stdout": "4"}, {"source": "..."}, {"source": "..."}])
        [True, True, None]
        >>> verdicts("[[", [{"source": "..."}])
        [False]
    """
    try:
        found = json.loads(report)
    except (ValueError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list) or len(found) != len(tests):
        return [False] * len(tests)
    return [_verdict(one, test) for one, test in zip(found, tests, strict=True)]


def _verdict(found: Any, test: Case) -> bool | None:
    if "source" in test:
        return None if found is None else found is True
    if not isinstance(found, str):
        return False
    if "stdin" in test:
        return same_output(found, test["stdout"])
    try:
        return same_value(json.loads(found), json.loads(json.dumps(test["returns"])))
    except (ValueError, RecursionError, MemoryError):
        return False


def same_value(found: Any, wanted: Any) -> bool:
    """Equal as JSON; as in APPS, a tuple is a list, and [x] expects x too."""
    return bool(found == wanted or (isinstance(wanted, list) and len(wanted) == 1 and found == wanted[0]))


def same_output(found: str, wanted: str) -> bool:
    """Equal line by line, white space at the ends aside; numbers with a decimal point within 1e-6."""
    lines, others = ([line.split() for line in text.strip().splitlines()] for text in (found, wanted))
    return len(lines) == len(others) and all(
        len(one) == len(other) and all(map(same_word, one, other)) for one, other in zip(lines, others, strict=True)
    )


def same_word(found: str, wanted: str) -> bool:
    """Equal, or close to a number with a decimal point."""
    if found == wanted:
        return True
    try:
        return "." in wanted and abs(float(found) - float(wanted)) <= 1e-6 * max(1.0, abs(float(wanted)))
    except ValueError:
        return False
