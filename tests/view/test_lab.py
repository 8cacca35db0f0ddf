"""The live view in a real JupyterLab, looked at through Chromium."""

import json
import shutil

import nbformat
import pytest
from folders import write_run
from lab import wait_until

pytestmark = pytest.mark.browser

SETUP = """
import rlkit as rl, torch
world = rl.setup(seed=0)
policy = rl.load_policy("tiny-add")
reference = policy.reference()
policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=3e-4))
task = rl.tasks.load("addition")
prompts = rl.PromptLoader(task.train, policy, batch_size=4, seed=0)
"""
SHOW = """
run = rl.Run("runs/{name}")
dash = run.dashboard()
"""
LOOP = """
import time
for step, batch in run.steps(prompts, {steps}):
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
    scores = rl.score(rollout, task.rewards)
    ref_logps = rl.compute_logps(reference, rollout)
    kl = rl.compute_kl(rollout, ref_logps)
    advantages = rl.compute_loo_advantage(scores, kl=kl, beta=0.02)
    update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO(epsilon=0.2))
    run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)
    time.sleep({pause})
"""


def test_the_view_grows_while_the_loop_runs_and_a_saved_notebook_keeps_a_picture(lab):
    page = lab.open("rloo.ipynb", [SETUP, SHOW.format(name="grows"), LOOP.format(steps=40, pause=0.4)])
    page.run(0)
    page.run(1)
    page.start(2)
    seen = [wait_until(lambda: page.points(1), "a first point is drawn")]
    for _ in range(3):
        seen.append(wait_until(lambda: (now := page.points(1)) > seen[-1] and now, "the chart grows"))
    assert not page.ended(2), "the charts grew only after the loop"
    assert not page.output(1).locator(".rlkit-static").is_visible()
    page.shot("live-running", 1)
    page.wait(2)
    wait_until(lambda: page.points(1) == 40, "all steps are drawn")
    wait_until(lambda: page.output(1).locator("bdi.rl-said").count() > 5, "completions are listed")
    page.shot("live-done", 1)
    assert not page.strangers and not page.errors
    page.save()
    saved = json.dumps(nbformat.read(page.file, as_version=4))
    assert "step 40 of 40" in saved and len(saved) < 400_000

    lab.server.kill_kernels()
    page.close()
    again = lab.open("rloo.ipynb")
    again.page.wait_for_timeout(2000)  # whatever would be drawn late
    output = again.output(1)
    assert output.locator(".rlkit-static img").count() >= 8
    assert output.locator(".rlkit-static").is_visible()
    assert output.locator(".rlkit-static img").first.evaluate("img => img.naturalWidth") > 100
    assert "step 40 of 40" in output.inner_text()
    assert "Error" not in output.inner_text()
    again.shot("saved-reopened", 1)
    assert not again.strangers


def test_a_reload_is_live_again_a_copy_shows_the_picture_and_close_leaves_it(lab):
    write_run(lab.server.notebooks / "runs" / "other", 30)
    cells = ["import rlkit as rl", "dash = rl.Dashboard('runs/other')\ndash", "dash.close()"]
    page = lab.open("look.ipynb", cells)
    page.run(0)
    page.run(1)
    wait_until(lambda: page.points(1) == 30, "the run is drawn")
    page.save()
    page.page.reload()  # a closed tab
    page.page.wait_for_selector(".jp-OutputArea .js-plotly-plot", timeout=90_000)
    write_run(lab.server.notebooks / "runs" / "other", 5, first=30)
    wait_until(lambda: page.points(1) == 35, "the run goes on in the page that was loaded again")
    assert not page.output(1).locator(".rlkit-static").is_visible()
    page.run(2)
    picture = page.output(1).locator(".rlkit-static")
    picture.wait_for(state="visible", timeout=90_000)
    assert "step 30 of 30" in picture.inner_text()  # a page that was loaded again no longer takes a new picture
    assert not page.output(1).locator(".js-plotly-plot").count()
    assert not page.strangers and not page.errors
    page.save()

    text = page.file.read_text().replace("look", "copy")  # signed by nobody: JupyterLab does not trust it
    copy = nbformat.reads(text, as_version=4)
    copy.cells[0].source += "  # changed"
    for cell in copy.cells:
        cell.id = "c" + cell.id[1:]
    nbformat.write(copy, lab.server.notebooks / "copy.ipynb")
    shutil.rmtree(lab.server.notebooks / "runs" / "other")
    strange = lab.open("copy.ipynb")
    image = strange.output(1).locator("img").first
    image.wait_for(state="visible", timeout=90_000)
    assert image.evaluate("img => img.naturalWidth") > 100 and strange.output(1).locator("img").count() >= 8
    assert "Error" not in strange.output(1).inner_text() and not strange.strangers
