"""A loop in a function: `run.start(loop); run.wait()` exports, and runs the same bits as the plain loop, everywhere."""

import pytest
from cells import cell, problems, python, write
from test_processes import in_kernel, metrics

from rlkit.export import export_text

SETUP = """world = rl.setup(seed=0)
policy = rl.load_policy("tiny-add")
policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=1e-3))
task = rl.tasks.load("addition")
prompts = rl.PromptLoader(task.train, policy, batch_size=4, seed=0)
run = rl.Run("runs/x")
run.track(policy, optimizer, prompts=prompts)
knobs = run.knobs(beta=beta, learning_rate=optimizer)
reference = policy.reference()"""
BODY = """for step, batch in run.steps(prompts, max_steps):
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
    scores = rl.score(rollout, task.rewards)
    kl = rl.compute_kl(rollout, rl.compute_logps(reference, rollout))
    advantages = rl.compute_loo_advantage(scores, kl=kl, beta=knobs.beta)
    update = rl.loss_step(policy, optimizer, rollout, advantages)
    run.log(step, rollout, scores, advantages, update, drawn=float(torch.rand(())))"""
FIRST = ["import torch, rlkit as rl", cell("max_steps = 4\nbeta = 0.05", "parameters"), SETUP]
PLAIN = [*FIRST, cell(BODY, "loop"), "run.step"]
FUNCTION = "def loop():\n" + "\n".join("    " + line for line in BODY.split("\n"))
STARTED = [*FIRST, cell(FUNCTION, "loop"), "run.start(loop)\nrun.wait()", "assert run.step == 4, run.step"]


def test_a_loop_in_a_function_is_no_worker(tmp_path):
    """`run.start(loop)` hands the function on to nobody: no W201, and it stays with the cells that it needs."""
    assert problems(tmp_path, *STARTED) == []
    text = export_text(write(tmp_path, *STARTED)).text
    assert text.index('if __name__ == "__main__":') < text.index("    def loop():") < text.index("run.start(loop)")
    handed = [*FIRST, cell(FUNCTION, "loop"), "import threading\nthreading.Thread(target=loop).start()"]
    assert [problem.split()[0] for problem in problems(tmp_path, *handed)] == ["W201"]


def test_what_accumulate_draws_with_is_no_worker(tmp_path):
    """Dynamic sampling calls `draw` in place: no W201, and it stays with the policy that it needs."""
    draw = (
        "def draw(batch):\n    rollout = rl.sample(policy, batch)\n    return rollout, rl.score(rollout, task.rewards)"
    )
    cells = [*FIRST, draw, "found = rl.accumulate(draw, prompts.next_batch(), prompts, groups=4)\nfound"]
    assert problems(tmp_path, *cells) == []
    text = export_text(write(tmp_path, *cells)).text
    assert text.index('if __name__ == "__main__":') < text.index("    def draw(batch):") < text.index("rl.accumulate(")


def test_start_on_one_process_only_is_named(tmp_path):
    cells = [*FIRST, FUNCTION, "if world.main:\n    run.start(loop)"]
    assert [problem.split()[0] for problem in problems(tmp_path, *cells)] == ["W205"]


@pytest.mark.slow
def test_the_same_bits_in_a_thread_in_place_and_as_a_plain_loop(tmp_path):
    found = {}
    for name, cells in (("plain", PLAIN), ("started", STARTED)):
        folder = tmp_path / name
        folder.mkdir()
        notebook = write(folder, *cells)
        (folder / "n.py").write_text(export_text(notebook).text)
        done = python("n.py", "--out", "script", cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        in_kernel(notebook, {}, folder)
        for place in ("script", "runs/x"):
            found[name, place] = (folder / place / "metrics.jsonl").read_bytes()
    assert len(set(found.values())) == 1 and len(metrics(tmp_path / "plain" / "script")) == 4
    assert {line["knobs/beta"] for line in metrics(tmp_path / "started" / "runs" / "x")} == {0.05}
