"""The report: one file, nothing from elsewhere, and what a model wrote stays text."""

import json
import re

import pytest
from folders import HOSTILE, write_rollout, write_run
from lab import PATIENCE, start_chromium, watch

from rlkit.cli import main
from rlkit.view.report import write_report


def test_a_report_holds_no_address_of_another_machine_in_its_tags(tmp_path):
    page = write_report([write_run(tmp_path / "r", 3)], tmp_path / "out" / "report.html").read_text()
    head = page[: page.index("<script>")]
    assert "http://" not in head and "https://" not in head
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=", head + page[page.rindex('id="figure"') :])
    assert "default-src 'none'" in head and page.count("</script>") == 5


@pytest.mark.slow
def test_a_long_run_is_cut_and_the_report_says_so(tmp_path):
    folder = write_run(tmp_path / "r", 20, rows=16, characters=400)
    whole = write_report([folder], tmp_path / "whole.html")
    cut = write_report([folder], tmp_path / "cut.html", max_bytes=600_000)
    assert "All kept steps are in it." in whole.read_text()
    found = re.search(r"(\d+) older steps were left out", cut.read_text())
    assert 0 < int(found[1]) < 20
    assert cut.stat().st_size < whole.stat().st_size - 500_000


def test_the_command_writes_and_names_what_is_wrong(tmp_path, capsys):
    folder = write_run(tmp_path / "r", 3)
    assert main(["report", str(folder), "-o", str(tmp_path / "x.html")]) == 0
    assert "wrote" in capsys.readouterr().out and (tmp_path / "x.html").exists()
    assert main(["report", str(tmp_path / "none"), "-o", str(tmp_path / "y.html")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err and not (tmp_path / "y.html").exists()


@pytest.mark.browser
def test_a_report_of_hostile_completions_in_a_browser(tmp_path, playwright_):
    folder = write_run(tmp_path / "r", 4)
    write_rollout(folder, 4, texts=HOSTILE)
    other = write_run(tmp_path / "other", 4, seed=1)
    file = write_report([folder, other], tmp_path / "report.html")
    browser = start_chromium(playwright_)
    page = browser.new_context(offline=True).new_page()
    strangers, errors = [], []
    watch(page, 0, strangers, errors)
    page.goto(f"file://{file}")
    page.wait_for_selector(".js-plotly-plot .scatterlayer .trace", timeout=PATIENCE * 1000)
    page.get_by_text("<script>document.title", exact=False).first.wait_for(timeout=PATIENCE * 1000)
    assert page.title() == "r, other"
    assert page.locator(".js-plotly-plot .cartesianlayer .subplot").count() >= 10
    text = page.locator("#panel").inner_text()
    assert "</script><script>" in text and "[bold red]" in text and "<think>" in text
    assert page.locator("#panel img").count() == 0
    assert not strangers and not errors
    browser.close()


def test_json_in_a_page_cannot_end_its_script(tmp_path):
    folder = write_run(tmp_path / "r", 1)
    write_rollout(folder, 1, texts=HOSTILE)
    page = write_report([folder], tmp_path / "report.html").read_text()
    piece = page.split('id="bundle">')[1].split("</script>")[0]
    assert "<" not in piece and "\u2028" not in piece
    texts = json.dumps(json.loads(piece), ensure_ascii=False)
    assert "</script><script>document.title" in texts  # and it is all there
