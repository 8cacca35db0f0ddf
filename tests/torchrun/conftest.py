"""Fixtures of the tests with several processes: each worker is launched once a session."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # launching, also with --import-mode=importlib

import pytest
from launching import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """Runs a worker as one process or under torchrun, and remembers what it wrote."""
    return Launcher(tmp_path_factory.mktemp("torchrun"))
