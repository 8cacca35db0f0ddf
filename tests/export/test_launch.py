"""Several processes from inside one: torchrun in a subprocess, never a fork."""

import json
import os

import nbformat
import pytest

import rlkit as rl
from rlkit.export.launch import clean_environment

LOOP = """
import json, os, sys
import rlkit as rl
import torch

world = rl.setup(seed=0)
policy = rl.load_policy("tiny-add")
policy, optimizer = world.prepare(policy, lambda params: torch.optim.SGD(params, lr=0.1))
task = rl.tasks.load("addition")
run = rl.Run(os.environ["RUN_FOLDER"])
run.dashboard()
for step, batch in run.steps(rl.PromptLoader(task.train, policy, batch_size=3), 2):
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
    scores = rl.score(rollout, task.rewards)
    advantages = rl.compute_loo_advantage(scores)
    run.log(step, rollout, scores, advantages, rl.loss_step(policy, optimizer, rollout, advantages))
print(json.dumps({"size": world.size, "strategy": policy.strategy, "threads": os.environ["OMP_NUM_THREADS"]}))
"""


def write_notebook(path, cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("# A loop"))
    nbformat.write(notebook, path)


@pytest.mark.torchrun
def test_a_notebook_runs_on_two_processes_and_prints_once(tmp_path, capfd):
    write_notebook(tmp_path / "loop.ipynb", LOOP.strip().split("\n\n"))
    status = rl.launch(tmp_path / "loop.ipynb", nproc=2, strategy="fsdp2", env={"RUN_FOLDER": str(tmp_path / "run")})
    said = capfd.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert status == 0 and len(lines) == 1, said  # the main process alone prints
    assert json.loads(lines[0]) | {"threads": ""} == {"size": 2, "strategy": "fsdp2", "threads": ""}
    assert said.count("step 0 |") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.torchrun
def test_a_run_that_fails_raises_with_what_it_said(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import rlkit as rl\nrl.setup()\nraise KeyError('no such column')\n")
    with pytest.raises(RuntimeError, match=r"(?s)launch: the run ended with status 1.*no such column"):
        rl.launch(script, nproc=1)
    assert rl.launch(script, nproc=1, check=False) == 1


def test_the_environment_of_another_launcher_is_left_behind(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    env = clean_environment(2, "ddp", {"MINE": "yes"})
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"} & env.keys()
    assert (env["MPLBACKEND"], env["RLKIT_STRATEGY"], env["MINE"]) == ("Agg", "ddp", "yes")
    assert int(env["OMP_NUM_THREADS"]) == max(1, os.cpu_count() // 2)


@pytest.mark.parametrize("cell", ["!pip install x", "files = !ls", "run?", "%%bash\nls"])
def test_a_cell_that_is_not_python_is_named(cell, tmp_path):
    """Never commented out silently; nothing is started."""
    write_notebook(tmp_path / "n.ipynb", ["x = 1", cell])
    with pytest.raises(rl.ExportError, match=r"n\.ipynb cell 3 line 1: E101 .* is notebook syntax"):
        rl.launch(tmp_path / "n.ipynb")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("a.py", {"nproc": 0}, ValueError, "nproc must be at least 1"),
        ("missing.py", {}, FileNotFoundError, "there is no file"),
        ("a.txt", {}, ValueError, "expected a .py script or an .ipynb notebook"),
    ],
)
def test_bad_input_is_named(name, options, error, message, tmp_path):
    (tmp_path / "a.py").write_text("")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(error, match=message):
        rl.launch(tmp_path / name, **options)
