"""Print the library in an evening, in reading order, with the lines of each module: `python scripts/reading_list.py`.

The list is the one in CONTRIBUTING.md, "The library in an evening"; tests/test_reading.py asserts its length.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOUND = 2200


def reading_list() -> dict[str, int]:
    """The modules that the section of CONTRIBUTING.md names, and their lines."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = page.partition("## The library in an evening\n")[2].partition("\n## ")[0]
    modules = re.findall(r"^\d+\..*?(?=^\d+\.|^$)", section, flags=re.MULTILINE | re.DOTALL)
    paths = dict.fromkeys(re.findall(r"`(rlkit/[\w/]+\.py)`", "".join(modules)))
    return {path: len((ROOT / path).read_text("utf-8").splitlines()) for path in paths}


if __name__ == "__main__":
    found = reading_list()
    for path, count in found.items():
        print(f"{count:5} {path}")
    print(f"{sum(found.values()):5} lines of {len(found)} modules; at most {BOUND}")
