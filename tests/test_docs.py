"""The documents say what the code does."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import rlkit as rl

ROOT = Path(__file__).parents[1]


def test_the_metrics_page_is_the_declaration():
    assert rl.metrics.markdown_table() in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_every_link_of_the_readme_and_docs_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_documented():
    for name in rl.__all__:
        thing = getattr(rl, name)
        assert (thing.__doc__ or "").strip(), name


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_still_has_its_line(mutants):
    """`make mutants` takes minutes; that its faults can be applied at all is checked here."""
    lost = [m.name for m in mutants.MUTANTS if (ROOT / "rlkit" / m.file).read_text(encoding="utf-8").count(m.old) != 1]
    assert not lost
    absent = [m.name for m in mutants.MUTANTS for test in m.tests.split() if not (ROOT / "tests" / test).exists()]
    assert not absent
    names = [m.name for m in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 150 and "|" not in "".join(names)  # they are the rows of a table


def test_what_an_earlier_run_of_the_mutants_found_stays_in_the_page(mutants, tmp_path, monkeypatch):
    """Runs of parts are joined: each enters its rows; a fault that was not noticed has none."""
    monkeypatch.setattr(mutants, "PAGE", tmp_path / "mutants.md")
    one, other, third = (m.name for m in mutants.MUTANTS[:3])
    known = {
        one: mutants.Verdict("killed", "test_step.py::test_one", "abc1234"),
        other: mutants.Verdict("killed", "run/test_x.py::TestX::test_two", "abc1234+"),
    }
    mutants.write_page(known | {"a fault that is no longer in the list": known[one]})
    assert mutants.read_page() == known and third not in mutants.read_page()
    assert f"2 of {len(mutants.MUTANTS)} were noticed" in mutants.PAGE.read_text()
