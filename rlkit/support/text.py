"""Text made safe to show, on a page and in a terminal.

A completion may hold anything: ANSI codes that repaint a terminal, a NUL, marks that turn the writing direction. Such
characters are shown as signs, never sent. A page may hold MathJax, which would typeset what stands between two "$". And
a terminal may have an encoding that lacks a letter: no line that is printed may end a training for that.
"""

import contextlib
import html
import numbers
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

UNTYPESET = "mathjax_ignore tex2jax_ignore"
"""Classes of HTML whose "$" are no formulas, to JupyterLab and to nbconvert."""


def visible(text: str, limit: int | None = None) -> str:
    r"""The text with every control and direction character drawn as a sign; line ends as ⏎.

    Args:
        text: any text.
        limit: characters to keep; what is cut is counted at the end.

    Example:
        >>> visible("a\x1b[31mb\x00\n\u202e", 20)
        'a␛[31mb␀⏎⟨202E⟩'
        >>> visible("x" * 1000, 3)
        'xxx… (+997 characters)'
    """
    cut = "" if limit is None or len(text) <= limit else f"… (+{len(text) - limit:,} characters)"
    return "".join(_sign(letter) for letter in text[:limit]) + cut


def _sign(letter: str) -> str:
    if letter == "\n":
        return "⏎"
    if letter.isprintable() or letter == " ":
        return letter
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(letter) == "Zs":  # the many kinds of blank
        return " "
    return f"⟨{code:04X}⟩"


def as_html(text: str, limit: int | None = None) -> str:
    """`visible`, escaped for a page; its writing direction stays inside."""
    return f"<bdi>{html.escape(visible(text, limit))}</bdi>"


def table_html(heading: str, frame: "pd.DataFrame", limit: int = 80) -> str:
    """A line of text and a table, for a notebook.

    Args:
        heading: plain text.
        frame: the table; what is no number is shown as text.
        limit: characters of a text that are shown.
    """
    import pandas as pd

    def shown(value: Any) -> Any:
        return value if value is None or isinstance(value, numbers.Number) else visible(str(value), limit)

    shown_frame = frame.apply(lambda column: column.map(shown) if column.dtype.kind not in "biuf" else column)
    shown_frame.columns = [visible(str(name), limit) for name in frame.columns]
    with pd.option_context("display.max_colwidth", None):
        table = shown_frame.to_html(index=False, escape=True, max_cols=16)
    return f'<div class="{UNTYPESET}"><p>{as_html(heading)}</p>{table}</div>'


def as_plotly(text: str, limit: int = 40) -> str:
    """A name, shortened, without what plotly takes for markup, for a template or for a formula."""
    short = visible(text if len(text) <= limit else f"{text[: limit - 1]}…")
    return html.escape(short, quote=False).replace("{", "&#123;").replace("$", "&#36;")


def fits(text: str, stream: Any = None) -> str:
    r"""The text with `\x..` for the letters that a stream's encoding lacks.

    Args:
        text: any text.
        stream: None for standard output.

    Example:
        >>> import io
        >>> fits("Ü$", io.TextIOWrapper(io.BytesIO(), "ascii"))
        '\\xdc$'
    """
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def say(text: object, *, end: str = "\n", flush: bool = False) -> None:
    """`print` that no encoding of the terminal can make fail."""
    print(fits(str(text)), end=end, flush=flush)


def tolerate_encodings() -> None:
    """What a program of its own does at its start: its whole output is printed as `say` would, help texts too."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, or not a file
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
