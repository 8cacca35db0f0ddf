"""Fixtures for tests in a browser: one JupyterLab and one Chromium for all of them."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # lab and folders, also with --import-mode=importlib


@pytest.fixture(scope="session")
def playwright_():
    """Playwright; skips where there is no Chromium."""
    from lab import CHROMIUM

    if not os.path.exists(CHROMIUM):
        pytest.skip(f"no {CHROMIUM}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def lab(playwright_, tmp_path_factory):
    """A JupyterLab with a browser, see lab.py."""
    from lab import Lab

    found = Lab(tmp_path_factory.mktemp("lab"), playwright_)
    yield found
    found.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A picture of the last page where a test in the browser failed."""
    report = yield
    if report.failed and call.when == "call" and "lab" in item.fixturenames and item.funcargs["lab"].pages:
        page = item.funcargs["lab"].pages[-1]
        with contextlib.suppress(Exception):  # it may be closed by now, and the test's own words are what counts
            report.sections.append(("picture of the page", str(page.shot(f"failed-{item.name}"))))
    return report
