"""Scripts as processes: spawned workers, failures, and the shipped notebooks as kernel, python and torchrun."""

import json
import math
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from cells import ROOT, cell, environment, export_text, exported, python

pytestmark = pytest.mark.integration

MEAN_TOLERANCE = 1e-6
SHORT = {
    "01_rloo": {"max_steps": 3, "batch_size": 4, "num_generations": 4},
    "02_a2po": {"max_steps": 3, "batch_size": 6, "num_value_samples": 2},
}
RUNS = {"01_rloo": "runs/rloo-first", "02_a2po": "runs/a2po-first"}
FEW_ROWS = {  # 500 held-out prompts and the whole train set are not the point here
    "task.test.select(range(500))": "task.test.select(range(8))",
    "    task.train,\n": "    task.train.select(range(24)),\n",
    "keep_solvable(task.train)": "keep_solvable(task.train.select(range(24)))",
}


def test_a_spawned_worker_sees_a_changed_flag_and_a_failure_leaves_its_traceback(tmp_path):
    """The worker imports the script again; no cell runs there."""
    text = exported(
        tmp_path,
        "import multiprocessing, pathlib, os",
        cell("k = 2  # factor\nfail = False", "parameters"),
        "print('cell ran in', os.getpid())",
        "def times(x):\n    return x * k",
        "with multiprocessing.get_context('spawn').Pool(1) as pool:\n    found = pool.map(times, [1, 2, 3])",
        "print('found', found)\nif fail:\n    raise KeyError('no such column')",
    ).text
    (tmp_path / "s.py").write_text(text)
    done = python("s.py", "--k", "7", "--fail", "--out", "o", cwd=tmp_path)
    assert "found [7, 14, 21]" in done.stdout and done.stdout.count("cell ran in") == 1, done.stderr
    assert done.returncode == 1 and "KeyError: 'no such column'" in done.stderr
    assert "no such column" in (tmp_path / "o" / "error_rank0.txt").read_text()


def small_notebook(name: str, folder: Path) -> Path:
    """A shipped notebook on fewer held-out rows, in a folder of its own."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    for one in notebook.cells:
        for old, new in FEW_ROWS.items():
            one["source"] = one["source"].replace(old, new)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def in_kernel(path: Path, values: dict, folder: Path) -> None:
    """Run a notebook in a kernel, with parameters set as papermill does: in a cell after the parameters cell."""
    notebook = nbformat.read(path, as_version=4)
    place = next(i for i, one in enumerate(notebook.cells) if "parameters" in one.metadata.get("tags", []))
    setting = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(setting))
    nbformat.write(notebook, folder / "run.ipynb")
    script = (
        "import nbformat, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from run_notebooks import ThisPython\n"
        "from nbclient import NotebookClient\n"
        "nb = nbformat.read('run.ipynb', as_version=4)\n"
        "patience = {'timeout': 1200, 'startup_timeout': 300}\n"
        "NotebookClient(nb, **patience, km=ThisPython(), resources={'metadata': {'path': '.'}}).execute()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=sorted(SHORT))
def shipped(request, tmp_path_factory):
    """A shipped notebook, its script, its flags and the metrics of `python script.py`."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    notebook = small_notebook(name, folder)
    script = folder / f"{name}.py"
    script.write_text(export_text(notebook).text)
    flags = [part for key, value in SHORT[name].items() for part in (f"--{key.replace('_', '-')}", str(value))]
    done = python(script, *flags, "--out", "python", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return name, folder, notebook, script, flags


@pytest.mark.torchrun
def test_kernel_python_and_torchrun_with_one_process_are_the_same(shipped):
    """Byte for byte."""
    name, folder, notebook, script, flags = shipped
    expected = (folder / "python" / "metrics.jsonl").read_bytes()
    assert len(expected.splitlines()) == SHORT[name]["max_steps"]
    in_kernel(notebook, SHORT[name], folder)
    assert (folder / RUNS[name] / "metrics.jsonl").read_bytes() == expected
    done = python(script, *flags, "--out", "torchrun1", cwd=folder, torchrun=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "torchrun1" / "metrics.jsonl").read_bytes() == expected
    config = json.loads((folder / "python" / "config.json").read_text())
    assert config["parameters"].items() >= SHORT[name].items()
    assert config["script"]["notebook"] == f"{name}.ipynb" and config["script"]["processes"] == 1


@pytest.fixture(scope="module")
def plain_descent(shipped):
    """The same with SGD, and the metrics of one process.

    AdamW divides every gradient by its own size: where a gradient is 1e-9 of rounding noise, the first step is a whole
    learning rate long, in a direction that the order of a sum decides (measured: kl of step 2 differs by 8e-6). With
    SGD noise stays noise, and in float64 it is far below the 1e-6 to which two processes are held: in float32 a KL
    summed over a sequence differs by up to 1.5e-6 on some processors.
    """
    name, folder, _, script, flags = shipped
    sgd = folder / f"{name}_sgd.py"
    text = script.read_text().replace("torch.optim.AdamW(", "torch.optim.SGD(")
    sgd.write_text(text.replace("rl.load_policy(model_name)", "rl.load_policy(model_name, dtype=torch.float64)"))
    flags = [*flags, "--learning-rate", "0.03"]
    done = python(sgd, *flags, "--out", "sgd", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, sgd, flags


@pytest.mark.torchrun
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_agree(plain_descent, strategy):
    folder, script, flags = plain_descent
    done = python(script, *flags, "--out", strategy, "--strategy", strategy, cwd=folder, torchrun=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 0 |") == 1, done.stdout  # one copy of every line
    one, two = metrics(folder / "sgd"), metrics(folder / strategy)
    assert [line.keys() for line in one] == [line.keys() for line in two]
    assert abs(one[-1]["kl"]) > 1e3 * MEAN_TOLERANCE  # the policy has moved
    different = {
        f"{key} of step {left['step']}": (value, right[key])
        for left, right in zip(one, two, strict=True)
        for key, value in left.items()
        if not key.endswith("/max")  # of rounding noise; the others are means, sums and counts
        if not same(value, right[key])
    }
    assert not different


def same(one, two) -> bool:
    if one is None or two is None:
        return one is two
    return math.isclose(one, two, rel_tol=MEAN_TOLERANCE, abs_tol=MEAN_TOLERANCE)


@pytest.mark.slow
def test_resume_goes_on_to_the_same_metrics(tmp_path):
    script = tmp_path / "s.py"
    script.write_text(export_text(small_notebook("01_rloo", tmp_path)).text)
    flags = ["--batch-size", "4", "--num-generations", "4"]
    for arguments in (
        ["--max-steps", "4", "--out", "whole"],
        ["--max-steps", "2", "--out", "parts", "--save-every", "1"],
        ["--max-steps", "4", "--out", "parts", "--resume", "auto"],
    ):
        done = python(script, *flags, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "parts at step 2" in done.stdout
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_the_tutorials_script_runs(tmp_path):
    """Every assert of the lesson holds in the script too."""
    done = python(ROOT / "notebooks" / "scripts" / "00_exact_gradient.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
