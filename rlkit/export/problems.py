"""Problems of an export: one line each, with cell, line, reason and fix."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do."""

    code: str  # "E101" (the script would be wrong), "W203" (it may be wrong on several processes), "N001" (a note)
    cell: int  # counted from 1 over all cells; 0 is the notebook as a whole
    line: int  # in the cell, counted from 1; 0 is the whole cell
    reason: str
    fix: str = ""

    @property
    def is_error(self) -> bool:
        """True if no script can be written."""
        return self.code.startswith("E")

    def text(self, notebook: str) -> str:
        """The problem on one line."""
        cell, line = (f" cell {self.cell}" if self.cell else ""), (f" line {self.line}" if self.line else "")
        return f"{notebook}{cell}{line}: {self.code} {self.reason}" + (f" Fix: {self.fix}" if self.fix else "")


class ExportError(ValueError):
    """The notebook cannot be exported; the message lists every problem.

    Attributes:
        problems: all of them.
    """

    def __init__(self, notebook: str, problems: Sequence[Problem]) -> None:
        self.notebook = notebook
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [problem.text(notebook) for problem in self.problems]
        head = f"export: {notebook} has {count} problem{'s' if count != 1 else ''}:"
        super().__init__("\n".join([head, *lines]))
