"""A preemption before the first step of a script is remembered, and taken by `run.steps`: so the job starts again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
import os, signal, sys, time
import rlkit as rl
from rlkit import script
from rlkit.run import signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
script.start(__file__, notebook="n.ipynb", sha256="0")
run = rl.Run(sys.argv[1])
signals.SECOND_SECONDS = {apart}
def signalled(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.01)
{body}
"""
LOOP = """
try:
    for step, _ in run.steps(range(9), 3, progress=False):
        print("step", step, flush=True)
except SystemExit as stop:
    print("ended", run.stopped, run.step, stop.code)
"""


def output(tmp_path, body, apart=3600.0):
    """What the script says; `apart`: seconds from which on a second signal is one of its own."""
    (tmp_path / "s.py").write_text(SCRIPT.replace("{body}", body).replace("{apart}", repr(apart)))
    command = [sys.executable, "s.py", "run"]
    environment = os.environ | {"PYTHONPATH": ROOT}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_an_early_signal_is_taken_by_the_loop(tmp_path, name):
    """Also twice at once: a cluster and a launcher may both pass it on."""
    done = output(tmp_path, f"signalled('{name}'); signalled('{name}')" + LOOP)
    assert done.returncode == 0, done.stderr
    assert "ended preempted 0 0" in done.stdout and "step" not in done.stdout.replace("first step", "")
    assert (tmp_path / "run" / "STOPPED").read_text() == "0\n"
    assert f"got {name}, stopping before the first step" in done.stderr


@pytest.mark.slow
def test_a_script_can_still_be_ended(tmp_path):
    """A second signal that comes later ends it at once; after the loop the first one does; Ctrl-C always."""
    done = output(tmp_path, "signalled('SIGTERM')\nsignalled('SIGTERM')\nprint('survived')", apart=0.0)
    assert done.returncode == -signal.SIGTERM and "survived" not in done.stdout
    done = output(tmp_path, LOOP + "signalled('SIGTERM')\nprint('survived')")
    assert done.returncode == -signal.SIGTERM and "survived" not in done.stdout and "step 2" in done.stdout
    done = output(tmp_path, "signalled('SIGINT')\nprint('survived')")
    assert "survived" not in done.stdout and "KeyboardInterrupt" in done.stderr
