"""What the other processes of a run print: into `rank1.log`, `rank2.log` ... in the run's folder, not on the console.

The folder is not known when the process group is joined, and a new run takes no folder that holds
anything. So lines wait in memory, the last megabyte of them, until the run has its folder.
"""

import io
import sys
from pathlib import Path

from rlkit.support.files import regular

MOST_CHARACTERS = 1 << 20


class RankLog(io.TextIOBase):
    """A standard output that goes to a file, as soon as the run has a folder to put it in.

    Args:
        rank: of this process.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._name = f"rank{rank}.log"
        self._waiting: list[str] = []
        self._size = 0
        self._file: io.TextIOBase | None = None

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str, /) -> int:
        """Take a text, and write it if the folder is known."""
        if self._file is not None:
            return self._file.write(text)
        self._waiting.append(text)
        self._size += len(text)
        while self._size > MOST_CHARACTERS:
            self._size -= len(self._waiting.pop(0))
        return len(text)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        if self._file is not None:
            self._file.flush()

    def move_to(self, folder: Path) -> None:
        """From now on the lines go to a file of this folder, those that waited first. On a node that does not see the
        folder they go on waiting.
        """
        if not folder.is_dir():
            return
        if self._file is not None:
            self._file.close()
        file = folder / self._name
        self._file = open(file, "a", encoding=self.encoding, errors=self.errors, buffering=1, opener=regular)
        self._file.write("".join(self._waiting))
        self._waiting, self._size = [], 0


def move_output_to(folder: Path) -> None:
    """Move what this process prints into a run's folder, if it is not the main one. The newest run has it."""
    if isinstance(sys.stdout, RankLog):
        sys.stdout.move_to(folder)
