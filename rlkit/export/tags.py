"""Cell tags that the exporter understands.

| tag | alias | in the script |
|---|---|---|
| parameters | | defaults of the flags |
| notebook-only | active-ipynb, remove-cell | left out, one comment line says so |
| script-only | active-py | exported; the text of a raw cell is taken as code |
| setup | | at the very top, not guarded |
| loop | | a marker |

Case does not matter. A first line `# rlkit: notebook-only` does the same, for editors without a field for tags.
"""

from collections.abc import Sequence

from rlkit.support.text import nearest

ALIASES = {
    "parameters": "parameters",
    "notebook-only": "notebook-only",
    "active-ipynb": "notebook-only",
    "remove-cell": "notebook-only",
    "script-only": "script-only",
    "active-py": "script-only",
    "setup": "setup",
    "loop": "loop",
    "injected-parameters": "injected-parameters",
}
PREFIX = "rlkit:"
CLOSE = 0.8


def known_tags(tags: Sequence[str], source: str = "") -> frozenset[str]:
    """The roles of a cell, from its tags and its first line.

    Example:
        >>> sorted(known_tags(["Remove-Cell", "mine"], "# rlkit: loop"))
        ['loop', 'notebook-only']
    """
    return frozenset(ALIASES[tag] for tag in [*map(_plain, tags), *comment_tags(source)] if tag in ALIASES)


def comment_tags(source: str) -> list[str]:
    """What a first line `# rlkit: a, b` names; nothing for `# rlkit: ok W203`, which is about a line."""
    first = source.lstrip("\n").split("\n", 1)[0].strip()
    if not first.startswith("#"):
        return []
    text = first.lstrip("#").strip()
    if not text.startswith(PREFIX):
        return []
    words = text[len(PREFIX) :].replace(",", " ").split()
    return [] if words[:1] == ["ok"] else [_plain(word) for word in words]


def near_miss(tag: str) -> str | None:
    """The known tag that an unknown one was probably meant to be, or None.

    Example:
        >>> near_miss("notebook_only"), near_miss("figure")
        ('notebook-only', None)
    """
    if _plain(tag) in ALIASES:
        return None
    return nearest(_plain(tag).replace("_", "-"), ALIASES, CLOSE)


def _plain(tag: str) -> str:
    return tag.strip().lower()
