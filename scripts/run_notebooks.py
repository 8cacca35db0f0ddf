"""Execute every notebook from top to bottom, as a reader would with "restart and run all".

    .venv/bin/python scripts/run_notebooks.py                    # notebooks/ and tutorials/
    .venv/bin/python scripts/run_notebooks.py tutorials/00_exact_gradient.ipynb --timeout 300

Each notebook gets a fresh kernel of this same Python, where rlkit must be installed, and an empty working folder.
Nothing is written beside it, and no output goes back into the file. Prints the wall time of each; ends with 1 if any
fails.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("notebooks", "tutorials")


class ThisPython(AsyncKernelManager):
    """Starts the kernel with this interpreter, whatever kernel a notebook names and whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The kernelspec of the running Python."""
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def find_notebooks(paths: list[Path]) -> list[Path]:
    """Files as given, folders searched; editors' checkpoints left out."""
    found = []
    for path in paths:
        if not path.exists():
            sys.exit(f"run_notebooks: there is no {path}")
        found += sorted(path.rglob("*.ipynb")) if path.is_dir() else [path]
    return [path for path in found if ".ipynb_checkpoints" not in path.parts]


def execute(path: Path, timeout: float) -> str | None:
    """Run one notebook; None if it went well, else what went wrong."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="rlkit-notebook-", ignore_cleanup_errors=True) as folder:
        client = NotebookClient(notebook, timeout=timeout, kernel_manager_class=ThisPython)
        try:
            client.execute(cwd=folder)
        except CellExecutionError as error:
            return str(error)
        except CellTimeoutError as error:
            return f"a cell took longer than {timeout:g} s: {error}"
        except DeadKernelError as error:
            return f"the kernel died: {error}"
    return None


def main() -> int:
    """Read the command line, run, report."""
    parser = argparse.ArgumentParser(description="Execute notebooks and report the wall time of each.")
    parser.add_argument("paths", nargs="*", type=Path, help=f"notebooks or folders (default: {' and '.join(FOLDERS)})")
    parser.add_argument("--timeout", type=float, default=300.0, help="limit for one cell in seconds (default: 300)")
    options = parser.parse_args()
    paths = options.paths or [ROOT / name for name in FOLDERS if (ROOT / name).is_dir()]

    failed = []
    notebooks = find_notebooks(paths)
    for path in notebooks:
        start = time.perf_counter()
        problem = execute(path, options.timeout)
        print(f"{time.perf_counter() - start:7.1f} s  {'FAILED' if problem else 'ok':6}  {path}", flush=True)
        if problem:
            failed.append(path)
            print(problem, flush=True)
    print(f"{len(notebooks)} notebooks, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
