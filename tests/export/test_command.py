"""`rlkit export NOTEBOOK --slurm FILE --launch ...`: the command line from end to end."""

import subprocess

import nbformat
import pytest

from rlkit.cli import main


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2"], "Add --slurm FILE"),
        (["--slurm", "job", "--vllm-nodes", "1", "--vllm-model", "m"], "--vllm-nodes needs scripts that sample"),
        (["--check", "--slurm", "job"], "go without --check"),
    ],
)
def test_what_cannot_be_meant_is_refused(notebook, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["export", str(notebook)])
    status = main(["export", str(notebook), *arguments])
    assert status == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "job").exists()
