"""`python_tests`: reward by running the completion's Python code against the row's tests.

Each completion gets a process of its own (`python -I`, an empty folder, an empty environment, a session of its own)
with limits of time, memory and file size, without network and without child processes; what is left after the time is
killed. Where the kernel allows it, the process also gets its own user, network and process namespaces (`unshare`), so
that nothing can outlive it.

What this is not: a sandbox against a determined attacker. The code can read what the user can read, and it shares a
process with its tests, so that it could find out how they report. Run unknown models in a container.
"""

import contextlib
import functools
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.record import Prompt
from rlkit.rewards.answers import answer_part, completion_text
from rlkit.rewards.code_runner import STARTED

RUNNER = Path(__file__).with_name("code_runner.py")
START_SECONDS = 60.0  # to start Python on a busy machine; the time of the code counts from then
FILE_SIZE = 16 << 20  # bytes
REPORT = 1 << 20  # bytes of a report at most: code that finds where it goes could send without end
_FENCE = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)```", re.DOTALL)
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class PythonTests:
    """1 where the code passes every test of its row, else 0; None where the row has no tests.

    The code is the last block of the answer that is fenced as Python, else the last without a language, else the whole
    answer. A test is Python that raises if something is wrong (`assert add(1, 2) == 3`); it sees the code's names.

    Attributes:
        column: of the tests: one text, or a list of texts.
        timeout: seconds of wall time for code and tests together, > 0.
        memory_mb: address space of the process, at least 64.
        partial: give the share of passed tests instead of all or nothing.
        processes: at once; None takes as many as there are processors, at most 8.

    Example:
        >>> PythonTests()(["def add(a, b): return a + b", "add = max"], tests=["assert add(1, 2) == 3"] * 2)
        [1.0, 0.0]
    """

    column: str = "tests"
    timeout: float = 5.0
    memory_mb: int = 512
    partial: bool = False
    processes: int | None = None
    __name__ = "python_tests"

    def __post_init__(self) -> None:
        if not self.timeout > 0 or self.memory_mb < 64 or (self.processes is not None and self.processes < 1):
            raise ValueError(
                f"PythonTests: expected timeout > 0, memory_mb >= 64 and processes >= 1, got {self.timeout}, "
                f"{self.memory_mb}, {self.processes}."
            )

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        """One reward per completion."""
        if self.column not in columns:
            raise ValueError(f"PythonTests: there is no column {self.column!r}. Name it: PythonTests(column=...).")
        jobs = [
            (code_of(completion_text(completion)), _as_tests(tests))
            for completion, tests in zip(completions, columns[self.column], strict=True)
        ]
        workers = self.processes or min(8, os.cpu_count() or 1)
        running: set[subprocess.Popen[bytes]] = set()
        with ThreadPoolExecutor(workers, thread_name_prefix="python_tests") as pool:
            try:
                return list(pool.map(lambda job: self._reward(job[0], job[1], running), jobs))
            except BaseException:  # the stop button: the pool would wait for what runs, and for what waits
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(running):
                    _kill(process)
                raise

    def _reward(self, code: str, tests: list[str], running: set["subprocess.Popen[bytes]"]) -> float | None:
        if not tests:
            return None
        if not code.strip():
            return 0.0
        passed = self._run(code, tests, running)
        return sum(passed) / len(tests) if self.partial else float(all(passed))

    def _run(self, code: str, tests: list[str], running: set["subprocess.Popen[bytes]"]) -> list[bool]:
        """Which tests passed; none of them if the process did not report."""
        token = secrets.token_hex(16)
        job = {
            "code": code,
            "tests": tests,
            "token": token,
            "seconds": self.timeout,
            "memory": self.memory_mb << 20,
            "file_size": FILE_SIZE,
        }
        with tempfile.TemporaryDirectory(prefix="rlkit-code-", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                [*own_namespaces(), sys.executable, "-I", str(RUNNER)],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            running.add(process)
            try:
                report = _report(process, json.dumps(job).encode(), self.timeout)
            finally:
                _kill(process)
                running.discard(process)
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        with contextlib.suppress(BrokenPipeError):
                            stream.close()
        text = report.decode("utf-8", "replace")
        if not text.startswith(token):
            return [False] * len(tests)
        passed = json.loads(text.removeprefix(token))
        return [bool(one) for one in passed]


def _report(process: "subprocess.Popen[bytes]", job: bytes, seconds: float) -> bytes:
    """What the process reports; nothing if it takes longer than so many seconds after it started the code."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(job)
        process.stdin.flush()
        process.stdin.close()
    found, deadline = b"", time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return found.removeprefix(STARTED)
            if not found:
                deadline = time.monotonic() + seconds
            found += piece
            if len(found) > REPORT:
                return b""
    return b""


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the whole session of a process that was not waited for yet; also after an orderly end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def own_namespaces() -> tuple[str, ...]:
    """The command that gives a process its own user, network and process namespaces; empty where it is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    tried = subprocess.run([*command, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return command if tried.returncode == 0 else ()


def code_of(text: str) -> str:
    r"""The code in a completion: the last block of its answer that is fenced as Python, else the last fenced without a
    language, else all of it.

    Example:
        >>> code_of("I think:\n```python\nx = 1\n```\nIt prints:\n```\n1\n```\nDone.")
        'x = 1\n'
    """
    part = answer_part(text).replace("\r\n", "\n")
    blocks = _FENCE.findall(part)
    marked = [code for language, code in blocks if language.lower() in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return (marked or plain or [part])[-1]


def _as_tests(tests: Any) -> list[str]:
    found = [tests] if isinstance(tests, str) else list(tests or [])
    if not all(test is None or isinstance(test, str) for test in found):
        raise TypeError(f"PythonTests: expected tests as one text or a list of texts, got {tests!r:.80}.")
    return [test for test in found if test and test.strip()]


python_tests = PythonTests()
