"""Opening regular files only, and writing files whole or not at all.

A run's folder may come from elsewhere: opening a FIFO blocks, a device never ends, a full disk leaves half a file.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def regular(path: str, flags: int) -> int:
    """An `opener` for `open` that takes regular files only, and never blocks.

    Raises:
        OSError: the path is a FIFO, a device, a socket or a folder.

    Example:
        >>> open("/dev/zero", "rb", opener=regular)
        Traceback (most recent call last):
        OSError: [Errno 22] not a regular file: '/dev/zero'
    """
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # without it opening a FIFO waits
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yield another name to write under, then rename it to `file`.

    Raises:
        OSError: it cannot be written (a full disk); the error names the file, and the partial one is deleted.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        partial.unlink(missing_ok=True)  # a killed process's, or a FIFO
        yield partial
        os.replace(partial, file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = error.filename or str(file)
            raise error from None  # closing the file fails a second time
        raise
