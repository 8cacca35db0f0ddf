"""IPython syntax in a cell, found by IPython's own transformer, with assignments, continuations, indents.

Each such line is reported. A few mean nothing in a script and are left out with a note; for the others a stand-in keeps
the rest of the cell analysable, so that all problems are reported at once. Line numbers never change.
"""

from dataclasses import dataclass
from typing import Any

from rlkit.export.problems import Problem

DROPPED = ("matplotlib", "load_ext", "reload_ext", "autoreload", "config", "pylab")
DROPPED_ARGUMENTS = {"load_ext": ("autoreload",), "reload_ext": ("autoreload",), "pylab": ()}
DROPPED_CELL = ("time", "capture")
PYTHON_CELLS = (*DROPPED_CELL, "timeit", "prun")  # the rest of the cell is Python
FIX = "Tag the cell notebook-only (or start it with `# rlkit: notebook-only`), or write it in Python."
INSTALL = "Put the package into your requirements and tag the cell notebook-only."
INSTALLERS = {"pip", "conda", "mamba", "uv", "apt", "apt-get"}
INSTEAD = {
    "%env": "Write `os.environ[...] = ...`, in a cell tagged setup if it must stand before the imports.",
    "%set_env": "Write `os.environ[...] = ...`, in a cell tagged setup if it must stand before the imports.",
    "%cd": "Write `os.chdir(...)`, or use a path from the parameters.",
    "%time": "Write the statement without it.",
    "%run": "Import what you need of that file.",
}


@dataclass(frozen=True)
class Plain:
    """A cell's text with IPython syntax replaced, line by line."""

    source: str
    problems: tuple[Problem, ...]


def plain_python(source: str, cell: int) -> Plain:
    """Replace IPython syntax.

    Args:
        source: text of a cell.
        cell: its number, for the messages.

    Returns:
        Text of as many lines, and what was found: E101, or N001 for a line that was left out.
    """
    from IPython.core.inputtransformer2 import TransformerManager, make_tokens_by_line

    manager: Any = TransformerManager()
    lines = [line + "\n" for line in source.split("\n")]
    whole = len(lines)
    for transform in manager.cleanup_transforms:  # empty first lines, indented cells, prompts that were pasted along
        lines = transform(lines)
    lines = [line + "\n" for line in "".join(lines).removesuffix("\n").split("\n")]  # IPython also splits at U+2028
    lines = ["\n"] * (whole - len(lines)) + lines
    problems = []
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[first].startswith("%%"):
        text, problem = _cell_magic(lines, first, cell)
        problems.append(problem)
        if lines[first].strip()[2:].split(" ")[0] not in PYTHON_CELLS:
            return Plain("\n".join("#" for _ in lines), tuple(problems))
        lines[first] = text
    for _ in range(2 * whole + 10):
        try:
            tokens = make_tokens_by_line(lines)
        except SyntaxError:
            break
        found = [match for transformer in manager.token_transformers if (match := transformer.find(tokens))]
        if not found:
            break
        match = min(found, key=lambda one: one.sortby())
        try:
            transformed = match.transform(lines)
        except SyntaxError:
            break
        start = match.start_line
        span = len(lines) - len(transformed) + 1
        text = "".join(lines[start : start + span]).strip()
        stand_in, problem = _line(match, lines[start], text, cell, start + 1)
        problems.append(problem)
        lines[start : start + span] = [stand_in + "\n"] + ["#\n"] * (span - 1)
    text = "".join(lines)
    is_continued = text.rstrip().endswith("\\")  # by an empty line
    return Plain(text.removesuffix("\n") if is_continued else text.rstrip("\n"), tuple(problems))


def _cell_magic(lines: list[str], first: int, cell: int) -> tuple[str, Problem]:
    text = lines[first].strip()
    name, _, arguments = text[2:].partition(" ")
    words = [word for word in arguments.split() if not word.startswith("-")]
    if name in DROPPED_CELL and not words and lines[first + 1 :]:
        return f"# left out: {text}\n", Problem("N001", cell, first + 1, f"`{text}` is left out, its cell is kept.")
    reason = f"`{text}` is notebook syntax"
    if name == "capture" and words:
        reason += f", and so is what it puts into {words[0]!r}"
    return "#\n", Problem("E101", cell, first + 1, reason + ".", FIX)


def _line(match: Any, line: str, text: str, cell: int, number: int) -> tuple[str, Problem]:
    """The stand-in for a line, and what to report."""
    before, shown = line[: match.start_col], text.split("\n")[0].rstrip("\\").strip()
    if type(match).__name__ == "EscapedCommand" and shown.startswith("%"):
        name, *arguments = shown[1:].split()
        wanted = DROPPED_ARGUMENTS.get(name, tuple(arguments))
        if name in DROPPED and all(argument in wanted for argument in arguments):
            left = f"{'pass  ' if before else ''}# left out: {shown}"
            return before + left, Problem("N001", cell, number, f"`{shown}` is left out.")
    words = shown.replace("!", " ").replace("%", " ").split()
    fix = INSTALL if INSTALLERS.intersection(words) and "install" in words else INSTEAD.get(shown.split()[0], FIX)
    problem = Problem("E101", cell, number, f"`{shown}` is notebook syntax.", fix)
    stand_in = "None" if type(match).__name__ in ("MagicAssign", "SystemAssign") else "pass"
    return before + stand_in, problem
