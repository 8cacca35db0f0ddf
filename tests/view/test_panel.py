"""The panel as a widget: real ipywidgets messages on a wire that keeps what is sent; no browser, no kernel."""

import gc
import json
import weakref

import comm
import ipywidgets
import pytest
from comm.base_comm import BaseComm
from run_folders import add_step, hostile_rows, write_rollout, write_run, write_state

from rlkit.run import commands
from rlkit.run.reader import RunReader
from rlkit.view.export_button import export_notebook
from rlkit.view.panel import Panel

MOST = 100_000  # bytes of one push
sent = []


class Wire(BaseComm):
    """A comm that keeps the messages, as strict JSON."""

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        sent.append(json.loads(json.dumps(data, allow_nan=False)))


@pytest.fixture(autouse=True)
def wire(monkeypatch):
    monkeypatch.setattr(comm, "create_comm", lambda *args, **keys: Wire(*args, **keys))
    sent.clear()


@pytest.fixture
def reader(tmp_path):
    return RunReader(write_run(tmp_path / "first", steps=3))


def customs():
    return [one["content"] for one in sent if one and one.get("method") == "custom"]


def tell(panel, content):
    """A message as a front end sends it; returns what comes back."""
    before = len(customs())
    panel._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    return customs()[before:]


def ask(panel, **request):
    [found] = tell(panel, {"kind": "request", "id": "a-1", "request": request})
    assert found["kind"] == "answer" and found["id"] == "a-1"
    return found["answer"]


def test_questions_are_answered_and_faults_become_words(reader):
    panel = Panel([reader])
    assert ask(panel, kind="table", run=0)["total"] == 16
    assert ask(panel, kind="lens", run=0, step=1, row=2)["length"] == 7
    assert "no row 99" in ask(panel, kind="group", run=0, step=1, row=99)["error"]
    assert "unknown request" in ask(panel, kind="nonsense")["error"]
    assert tell(panel, "nonsense") == [] and tell(panel, {"kind": "request"}) == []


def test_a_reader_that_breaks_is_said_and_not_raised(reader, monkeypatch):
    panel = Panel([reader])
    monkeypatch.setattr(type(reader), "rollouts", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in ask(panel, kind="table", run=0)["error"]
    panel.refresh()


def test_a_page_that_is_loaded_late_gets_everything_from_the_snapshot(reader):
    panel = Panel([reader], controls=False)
    tell(panel, {"kind": "remember", "state": {"tab": "pins", "pins": [{"run": 0, "row_id": 1}]}})
    add_step(reader.path, 3)
    reader.refresh()
    state = panel.get_state()["snapshot"]
    assert state["overview"]["runs"][0]["steps"] == [0, 1, 2, 3] and state["table"]["step"] == 3
    assert state["remembered"]["tab"] == "pins" and state["controls"] is False


def test_a_refresh_sends_only_news_and_little_of_it(reader):
    panel = Panel([reader])
    panel.refresh()
    before = len(customs())
    for _ in range(50):
        panel.refresh()
    assert len(customs()) == before
    write_state(reader.path, 9)
    reader.refresh()
    panel.refresh()
    [news] = customs()[before:]
    assert news["table"] is None and news["overview"]["runs"][0]["step"] == 9
    write_rollout(reader.path, 9, [row | {"completion": "x" * 9000} for row in hostile_rows(9)] * 60)
    reader.refresh()
    panel.refresh()
    news = customs()[-1]
    assert news["table"]["step"] == 9 and len(news["table"]["rows"]) == 64 and news["table"]["total"] == 720
    assert len(json.dumps(news)) < MOST


def test_commands_only_go_to_the_folder_of_the_run(tmp_path, monkeypatch):
    readers = [RunReader(write_run(tmp_path / name, steps=1)) for name in ("a", "b")]
    told = []

    def send(path, command, *, name=None, value=None, by=""):
        if value == 7:
            raise ValueError("beta must be between 0 and 1, got 7.")
        told.append((path, command, name, value, by))
        return len(told)

    monkeypatch.setattr(commands, "send", send)
    panel = Panel(readers)
    assert ask(panel, kind="command", run=1, command="pause") == {"kind": "command", "command": "pause", "number": 1}
    assert ask(panel, kind="command", run=0, command="set", name="beta", value=0.1)["number"] == 2
    assert told == [
        (readers[1].path, "pause", None, None, "the view"), (readers[0].path, "set", "beta", 0.1, "the view")
    ]  # fmt: skip
    assert "between 0 and 1" in ask(panel, kind="command", run=0, command="set", name="beta", value=7)["error"]
    assert "no run 5" in ask(panel, kind="command", run=5, command="stop")["error"] and len(told) == 2


def test_twenty_panels_leave_nothing_behind(reader):
    before = len(ipywidgets.widgets.widget._instances)
    gone = []
    for _ in range(20):
        panel = Panel([reader])
        ask(panel, kind="table", run=0)
        panel.refresh()
        gone.append(weakref.ref(panel))
        panel.close()
        del panel
    gc.collect()
    assert len(ipywidgets.widgets.widget._instances) == before
    assert [one() for one in gone] == [None] * 20


def test_a_closed_panel_is_silent(reader):
    panel = Panel([reader])
    panel.close()
    before = len(sent)
    write_state(reader.path, 9)
    reader.refresh()
    panel.refresh()
    panel.close()
    assert len(sent) == before


# ------------------------------------------------------------------ export


def notebook_of(path, *sources):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for i, source in enumerate(sources)
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_export_writes_the_script_of_a_notebook(tmp_path):
    found = export_notebook(str(notebook_of(tmp_path / "good.ipynb", "x = 1\nprint(x)")))
    assert found["script"] == str(tmp_path / "good.py") and (tmp_path / "good.py").exists() and not found["needs_path"]


def test_export_lists_what_is_in_the_way(tmp_path):
    found = export_notebook(str(notebook_of(tmp_path / "bad.ipynb", "x = 1", "y = input()")))
    assert found["script"] is None and not (tmp_path / "bad.py").exists()
    assert [(one["code"][0], one["cell"], one["line"]) for one in found["problems"]] == [("E", 2, 1)]
    assert found["problems"][0]["reason"]


def test_export_finds_the_notebook_that_runs_or_asks(tmp_path, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert export_notebook(None)["needs_path"]
    assert export_notebook(str(tmp_path / "none.ipynb"))["needs_path"]
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebook_of(tmp_path / "here.ipynb", "x = 1")))
    assert export_notebook(None)["script"] == str(tmp_path / "here.py")


def test_a_button_writes_the_command_into_the_folder(reader, unchecked):
    panel = Panel([reader])
    assert ask(panel, kind="command", run=0, command="pause")["number"] == 1
    assert ask(panel, kind="command", run=0, command="set", name="beta", value=0.1)["number"] == 2
    lines = [json.loads(line) for line in (reader.path / "commands.jsonl").read_text().splitlines()]
    assert [(one["command"], one.get("name"), one.get("value"), one["by"]) for one in lines] == [
        ("pause", None, None, "the view"), ("set", "beta", 0.1, "the view")
    ]  # fmt: skip
    assert "gamma" in ask(panel, kind="command", run=0, command="set", name="gamma", value=0.1)["error"]
    assert "number" in ask(panel, kind="command", run=0, command="set", name="beta", value="x")["error"]
