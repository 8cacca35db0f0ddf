"""Find the answer in a completion, and the column of the right one; shared by the ready-made rewards.

Everything here takes time linear in the length of the text, because a policy in training writes every kind of text.
"""

import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.record import Prompt, text_of

GOLD = ("answer", "solution")  # rlkit's tasks and GSM8K; TRL and DeepMath
_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([^\s`~]*)[^`~\n]*$")
_PYTHON = ("python", "python3", "py", "py3")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def completion_text(completion: Prompt) -> str:
    """The text to judge: the completion itself, or the content of its last message.

    Example:
        >>> completion_text([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
        '4'
    """
    return text_of(completion if isinstance(completion, str) else list(completion)[-1:])


def answer_part(text: str) -> str:
    r"""The answer of a completion: after the reasoning, inside the last complete `<answer>` block if there is one.

    Empty if the reasoning is not closed, or if `<answer>` blocks were opened and none was closed.

    Example:
        >>> answer_part("<think>is it 3?</think> It is <answer>4</answer>.")
        '4'
        >>> answer_part("<think>is it 3? \boxed{3}")
        ''
    """
    _, _, after = text.rpartition("</think>")
    if "<think>" in after:
        return ""
    end = after.rfind("</answer>")
    start = after.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return "" if "<answer>" in after else after
    return after[start + len("<answer>") : after.find("</answer>", start)].strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, with balanced braces; None if there is none.

    Escaped braces do not count. Of nested boxes the outer one counts; one that is never closed does not.

    Example:
        >>> last_boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}} and \boxed{3")
        '\\frac{1}{2}'
    """
    return boxes(text)[0]


def boxes(text: str) -> tuple[str | None, bool]:
    r"""As `last_boxed`, and whether a box was opened and never closed: its content was cut off.

    Example:
        >>> boxes(r"so \boxed{1} or \boxed{12")
        ('1', True)
    """
    opened: list[int | None] = []
    found: str | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and token != "\\{":
            opened.append(match.end() if len(token) > 1 else None)
        elif token == "}" and opened:
            start = opened.pop()
            if start is not None:
                found = text[start : match.start()]
    return found, any(start is not None for start in opened)


def code_of(text: str) -> str:
    r"""The code in a completion: the last block fenced as Python, else the last without a language, else all of it.

    A fence is three or more backticks or tildes, also indented or after other text. A line that opens a block of Python
    within another block shows that the other was never closed.

    Example:
        >>> code_of("I think:\n```python\nx = 1\n```\nIt prints:\n```\n1\n```\nDone.")
        'x = 1\n'
    """
    part = answer_part(text).replace("\r\n", "\n")
    blocks: list[tuple[str, str]] = []
    fence, language, lines = "", "", list[str]()
    for line in part.splitlines(keepends=True):
        opening = _FENCE.search(line)
        language_here = opening[2].strip("{.}").lower() if opening else ""
        if opening and (not fence or language_here in _PYTHON):
            fence, language, lines = opening[1], language_here, []
        elif fence and (line.lstrip().startswith(fence) or line.rstrip().endswith(fence)):
            lines.append(line[: line.index(fence)])
            blocks.append((language, textwrap.dedent("".join(lines))))
            fence = ""
        elif fence:
            lines.append(line)
    marked = [code for language, code in blocks if language in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return (marked or plain or [part])[-1]


def program_of(code: str, prompt: Prompt | None, entry: str | None) -> dict[str, str]:
    """The code to run, and what runs before it: a prompt that begins a program (HumanEval).

    Code that does not define the function `entry` continues the prompt.
    """
    if entry is None or not isinstance(prompt, str) or not re.search(rf"\bdef {re.escape(entry)}\b", prompt):
        return {"before": "", "code": code}
    if not re.search(rf"\b(def|class) {re.escape(entry)}\b|^{re.escape(entry)}\s*=", code, re.MULTILINE):
        whole = (prompt + code, prompt + textwrap.indent(code, "    "))
        code = next(filter(_parses, whole), code)
    return {"before": prompt if _parses(prompt) else "", "code": code}


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<completion>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def gold_column(columns: Mapping[str, Any], column: str | None, name: str) -> Sequence[Any]:
    """The right answers, one per completion: the named column, else `answer` or `solution`; ValueError if missing."""
    wanted = GOLD if column is None else (column,)
    for one in wanted:
        if one in columns:
            return columns[one]
    known = sorted(name for name, values in columns.items() if isinstance(values, (list, tuple)))
    raise ValueError(
        f"{name}: expected a column {' or '.join(wanted)} in the dataset; there are {known}. Name it: "
        f"{name}(column=...)."
    )
