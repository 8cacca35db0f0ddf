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

ROLES = ("parameters", "notebook-only", "script-only", "setup", "loop", "injected-parameters")
ALIASES = dict(zip(ROLES, ROLES, strict=True)) | {
    "active-ipynb": "notebook-only",
    "remove-cell": "notebook-only",
    "active-py": "script-only",
}


def known_tags(tags: Sequence[str], source: str = "") -> frozenset[str]:
    """The roles of a cell, from its tags and its first line `# rlkit: a, b`.

    Example:
        >>> sorted(known_tags(["Remove-Cell", "mine"], "# rlkit: loop"))
        ['loop', 'notebook-only']
    """
    marked, _, text = source.lstrip("\n").split("\n", 1)[0].partition("rlkit:")
    words = text.replace(",", " ").split() if marked.strip() and not marked.strip(" \t#") else []
    if words[:1] == ["ok"]:  # `# rlkit: ok W203` is about a line
        words = []
    return frozenset(ALIASES[tag] for tag in map(_plain, [*tags, *words]) if tag in ALIASES)


def near_miss(tag: str) -> str | None:
    """The known tag that an unknown one was probably meant to be, or None.

    Example:
        >>> near_miss("notebook_only"), near_miss("figure")
        ('notebook-only', None)
    """
    if _plain(tag) in ALIASES:
        return None
    return nearest(_plain(tag).replace("_", "-"), ALIASES, 0.8)


def _plain(tag: str) -> str:
    return tag.strip().lower()
