"""The reading list of CONTRIBUTING.md, and what one iteration of the loop crosses, stay short."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

SCRIPTS = Path(__file__).parents[1] / "scripts"
STEPS = {"sampling.py", "scoring.py", "advantages.py", "step.py"}
MATHS = {"kl.py", "losses.py"}


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reading_list_is_an_evening():
    module = script("reading_list")
    lines = module.reading_list()
    assert {Path(name).name for name in lines} >= STEPS | MATHS
    assert sum(lines.values()) <= module.BOUND == 2200


@pytest.mark.integration
def test_one_iteration_crosses_few_lines():
    """In a process of its own: the tracer would take the place of coverage's and of a debugger's."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "loop_lines.py")], capture_output=True, text=True, timeout=LONG, check=True
    )
    *modules, code, every = done.stdout.splitlines()
    names = {line.split()[1] for line in modules}
    assert {"sampling.py", "scoring.py", "advantages.py", "losses.py", "step.py", "run/step_log.py"} <= names
    module = script("loop_lines")
    assert 1000 < int(code.split()[0]) <= module.BOUND == 2500
    assert int(every.split()[0]) <= module.BOUND_WITH_DOCSTRINGS
