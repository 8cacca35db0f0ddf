"""The dashboard without a browser: it replaces, it closes, it sends little, and it never raises into the loop."""

import json
import subprocess
import sys
import threading
import time

import nbclient
import nbformat
import pytest
from folders import HOSTILE, write_rollout, write_run
from ipywidgets.widgets.widget import Widget, _instances
from lab import environment, wait_until

import rlkit as rl
from rlkit.view import frontend
from rlkit.view.charts import Charts
from rlkit.view.dashboard import _OPEN, Dashboard


@pytest.fixture(autouse=True)
def closed():
    """No dashboard of a test outlives it."""
    yield
    for one in list(_OPEN.values()):
        one.close()


def view_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rlkit-view"]


@pytest.mark.slow
def test_twenty_dashboards_leave_no_widget_and_no_thread(tmp_path):
    folder = write_run(tmp_path / "r", 3)
    before = set(_instances)
    for _ in range(20):
        dash = Dashboard(folder, live=True)
        assert len(set(_instances) - before) >= 3
        dash._start()
        dash.close()
    assert set(_instances) == before
    wait_until(lambda: not view_threads(), "the threads end")


def test_a_second_dashboard_replaces_the_first(tmp_path):
    folder = write_run(tmp_path / "r", 3)
    before = set(_instances)
    first = Dashboard(folder, live=True)
    many = len(set(_instances) - before)
    second = Dashboard(folder, live=True)
    assert len(set(_instances) - before) == many
    assert first.panel is None and not first.refresh() and second.panel is not None


def test_a_cell_that_makes_its_run_again_replaces_its_view(tmp_path):
    """The second run gets another folder, and still there is one view."""
    for number in range(3):
        run = rl.Run(tmp_path / "r")
        run.log(0, reward=0.5)
        dash = Dashboard(run, live=True)
        assert run.path.name == ("r" if not number else f"r-{number + 1}")
    assert list(_OPEN.values()) == [dash]


def test_the_view_follows_a_run_that_has_not_begun_and_chooses_no_folder_for_it(tmp_path):
    """A view before the first step, new keys later, a number that is missing."""
    run = rl.Run(tmp_path / "r")
    dash = Dashboard(run, live=True)
    assert not (tmp_path / "r").exists() and not dash.refresh() and "not begun" in repr(dash)
    run.log(0, reward=0.5)
    assert dash.refresh() and len(dash.fig.data) == 1
    run.log(1, kl=float("nan"), mine=3.0)
    assert dash.refresh() and not dash.refresh()
    assert [note.name for note in dash.fig.layout.annotations] == ["Reward", "mine"]
    assert dash.notes == [] or all("state.json" in note for note in dash.notes)


def test_a_fault_of_the_view_is_noted_once_and_raised_nowhere(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "r", 3)
    dash = Dashboard(folder, live=True)

    def broken(self):
        raise RuntimeError("<b>no ink</b>")

    monkeypatch.setattr(Charts, "draw", broken)
    for step in (3, 4):
        write_run(folder, 1, first=step)
        assert dash.refresh()
    assert [note for note in dash.notes if "no ink" in note] == ["The view had a fault: RuntimeError: <b>no ink</b>"]
    assert "&lt;b&gt;no ink" in dash._said.value
    monkeypatch.undo()
    write_run(folder, 1, first=5)
    dash.refresh()
    assert len(dash.fig.data[0].x) == 6  # it goes on


def test_run_dashboard_does_not_fail_with_the_view(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlkit.view.dashboard.front_end", lambda: "live")
    monkeypatch.setattr(Dashboard, "show", lambda self: 1 / 0)
    run = rl.Run(tmp_path / "r")
    assert run.dashboard() is None
    run.log(0, reward=0.25)
    said = capsys.readouterr().out
    assert "no live view: ZeroDivisionError" in said and "step 0 | reward 0.250" in said


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="expected at least one run"):
        Dashboard()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Dashboard(tmp_path / "nowhere")


@pytest.mark.parametrize("name", frontend.NEEDED)
def test_without_a_library_of_the_view_there_is_a_picture_and_one_hint(tmp_path, monkeypatch, name):
    folder = write_run(tmp_path / "r", 3)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(frontend, "shell", lambda: object())
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    assert frontend.front_end() == "static" and frontend.missing() == [name]
    dash = Dashboard(folder, live=True)
    assert dash.fig is None and dash.refresh() is False
    page = dash._bundle()["text/html"]
    assert page.count(f"pip install {name}") == 1 and page.count("<img") >= 8


@pytest.mark.integration
def test_importing_rlkit_needs_no_library_of_the_view():
    """Not one of them is there; an import of any would say which."""
    missing = f"import sys; sys.modules.update(dict.fromkeys({frontend.NEEDED!r}))"
    code = f"{missing}; import rlkit; rlkit.Dashboard; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_front_ends(monkeypatch):
    assert frontend.front_end() == "text"  # a test runner has no kernel
    monkeypatch.setattr(frontend, "shell", lambda: object())
    for name in [*frontend.TRACES, *(key for key in __import__("os").environ if key.startswith("VSCODE_"))]:
        monkeypatch.delenv(name, raising=False)
    assert frontend.front_end() == "static"  # nbclient
    for name in ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG"):
        monkeypatch.setenv(name, "1")
        assert frontend.front_end() == "live"
        monkeypatch.delenv(name)


@pytest.fixture
def sent(monkeypatch):
    """Bytes of each message that a widget sends; nothing leaves."""
    sizes = []

    def count(self, msg, buffers=None):
        sizes.append(
            len(json.dumps(msg, default=str)) + sum(len(memoryview(buffer).cast("B")) for buffer in buffers or [])
        )

    monkeypatch.setattr(Widget, "_send", count)
    return sizes


@pytest.mark.slow
def test_a_step_of_many_long_completions_is_few_and_small_messages(tmp_path, sent):
    """512 completions of 4,000 characters, that is 2 MB of text a step."""
    folder = write_run(tmp_path / "r", 2, rows=512, characters=4_000)
    dash = Dashboard(folder, live=True)
    for step in (2, 3):
        write_run(folder, 1, first=step, rows=512, characters=4_000)
        sent.clear()
        assert dash.refresh() and not dash.notes
        assert len(sent) <= 6, sent
        assert sum(sent) < 200_000, sent  # at two refreshes a second below half of what a server drops


def test_nothing_new_sends_nothing(tmp_path, sent):
    dash = Dashboard(write_run(tmp_path / "r", 3), live=True)
    dash.refresh()
    sent.clear()
    for _ in range(5):
        dash.refresh()
    assert not sent


def test_the_thread_looks_only_when_the_last_look_is_paid_for(tmp_path, monkeypatch):
    """Dear looks are rare ones; the first one, which builds the charts, is for nothing."""
    dash = Dashboard(write_run(tmp_path / "r", 3), live=True)
    looks, pauses = [], []

    class Waits:
        def wait(self, pause):
            pauses.append(pause)
            return len(pauses) > 5

        def is_set(self):
            return True

    def busy():
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        looks.append(len(pauses))
        return True

    monkeypatch.setattr(dash, "refresh", busy)
    dash._stale = False
    with dash._lock:  # what the cell before has cost does not hold back the first numbers
        busy()
    looks.clear()
    real, dash._closed = dash._closed, Waits()
    dash._watch()
    dash._closed = real
    assert looks == [1, 2]  # the clock hardly moves here: after the second one it owes
    assert pauses[:2] == [0.5, 0.5] and 1.0 < pauses[2] <= 100 * dash._lock.spent


def test_a_shaken_view_shows_everything_in_the_end(tmp_path):
    """A hundred quick refreshes from a thread while a run is written."""
    folder = write_run(tmp_path / "r", 1)
    dash = Dashboard(folder, live=True)
    over = threading.Event()
    shaker = threading.Thread(target=lambda: [dash.refresh() for _ in iter(over.is_set, True)])
    shaker.start()
    for step in range(1, 40):
        write_run(folder, 1, first=step)
    over.set()
    shaker.join()
    dash.refresh()
    assert len(dash.fig.data[0].x) == 40
    assert all("no signal" in note for note in dash.notes)  # what the invented run says, no fault


CELLS = (
    "import rlkit as rl",
    "run = rl.Run('runs/headless'); dash = run.dashboard()",
    "for step in range(3):\n    run.log(step, reward=0.25 * step, kl=0.1)",
    "print('after')",
)


def notebook_of(cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


@pytest.fixture
def headless(tmp_path, monkeypatch):
    """As on a build server: no trace of a front end."""
    for name, value in environment(tmp_path / "home").items():
        if name != "HOME":
            monkeypatch.setenv(name, value)
    for name in [*frontend.TRACES, *(key for key in __import__("os").environ if key.startswith("VSCODE_"))]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.slow
def test_nbclient_leaves_a_picture_in_a_small_file(headless):
    """With nbclient's own settings, which store the state of every widget."""
    notebook = notebook_of(CELLS)
    nbclient.NotebookClient(
        notebook, timeout=1200, startup_timeout=300, resources={"metadata": {"path": str(headless)}}
    ).execute()
    check_picture(notebook)


@pytest.mark.slow
def test_papermill_leaves_a_picture_in_a_small_file(headless):
    import papermill

    nbformat.write(notebook_of(CELLS), headless / "in.ipynb")
    papermill.execute_notebook(
        str(headless / "in.ipynb"),
        str(headless / "out.ipynb"),
        cwd=str(headless),
        progress_bar=False,
        start_timeout=300,
    )
    check_picture(nbformat.read(headless / "out.ipynb", as_version=4))


def check_picture(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "rlkit-static" in output.get("data", {}).get("text/html", "")]
    assert len(pictures) == 1 and pictures[0] in notebook.cells[1].outputs
    assert "reward 0.500" in pictures[0].data["text/html"] and "reward 0.500" in pictures[0].data["text/plain"]
    assert pictures[0].data["text/html"].count("<img") == 2
    assert len(nbformat.writes(notebook)) < 60_000
    assert "widgets" not in notebook.metadata and "Traceback" not in nbformat.writes(notebook)


@pytest.mark.integration
def test_in_plain_python_there_are_lines_and_no_widgets(tmp_path):
    code = (
        "import rlkit as rl, sys\nrun = rl.Run('r'); assert run.dashboard(every=2) is None\n"
        "for step in range(4): run.log(step, reward=step / 4)\n"
        "print(rl.Dashboard('r'))\nassert 'ipywidgets' not in sys.modules and 'plotly' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["step 0 | reward 0.000", "step 2 | reward 0.500", "Run r · reward 0.750"]


def test_hostile_completions_are_text_in_the_picture(tmp_path):
    folder = write_run(tmp_path / "r", 1)
    write_rollout(folder, 1, texts=[*HOSTILE[:7], "x" * 1_000_000])
    page = Dashboard(folder, live=False)._bundle()["text/html"]
    for piece in ("<script", "<img", "</script>", "\x1b", "\x00", "\x07", "\u202e", "\u2028", "<svg", "<think>"):
        assert piece not in page.split("<table")[1], piece
    assert "mathjax_ignore tex2jax_ignore" in page and len(page) < 200_000
    assert "&lt;script&gt;" in page and "(+999,840 characters)" in page
