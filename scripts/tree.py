"""Draw rlkit's tree in CONTRIBUTING.md: modules at the top and folders, each with the first sentence of its docstring.

    make tree

The order is that of the layers in pyproject.toml, from the top: a line imports only from lines below it in either list.
tests/test_docs.py fails when the drawing is stale.
"""

import ast
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rlkit"
PAGE = ROOT / "CONTRIBUTING.md"
START, END = "<!-- tree: written by `make tree` -->\n", "<!-- end of tree -->\n"
WIDTH = 24  # of the column of names


def names_by_layer() -> list[str]:
    """The names directly under rlkit/, from the highest layer to the lowest, and those without a layer at the end."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if c["id"] == "layers")
    names = [name for layer in contract["layers"] for name in re.split(r" *[|:] *", layer)]
    return names + contract["exhaustive_ignores"]


def first_sentence(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0]


def line(name: str, module: Path, depth: int = 1) -> str:
    return f"{'    ' * depth}{name}".ljust(WIDTH) + " " + first_sentence(module)


def folder_lines(folder: Path, depth: int = 1) -> list[str]:
    """A folder and the packages inside it."""
    inner = sorted(init.parent for init in folder.glob("*/__init__.py"))
    below = [text for package in inner for text in folder_lines(package, depth + 1)]
    return [line(f"{folder.name}/", folder / "__init__.py", depth), *below]


def tree() -> str:
    """The drawing as a block of Markdown."""
    names = names_by_layer()
    modules = [line(f"{n}.py", PACKAGE / f"{n}.py") for n in names if (PACKAGE / f"{n}.py").exists()]
    folders = [text for n in names if (PACKAGE / n).is_dir() for text in folder_lines(PACKAGE / n)]
    root = line("rlkit/", PACKAGE / "__init__.py", depth=0)
    return "\n".join(["```text", root, "", *modules, "", *folders, "```", ""])


def drawn_in(page: str) -> str:
    """The page with the present tree between its two marks."""
    before, _, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} has no lines {START.strip()!r} and {END.strip()!r}")
    return before + START + tree() + END + after


if __name__ == "__main__":
    PAGE.write_text(drawn_in(PAGE.read_text("utf-8")), "utf-8")
