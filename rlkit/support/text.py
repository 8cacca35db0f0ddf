"""Text that is safe to show on a page and in a terminal, and hints for misspelt names.

A completion may hold anything: ANSI codes that repaint a terminal, a NUL, marks that change the writing direction. Such
characters are shown as visible symbols. A page may run MathJax, which would typeset the text between two "$". And the
encoding of a terminal may lack a character, which must not stop a training.
"""

import contextlib
import difflib
import html
import numbers
import sys
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

UNTYPESET = "mathjax_ignore tex2jax_ignore"
"""Classes of HTML in which JupyterLab and nbconvert do not read "$" as a formula."""


def visible(text: str, limit: int | None = None) -> str:
    r"""The text with control and direction characters as symbols, line ends as ⏎, cut after `limit` characters.

    Example:
        >>> visible("a\x1b[31mb\x00\n\u202e", 20)
        'a␛[31mb␀⏎⟨202E⟩'
        >>> visible("x" * 1000, 3)
        'xxx… (+997 characters)'
    """
    cut = "" if limit is None or len(text) <= limit else f"… (+{len(text) - limit:,} characters)"
    return "".join(_symbol(letter) for letter in text[:limit]) + cut


def _symbol(letter: str) -> str:
    if letter == "\n":
        return "⏎"
    if letter.isprintable() or letter == " ":
        return letter
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(letter) == "Zs":  # other kinds of space
        return " "
    return f"⟨{code:04X}⟩"


def as_html(text: str, limit: int | None = None) -> str:
    """`visible`, escaped for a page and isolated from the writing direction around it."""
    return f"<bdi>{html.escape(visible(text, limit))}</bdi>"


def table_html(heading: str, frame: "pd.DataFrame", limit: int = 80) -> str:
    """A heading and a table for a notebook; values other than numbers as text of at most `limit` characters."""
    import pandas as pd

    def shown(value: Any) -> Any:
        return value if value is None or isinstance(value, numbers.Number) else visible(str(value), limit)

    shown_frame = frame.apply(lambda column: column.map(shown) if column.dtype.kind not in "biuf" else column)
    shown_frame.columns = [visible(str(name), limit) for name in frame.columns]
    with pd.option_context("display.max_colwidth", None):
        table = shown_frame.to_html(index=False, escape=True, max_cols=16)
    return f'<div class="{UNTYPESET}"><p>{as_html(heading)}</p>{table}</div>'


def as_plotly(text: str, limit: int = 40) -> str:
    """A name, shortened, without the characters that plotly reads as markup, template or formula."""
    short = visible(text if len(text) <= limit else f"{text[: limit - 1]}…")
    return html.escape(short, quote=False).replace("{", "&#123;").replace("$", "&#36;")


def fits(text: str, stream: Any = None) -> str:
    r"""The text with `\x..` for the characters that a stream's encoding lacks (None: standard output's).

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
    """`print`, whatever the encoding of the terminal."""
    print(fits(str(text)), end=end, flush=flush)


def tolerate_encodings() -> None:
    """Make all output of this process tolerate the terminal's encoding, as `say` does; for the start of a program."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, or not a file
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that a misspelt one was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest known name; empty if none is close.

    Example:
        >>> "Unknown task." + did_you_mean("adition", ["addition", "sort"])
        "Unknown task. Did you mean 'addition'?"
    """
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""
