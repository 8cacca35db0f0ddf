"""`await` at the level of a cell, which IPython allows and a script does not.

`await X` becomes `rlkit_script.run_async(X)`, on one event loop that lives as long as the process, as a kernel's does.
What cannot be said that way (`async for`, `async with`, tasks that run between cells) is an error.
"""

import ast

from rlkit.export.problems import Problem
from rlkit.export.syntax import at_cell_level, dotted

SCRIPT = "rlkit_script"  # what the script calls `rlkit.script`
CALL = f"{SCRIPT}.run_async("
NEEDS_LOOP = ("create_task", "ensure_future", "get_running_loop")
LEVEL = "at the level of a cell"


def _refused(node: ast.AST) -> str:
    """Why a node cannot be part of a script; empty if it can."""
    if isinstance(node, ast.AsyncFor | ast.AsyncWith):
        return f"`async {'for' if isinstance(node, ast.AsyncFor) else 'with'}` {LEVEL}"
    if any(generator.is_async for generator in getattr(node, "generators", ())):
        return f"an asynchronous comprehension {LEVEL}"
    if isinstance(node, ast.GeneratorExp) and any(isinstance(part, ast.Await) for part in at_cell_level([node])):
        return f"`await` in a generator expression {LEVEL}"
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
        if name in NEEDS_LOOP:
            return f"`{name}` needs an event loop that runs between cells; a script has none"
    return ""


def rewrite_awaits(source: str, tree: ast.Module, cell: int) -> tuple[str, list[Problem]]:
    """A cell's text, of as many lines, without `await` at its level; and E103 for what cannot be rewritten.

    Example:
        >>> source = "a = await f(await g())"
        >>> rewrite_awaits(source, ast.parse(source), 1)[0]
        'a = rlkit_script.run_async(f(rlkit_script.run_async(g())))'
    """
    problems = []
    data = source.encode()
    starts = [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    edits: list[tuple[int, int, bytes]] = []
    for node in at_cell_level([tree]):
        if why := _refused(node):
            fix = "Put it into an `async def` and await that."
            problems.append(Problem("E103", cell, getattr(node, "lineno", 0), f"{why}.", fix))
        if not isinstance(node, ast.Await):
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        if not data.startswith(b"await", begin):  # before Python 3.12 the places inside an f-string are not known
            fix = "Give the value a name first."
            problems.append(Problem("E103", cell, node.lineno, "`await` inside an f-string.", fix))
            continue
        after = begin + len(b"await")
        while data.startswith((b" ", b"\t"), after):
            after += 1
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + node.end_col_offset
        edits += [(begin, after, CALL.encode()), (end, end, b")")]
    for begin, end, new in sorted(edits, reverse=True):
        data = data[:begin] + new + data[end:]
    return data.decode(), problems
