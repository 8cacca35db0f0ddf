"""IPython syntax in a cell, found by IPython's own transformer, with assignments, continuations, indents.

Each such line is reported. A few mean nothing in a script and are left out with a note; for the others a stand-in keeps
the rest of the cell analysable, so that all problems are reported at once. Line numbers never change.
"""

from typing import Any

from rlkit.export.problems import Problem

DROPPED = ("matplotlib", "load_ext", "reload_ext", "autoreload", "config", "pylab")
DROPPED_ARGUMENTS = {"load_ext": ("autoreload",), "reload_ext": ("autoreload",), "pylab": ()}
DROPPED_CELL = ("time", "capture")
PYTHON_CELLS = (*DROPPED_CELL, "timeit", "prun")  # the rest of the cell is Python
FIX = "Tag the cell notebook-only (or start it with `# rlkit: notebook-only`), or write it in Python."
INSTALL = "Put the package into your requirements and tag the cell notebook-only."
INSTALLERS = {"pip", "conda", "mamba", "uv", "apt", "apt-get"}
ENVIRON = "Write `os.environ[...] = ...`, in a cell tagged setup if it must stand before the imports."
INSTEAD = {
    "%env": ENVIRON,
    "%set_env": ENVIRON,
    "%cd": "Write `os.chdir(...)`, or use a path from the parameters.",
    "%time": "Write the statement without it.",
    "%run": "Import what you need of that file.",
}


def plain_python(source: str, cell: int) -> tuple[str, list[Problem]]:
    """A cell's text without IPython syntax, of as many lines; and E101 for it, or N001 for a line left out."""
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
    if lines[first].startswith("%%"):
        name, stand_in, problem = _cell_magic(lines[first].strip(), cell, first + 1, alone=first + 1 == len(lines))
        problems.append(problem)
        if name not in PYTHON_CELLS:
            return "\n".join("#" for _ in lines), problems
        lines[first] = stand_in
    for _ in range(2 * whole + 10):
        try:
            tokens = make_tokens_by_line(lines)
            found = [match for transformer in manager.token_transformers if (match := transformer.find(tokens))]
            if not found:
                break
            match = min(found, key=lambda one: one.sortby())
            span = len(lines) - len(match.transform(lines)) + 1
        except SyntaxError:
            break
        start = match.start_line
        text = "".join(lines[start : start + span]).strip()
        stand_in, problem = _line(match, lines[start], text, cell, start + 1)
        problems.append(problem)
        lines[start : start + span] = [stand_in + "\n"] + ["#\n"] * (span - 1)
    text = "".join(lines)
    is_continued = text.rstrip().endswith("\\")  # by an empty line
    return text.removesuffix("\n") if is_continued else text.rstrip("\n"), problems


def _cell_magic(text: str, cell: int, line: int, *, alone: bool) -> tuple[str, str, Problem]:
    """The name of a cell magic, its stand-in, and what to report."""
    name, _, rest = text[2:].partition(" ")
    words = [word for word in rest.split() if not word.startswith("-")]
    if name in DROPPED_CELL and not words and not alone:
        return name, f"# left out: {text}\n", Problem("N001", cell, line, f"`{text}` is left out, its cell is kept.")
    more = f", and so is what it puts into {words[0]!r}" if name == "capture" and words else ""
    return name, "#\n", Problem("E101", cell, line, f"`{text}` is notebook syntax{more}.", FIX)


def _line(match: Any, line: str, text: str, cell: int, number: int) -> tuple[str, Problem]:
    """The stand-in for a line, and what to report."""
    before, shown = line[: match.start_col], text.split("\n")[0].rstrip("\\").strip()
    kind = type(match).__name__
    if kind == "EscapedCommand" and shown.startswith("%"):
        name, *arguments = shown[1:].split() or [""]
        wanted = DROPPED_ARGUMENTS.get(name, tuple(arguments))
        if name in DROPPED and all(argument in wanted for argument in arguments):
            left = f"{'pass  ' if before else ''}# left out: {shown}"
            return before + left, Problem("N001", cell, number, f"`{shown}` is left out.")
    words = shown.replace("!", " ").replace("%", " ").split()
    fix = INSTALL if INSTALLERS.intersection(words) and "install" in words else INSTEAD.get(shown.split()[0], FIX)
    stand_in = "None" if kind in ("MagicAssign", "SystemAssign") else "pass"
    return before + stand_in, Problem("E101", cell, number, f"`{shown}` is notebook syntax.", fix)
