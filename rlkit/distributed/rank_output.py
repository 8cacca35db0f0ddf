"""Standard output of ranks other than 0: to `rank1.log`, `rank2.log` ... in the run's folder, not to the console.

The folder is unknown when the process group starts, and a new run needs an empty folder. So up to a megabyte of lines
waits in memory until the run has its folder.
"""

import io
import sys
from pathlib import Path

from rlkit.support.files import regular

MOST_CHARACTERS = 1 << 20


class RankLog(io.TextIOBase):
    """A standard output that goes to a file once the run has its folder; `rank` is in the file's name."""

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
        """Write to the file, or keep the text until there is one."""
        if self._file is not None:
            return self._file.write(text)
        self._waiting.append(text)
        self._size += len(text)
        while self._size > MOST_CHARACTERS:
            self._size -= len(self._waiting.pop(0))
        return len(text)

    def flush(self) -> None:
        """Flush the file."""
        if self._file is not None:
            self._file.flush()

    def move_to(self, folder: Path) -> None:
        """Write to a file in this folder from now on, the waiting lines first."""
        if not folder.is_dir():  # a node that does not see the folder: the lines keep waiting
            return
        if self._file is not None:
            self._file.close()
        file = folder / self._name
        self._file = open(file, "a", encoding=self.encoding, errors=self.errors, buffering=1, opener=regular)
        self._file.write("".join(self._waiting))
        self._waiting, self._size = [], 0


def move_output_to(folder: Path) -> None:
    """Redirect the output of this process to a run's folder, unless it is the main process."""
    if isinstance(sys.stdout, RankLog):
        sys.stdout.move_to(folder)
