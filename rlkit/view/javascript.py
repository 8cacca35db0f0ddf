"""The panel's JavaScript as one text: the files of `js/`, concatenated.

They share one scope, so there is no build step, and no import that a page would have to fetch. Notebooks, reports and
tests use this text.
"""

from pathlib import Path

HERE = Path(__file__).parent
PARTS = ("basics", "table", "detail", "compare", "panel", "widget")


def script() -> str:
    """Return one ES module; `default` is anywidget's factory, `mount` and `bundled` are for pages without it."""
    return "\n".join((HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in PARTS)


def style() -> str:
    """Return its style sheet."""
    return (HERE / "panel.css").read_text(encoding="utf-8")
