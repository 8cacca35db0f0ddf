"""A real JupyterLab in a real browser, for tests: a server, a page, cells that are run and waited for.

    def test_something(lab):                       # the fixture of tests/view/conftest.py
        page = lab.open("a.ipynb", ["import rlkit", "1 + 1"])
        page.run(0)                                # runs the cell and waits until it has ended
        page.start(1); page.wait(1)                # the same in two halves
        page.page                                  # playwright's own page
        assert not page.strangers and not page.errors

Rules that keep it steady: own folders for everything Jupyter stores, a free port, no news, no fixed sleeps for
readiness; a cell is waited for by its own executionState, because the kernel's status reads idle when a message of a
widget has ended.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
from waiting import LONG

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
ROOT = Path(__file__).parents[2]
PATIENCE = LONG  # seconds, for a machine with other work
QUIET = ("Failed to load resource: the server responded with a status of 404",)  # optional files of JupyterLab itself


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until(condition, what: str, patience: float = PATIENCE, pause: float = 0.1):
    """The first true value of `condition()`."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(pause)
    raise AssertionError(f"not within {patience} s: {what}")


def environment(home: Path) -> dict[str, str]:
    """Variables of a Jupyter that keeps everything in `home` and finds this repository."""
    settings = home / "settings" / "@jupyterlab"
    for name, values in {
        "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    folders = {"CONFIG": "JUPYTER_CONFIG_DIR", "DATA": "JUPYTER_DATA_DIR", "RUN": "JUPYTER_RUNTIME_DIR"}
    folders |= {"settings": "JUPYTERLAB_SETTINGS_DIR", "WS": "JUPYTERLAB_WORKSPACES_DIR", "HOME": "HOME"}
    ours = {variable: str(home / name) for name, variable in folders.items()}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return os.environ | ours | quiet


class Server:
    """JupyterLab on the loopback, with its notebooks in `notebooks`."""

    def __init__(self, home: Path) -> None:
        self.home, self.notebooks = home, home / "notebooks"
        self.notebooks.mkdir(parents=True, exist_ok=True)
        self.port, self.token = free_port(), secrets.token_hex(16)
        options = [
            *("--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={self.port}", "--ServerApp.port_retries=0"),
            *(f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.notebooks}"),
            *("--expose-app-in-browser", "--LabApp.news_url=", "--LabApp.extension_manager=readonly"),
            "--ServerApp.terminals_enabled=False",
        ]
        self.log = open(home / "server.log", "wb")
        command = [sys.executable, "-m", "jupyterlab", *options]
        self.process = subprocess.Popen(
            command, env=environment(home), cwd=self.notebooks, stdout=self.log, stderr=subprocess.STDOUT
        )
        wait_until(self.answers, f"the server is up, see {home / 'server.log'}")

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return (
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api?token={self.token}", timeout=10).status == 200
            )
        return False

    def call(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/{path}?token={self.token}", method=method)
        return urllib.request.urlopen(request, timeout=PATIENCE).read()

    def kill_kernels(self) -> None:
        """End all kernels and sessions, as a closed laptop would."""
        for session in json.loads(self.call("GET", "sessions")):
            self.call("DELETE", f"sessions/{session['id']}")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def start_chromium(playwright):
    """A browser without a window."""
    return playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS, timeout=PATIENCE * 1000)


class Lab:
    """A server and a browser."""

    def __init__(self, home: Path, playwright) -> None:
        self.server = Server(home)
        self.browser = start_chromium(playwright)
        self.pages: list[NotebookPage] = []

    def write(self, name: str, cells: list[str]) -> Path:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.server.notebooks / name)
        return self.server.notebooks / name

    def open(self, name: str, cells: list[str] | None = None, *, kernel: bool = True) -> "NotebookPage":
        """A page with the notebook, written first if cells are given; its kernel is ready.

        A notebook that was open before has its kernel still, unless that was ended: as for a tab that was closed.
        """
        if cells is not None:
            self.write(name, cells)
        self.pages.append(NotebookPage(self, name, kernel=kernel))
        return self.pages[-1]

    def close(self) -> None:
        for page in self.pages:
            page.close()
        self.browser.close()
        self.server.close()


class NotebookPage:
    """One notebook in the browser.

    Attributes:
        page: playwright's page.
        strangers: requests that would leave this machine.
        errors: errors on the page's console.
    """

    def __init__(self, lab: Lab, name: str, *, kernel: bool = True) -> None:
        self.lab, self.file = lab, lab.server.notebooks / name
        self.strangers: list[str] = []
        self.errors: list[str] = []
        self._counts: dict[int, int | None] = {}
        self.context = lab.browser.new_context(viewport={"width": 1280, "height": 1500})
        self.context.set_default_timeout(PATIENCE * 1000)
        self.page = self.context.new_page()
        watch(self.page, lab.server.port, self.strangers, self.errors)
        self.page.goto(f"http://127.0.0.1:{lab.server.port}/lab/tree/{name}?token={lab.server.token}&reset")
        ready = "() => window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length > 0"
        self.page.wait_for_function(ready, timeout=PATIENCE * 1000)
        if kernel:
            idle = "() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
            self.page.wait_for_function(idle, timeout=PATIENCE * 1000)
        self.page.evaluate("() => jupyterapp.shell.collapseLeft()")

    def cell(self, index: int) -> dict:
        """executionState and executionCount of a cell."""
        code = "i => { const m = jupyterapp.shell.currentWidget.content.widgets[i].model;"
        return self.page.evaluate(code + " return {state: m.executionState, count: m.executionCount}; }", index)

    def start(self, index: int) -> None:
        """Run a cell without waiting."""
        self._counts[index] = self.cell(index)["count"]
        code = "i => { jupyterapp.shell.currentWidget.content.activeCellIndex = i;"
        self.page.evaluate(code + " void jupyterapp.commands.execute('notebook:run-cell'); }", index)

    def ended(self, index: int) -> bool:
        now = self.cell(index)
        return now["state"] == "idle" and now["count"] is not None and now["count"] != self._counts.get(index)

    def wait(self, index: int, patience: float = PATIENCE) -> None:
        """Until a cell that was started has ended; fails on a traceback in it."""
        wait_until(lambda: self.ended(index), f"cell {index} of {self.file.name} ends", patience)
        error = self.output(index).locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']")
        if error.count():
            raise AssertionError(error.first.inner_text())

    def run(self, index: int) -> None:
        self.start(index)
        self.wait(index)

    def set_source(self, index: int, text: str) -> None:
        code = "([i, t]) => jupyterapp.shell.currentWidget.content.widgets[i].model.sharedModel.setSource(t)"
        self.page.evaluate(code, [index, text])

    def interrupt(self) -> None:
        """The ■ button."""
        self.page.evaluate("() => void jupyterapp.commands.execute('notebook:interrupt-kernel')")

    def output(self, index: int):
        """The output area of a cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-Cell-outputArea")

    def save(self) -> None:
        self.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")

    def points(self, index: int, trace: int = 0) -> int:
        """Points that a plotly chart in a cell's output has drawn."""
        code = f"gd => (gd.data?.[{trace}]?.x ?? []).length"
        chart = self.output(index).locator(".js-plotly-plot")
        return chart.first.evaluate(code) if chart.count() else 0

    def theme(self, name: str) -> None:
        """Change JupyterLab's theme, Light or Dark; the server remembers it for the pages that come."""
        code = "name => void jupyterapp.commands.execute('apputils:change-theme', {theme: `JupyterLab ${name}`})"
        self.page.evaluate(code, name)
        done = "light => document.body.dataset.jpThemeLight === light"
        self.page.wait_for_function(done, arg="true" if name == "Light" else "false", timeout=PATIENCE * 1000)

    def shots(self) -> Path:
        """The folder for pictures: $RLKIT_SHOTS, or beside the server's log."""
        folder = Path(os.environ.get("RLKIT_SHOTS", self.lab.server.home / "shots"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def shot(self, name: str, index: int | None = None) -> Path:
        """A picture of the page or of a cell's output."""
        target = self.page if index is None else self.output(index)
        target.screenshot(path=self.shots() / f"{name}.png")
        return self.shots() / f"{name}.png"

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.context.close()


def watch(page, port: int, strangers: list[str], errors: list[str]) -> None:
    """Collect what a page asks of other machines, and its errors."""
    local = (f"http://127.0.0.1:{port}", f"ws://127.0.0.1:{port}", "data:", "blob:", "file:", "about:")
    page.on("request", lambda request: None if request.url.startswith(local) else strangers.append(request.url))

    def told(message) -> None:
        if message.type == "error" and not message.text.startswith(QUIET):
            errors.append(message.text)

    page.on("console", told)
    page.on("pageerror", lambda error: errors.append(str(error)))
