"""How files are opened: regular files only, and new ones whole or not at all.

A run's folder may come from somewhere else. A FIFO under the name of a file blocks whoever opens it, a device never
ends, and a full disk leaves half a file behind.
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
    """Write a file under another name, which is yielded, and rename it in the end.

    Raises:
        OSError: it cannot be written (a full disk); the error names the file, and nothing of it stays.
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
