"""The repository's own files, for the tests that read or load them."""

import ast
import importlib.util
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlkit", "tests", "docs", "scripts", "notebooks", "tutorials", "benchmarks")
TEXT = {".py", ".md", ".ipynb", ".js", ".css", ".html", ".sbatch", ".toml", ".yml", ".txt"}


def load_script(name: str) -> ModuleType:
    """A module of scripts/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def text_files() -> list[Path]:
    """Every text file of the repository, without what runs and tools write."""
    inside = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in [*sorted(ROOT.iterdir()), *inside] if path.suffix in TEXT and "runs" not in path.parts]


def prose(module: Path) -> Iterator[str]:
    """Docstrings and comments of a Python file."""
    text = module.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
