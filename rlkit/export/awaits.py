"""`await` at the level of a cell, which IPython allows and a script does not.

`await X` becomes `rlkit_script.run_async(X)`, by its place in the syntax tree: on one event loop that lives as long as
the process, as a kernel's does. What cannot be said that way (`async for`, `async with`, tasks that are to run between
cells) is an error that asks for an `async def`.
"""

import ast

from rlkit.export.problems import Problem

SCRIPT = "rlkit_script"  # what the script calls `rlkit.script`
CALL = f"{SCRIPT}.run_async("
FIX = "Put it into an `async def` and await that."
NEEDS_LOOP = ("create_task", "ensure_future", "get_running_loop")


class _CellLevel(ast.NodeVisitor):
    """Visits what runs at the level of the cell: not the bodies of functions and lambdas."""

    def __init__(self) -> None:
        self.awaits: list[ast.Await] = []
        self.refused: list[tuple[ast.AST, str]] = []
        self._generators = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(part)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.refused.append((node, "`async for` at the level of a cell"))
        self.generic_visit(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.refused.append((node, "`async with` at the level of a cell"))
        self.generic_visit(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        if any(generator.is_async for generator in node.generators):
            self.refused.append((node, "an asynchronous comprehension at the level of a cell"))
        self._generators += isinstance(node, ast.GeneratorExp)
        self.generic_visit(node)
        self._generators -= isinstance(node, ast.GeneratorExp)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_Await(self, node: ast.Await) -> None:
        if self._generators:
            self.refused.append((node, "`await` in a generator expression at the level of a cell"))
        self.awaits.append(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in NEEDS_LOOP:
            self.refused.append((node, f"`{name}` needs an event loop that runs between cells; a script has none"))
        self.generic_visit(node)


def rewrite_awaits(source: str, tree: ast.Module, cell: int) -> tuple[str, list[Problem]]:
    """Rewrite a cell.

    Args:
        source: a cell in plain Python.
        tree: its syntax tree.
        cell: its number, for the messages.

    Returns:
        The text, of as many lines, and E103 for what cannot be rewritten.

    Example:
        >>> source = "a = await f(await g())"
        >>> rewrite_awaits(source, ast.parse(source), 1)[0]
        'a = rlkit_script.run_async(f(rlkit_script.run_async(g())))'
    """
    found = _CellLevel()
    found.visit(tree)
    problems = [Problem("E103", cell, getattr(node, "lineno", 0), f"{what}.", FIX) for node, what in found.refused]
    data = source.encode()
    starts = [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    edits: list[tuple[int, int, bytes]] = []
    for node in found.awaits:
        begin = starts[node.lineno - 1] + node.col_offset
        if data[begin : begin + 5] != b"await":  # before Python 3.12 the places inside an f-string are not known
            problems.append(
                Problem("E103", cell, node.lineno, "`await` inside an f-string.", "Give the value a name first.")
            )
            continue
        after = begin + 5
        while data[after : after + 1] in (b" ", b"\t"):
            after += 1
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + node.end_col_offset
        edits += [(begin, after, CALL.encode()), (end, end, b")")]
    for begin, end, new in sorted(edits, reverse=True):
        data = data[:begin] + new + data[end:]
    return data.decode(), problems
