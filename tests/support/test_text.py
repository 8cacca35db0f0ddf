"""What is shown is safe: one table of hostile texts for every HTML that rlkit makes, and every terminal's encoding."""

import html.parser
import io
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import rlkit as rl
from rlkit.run.plot import plot_metrics
from rlkit.support import text as texts
from rlkit.support.text import UNTYPESET

HOSTILE = {
    "a formula": "cost $5 and $6, \\(x\\)",
    "a script": "</td><script>alert(1)</script>&amp;",
    "control characters": "\x1b[31mred\x00\x07\x7f\x9b31m",
    "writing direction": "a\u202eb\u2066c\u200f",
    "half a surrogate pair": "a\ud83db",
    "line ends": "a\nb\r\nc\u2028d",
    "unusual blanks": "a\u00a0b\u200bc\ufeff",
}
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff\ud800-\udfff]")


class Page(html.parser.HTMLParser):
    """The text of a page that stands outside of what MathJax is told to leave alone, its tags, and its whole text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.typeset, self.text = [], set(), "", ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("br", "img", "rect", "path", "circle", "line"):
            self.open.append(set(UNTYPESET.split()) <= set((dict(attributes).get("class") or "").split()))

    def handle_endtag(self, tag):
        if self.open and tag not in ("rect", "path", "circle", "line"):
            self.open.pop()

    def handle_data(self, data):
        self.text += data
        if not any(self.open):
            self.typeset += data


@pytest.fixture(scope="module")
def policy():
    return rl.load_policy("tiny-add")


@pytest.fixture(scope="module")
def step(policy):
    return rl.sample(policy, ["1+2="], num_generations=2, max_completion_length=3, seed=0)


def pages(step, policy, bad, folder):
    """Every HTML that rlkit makes, with a text in each place that takes one."""
    rollout = replace(step, prompts=(bad, bad), completions=(bad, bad), columns={"answer": (bad, [bad]), bad: (1, bad)})
    scores = rl.score(rollout, lambda completions, log_extra: log_extra("said", [bad, {"a": bad}]) or [0.0, 1.0])
    yield "rollout", rollout._repr_html_()
    yield "scores", scores._repr_html_()
    batch = next(iter(rl.PromptLoader([{"prompt": "1+2=", "note": bad}], policy, batch_size=1)))
    yield "batch", batch._repr_html_()
    run = rl.Run(folder / "r")
    for _ in run.steps([0], 1, progress=False):
        run.log(0, rollout, scores, **{bad: 1.0})
    yield "curves", run.plot("reward")._repr_html_()
    yield "curves of an odd name", plot_metrics(run.metrics, [run.metrics.columns[-1]])._repr_html_()
    yield "static page", rl.Dashboard(run)._bundle()["text/html"]
    vstar = rl.estimate_vstar(
        policy,
        [{"prompt": "1+2=", "note": bad}],
        lambda completions: [1.0] * len(completions),
        num_value_samples=2,
        progress=False,
    )
    yield "table of V*", vstar._repr_html_()
    rows = [{"prompt": "1+2=", "note": bad}]
    evaluation = rl.evaluate(policy, rows, lambda completions: [1.0] * len(completions), max_completion_length=3)
    yield "evaluation", evaluation._repr_html_()


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_text_does_anything_to_a_page(bad, step, policy, tmp_path):
    """No element and no formula is made of it, and no character is sent that cannot be seen."""
    for name, page in pages(step, policy, bad, tmp_path):
        found = Page(page)
        assert "script" not in found.tags, name
        assert "$" not in found.typeset and "\\(" not in found.typeset, name
        assert not RAW.search(page), (name, RAW.search(page))
        page.encode()


def test_tasks_and_comparisons_are_safe_too(step, policy):
    from rlkit.tasks import Task

    bad = HOSTILE["a formula"] + HOSTILE["control characters"] + HOSTILE["a script"]
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": bad.replace("\0", "")}])
    found = Page(Task(bad, rows, rows, ())._repr_html_())
    assert "script" not in found.tags and "$" not in found.typeset and not RAW.search(found.text)


def test_a_table_shows_numbers_as_pandas_does_and_cuts_texts():
    import pandas as pd

    frame = pd.DataFrame({"n": [1, 2], "x": [0.5, float("nan")], "flag": [True, False], "text": ["a" * 200, None]})
    page = Page(texts.table_html("head", frame))
    for shown in ("0.5", "NaN", "True", "a" * 80 + "… (+120 characters)"):
        assert shown in page.text
    assert "a" * 81 not in page.text and page.text.startswith("head")


def test_a_name_is_no_markup_to_plotly():
    assert texts.as_plotly("<b>$a$ %{y}\x00") == "&lt;b&gt;&#36;a&#36; %&#123;y}␀"
    assert len(texts.as_plotly("x" * 99)) == 40


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "cp437", "utf-8", "koi8-r"])
@pytest.mark.parametrize("text", ["plain", "Ü · ␛ 中文 ⏎", "\ud83d", "→ €"])
def test_every_terminal_takes_every_line(encoding, text, monkeypatch):
    """As `print` does where that works; else no error, and the letters that the encoding has stay."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    texts.say(text)
    stream.flush()
    written = stream.buffer.getvalue().decode(encoding)
    kept = [letter for letter in text if letter.encode(encoding, "ignore")]
    assert [letter for letter in written if letter in kept][: len(kept)] == kept
    if len(kept) == len(text):
        assert written == text + "\n"


ASKED = """
import pathlib
from dataclasses import replace
import rlkit as rl
from rlkit import cli
folder = pathlib.Path("runs/ü中")
run = rl.Run(folder)
run.dashboard()
for step, _ in run.steps([0], 1, progress=False):
    rollout = rl.sample(rl.load_policy("tiny-add"), ["1+2="], num_generations=2, max_completion_length=3)
    run.log(step, replace(rollout, completions=("ü中 $", "\\x1b")), ü中=1.0)
print(rl.Dashboard(run))
rl.show_completions(run.path)
assert rl.export("ü中.ipynb", "n.py").name == "n.py"
for words in (
    ["ctl", str(folder), "status"], ["ctl", str(folder), "pause"], ["report", str(folder)], ["export", "ü中.ipynb"],
    ["export", "ü中.ipynb", "--check"], ["report", "ü"], ["view", "ü"], ["export", "ü.ipynb"], ["demo", "--help"],
):
    try:
        print(words[0], cli.main(words))
    except SystemExit as end:
        print(words[0], end.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "cp1252"},
    ],
    ids=["LC_ALL=C", "cp1252"],
)
def test_no_command_fails_on_the_terminals_encoding(settings, tmp_path):
    """A folder, a metric, a note and a comment that the terminal cannot show."""
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "export"))
    from cells import cell, environment, write

    env = {**environment(), **settings}
    name = "n.ipynb" if "LC_ALL" in settings else "ü中.ipynb"  # there Python can open no other name
    write(tmp_path, cell("lr = 1  # Ü 中", "parameters"), "x = 1\nx.cuda()  # ü中\nprint('ü中', lr)", name=name)
    asked = (
        ASKED if "LC_ALL" not in settings else ASKED.replace('"runs/ü中"', '"runs/r"').replace("ü中.ipynb", "n.ipynb")
    )
    (tmp_path / "ask.py").write_text(asked, encoding="utf-8")

    def ask(*words):
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True)

    done = ask("ask.py")
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr and b"UnicodeEncodeError" not in done.stderr + done.stdout
    done = ask("n.py", "--help")
    assert done.returncode == 0 and b"--lr" in done.stdout, done.stderr.decode(errors="replace")
    (tmp_path / "n.py").write_text((tmp_path / "n.py").read_text(encoding="utf-8").replace("x.cuda()", "pass"), "utf-8")
    done = ask("n.py", "--lr", "2")
    assert done.returncode == 0 and b"with lr=2" in done.stdout, done.stderr.decode(errors="replace")
