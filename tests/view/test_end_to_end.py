"""The view and its controls around a real training loop, in a real JupyterLab: what a person at the screen does.

One notebook per way of running a loop: in the background (`run.start`), in a plain cell, in another process. Every page
is watched: no request may leave the machine, and nothing may be an error on its console.
"""

import json
import re
import subprocess
import sys

import nbformat
import pytest
from folders import write_run
from lab import PATIENCE, environment, wait_until, watch

from rlkit.run.reader import RunReader

pytestmark = pytest.mark.browser

SETUP = """
import rlkit as rl, torch
world = rl.setup(seed=0)
policy = rl.load_policy("tiny-add")
reference = policy.reference()
policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=3e-4))
task = rl.tasks.load("addition")
prompts = rl.PromptLoader(task.train, policy, batch_size=8, seed=0)
"""
RUN = """
run = rl.Run("runs/{name}")
run.track(policy, optimizer, prompts=prompts)
knobs = run.knobs(beta=0.02, learning_rate=optimizer, bounds={{"beta": (0, 1)}})
"""
SHOW = "dash = run.dashboard()"
STEPS = """
import time
for step, batch in run.steps(prompts, 10_000):
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
    scores = rl.score(rollout, task.rewards)
    ref_logps = rl.compute_logps(reference, rollout)
    kl = rl.compute_kl(rollout, ref_logps)
    advantages = rl.compute_loo_advantage(scores, kl=kl, beta=knobs.beta)
    update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO(epsilon=0.2))
    run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)
    time.sleep(0.2)
"""
LOOP = "def loop():" + STEPS.replace("\n", "\n    ") + "\nrun.start(loop)\nprint('returned')"
SAID = "print(run.stopped, run.step, len(run.metrics) == run.step)"


class Panel:
    """What a reader does with the panel in a cell's output."""

    def __init__(self, page, index):
        self.notebook, self.page = page, page.page
        self.box = page.output(index).locator(".rlkit-panel")

    def press(self, key):
        self.box.locator(f"[data-key={key}]").click()

    def state(self):
        return self.box.locator(".rl-state").inner_text()

    def column(self, name):
        heads = [re.sub(r"[▼▲\s]", "", text) for text in self.box.locator(".rl-main thead th").all_inner_texts()]
        cells = self.box.locator(f".rl-main tbody tr > :nth-child({heads.index(name) + 1})").all_inner_texts()
        return [float(cell.replace("−", "-")) for cell in cells]

    def shades(self):
        code = "tokens => tokens.map((token) => getComputedStyle(token).backgroundColor)"
        return self.box.locator(".rl-token").evaluate_all(code)

    def turn(self, name, value):
        self.box.locator(f"[data-key=number-{name}]").fill(str(value))
        self.press(f"set-{name}")


def steps_of(lab, name):
    """The lines of the run's log that are whole."""
    file = lab.server.notebooks / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def state_of(lab, name):
    return RunReader(lab.server.notebooks / "runs" / name).state


def holds(lab, page, name):
    """The steps of a run that takes none any more: as many as before after a time in which it had taken some."""
    before = len(steps_of(lab, name))
    page.page.wait_for_timeout(1500)
    assert len(steps_of(lab, name)) == before
    return before


def test_a_loop_in_the_background_is_watched_and_steered(lab):
    name = "steered"
    page = lab.open("steered.ipynb", [SETUP, RUN.format(name=name), SHOW, LOOP, "run.wait()", SAID])
    for index in range(4):
        page.run(index)  # the cell of run.start returns
    assert "returned" in page.output(3).inner_text()
    wait_until(lambda: page.points(2) >= 3, "the charts follow")
    panel = Panel(page, 2)
    panel.box.locator(".rl-token").first.wait_for()
    first = page.points(2)
    wait_until(lambda: page.points(2) > first, "the charts grow")

    # a live change, by the fields of the view, reaches the loop
    panel.turn("beta", 0.3)
    wait_until(lambda: steps_of(lab, name)[-1]["knobs/beta"] == 0.3, "the loop has the new beta")
    panel.turn("learning_rate", 0.001)
    wait_until(lambda: steps_of(lab, name)[-1]["knobs/learning_rate"] == 0.001, "the optimizer has the new rate")
    used = [line["knobs/beta"] for line in steps_of(lab, name)]
    assert used[0] == 0.02 and used == sorted(used)  # changed once, between two steps
    page.page.get_by_text("taken by the run").wait_for()

    # pause holds
    panel.press("pause")
    wait_until(lambda: panel.state().startswith("❚❚"), "the view says that it pauses")
    held = holds(lab, page, name)
    wait_until(lambda: page.points(2) == held, "the charts have every step")
    page.shot("steered-paused", 2)

    # meanwhile: sort, walk over the steps, look at tokens
    panel.press("sort-advantage")
    wait_until(lambda: (seen := panel.column("advantage")) == sorted(seen, reverse=True), "largest first")
    panel.press("sort-advantage")
    wait_until(lambda: (seen := panel.column("advantage")) == sorted(seen), "smallest first")
    panel.box.locator("[data-key=slider]").fill("1")
    wait_until(lambda: panel.box.locator(".rl-step").inner_text() == "1", "the slider is at step 1")
    table = panel.box.locator(".rl-main table")
    wait_until(lambda: table.get_attribute("aria-label").endswith("step 1"), "the completions of step 1 are shown")
    panel.box.locator(".rl-main tbody tr").first.click()
    wait_until(lambda: panel.box.locator(".rl-where").inner_text().startswith("step 1,"), "the lens shows that step")
    panel.press("quantity-surprise")
    wait_until(lambda: len(set(panel.shades())) >= 2, "the tokens differ in colour")
    surprise = panel.shades()
    panel.press("quantity-log-ratio")
    wait_until(lambda: panel.shades() != surprise, "another quantity has other colours")
    page.shot("steered-lens", 2)
    panel.press("detail-group")
    panel.box.locator(".rl-group").wait_for()
    page.shot("steered-group", 2)

    # the tab is closed and the notebook opened again: live, at the reader's place
    page.save()
    assert not page.strangers and not page.errors
    page.close()
    again = lab.open("steered.ipynb")
    panel = Panel(again, 2)
    panel.box.locator(".rl-group").wait_for()
    assert panel.box.locator(".rl-step").inner_text() == "1"
    wait_until(lambda: again.points(2) == held, "the charts are back")
    panel.press("resume")
    wait_until(lambda: len(steps_of(lab, name)) > held + 1, "the loop goes on")
    wait_until(lambda: again.points(2) > held + 1, "the charts go on in the page that was opened again")

    # stop: everything saved, the kernel usable, the charts whole
    panel.press("stop")
    wait_until(lambda: panel.state().startswith("■ stopped"), "the view says that it has stopped")
    done = holds(lab, again, name)
    state = state_of(lab, name)
    assert state["status"] == "stopped" and state["step"] == done
    assert (lab.server.notebooks / "runs" / name / "ckpt" / f"step-{done:06d}").is_dir()
    again.run(4)  # run.wait
    again.run(5)
    wait_until(lambda: f"stopped {done} True" in again.output(5).inner_text(), "the kernel answers")
    wait_until(lambda: again.points(2) == done, "the last step is drawn")
    assert not again.strangers and not again.errors
    again.close()


def test_a_plain_cell_is_watched_and_interrupted_and_leaves_a_picture(lab):
    name = "plain"
    page = lab.open("plain.ipynb", [SETUP, RUN.format(name=name), SHOW, STEPS, SAID])
    for index in range(3):
        page.run(index)
    page.start(3)
    seen = [wait_until(lambda: page.points(2), "a first point is drawn")]
    for _ in range(3):
        seen.append(wait_until(lambda: (now := page.points(2)) > seen[-1] and now, "the chart grows"))
    assert not page.ended(3), "the charts grew only after the loop"
    assert not page.output(2).locator(".rlkit-static").is_visible()
    page.shot("plain-running", 2)
    page.interrupt()
    page.wait(3)  # no traceback
    page.run(4)
    done = len(steps_of(lab, name))
    wait_until(lambda: f"interrupted {done} True" in page.output(4).inner_text(), "the kernel answers")
    assert (lab.server.notebooks / "runs" / name / "ckpt" / f"step-{done:06d}").is_dir()
    wait_until(lambda: page.points(2) == done, "all steps are drawn")
    wait_until(lambda: page.output(2).locator("bdi.rl-said").count() > 5, "completions are listed")
    assert not page.strangers and not page.errors
    page.save()
    saved = json.dumps(nbformat.read(page.file, as_version=4))
    assert f"step {done} of 10000" in saved and len(saved) < 400_000

    lab.server.kill_kernels()
    page.close()
    again = lab.open("plain.ipynb")
    picture = again.output(2).locator(".rlkit-static")
    picture.wait_for(state="visible")
    again.page.wait_for_timeout(1000)  # whatever would be drawn late
    check_picture(picture, done)
    assert "Error" not in again.output(2).inner_text()
    again.shot("saved-reopened", 2)
    assert not again.strangers
    again.close()

    exported = as_html(lab, "plain.ipynb")
    strangers, errors = [], []
    with lab.browser.new_context(viewport={"width": 1100, "height": 1400}) as context:
        other = context.new_page()
        context.route(re.compile("^https?://"), lambda route: route.abort())  # offline
        watch(other, lab.server.port, strangers, errors)
        other.goto(exported.as_uri(), wait_until="domcontentloaded")
        picture = other.locator(".rlkit-static")
        picture.wait_for(state="visible")
        check_picture(picture, done)
        picture.screenshot(path=page.shots() / "nbconvert.png")
        # nbconvert's own page asks for these two, in every notebook; nothing of the view may be among them
        assert all(re.match(r"https://cdnjs\.cloudflare\.com/.*/(require|MathJax|mathjax)", url) for url in strangers)


def test_below_the_picture_there_is_no_word_of_a_widget_that_does_not_come(lab):
    """A saved notebook that is opened where no kernel can be had: JupyterLab waits for the widget, for ever."""
    write_run(lab.server.notebooks / "runs" / "waits", 6)
    page = lab.open("waits.ipynb", ["import rlkit as rl", "rl.Dashboard('runs/waits')"])
    page.run(0)
    page.run(1)
    live = page.output(1).locator(".js-plotly-plot")
    live.first.wait_for(state="visible")
    assert not page.output(1).locator(".rlkit-static").is_visible()
    page.page.set_viewport_size({"width": 720, "height": 1500})  # a narrow page has fewer charts side by side
    second = "gd => gd.layout.xaxis2.domain[0] * gd._fullLayout.width"
    wait_until(lambda: live.first.evaluate(second) > 290, "the second of two charts begins in the middle")
    page.save()
    lab.server.kill_kernels()
    page.close()
    with lab.browser.new_context(viewport={"width": 1280, "height": 1500}) as context:
        other = context.new_page()
        context.route(re.compile("/api/(sessions|kernels)"), lambda route: route.abort())
        other.goto(f"http://127.0.0.1:{lab.server.port}/lab/tree/waits.ipynb?token={lab.server.token}&reset")
        output = other.locator(".jp-Notebook .jp-Cell").nth(1).locator(".jp-Cell-outputArea")
        output.locator(".rlkit-static").wait_for(state="visible", timeout=PATIENCE * 1000)
        wait_until(lambda: "Loading widget" in output.text_content(), "JupyterLab waits for the widget")
        assert "Loading widget" not in output.inner_text()
        assert "step 5" in output.inner_text() or "reward" in output.inner_text()


def check_picture(picture, steps):
    images = picture.locator("img")
    assert images.count() >= 8
    assert all(wide > 100 for wide in images.evaluate_all("all => all.map((image) => image.naturalWidth)"))
    assert f"step {steps} of 10000" in picture.inner_text() and picture.locator("table tr").count() > 5


def as_html(lab, name):
    """What nbconvert makes of a saved notebook."""
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", name]
    said = subprocess.run(command, cwd=lab.server.notebooks, env=environment(lab.server.home), capture_output=True)
    assert said.returncode == 0, said.stderr.decode()
    return (lab.server.notebooks / name).with_suffix(".html")


def test_a_run_of_another_process_is_watched_and_steered_in_the_dark(lab):
    name = "other-process"
    script = SETUP + RUN.format(name=name) + STEPS + SAID
    quiet = environment(lab.server.home)
    worker = subprocess.Popen(
        [sys.executable, "-c", script], cwd=lab.server.notebooks, env=quiet, stdout=subprocess.PIPE, text=True
    )
    try:
        log = lab.server.notebooks / "runs" / name / "metrics.jsonl"
        wait_until(log.exists, "the other process has begun")
        page = lab.open(
            "other.ipynb", ["import rlkit as rl", f"dash = rl.Dashboard('runs/{name}')\ndash", "dash.notes"]
        )
        page.theme("Dark")
        page.run(0)
        page.run(1)
        first = wait_until(lambda: page.points(1), "its first steps are drawn")
        wait_until(lambda: page.points(1) > first + 1, "the charts follow it")
        panel = Panel(page, 1)
        panel.turn("beta", 0.5)
        wait_until(lambda: steps_of(lab, name)[-1]["knobs/beta"] == 0.5, "the other process has the new beta")
        panel.box.locator(".rl-token").first.wait_for()
        back = panel.box.evaluate("node => getComputedStyle(node).backgroundColor")
        assert max(int(part) for part in re.findall(r"\d+", back)[:3]) < 80, back
        title = page.output(1).locator(".js-plotly-plot .annotation-text").first
        ink = title.evaluate("node => getComputedStyle(node).fill")
        assert min(int(part) for part in re.findall(r"\d+", ink)[:3]) > 150, ink  # legible on a dark page
        page.shot("dark", 1)
        panel.press("stop")
        said, _ = worker.communicate(timeout=PATIENCE)
        assert re.search(r"stopped \d+ True", said)
        wait_until(lambda: panel.state().startswith("■ stopped"), "the view says that it has stopped")
        wait_until(lambda: page.points(1) == len(steps_of(lab, name)), "the last step is drawn")
        page.run(2)
        said = wait_until(lambda: page.output(2).inner_text(), "the kernel answers")
        assert "fault" not in said, said
        page.theme("Light")
        assert not page.strangers and not page.errors
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
