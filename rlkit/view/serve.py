"""`rlkit view`: the dashboard in a browser tab, without a notebook.

Voila runs a notebook of one cell and shows its output; the widgets are the same as in JupyterLab. It listens on the
loopback only, and asks for a token: without it everyone on this machine could stop the run. The token is in a file that
only this user can read, not on the command line, which everyone can.

To view a run on another machine: `ssh -L 8866:127.0.0.1:8866 host`, and `rlkit view runs/x --port 8866` there.
"""

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rlkit.run.reader import RunReader
from rlkit.support.processes import free_port
from rlkit.support.text import say

KERNEL = TEMPLATE = "rlkit-view"
WIDGETS = [
    "@voila-dashboards/widgets-manager8",
    "@jupyter-widgets/jupyterlab-manager",
    "anywidget",
]  # no other extension
# Voila's page without the icon fonts that it would fetch from another machine.
PAGE = """{% extends 'lab/index.html.j2' %}
{% block notebook_css %}{{ super() | replace("https://cdn.jsdelivr.net/", "data:text/css,/") }}{% endblock %}
"""
PATIENCE = 60.0  # seconds for the server to come up
NEEDED = ("voila", "ipykernel", "ipywidgets", "anywidget", "plotly")


def serve(runs: Sequence[str | os.PathLike[str]], *, port: int | None = None, browser: bool = True) -> int:
    """Show runs in a browser tab until interrupted; prints the address.

    Args:
        runs: folders of runs, at least one.
        port: on 127.0.0.1; None takes a free one.
        browser: open the address.

    Returns:
        The exit status: 0 when interrupted, else what the server ended with.

    Raises:
        ValueError: no run.
        FileNotFoundError: a folder that is not a run's.
        ImportError: a library is missing.
        RuntimeError: the port is taken, or the server did not come up.
    """
    if not runs:
        raise ValueError("rlkit view: expected at least one folder of a run, got none.")
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ImportError(f"rlkit view: needs {', '.join(absent)}: pip install 'rlkit-llm[view]'. Or: rlkit report.")
    folders = [str(RunReader(run).path.resolve()) for run in runs]
    port = port or free_port()
    _check_free(port)
    home = Path(tempfile.mkdtemp(prefix="rlkit-view-"))  # readable by this user only
    token = secrets.token_urlsafe(24)
    before = signal.signal(signal.SIGTERM, _leave)
    process = None
    try:
        _write(home, folders, port, token)
        process = _start(home)
        _wait(process, port, home / "log")
        address = f"http://127.0.0.1:{port}/?token={token}"
        say(f"rlkit: the view of {', '.join(map(str, runs))} is at\n    {address}\nCtrl-C ends it.", flush=True)
        if browser:
            webbrowser.open(address)
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
        if process is not None:
            _end(process)
        shutil.rmtree(home, ignore_errors=True)


def _write(home: Path, folders: list[str], port: int, token: str) -> None:
    """The notebook, a kernel that is this Python, and the server's settings."""
    import nbformat

    source = f"import rlkit\n\nrlkit.Dashboard(*{folders!r}, live=True).show()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata["kernelspec"] = {"name": KERNEL, "display_name": "rlkit", "language": "python"}
    notebook.metadata["title"] = "rlkit: " + ", ".join(Path(folder).name for folder in folders)
    nbformat.write(notebook, home / "rlkit.ipynb")
    kernel = home / "jupyter" / "kernels" / KERNEL
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    specification = {"argv": command, "display_name": "rlkit", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(specification), encoding="utf-8")
    template = home / "jupyter" / "voila" / "templates" / TEMPLATE
    template.mkdir(parents=True)
    (template / "conf.json").write_text('{"base_template": "lab"}', encoding="utf-8")
    (template / "index.html.j2").write_text(PAGE, encoding="utf-8")
    settings: dict[str, Any] = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "token": token}
    settings["open_browser"] = False
    look = {"template": TEMPLATE, "extension_allowlist": WIDGETS, "show_tracebacks": True}
    file = home / "voila.json"
    file.write_text(json.dumps({"Voila": settings, "VoilaConfiguration": look}), encoding="utf-8")


def _start(home: Path) -> "subprocess.Popen[bytes]":
    own = os.environ.get("JUPYTER_DATA_DIR") or str(
        Path.home() / ".local" / "share" / "jupyter"
    )  # widgets of pip --user
    paths = [str(home / "jupyter"), os.environ.get("JUPYTER_PATH", ""), own]
    found = [entry for entry in [os.environ.get("PYTHONPATH", ""), os.getcwd()] if entry]  # rlkit from a checkout too
    environment = os.environ | {
        "JUPYTER_PATH": os.pathsep.join(filter(None, paths)),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "PYTHONPATH": os.pathsep.join(found),
    }
    with open(home / "log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "voila", "rlkit.ipynb"],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us, and we end it with its kernels
        )


def _wait(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    said = log.read_text(encoding="utf-8", errors="replace")[-1500:]
    raise RuntimeError(f"rlkit view: the server did not come up within {PATIENCE:.0f} s. It said:\n{said}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the server to end its kernels and itself; insist after a while."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)  # its own session: the server and its kernels
            else:
                process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)  # kernels that were left behind


def _check_free(port: int) -> None:
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise RuntimeError(
                f"rlkit view: port {port} cannot be used ({error}). Choose another --port; without it a free "
                "one is found."
            ) from error


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
