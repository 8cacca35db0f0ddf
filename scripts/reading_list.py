"""Print the reading list of CONTRIBUTING.md with its line counts: `python scripts/reading_list.py`.

The list is the numbered modules of "The library in an evening", in its order. tests/test_reading.py asserts the bound.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUND = 2200


def reading_list() -> dict[str, int]:
    """Lines of each module on the list, in reading order; docstrings, comments and blank lines count."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split("\n## The library in an evening\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. .*(?:\n   .*)*", section, re.MULTILINE)
    modules = re.findall(r"`(rlkit/[\w/]+\.py)`", "\n".join(steps))
    return {module: len((ROOT / module).read_text(encoding="utf-8").splitlines()) for module in modules}


if __name__ == "__main__":
    lines = reading_list()
    for module, count in lines.items():
        print(f"{count:5} {module}")
    print(f"{sum(lines.values()):5} lines; at most {BOUND}")
