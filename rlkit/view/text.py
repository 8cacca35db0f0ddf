"""Text of a model, made safe to look at.

A completion may hold anything: ANSI codes that repaint a terminal, a NUL, marks that turn the writing direction. Such
characters are shown as signs, never sent.
"""

import html
import unicodedata


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
