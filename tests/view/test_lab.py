"""Pages that come later: loaded again, copied and not trusted, after `close`. The rest is in test_end_to_end.py."""

import shutil

import nbformat
import pytest
from folders import write_run
from lab import PATIENCE, wait_until

pytestmark = pytest.mark.browser


def test_a_reload_is_live_again_a_copy_shows_the_picture_and_close_leaves_it(lab):
    write_run(lab.server.notebooks / "runs" / "other", 30)
    cells = ["import rlkit as rl", "dash = rl.Dashboard('runs/other')\ndash", "dash.close()"]
    page = lab.open("look.ipynb", cells)
    page.run(0)
    page.run(1)
    wait_until(lambda: page.points(1) == 30, "the run is drawn")
    page.save()
    page.page.reload()  # a closed tab
    page.page.wait_for_selector(".jp-OutputArea .js-plotly-plot", timeout=PATIENCE * 1000)
    write_run(lab.server.notebooks / "runs" / "other", 5, first=30)
    wait_until(lambda: page.points(1) == 35, "the run goes on in the page that was loaded again")
    assert not page.output(1).locator(".rlkit-static").is_visible()
    page.run(2)
    picture = page.output(1).locator(".rlkit-static")
    picture.wait_for(state="visible", timeout=PATIENCE * 1000)
    assert "step 30 of 30" in picture.inner_text()  # a page that was loaded again no longer takes a new picture
    wait_until(lambda: not page.output(1).locator(".js-plotly-plot").count(), "the figure is gone")
    assert not page.strangers and not page.errors
    page.save()

    text = page.file.read_text().replace("look", "copy")  # signed by nobody: JupyterLab does not trust it
    copy = nbformat.reads(text, as_version=4)
    copy.cells[0].source += "  # changed"
    for cell in copy.cells:
        cell.id = "c" + cell.id[1:]
    nbformat.write(copy, lab.server.notebooks / "copy.ipynb")
    shutil.rmtree(lab.server.notebooks / "runs" / "other")
    strange = lab.open("copy.ipynb")
    image = strange.output(1).locator("img").first
    image.wait_for(state="visible", timeout=PATIENCE * 1000)
    assert image.evaluate("img => img.naturalWidth") > 100 and strange.output(1).locator("img").count() >= 8
    assert "Error" not in strange.output(1).inner_text() and not strange.strangers
