"""`rlkit export NOTEBOOK --slurm FILE --launch ...`: the command line from end to end."""

import os
import subprocess
import sys

import nbformat
import pytest

from rlkit.cli import main
from rlkit.export.runtime.flags import parse


@pytest.fixture
def notebook(tmp_path):
    path = tmp_path / "loop one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1\nprint(x)")]), path)
    return path


def test_a_job_and_its_script_are_written_and_the_command_is_printed(notebook, tmp_path, capsys):
    job = tmp_path / "job.sbatch"
    arguments = ["--slurm", str(job), "--nodes", "2", "--gpus-per-node", "4", "--launch", "torchrun"]
    assert main(["export", str(notebook), *arguments]) == 0
    script = notebook.with_suffix(".py")
    assert script.exists() and "#SBATCH --nodes=2" in job.read_text()
    subprocess.run(["bash", "-n", str(job)], check=True)
    assert "torchrun" in capsys.readouterr().out.splitlines()[-1]


def test_a_job_with_servers_gives_the_script_their_urls(notebook, tmp_path):
    job = tmp_path / "job.sbatch"
    assert main(["export", str(notebook), "--slurm", str(job), "--vllm-nodes", "2", "--vllm-model", "org/model"]) == 0
    text = job.read_text()
    assert "VLLM_NODES=2" in text and "VLLM_MODEL=org/model" in text and "script_flags+=(--vllm-url" in text
    accepted = parse([], ["--vllm-url", "http://a:8000,http://b:8000"], prog="script")
    assert accepted.run == {"vllm_url": "http://a:8000,http://b:8000"}


def test_a_job_is_written_again_over_itself_and_over_nothing_else(notebook, tmp_path, capsys):
    job, mine = tmp_path / "job.sbatch", tmp_path / "mine.sh"
    mine.write_text("echo mine\n")
    long = ["--sbatch=--comment=" + "x" * 3000]  # the mark stands above what the user writes
    assert main(["export", str(notebook), "--slurm", str(job), *long]) == 0
    assert main(["export", str(notebook), "--slurm", str(job), "--nodes", "2"]) == 0
    assert "#SBATCH --nodes=2" in job.read_text()
    assert main(["export", str(notebook), "--slurm", str(mine)]) == 2
    assert "mine.sh was not written by `rlkit export`" in capsys.readouterr().err
    assert mine.read_text() == "echo mine\n"


def test_a_wrong_option_of_the_job_leaves_no_script_behind(notebook, capsys):
    assert main(["export", str(notebook), "--slurm", "job", "--nodes", "0"]) == 2
    assert "nodes must be at least 1" in capsys.readouterr().err
    assert not notebook.with_suffix(".py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slurm", "job", "--nodes", "0"], "nodes must be at least 1"),
        (["--nodes", "2"], "Add --slurm FILE"),
        (["--slurm", "job", "--vllm-nodes", "1"], "Set model too"),
        (["--check", "--slurm", "job"], "go without --check"),
    ],
)
def test_what_cannot_be_meant_is_refused(notebook, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status = main(["export", str(notebook), *arguments])
    assert status == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


def test_a_pipe_as_the_script_is_an_error_and_does_not_block(notebook, tmp_path):
    os.mkfifo(tmp_path / "out.py")
    command = [sys.executable, "-m", "rlkit.cli", "export", str(notebook), "-o", str(tmp_path / "out.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "not a regular file" in found.stderr
