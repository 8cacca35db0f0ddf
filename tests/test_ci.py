"""`.ci/run` with a stand-in for make: every tier runs, and a failure anywhere is a failure at the end."""

import os
import shutil
import stat
import subprocess

import pytest
from project import ROOT
from waiting import LONG

pytestmark = pytest.mark.integration

MAKE = """#!/bin/bash
echo "$1" >> asked
[[ " $NO_TESTS " == *" $1 "* ]] && { echo "== 7 deselected in 0.10s =="; exit 0; }
case $1 in check) runs=3 ;; setup) runs=0 ;; *) runs=1 ;; esac
for ((i = 0; i < runs; i++)); do echo "===== 12 passed, 1 skipped in 65.10s (0:01:05) ====="; done
[[ " $FAIL " != *" $1 "* ]]
"""
ALL = ["setup", "check", "test-torchrun", "test-browser", "test-vllm"]


@pytest.fixture
def ci(tmp_path):
    """Runs the script in a copy; returns the exit status, what make was asked for, and the lines of the verdict."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"make": MAKE, "chromium": "#!/bin/bash\n", "shellcheck": "#!/bin/bash\n"}.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(stat.S_IRWXU)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")

    def run(**variables):
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | variables
        command = ["bash", tmp_path / ".ci" / "run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment)
        verdict = done.stdout.partition("== verdict\n")[2].splitlines()
        return done.returncode, (tmp_path / "asked").read_text().split(), verdict

    return run


def test_all_tiers_run_and_pass(ci):
    status, asked, verdict = ci()
    assert status == 0 and asked == ALL
    assert [line.split(",")[0] for line in verdict if line[0] != "="] == [
        "check: passed",
        "torchrun: passed",
        "browser: passed",
        "vllm: passed",
    ]


@pytest.mark.parametrize("target", ALL[1:])
def test_a_tier_that_fails_is_named_and_the_others_run(ci, target):
    status, asked, verdict = ci(FAIL=target)
    assert status == 1 and asked == ALL
    assert [line.split(":")[0] for line in verdict if "FAILED" in line] == [target.removeprefix("test-")]


@pytest.mark.parametrize("target", ALL[1:])
def test_a_tier_without_a_test_fails(ci, target):
    """For instance because a grep for the mark's files found nothing."""
    status, _, verdict = ci(NO_TESTS=target)
    assert status == 1
    assert [line.split(",")[0] for line in verdict if "FAILED" in line] == [
        f"{target.removeprefix('test-')}: FAILED: no test was run"
    ]


def test_nothing_runs_without_a_set_up(ci):
    status, asked, verdict = ci(FAIL="setup")
    assert status != 0 and asked == ["setup"] and not verdict
