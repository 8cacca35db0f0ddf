"""How much there is to read: the evening's list, and what one iteration of the loop enters."""

import subprocess
import sys

import pytest
from project import ROOT, load_script
from waiting import LONG


def test_the_library_can_be_read_in_an_evening():
    reading_list = load_script("reading_list")
    found = reading_list.reading_list()
    assert "rlkit/step.py" in found and len(found) >= 10
    assert sum(found.values()) <= reading_list.BOUND, found


@pytest.mark.integration
def test_one_iteration_of_the_loop_enters_few_lines():
    loop_lines = load_script("loop_lines")
    script = [sys.executable, ROOT / "scripts" / "loop_lines.py"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=LONG, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    total = done.stdout.strip().splitlines()[-1]
    assert "modules" in total and 500 < int(total.split()[0]) <= loop_lines.BOUND, done.stdout
