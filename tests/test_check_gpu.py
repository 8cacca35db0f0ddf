"""scripts/check_gpu.py runs to its end where there is no GPU, and says so. Its checks need one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]


def test_it_says_that_there_is_no_gpu():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("check_gpu: no GPU, 1 processes")
    assert "FAIL  GPU: torch sees none; use --cpu" in done.stdout
    assert "0 passed, 1 failed, 0 skipped" in done.stdout
