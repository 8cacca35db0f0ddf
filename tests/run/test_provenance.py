"""Where a run comes from: what config.json says of the commit, the notebook or script, and the parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from waiting import LONG

import rlkit as rl
from rlkit.run import provenance

ROOT = Path(__file__).parents[2]
PATIENT = f"import rlkit.run.provenance\nrlkit.run.provenance.PATIENCE = {LONG}"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """git may take long on a busy machine; a run would say nothing of it then."""
    monkeypatch.setattr(provenance, "PATIENCE", LONG)


@pytest.fixture
def repository(tmp_path):
    """A git repository with one commit, and its hash."""
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "loop.py").write_text(f"import rlkit as rl\n{PATIENT}\nprint(rl.Run('out').path)\n")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first")
    return folder, git(folder, "rev-parse", "HEAD").strip()


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit_and_whether_files_differ_from_it(repository):
    folder, commit = repository
    assert provenance.git_commit(folder) == {"commit": commit, "dirty": False}
    (folder / "untracked.txt").touch()
    assert provenance.git_commit(folder) == {"commit": commit, "dirty": False}
    (folder / "loop.py").write_text("changed")
    assert provenance.git_commit(folder) == {"commit": commit, "dirty": True}


def test_without_a_repository_or_without_git_nothing_is_said(tmp_path, capfd, monkeypatch):
    assert provenance.git_commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_commit(ROOT) is None
    assert provenance.git_commit(tmp_path / "nowhere") is None
    assert capfd.readouterr() == ("", "")


def test_a_git_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "PATIENCE", 0.2)
    assert provenance.git_commit(tmp_path) is None


@pytest.mark.integration
def test_a_script_of_a_repository(repository):
    folder, commit = repository
    done = subprocess.run(
        [sys.executable, "loop.py", "--lr", "1"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    config = rl.Run.open(folder / "out").config
    assert config["git"] == {"commit": commit, "dirty": False}
    assert config["script"] == {"file": str(folder / "loop.py"), "arguments": ["--lr", "1"]}
    assert "notebook" not in config and config["parameters"] == {}


@pytest.mark.slow
def test_a_notebook_with_its_parameters(repository, monkeypatch):
    """A real kernel; papermill's injected values, and what the user changed since, count."""
    import nbclient

    folder, commit = repository
    cells = [
        nbformat.v4.new_code_cell("lr, steps = 0.1, 5\nname: str = 'a'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("lr = 0.2"),
        nbformat.v4.new_code_cell(
            "import rlkit as rl\n" + PATIENT + "\nother = 1\nrl.Run('out', config={'extra': 2}).path"
        ),
    ]
    book = nbformat.v4.new_notebook(cells=cells)
    path = folder / "my notebook.ipynb"
    nbformat.write(book, path)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(
        book, resources={"metadata": {"path": str(folder)}}, timeout=LONG, startup_timeout=LONG
    ).execute()
    config = rl.Run.open(folder / "out").config
    assert config["notebook"] == str(path) and "script" not in config
    assert config["parameters"] == {"lr": 0.2, "steps": 5, "name": "a", "extra": 2}
    assert config["git"]["commit"] == commit


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"cells": [{"cell_type": "code"}]}', "not json"],
)
def test_a_strange_notebook_has_no_parameters(tmp_path, text):
    (tmp_path / "a.ipynb").write_text(text)
    assert provenance.notebook_parameters(tmp_path / "a.ipynb", {"lr": 1}) == {}
    assert provenance.notebook_parameters(tmp_path / "none.ipynb", {"lr": 1}) == {}


def test_magics_among_the_parameters_are_no_fault(tmp_path):
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["%matplotlib inline\n", "lr = 1"]}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert provenance.notebook_parameters(tmp_path / "a.ipynb", {"lr": 1}) == {}
