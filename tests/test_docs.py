"""The documents say what the code does."""

import ast
import pkgutil
import re

import pytest
from project import FOLDERS, ROOT, load_script, prose, text_files

import rlkit as rl

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_metrics_page_is_the_declaration():
    assert rl.metrics.markdown_table() in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_every_link_of_the_readme_and_docs_leads_somewhere():
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            if "://" not in path:
                target = page.parent / path if path else page
                assert target.exists(), f"{page.name} links to {path}"
                assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def anchors(page):
    """The headings of a page as GitHub makes them into anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_path_and_name_in_backticks_exists():
    """Paths from the repository's folders and names of `rl`. The rows of docs/mutants.md belong to their commits."""
    lost = []
    for page in set(PAGES) - {ROOT / "docs" / "mutants.md"}:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for quoted in re.findall(r"`([^`\n]+)`", text):
            lost += [(page.name, path) for path in missing_paths(quoted)]
            names = re.findall(r"(?<![\w./-])rl(?:kit)?((?:\.\w+)+)", quoted)
            lost += [(page.name, f"rlkit{name}") for name in names if not resolves(f"rlkit{name}")]
    assert not lost


def test_every_decision_is_a_dated_record_under_a_subject():
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    index, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    assert [section.splitlines()[0] for section in sections] == re.findall(r"\[([^]]+)\]\(#", index)
    for section in sections:
        subject, *records = re.split(r"^### ", section, flags=re.MULTILINE)
        assert len(subject.split("\n\n")) == 2 and records, f"text outside a record under {subject!r}"
        for record in records:
            assert re.match(r"[^\n]+\n\n20\d\d-\d\d-\d\d\. \S", record) and "\n**" not in record, record


def code_blocks(page):
    """The Python blocks of a page, in its order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_every_code_block_is_python_and_its_names_exist():
    blocks = [(page.name, block) for page in PAGES for block in code_blocks(page)]
    assert len(blocks) >= 20
    lost = []
    for name, block in blocks:
        for node in ast.walk(ast.parse(block, filename=name)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("rl."):
                used = re.match(r"rl((?:\.\w+)+)", ast.unparse(node)).group(1)
                lost += [(name, f"rl{used}")] if not resolves(f"rlkit{used}") else []
    assert not lost


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/rloo.md", "docs/a2po.md"])
def test_the_loop_of_a_page_runs(page, tmp_path, monkeypatch):
    """After the set-up of README.md, with two steps and rewards as they come."""
    monkeypatch.chdir(tmp_path)
    first = code_blocks(ROOT / "README.md")[0].replace("max_steps=120", "max_steps=2")
    names = {"max_steps": 2}
    set_up, found, loop = first.partition("for step, batch in")
    assert found and "max_steps=2" in loop
    exec(set_up, names)
    exec(found + loop if page == "README.md" else code_blocks(ROOT / page)[0], names)
    assert names["run"].stopped == "done" and len(names["run"].metrics) == 2


def missing_paths(text):
    """Paths below one of the repository's folders that do not exist, and pages that are neither there nor in docs/."""
    paths = re.findall(rf"(?<![\w/.~-])((?:{'|'.join(FOLDERS)})/[\w./-]*)", text)
    pages = re.findall(r"(?<![\w/.-])\w+\.md\b", text)
    lost = [path for path in paths if not (ROOT / path.rstrip(".")).exists()]
    return lost + [page for page in pages if not any((folder / page).exists() for folder in (ROOT, ROOT / "docs"))]


def resolves(name):
    """Whether a dotted name is a module, or a member of one or of a class in it."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_path_and_module_that_code_names_exists():
    """In docstrings and comments; a dotted name of rlkit in backticks is a module or a name of one."""
    lost = []
    for file in text_files():
        if file.suffix == ".py":
            for text in prose(file):
                lost += [(str(file.relative_to(ROOT)), path) for path in missing_paths(text)]
                names = re.findall(r"`(rlkit(?:\.\w+)+)`", text)
                lost += [(str(file.relative_to(ROOT)), name) for name in names if not resolves(name)]
    assert not lost


def test_nothing_cites_what_is_not_in_the_repository():
    """A reader gets the reason, or a page of docs/: never the number of an issue's point or another paper's page."""
    foreign = [
        r"known[_ ]" + "faults",
        r"shared " + "(study|notes)",
        r"\btrap " + r"\d",
        r"\bB" + r"[0-9]{2}\b",
        r"\.\./" + "shared",
    ]
    foreign += [rf"\b{page}\.md" for page in ("design", "algorithms", "house", "style", "vision")]
    pattern = re.compile("|".join(foreign), re.IGNORECASE)
    files = text_files()
    assert len(files) > 300
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match.group()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if (match := pattern.search(line))
    ]
    assert not found


def test_every_public_name_is_documented():
    for name in rl.__all__:
        thing = getattr(rl, name)
        assert (thing.__doc__ or "").strip(), name


def test_the_tree_in_contributing_is_fresh():
    tree, page = load_script("tree"), (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert tree.drawn_in(page) == page, "run `make tree`"
    top = {path.name for path in (ROOT / "rlkit").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    drawn = {line.split()[0].rstrip("/") for line in tree.tree().splitlines() if line.startswith("    ")}
    assert top - {"__init__.py"} <= drawn


@pytest.fixture(scope="module")
def mutants():
    return load_script("mutants")


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
