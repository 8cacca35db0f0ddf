"""The documents say what the code does."""

import re
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
