"""The documents say what the code does."""

import importlib.util
import re
import sys
from pathlib import Path

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


def test_every_mutant_still_has_its_line():
    """`make mutants` takes minutes; that its faults can be applied at all is checked here."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    mutants = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = mutants
    spec.loader.exec_module(mutants)
    lost = [m.name for m in mutants.MUTANTS if (ROOT / "rlkit" / m.file).read_text(encoding="utf-8").count(m.old) != 1]
    assert not lost
    assert len(mutants.MUTANTS) >= 25
