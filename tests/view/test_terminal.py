"""Completions in a terminal are text."""

import contextlib
import io
import sys

import pytest
from folders import HOSTILE, write_rollout, write_run

import rlkit as rl
from rlkit.support.text import as_html, visible


def printed(folder, **options):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        rl.show_completions(folder, **options)
    return out.getvalue()


def test_hostile_texts_reach_no_terminal(tmp_path):
    folder = write_run(tmp_path / "r", 1)
    write_rollout(folder, 1, texts=HOSTILE)
    text = printed(folder)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    for piece in ("[bold", "␛[31mred", "␀", "⟨202E⟩"):
        assert piece in text, piece


def test_rows_are_sorted_and_cut(tmp_path):
    folder = write_run(tmp_path / "r", 1)
    write_rollout(folder, 3, texts=["a" * 5, "b" * 900, "c" * 9])
    text = printed(folder, limit=2, sort="-length", characters=20)
    assert "2 of 3 completions" in text and "aaaaa" not in text and text.index("bbb") < text.index("ccc")
    assert "step 0" in printed(folder, step=0)


def test_errors_name_what_is_wrong(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "r", 1)
    with pytest.raises(ValueError, match=r"show_completions: no column 'rewrd' to sort by"):
        printed(folder, sort="rewrd")
    with pytest.raises(ValueError, match="limit and characters must be at least 1, got 0"):
        printed(folder, limit=0)
    with pytest.raises(KeyError, match="was not kept"):
        printed(folder, step=99)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "no rollout was kept yet" in printed(tmp_path / "empty")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match="needs rich"):
        printed(folder)


def test_visible_keeps_what_can_be_read():
    plain = "Ünïcode, 漢字, עברית, 👩 $x$ <b>"
    assert visible(plain) == plain
    assert as_html("<b>\x00", 10) == "<bdi>&lt;b&gt;␀</bdi>"
    assert visible("\ud800") == "⟨D800⟩"
