"""Helpers of the export tests, also with --import-mode=importlib; what a script sets for its process does not stay."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch):
    """A script that a test executes here leaves neither flags nor variables to the tests after it."""
    from rlkit.support import process_state

    monkeypatch.setattr(process_state.current, "__dict__", dict(vars(process_state.Settings())))
    for name in ("RLKIT_STRATEGY", "RLKIT_PRECISION", "RLKIT_PRINT_ALL_RANKS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
