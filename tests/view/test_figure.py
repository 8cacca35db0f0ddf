"""The figure in a notebook: it opens complete, a page loaded later gets the current figure, and no update is lost."""

import threading

import comm
import pytest
from folders import write_run
from waiting import LONG

from rlkit.run.reader import RunReader
from rlkit.view.charts import Charts
from rlkit.view.figure import LiveFigure
from rlkit.view.panels import History


class Recorder:
    """Takes the place of the channel to the browser."""

    made: list["Recorder"]

    def __init__(self, data=None, **others):
        self.comm_id, self.opened, self.sent = f"comm-{len(self.made)}", data or {}, []
        self.made.append(self)

    def send(self, data=None, **others):
        self.sent.append(data)

    def on_msg(self, callback):
        self.handle = callback

    def close(self, *others, **more):
        pass


@pytest.fixture
def channels(monkeypatch):
    Recorder.made = []
    monkeypatch.setattr(comm, "create_comm", Recorder)
    return Recorder.made


def charts_of(folder, steps):
    write_run(folder, steps)
    history = History(RunReader(folder))
    history.update()
    return Charts([history], live=True)


def grow(charts, folder, steps, first):
    write_run(folder, steps, first=first)
    charts.histories[0].reader.refresh()
    charts.histories[0].update()


def shape(trace):
    return tuple(trace["x"]["shape"])


def test_the_channel_is_opened_once_with_the_whole_figure(tmp_path, channels):
    charts_of(tmp_path / "r", 5)
    opened = [one.opened["state"] for one in channels if "_widget_data" in one.opened.get("state", {})]
    assert len(opened) == 1
    assert shape(opened[0]["_widget_data"][0]) == (5,) and opened[0]["_config"]["responsive"]
    assert opened[0]["_widget_layout"]["annotations"][0]["name"] == "Reward"


def test_a_page_that_is_loaded_later_gets_the_figure_of_now(tmp_path):
    charts = charts_of(tmp_path / "r", 5)
    grow(charts, tmp_path / "r", 4, first=5)
    charts.draw()
    charts.figure.update_layout(font_size=17)  # the user's
    state = charts.figure.get_state()
    assert shape(state["_widget_data"][0]) == (9,) and state["_widget_layout"]["font"]["size"] == 17
    assert set(charts.figure.get_state("_config")) == {"_config"}  # a single trait stays a single trait


def test_a_page_whose_javascript_is_late_has_the_figure_of_the_last_change(tmp_path, channels):
    """Whoever listens to nothing but plain state, as a page does until the JavaScript is loaded."""
    charts = charts_of(tmp_path / "r", 5)
    grow(charts, tmp_path / "r", 4, first=5)
    charts.draw()
    channel = next(one for one in channels if one is charts.figure.comm)
    kept = {}
    for data in channel.sent:
        kept |= (data or {}).get("state", {})
    assert shape(kept["_widget_data"][0]) == (9,) and len(kept["_widget_data"]) == len(charts.figure.data)
    assert len(kept["_widget_layout"]["annotations"]) == len(charts.figure.layout.annotations)


def test_an_update_during_a_message_of_the_browser_is_not_lost(tmp_path, channels, monkeypatch):
    """Inside set_state traitlets gathers changes: an update, set and taken back, would come to nothing."""
    charts = charts_of(tmp_path / "r", 5)
    grow(charts, tmp_path / "r", 4, first=5)
    figure = charts.figure
    drawing = threading.Thread(target=charts.draw)
    true_set = LiveFigure.set_trait

    def set_trait(self, name, value):
        if drawing.ident is None:
            drawing.start()
        drawing.join(1.0)  # as long as it takes without a lock
        true_set(self, name, value)

    monkeypatch.setattr(LiveFigure, "set_trait", set_trait)
    figure.set_state({"_js2py_pointsCallback": None})
    drawing.join(LONG)
    channel = next(one for one in channels if one is figure.comm)
    updates = [data["state"].get("_py2js_update") for data in channel.sent if "state" in (data or {})]
    assert any(updates), "the new points were never sent"
