"""The panel in a real browser, on a plain page: its script with answers of panel_data, no kernel, no network.

What only JupyterLab can show (the widget's messages, a busy kernel, a reloaded page) is in the tests of the dashboard.
"""

import json
import re
import time

import pytest
from lab import start_chromium
from run_folders import HOSTILE, add_step, hostile_rows, rows, write_rollout, write_run, write_state
from waiting import LONG

from rlkit.run.reader import RunReader
from rlkit.view import completions, panel_data
from rlkit.view.javascript import script, style

pytestmark = pytest.mark.browser

SITE = "http://panel.test/"
PATIENCE = 1000 * LONG  # ms, until something that must come is given up
HTML = """<!doctype html><html lang="en"><meta charset="utf-8"><title>panel</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="/panel.css"><body style="margin:12px"><div id="app"></div><script type="module">
import * as panel from "/panel.js";
window.panel = panel;
const listeners = new Set();
window.push = (message) => listeners.forEach((listener) => listener(message));
window.listening = () => listeners.size;
window.start = (settings) => {
  const source = settings.bundle ? panel.bundled(settings.bundle) : {
    live: true, controls: true, ...settings,
    request: (request) => (window.deaf ? new Promise(() => {}) : window.ask(request)),
    subscribe: (listener) => { listeners.add(listener); return () => listeners.delete(listener); },
    remember: (state) => { window.remembered = JSON.parse(JSON.stringify(state)); },
  };
  window.stop = panel.mount(document.getElementById("app"), source);
};
window.ready = true;
</script></body></html>"""


@pytest.fixture(scope="module")
def chromium(playwright_):
    browser = start_chromium(playwright_)
    yield browser
    browser.close()


class Bench:
    """A page with the panel on some runs, and everything that went wrong on it."""

    def __init__(self, chromium, readers, *, dark=False, width=1000):
        self.readers, self.errors, self.outside, self.asked = readers, [], [], []
        self.answers = {}  # by kind, instead of the folder's: for commands and export
        self.page = chromium.new_page(
            viewport={"width": width, "height": 1000}, color_scheme="dark" if dark else "light", locale="en-US"
        )
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda line: line.type in ("error", "warning") and self.errors.append(line.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.route("**/*", self.serve)
        self.page.expose_function("ask", self.ask)
        self.page.goto(SITE)
        self.page.wait_for_function("window.ready")

    def serve(self, route):
        name = route.request.url.removeprefix(SITE)
        if name in ("panel.js", "panel.css"):
            kind = "text/javascript" if name.endswith("js") else "text/css"
            body = script() if name.endswith("js") else style()
            route.fulfill(body=body, content_type=f"{kind}; charset=utf-8")
        elif name == "":
            route.fulfill(body=HTML, content_type="text/html; charset=utf-8")
        else:
            self.outside.append(route.request.url)
            route.abort()

    def ask(self, request):
        self.asked.append(request)
        if request["kind"] in self.answers:
            return self.answers[request["kind"]](request)
        try:
            return json.loads(json.dumps(panel_data.answer(self.readers, request), allow_nan=False))
        except ValueError as error:
            return {"error": str(error)}

    def start(self, **settings):
        self.page.evaluate("settings => window.start(settings)", settings)
        self.page.wait_for_selector(".rl-token")
        return self

    def push(self, table=None):
        for reader in self.readers:
            reader.refresh()
        message = {"overview": self.ask({"kind": "overview"}), "table": table}
        self.page.evaluate("message => window.push(message)", message)

    def cells(self, name):
        """A column of the table as it is shown."""
        heads = self.page.locator(".rl-main thead th").all_inner_texts()
        place = [re.sub(r"[▼▲\s]", "", head) for head in heads].index(name)
        cells = self.page.locator(f".rl-main tbody tr > :nth-child({place + 1})")
        return [text.strip() for text in cells.all_inner_texts()]

    def numbers(self, name):
        return [float(text.replace("−", "-")) for text in self.cells(name)]

    def until(self, expression, argument=None):
        self.page.wait_for_function(expression, arg=argument)

    def text(self, selector):
        return self.page.locator(selector).first.inner_text()

    def focus(self):
        return self.page.evaluate("document.activeElement?.dataset?.key ?? document.activeElement?.tagName")

    def background(self, selector):
        return self.page.locator(selector).first.evaluate("node => getComputedStyle(node).backgroundColor")


@pytest.fixture
def bench(chromium):
    made = []

    def make(*readers, **options):
        made.append(Bench(chromium, list(readers), **options))
        return made[-1]

    yield make
    for one in made:
        one.page.close()
    for one in made:
        assert one.errors == [] and one.outside == []


@pytest.fixture
def reader(tmp_path):
    return RunReader(write_run(tmp_path / "first", steps=6))


# ------------------------------------------------------------------ table


def test_a_click_on_a_heading_sorts_and_says_so(bench, reader):
    it = bench(reader).start()
    for name, shown in (("reward", "reward"), ("advantage", "advantage"), ("kl", "KL"), ("rewards/correct", "correct")):
        it.page.click(f'[data-key="sort-{name}"]')
        values = it.numbers(shown)
        assert values == sorted(values, reverse=True) and len(set(values)) > 1
        head = it.page.locator("th", has=it.page.locator(f'[data-key="sort-{name}"]'))
        assert head.get_attribute("aria-sort") == "descending"
        it.page.click(f'[data-key="sort-{name}"]')
        assert it.numbers(shown) == sorted(values) and head.get_attribute("aria-sort") == "ascending"
        assert it.focus() == f"sort-{name}"  # the heading was drawn again, and the focus stayed
    it.page.click('[data-key="sort-completion"]')
    assert it.cells("completion") == sorted(it.cells("completion"))


def test_conditions_and_search_keep_what_they_say(bench, reader):
    it = bench(reader).start()
    everything = it.numbers("reward")
    it.page.click("[data-key=filter]")
    it.page.select_option("select[aria-label='Column of the condition']", "reward")
    it.page.fill("input[aria-label='Value to compare with']", "1")
    it.page.keyboard.press("Enter")
    assert it.numbers("reward") == [value for value in everything if value >= 1] != []
    assert "of 16 completions" in it.text(".rl-pager")
    it.page.click("[data-key=chip-0]")
    assert it.numbers("reward") == everything
    it.page.fill("[data-key=search]", "answer is 1")
    it.until("document.querySelectorAll('.rl-main tbody tr').length < 16")
    assert all("answer is 1" in text for text in it.cells("completion"))
    it.page.fill("[data-key=search]", "nothing has this")
    it.until("document.querySelector('.rl-empty')?.textContent.includes('No completion meets the filter')")


def test_the_browser_selects_as_python_does(bench, tmp_path):
    """Small tables are sorted and filtered in the page; the rules must be those of rlkit/view/table_query.py."""
    folder = write_run(tmp_path / "run", steps=0)
    table = rows(0)
    for i, row in enumerate(table):
        row["reward"] = [None, float("nan"), 0.5, float("inf"), -1.0, 0.5][i % 6]
        row["answer"] = [None, "b", "B", "a", "Ab", ""][i % 6]
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder)).start()
    whole = it.ask({"kind": "table", "step": 0})
    requests = [
        {"sort": name, "descending": down, "where": where, "text": text}
        for name in (None, "reward", "answer", "truncated", "row", "completion")
        for down in (False, True)
        for where in (
            [], [{"column": "reward", "op": ">=", "value": "0.5"}], [{"column": "reward", "op": "!=", "value": "0.5"}],
            [{"column": "answer", "op": "<=", "value": "ab"}], [{"column": "answer", "op": "missing", "value": ""}],
            [{"column": "answer", "op": "contains", "value": "B"}, {"column": "row", "op": "<=", "value": "9"}],
            [{"column": "truncated", "op": "=", "value": "false"}],
        )
        for text in ("", "IS 1")
    ]  # fmt: skip
    there = it.page.evaluate(
        "([table, requests]) => requests.map((one) => window.panel.select(table, one).map((row) => row.row))",
        [whole, requests],
    )
    for request, found in zip(requests, there, strict=True):
        assert found == [row["row"] for row in it.ask({"kind": "table", "step": 0, **request})["rows"]], request


def test_a_large_step_is_paged_and_sorted_by_python(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    write_rollout(folder, 0, rows(0, prompts=[f"prompt {i}" for i in range(150)]))
    it = bench(RunReader(folder)).start()
    it.page.click("[data-key=sort-advantage]")
    wanted = it.ask({"kind": "table", "sort": "advantage", "descending": True, "limit": 50})
    first = str(wanted["rows"][0]["row"])
    it.until("first => document.querySelector('.rl-main tbody tr')?.dataset.row === first", first)
    assert it.text(".rl-pager span + details + button + span") == "1 / 12"
    seen = it.cells("row")
    it.page.click("[data-key=page-on]")
    it.until("first => document.querySelector('.rl-main tbody tr')?.dataset.row !== first", first)
    assert len(seen) == 50 and not set(seen) & set(it.cells("row"))


def test_columns_can_be_shown_and_hidden(bench, reader):
    it = bench(reader).start()
    assert "answer" in " ".join(it.page.locator(".rl-main thead th").all_inner_texts())
    it.page.click("[data-key=columns]")
    it.page.uncheck('[data-key="column-answer"]')
    it.page.check('[data-key="column-row_id"]')
    heads = " ".join(it.page.locator(".rl-main thead th").all_inner_texts())
    assert "answer" not in heads and "row_id" in heads
    it.page.click(".rl-name")
    assert it.page.locator("details[open]").count() == 0


# ------------------------------------------------------------------ steps while a run goes


def test_the_newest_step_is_followed_until_the_slider_is_moved(bench, reader):
    it = bench(reader).start()
    assert it.text(".rl-step") == "5"
    add_step(reader.path, 6)
    it.push()
    it.until("document.querySelector('.rl-step').textContent === '6'")
    it.page.locator("[data-key=slider]").fill("2")
    it.until("document.querySelector('.rl-main table').getAttribute('aria-label').endsWith('step 2')")
    assert not it.page.locator("[data-key=follow]").is_checked()
    assert it.page.locator("[data-key=slider]").get_attribute("aria-valuetext") == "step 2"
    shown = it.cells("completion")
    add_step(reader.path, 7)
    it.push()
    it.until("document.querySelector('[data-key=slider]').max === '7'")
    assert it.text(".rl-step") == "2" and it.cells("completion") == shown
    it.page.keyboard.press("ArrowRight")
    it.until("document.querySelector('.rl-step').textContent === '3'")
    it.page.check("[data-key=follow]")
    it.until("document.querySelector('.rl-main table').getAttribute('aria-label').endsWith('step 7')")


def test_a_refresh_keeps_selection_scroll_and_focus(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=2, prompts=[f"prompt {i}" for i in range(12)])
    reader = RunReader(folder)
    it = bench(reader).start()
    it.page.locator("[data-key=slider]").fill("0")
    it.until("document.querySelector('.rl-step').textContent === '0'")
    it.page.click("[data-key=row-9]")
    it.page.click("[data-key=detail-group]")
    it.page.wait_for_selector(".rl-group")
    it.page.locator(".rl-main .rl-scroll").evaluate("node => { node.scrollTop = 120; }")
    it.page.locator("[data-key=row-9]").focus()
    scroll = it.page.locator(".rl-main .rl-scroll").evaluate("node => node.scrollTop")
    for step in range(2, 6):
        add_step(folder, step, prompts=[f"prompt {i}" for i in range(12)])
        it.push()
    it.until("document.querySelector('[data-key=slider]').max === '5'")
    assert it.page.locator("[data-key=row-9]").get_attribute("aria-selected") == "true"
    assert it.page.locator(".rl-main .rl-scroll").evaluate("node => node.scrollTop") == scroll
    assert it.focus() == "row-9" and it.page.locator(".rl-group").count() == 1
    assert it.text(".rl-where") == "step 0, row 9"


def test_a_press_outlives_a_push(bench, reader):
    """The head is drawn again at a push; a button that vanished under the finger would lose the click."""
    it = bench(reader)
    sent = []
    it.answers["command"] = lambda request: sent.append(request["command"]) or {"kind": "command", "number": 1}
    it.start()
    box = it.page.locator("[data-key=pause]").bounding_box()
    it.page.mouse.move(box["x"] + 5, box["y"] + 5)
    it.page.mouse.down()
    write_state(reader.path, 7)
    it.push()
    it.page.mouse.up()
    it.until("document.querySelector('.rl-word').textContent.includes('pause')")
    assert sent == ["pause"]
    it.until("document.querySelector('.rl-state').textContent.includes('step 7 of 60')")  # the push came after


def test_a_kernel_that_does_not_answer_leaves_a_table_that_sorts(bench, reader):
    """A plain loop in a cell: no message is answered until it ends, and what was pushed must be of use."""
    it = bench(reader).start()
    it.page.evaluate("window.deaf = true")
    add_step(reader.path, 6)
    reader.refresh()
    it.push(table=it.ask({"kind": "table", "limit": 64}))
    it.until("document.querySelector('.rl-main table').getAttribute('aria-label').endsWith('step 6')")
    it.page.click("[data-key=sort-reward]")
    assert it.numbers("reward") == sorted(it.numbers("reward"), reverse=True)
    it.page.click("[data-key=row-3]")
    it.until("document.querySelector('.rl-word').textContent.includes('Waiting for the kernel')")


# ------------------------------------------------------------------ group, pins, comparison


def test_the_group_writes_its_sums_in_numbers(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=0, beta=0.0)
    table = rows(0, num_generations=3)
    for row, reward, advantage in zip(table, [1.0, 0.0, 0.5], [0.75, -0.75, 0.0], strict=False):
        row |= {"reward": reward, "kl": 0.0, "advantage": advantage}
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder)).start()
    it.page.click("[data-key=row-1]")
    it.page.click("[data-key=detail-group]")
    it.page.wait_for_selector(".rl-group tr[aria-selected=true][data-row='1']")
    lines = [" ".join(line.split()) for line in it.page.locator(".rl-group tbody tr").all_inner_texts()]
    assert "(0.000 + 0.500) / 2 = 0.250 1.000 − 0.250 = 0.750 ✓ 0.750" in lines[0]
    assert "(1.000 + 0.500) / 2 = 0.750 0.000 − 0.750 = −0.750 ✓ −0.750" in lines[1]
    assert "(1.000 + 0.000) / 2 = 0.500 0.500 − 0.500 = 0.000 ✓ 0.000" in lines[2]
    assert it.page.locator(".rl-group tr[aria-selected=true]").get_attribute("data-row") == "1"


def test_another_algorithm_is_not_passed_off_as_leave_one_out(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    table = rows(0)
    for row in table:
        row["advantage"] = row["reward"] - 0.4
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder)).start()
    it.page.click("[data-key=detail-group]")
    assert "0.4 in every row" in it.text(".rl-rule") and "V*" in it.text(".rl-rule")
    assert "≠" in it.text(".rl-group tbody")


def test_a_pinned_prompt_is_watched_over_the_steps(bench, reader):
    it = bench(reader).start()
    it.page.click("[data-key=row-6]")
    it.page.click("[data-key=detail-group]")
    it.page.click("[data-key=pin]")
    it.page.click("[data-key=tab-pins]")
    it.page.wait_for_selector(".rl-at")
    assert it.page.locator(".rl-when").all_inner_texts()[0].startswith("step 5")
    assert it.page.locator(".rl-at").count() == 6
    answers = it.page.locator(".rl-at").first.locator(".rl-answer .rl-clip").all_inner_texts()
    assert answers == [row["completion"] for row in rows(5)[4:8]]
    it.page.locator(".rl-tall").evaluate("node => { node.scrollTop = 90; }")
    add_step(reader.path, 6)  # watched: the new step comes by itself, and the place stays
    it.push()
    it.until("document.querySelector('.rl-when').textContent.startsWith('step 6')")
    assert it.page.locator(".rl-tall").evaluate("node => node.scrollTop") == 90
    it.page.click("[data-key=answer-0-2-5]")
    it.until("document.querySelector('.rl-where').textContent === 'step 2, row 5'")
    it.page.click("[data-key=unpin-0-1]")
    it.until("document.querySelector('.rl-main').textContent.includes('No prompt is pinned')")


def test_two_steps_and_two_runs_stand_side_by_side(bench, reader, tmp_path):
    other = RunReader(write_run(tmp_path / "second", steps=3, seed=9))
    it = bench(reader, other).start()
    it.page.click("[data-key=tab-compare]")
    it.page.wait_for_selector(".rl-pair")
    it.page.select_option("[data-key=left-step]", "0")
    it.until("document.querySelector('.rl-heads').textContent.includes('first, step 0')")
    left, right = (it.page.locator(".rl-two .rl-answers").nth(i).locator(".rl-clip").all_inner_texts() for i in (0, 1))
    wanted = it.ask({"kind": "compare", "left": {"run": 0, "step": 0}, "right": {"run": 0}})["prompts"][0]
    assert left == [row["completion"] for row in wanted["left"]["rows"]]
    assert right == [row["completion"] for row in wanted["right"]["rows"]]
    it.page.select_option("[data-key=right-run]", "1")
    it.until("document.querySelector('.rl-heads').textContent.includes('second, step 2')")
    it.page.locator(".rl-answers").nth(1).locator(".rl-answer").first.click()
    it.until("document.querySelector('.rl-where').textContent.startsWith('second · step 2')")


# ------------------------------------------------------------------ token lens


def test_tokens_are_shaded_by_sign_and_size(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    table = rows(0, prompts=["p "], num_generations=2, texts=["abcdefghijkl"] * 2)
    table[0] |= {"advantage": 1.0, "logp": [-1.0] * 5, "ref_logp": [-1.5, -1.25, -1.0, -0.75, -0.5], "new_logp": None}
    table[0] |= {"loss_mask": [True] * 4 + [False], "truncated": False}
    table[1] |= {"truncated": True}
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder)).start()
    colours = [it.background(f'[data-token="{i}"]') for i in range(5)]
    channel = [[float(part) for part in re.findall(r"[\d.]+", colour)] for colour in colours]
    assert channel[0][2] > channel[0][0] and channel[3][0] > channel[3][2]  # blue above 0, orange below
    assert channel[0][3] > channel[1][3] > 0 and channel[2][3] == 0  # stronger where larger; 0 is bare
    assert channel[4][3] == 0 and "rl-masked" in it.page.locator('[data-token="4"]').get_attribute("class")
    assert it.page.locator('[data-token="4"].rl-end').count() == 1 and it.page.locator(".rl-cut").count() == 0
    assert "log π_ref" in it.text(".rl-legend")
    it.page.click("[data-key=quantity-entropy]")
    assert [it.background(f'[data-token="{i}"]') for i in range(5)] != colours
    assert it.page.locator("[data-key=quantity-entropy]").get_attribute("aria-checked") == "true"
    it.page.click("[data-key=row-1]")
    it.page.wait_for_selector(".rl-cut")
    assert it.page.locator(".rl-end").count() == 0


def test_the_ratio_is_a_ratio_with_its_clip_state(bench, tmp_path):
    """One token is half as likely as before, one is twice as likely: equally strong; their product is the row's."""
    folder = write_run(tmp_path / "run", steps=0)
    table = rows(0, prompts=["p "], num_generations=2, texts=["abcdefghijkl"] * 2)
    logs = [-0.6931472, 0.6931472, 0.0, 0.0, 0.2231436]  # 1/2, 2, 1, 1, 5/4
    table[0] |= {"old_logp": [-1.0] * 5, "logp": [value - 1.0 for value in logs], "loss_mask": [True] * 5}
    table[0] |= {"ratio": 1.25, "clipped": 1, "epsilon": 0.2, "epsilon_high": 0.2, "truncated": False}
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder)).start()
    it.page.click("[data-key=quantity-ratio]")
    it.page.click("[data-key=figures]")
    assert it.page.locator(".rl-token .rl-figure").all_inner_texts() == [
        "×0.500",
        "×2.000",
        "×1.000",
        "×1.000",
        "×1.250",
    ]
    colours = [re.findall(r"[\d.]+", it.background(f'[data-token="{i}"]')) for i in range(3)]
    channel = [[float(part) for part in colour] for colour in colours]
    assert channel[0][0] > channel[0][2] and channel[1][2] > channel[1][0]  # orange below 1, blue above
    assert channel[0][3] == pytest.approx(channel[1][3]) and channel[2][3] == 0
    legend = it.text(".rl-legend")
    assert "π / π_old" in legend and "product ×1.250" in legend
    assert "ratio of the row 1.250 ▲ clipped above" in legend and "(1 − 0.200 to 1 + 0.200)" in legend
    assert "ratio ×0.500" in it.page.locator('[data-token="0"]').get_attribute("aria-label")


def test_numbers_by_mouse_and_by_keyboard(bench, reader):
    it = bench(reader).start()
    row = rows(5)[0]
    wanted = [row["logp"][i] - row["ref_logp"][i] for i in range(row["length"])]

    def said(index):
        start = f"{index + 1} / {row['length']}"
        it.until("text => document.querySelector('.rl-readout').textContent.startsWith(text)", start)
        found = re.search(r"log-ratio ([+−\d.]+)", it.text(".rl-readout").replace("\n", " "))
        return float(found[1].replace("−", "-"))

    it.page.hover('[data-token="2"]')
    assert said(2) == pytest.approx(wanted[2], abs=1e-3)
    it.page.focus('[data-token="0"]')
    for index in (1, 2, 3):
        it.page.keyboard.press("ArrowRight")
        assert said(index) == pytest.approx(wanted[index], abs=1e-3)
    it.page.keyboard.press("End")
    assert said(row["length"] - 1) == pytest.approx(wanted[-1], abs=1e-3)
    label = it.page.locator('[data-token="1"]').get_attribute("aria-label")
    assert label.startswith("token 2:") and "credit" in label
    it.page.check("[data-key=figures]")
    assert it.page.locator(".rl-figure").count() == row["length"]


def test_long_completions_are_paged(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    write_rollout(folder, 0, rows(0, prompts=["p "], texts=["xyz" * 900] * 4))
    it = bench(RunReader(folder)).start()
    assert it.page.locator(".rl-token").count() == 400
    it.page.click("[data-key=lens-on]")
    it.until("document.querySelector('.rl-detail').textContent.includes('tokens 401 to 800 of 901')")
    it.page.click("[data-key=lens-on]")
    it.page.wait_for_selector(".rl-end, .rl-cut")
    assert it.page.locator(".rl-token").count() == 101


def test_a_step_without_numbers_per_token_says_so(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    table = rows(0)
    for row in table:
        for name in ("sampler_logp", "logp", "old_logp", "ref_logp", "new_logp", "entropy", "loss_mask"):
            row[name] = None
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder)).start()
    assert "no numbers per token" in it.text(".rl-detail") and it.page.locator(".rl-pick:disabled").count() == 6


# ------------------------------------------------------------------ keyboard and screen readers


def test_everything_by_keyboard(bench, reader):
    it = bench(reader).start()
    it.page.focus("[data-key=row-0]")
    it.page.keyboard.press("ArrowDown")
    it.page.keyboard.press("ArrowDown")
    assert it.focus() == "row-2" and it.page.locator("[data-key=row-2]").get_attribute("aria-selected") == "true"
    it.page.keyboard.press("End")
    assert it.focus() == "row-15"
    it.page.keyboard.press("Enter")
    it.until("document.activeElement.classList.contains('rl-token')")
    assert it.text(".rl-where") == "step 5, row 15"
    it.page.keyboard.press("Escape")
    assert it.focus() == "row-15"
    it.page.keyboard.press("g")
    it.page.wait_for_selector(".rl-group")
    it.page.keyboard.press("/")
    assert it.focus() == "search"
    it.page.keyboard.type("is 1")
    it.until("document.querySelectorAll('.rl-main tbody tr').length < 16")
    assert it.focus() == "search"
    it.page.keyboard.press("Escape")
    it.until("document.activeElement.matches('tr[data-row]')")
    it.page.focus("[data-key=detail-group]")
    it.page.keyboard.press("ArrowRight")
    it.until("document.querySelector('.rl-whole')")
    assert it.focus() == "detail-text"


def test_keys_do_not_reach_the_notebook(bench, reader):
    it = bench(reader).start()
    it.page.evaluate("window.leaked = 0; document.addEventListener('keydown', () => { window.leaked += 1; })")
    it.page.focus("[data-key=row-0]")
    for key in ("ArrowDown", "Enter", "d", "d", "/"):
        it.page.keyboard.press(key)
    assert it.page.evaluate("window.leaked") == 0
    mark = it.page.locator(".rlkit-panel").get_attribute("data-lm-suppress-shortcuts")
    assert mark == "true"  # what JupyterLab looks for before it takes a key as a shortcut


def test_every_control_has_a_name_for_screen_readers(bench, reader):
    it = bench(reader).start()
    it.page.click("[data-key=detail-group]")
    it.page.wait_for_selector(".rl-group")
    nameless = it.page.evaluate(
        """() => Array.from(document.querySelectorAll("button, input, select, summary, [role=grid], [role=listbox]"))
        .filter((node) => ![node.getAttribute("aria-label"), node.textContent, node.closest("label")?.textContent]
            .some((text) => text?.trim()))
        .map((node) => node.outerHTML)"""
    )
    assert nameless == []
    it.page.focus("[data-key=row-1]")
    it.page.keyboard.press("ArrowDown")
    outline = it.page.locator("[data-key=row-2]").evaluate("node => getComputedStyle(node).outlineStyle")
    assert outline == "solid"


def luminance(colour):
    channels = [value / 255 for value in colour[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read_in_both_themes_on_every_shade(bench, tmp_path, dark):
    """WCAG 2 asks for a contrast of 4.5 between a text and what is behind it."""
    folder = write_run(tmp_path / "run", steps=0)
    table = rows(0, prompts=["p "], num_generations=2, texts=["abcdef"] * 2)
    for row in table:
        row |= {"advantage": 1.0, "logp": [-1.0] * 3, "ref_logp": [-2.0, 0.0, -1.0]}
        row |= {"new_logp": None, "loss_mask": [True] * 3}
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder), dark=dark).start()

    def channels(text):
        return [float(part) for part in re.findall(r"[\d.]+", text)]

    back = channels(it.background(".rlkit-panel"))
    assert (luminance(back) < 0.1) == dark
    for token in range(3):
        shade = channels(it.background(f'[data-token="{token}"]'))
        alpha = shade[3] if len(shade) == 4 else 1.0
        behind = [alpha * over + (1 - alpha) * under for over, under in zip(shade, back, strict=False)]
        ink = channels(it.page.locator(f'[data-token="{token}"]').evaluate("node => getComputedStyle(node).color"))
        light, dim = sorted((luminance(behind), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dim + 0.05) >= 4.5, (token, shade)


def test_the_front_ends_theme_is_taken_on(bench, reader):
    it = bench(reader).start()
    it.page.evaluate("document.body.style.setProperty('--jp-layout-color1', 'rgb(1, 2, 3)')")
    assert it.background(".rlkit-panel") == "rgb(1, 2, 3)"


# ------------------------------------------------------------------ hostile texts


def test_hostile_texts_are_shown_as_text(bench, tmp_path):
    folder = write_run(tmp_path / "run<img src=x onerror=alert(1)>", steps=0)
    write_rollout(folder, 0, hostile_rows(0))
    it = bench(RunReader(folder)).start()
    names = list(HOSTILE)
    for row, name in enumerate(names):
        it.page.click(f"[data-key=row-{row}]")
        for tab in ("tokens", "group", "text"):
            it.page.click(f"[data-key=detail-{tab}]")
            it.page.wait_for_selector({"tokens": ".rl-tokens", "group": ".rl-group", "text": ".rl-whole"}[tab])
            it.until("row => document.querySelector('.rl-where').textContent.endsWith(`row ${row}`)", row)
        whole = it.page.locator(".rl-whole").nth(1).evaluate("node => node.textContent")
        if name in ("script", "think", "quotes", "surrogate", "zalgo"):
            assert whole == HOSTILE[name]
        if name == "long":
            assert whole == "a" * completions.TEXT and "of 1,000,000" in it.text(".rl-block:nth-child(3)")
        if name == "ansi":
            assert whole == "ESC[31mredESC[0m and BEL bell"
        if name == "nul":
            assert whole == "aNULb"
        if name == "right to left":
            assert "U+202E" in whole and "\u202e" not in whole and "\u200f" not in whole
        if name == "tags":
            assert "U+E0041" in whole and "U+200B" in whole
        if name == "lines":
            assert whole == "one↵\ntwoCR↵\n⇥threeU+2028four"
    assert it.page.evaluate("window.hacked") is None
    assert it.page.locator(".rlkit-panel :is(img, script, b b, iframe, svg, style)").count() == 0
    assert it.page.evaluate("document.querySelectorAll('*').length") < 6000
    assert "NaN" in it.cells("reward") and "∞" in " ".join(it.cells("KL")) and "−∞" in " ".join(it.cells("ratio"))


def test_a_right_to_left_completion_does_not_turn_its_neighbours(bench, tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    table = rows(0, prompts=["p "], num_generations=2, texts=["\u202e\u05d0\u05d1\u05d2", "plain"])
    write_rollout(folder, 0, table)
    it = bench(RunReader(folder)).start()
    lefts = it.page.locator(".rl-main tbody tr").evaluate_all(
        "rows => rows.map((row) => Array.from(row.cells).map((cell) => cell.getBoundingClientRect().left))"
    )
    assert lefts[0] == lefts[1] == sorted(lefts[0])


# ------------------------------------------------------------------ controls, export, life and death


def test_buttons_and_numbers_send_commands(bench, reader):
    it = bench(reader)
    sent = []
    it.answers["command"] = lambda request: sent.append(request) or {"kind": "command", "number": len(sent)}
    it.start()
    for command in ("pause", "save", "stop"):
        it.page.click(f"[data-key={command}]")
        it.until("text => document.querySelector('.rl-word').textContent.startsWith(text)", f"{command}: sent; ")
    it.page.fill("[data-key=number-beta]", "0.1")
    it.page.keyboard.press("Enter")
    it.until("document.querySelector('.rl-word').textContent.startsWith('beta = 0.1: sent; ')")
    assert [one["command"] for one in sent] == ["pause", "save", "stop", "set"]
    assert (sent[3]["name"], sent[3]["value"], sent[3]["run"]) == ("beta", 0.1, 0)
    write_state(reader.path, 6, status="paused", taken=4, beta=0.1)
    it.push()
    it.until("document.querySelector('.rl-word').textContent === 'beta = 0.1: taken by the run.'")
    assert it.page.locator("[data-key=number-beta]").input_value() == "0.1"
    it.page.click("[data-key=resume]")
    it.until("document.querySelector('.rl-word').textContent.startsWith('resume: sent')")
    write_state(reader.path, 6, status="done", taken=5)
    it.push()
    it.until("!document.querySelector('[data-key=stop]')")
    assert it.page.locator("[data-key=export]").count() == 1


def test_a_refused_command_is_said(bench, reader):
    it = bench(reader)
    it.answers["command"] = lambda request: {"error": "ValueError: controls.send: beta must be between 0 and 1, got 7."}
    it.start()
    it.page.fill("[data-key=number-beta]", "7")
    it.page.click("[data-key=set-beta]")
    it.until("document.querySelector('.rl-word[data-kind=error]')?.textContent.includes('between 0 and 1')")


def test_without_controls_there_are_none(bench, reader):
    it = bench(reader).start(controls=False)
    assert it.page.locator(".rl-controls").count() == 0


def test_a_number_that_is_being_typed_is_not_overwritten(bench, reader):
    it = bench(reader).start()
    it.page.fill("[data-key=number-beta]", "0.7")
    write_state(reader.path, 9)
    it.push()
    it.until("document.querySelector('.rl-state').textContent.includes('step 9')")
    assert it.page.locator("[data-key=number-beta]").input_value() == "0.7" and it.focus() == "number-beta"


def test_export_asks_for_the_path_and_lists_problems(bench, reader):
    from rlkit.view.export_button import export_notebook

    it = bench(reader)
    notebook = reader.path / "bad.ipynb"
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": "x = input()", "outputs": []}
    cell["execution_count"] = None
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    it.answers["export"] = lambda request: json.loads(json.dumps(export_notebook(request.get("path"))))
    it.start()
    it.page.click("[data-key=export]")
    field = it.page.locator("input[aria-label='Path of the notebook']")
    field.wait_for()
    field.fill(str(notebook))
    field.press("Enter")
    it.until("document.querySelector('.rl-export li')")
    wanted = export_notebook(str(notebook))["problems"]
    assert wanted and it.page.locator(".rl-export li code").all_inner_texts() == [one["code"] for one in wanted]
    assert "no script was written" in it.text(".rl-export")


def test_the_readers_place_is_restored(bench, reader):
    it = bench(reader).start()
    it.page.click("[data-key=sort-kl]")
    it.page.locator("[data-key=slider]").fill("3")
    it.page.click("[data-key=row-7]")
    it.page.click("[data-key=detail-group]")
    it.page.wait_for_selector(".rl-group")
    remembered = it.page.evaluate("window.remembered")
    it.page.evaluate("window.stop()")
    snapshot = {"overview": it.ask({"kind": "overview"}), "table": None, "remembered": remembered}
    it.page.evaluate("settings => window.start(settings)", {"snapshot": snapshot})
    it.page.wait_for_selector(".rl-group")
    assert it.text(".rl-where") == "step 3, row 7" and it.text(".rl-step") == "3"
    assert it.numbers("KL") == sorted(it.numbers("KL"), reverse=True)


def test_an_unmounted_panel_is_gone(bench, reader):
    it = bench(reader).start()
    assert it.page.evaluate("window.listening()") == 1
    it.page.evaluate("window.stop()")
    assert it.page.evaluate("window.listening()") == 0 and it.page.locator(".rlkit-panel").count() == 0
    asked = len(it.asked)
    it.page.evaluate("window.push({overview: {runs: []}})")
    time.sleep(0.3)
    assert len(it.asked) == asked


def test_a_page_without_a_kernel(bench, reader):
    """The answers of `panel_data.bundle` in a page: table, lens, group and slider work, and nothing is asked."""
    it = bench(reader).start(bundle=json.loads(json.dumps(panel_data.bundle([reader]), allow_nan=False)))
    it.page.click("[data-key=sort-reward]")
    assert it.numbers("reward") == sorted(it.numbers("reward"), reverse=True)
    it.page.locator("[data-key=slider]").fill("1")
    it.until("document.querySelector('.rl-main table').getAttribute('aria-label').endsWith('step 1')")
    it.page.click("[data-key=row-5]")
    it.until("document.querySelector('.rl-where').textContent === 'step 1, row 5'")
    it.page.click("[data-key=detail-group]")
    it.page.wait_for_selector(".rl-group")
    kernels_own = ".rl-controls, [data-key=tab-compare], [data-key=detail-text], [data-key=follow]"
    assert it.page.locator(kernels_own).count() == 0
    assert it.asked == []


def test_a_narrow_output_stays_in_its_frame(bench, reader):
    it = bench(reader, width=560).start()
    for tab in ("compare", "pins", "rows"):
        it.page.click(f"[data-key=tab-{tab}]")
        wide = it.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 560
