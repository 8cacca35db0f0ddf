"""`rlkit view`: a browser tab on the loopback, behind a token, that leaves nothing behind."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from folders import write_run
from lab import PATIENCE, ROOT, environment, start_chromium, wait_until, watch

from rlkit.cli import main
from rlkit.view import serve as module

COMMAND = [sys.executable, "-c", "import sys; from rlkit.cli import main; sys.exit(main(sys.argv[1:]))", "view"]


def test_a_missing_library_a_missing_run_and_a_taken_port_are_named(tmp_path, capsys, monkeypatch):
    folder = str(write_run(tmp_path / "r", 2))
    assert main(["view", str(tmp_path / "none"), "--no-browser"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["view", folder, "--no-browser", "--port", str(port)]) == 2
    assert f"port {port} cannot be used" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "voila", None)
    assert main(["view", folder, "--no-browser"]) == 2
    assert "needs voila: pip install" in capsys.readouterr().err


def test_the_token_is_readable_by_this_user_only(tmp_path):
    home = Path(module.tempfile.mkdtemp(dir=tmp_path))
    module._write(home, [str(tmp_path)], 1, "a token")
    assert home.stat().st_mode & 0o077 == 0
    assert "a token" in (home / "voila.json").read_text() and "a token" not in (home / "rlkit.ipynb").read_text()


@pytest.mark.browser
def test_a_tab_shows_charts_and_completions_of_a_run_that_goes_on(tmp_path, playwright_):
    folder = write_run(tmp_path / "r", 5)
    viewer = subprocess.Popen(
        [*COMMAND, str(folder), "--no-browser"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path / "home"),
    )
    try:
        said = ""
        while "Ctrl-C" not in said:
            line = viewer.stdout.readline()
            assert line, said
            said += line
        address, port = re.search(r"(http://127\.0\.0\.1:(\d+)/\?token=\S+)", said).groups()
        family = psutil.Process(viewer.pid).children(recursive=True)
        assert all("token=" not in " ".join(one.cmdline()) for one in family)
        listening = [c.laddr.ip for one in family for c in one.net_connections() if c.status == "LISTEN"]
        assert set(listening) == {"127.0.0.1"}

        browser = start_chromium(playwright_)
        answer = browser.new_context().request.get(address.split("?")[0])
        assert "/login" in answer.url  # without the token

        page = browser.new_context(viewport={"width": 1200, "height": 1400}).new_page()
        strangers, errors = [], []
        watch(page, int(port), strangers, errors)
        page.goto(address, wait_until="commit")
        page.wait_for_selector(".js-plotly-plot .scatterlayer .trace", timeout=PATIENCE * 1000)
        page.locator("bdi.rl-said", has_text="4+0=").first.wait_for(timeout=PATIENCE * 1000)
        write_run(folder, 3, first=5)  # another process writes on
        drawn = "() => document.querySelector('.js-plotly-plot').data[0].x.length"
        wait_until(lambda: page.evaluate(drawn) == 8, "the chart has the new steps")
        page.locator("bdi.rl-said", has_text="7+0=").first.wait_for(timeout=PATIENCE * 1000)
        assert not page.locator(".rlkit-static").first.is_visible()
        assert not strangers and not errors
        browser.close()
        family = psutil.Process(viewer.pid).children(recursive=True)
        assert len(family) >= 2  # the server and its kernel
    finally:
        viewer.send_signal(signal.SIGTERM)
        status = viewer.wait(PATIENCE)
    assert status == 0
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert not alive
