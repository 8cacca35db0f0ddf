"""`python_tests`: reward by running the completion's Python code against the row's tests.

Each completion gets a process of its own (`python -I`, an empty folder, an empty environment, a session of its own)
with limits of time, memory and disk; what is left after the time is killed. `sandbox` confines it: no files but its
own and Python's, no other processes, no network. Where the kernel allows it, the process also gets its own user,
network and process namespaces (`unshare`). A warning names once what the machine cannot protect.

Outputs of programs and values of calls are judged in our process, and what is expected of them is not in the code's
(`code_verdict`). Tests that are Python are not protected: they share a process with the code, which can find out how
they report, or return an object that equals everything.
"""

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlkit.prompts.rows import any_rows
from rlkit.record import Prompt
from rlkit.reward_calls.child import Child, Died, TimedOut
from rlkit.rewards.answers import code_of, completion_text, program_of
from rlkit.rewards.code_cases import cases_of, settle, stub_job
from rlkit.rewards.code_runner import CHECKED, STARTED
from rlkit.rewards.code_verdict import longest_output, verdicts, without_answers
from rlkit.rewards.sandbox import system_calls

logger = logging.getLogger(__name__)

COLUMNS = ("tests", "test", "test_list", "input_output")  # rlkit, HumanEval, MBPP, APPS and TACO
RUNNER = Path(__file__).with_name("code_runner.py")
START_SECONDS = 60.0  # to start Python on a busy machine; the time of the code counts from then
FILE_SIZE = 16 << 20  # bytes
DISK = 64 << 10  # KiB of all files of a completion, measured every `WATCH_SECONDS`
THREADS = 200  # of a completion, measured likewise: a thread that only waits costs none of its memory
REPORT = 1 << 20  # bytes of a report at most: code that finds where it goes could send without end
STUBS_SECONDS = 5.0  # for tests without the code, which may never end: then they can fail
JSON_BYTES = 14  # of a character: two escapes, escaped once more

T = TypeVar("T")


@dataclass(frozen=True)
class PythonTests:
    """1 where the code passes every test of its row, else 0; None where the row has no tests.

    The code is the last block of the answer that is fenced as Python, else the last without a language, else the whole
    answer. A test is Python that raises if something is wrong (`assert add(1, 2) == 3`); it sees the code's names.
    The forms of HumanEval, MBPP, APPS and TACO are read too: see `rlkit.rewards.code_cases`. Of HumanEval, a completion
    may go on where a prompt that is text ends. `check` looks at a dataset before a run.

    Attributes:
        column: of the tests; None takes `tests`, `test`, `test_list` or `input_output`, the first that there is. The
            columns `entry_point` (or `fn_name`), `test_setup_code` and `test_imports` are used where there are such.
        timeout: seconds of wall time for code and tests together, > 0.
        memory_mb: address space of the process, at least 64.
        partial: give the share of passed tests instead of all or nothing.
        processes: at once; None takes as many as there are processors, at most 8.

    Example:
        >>> PythonTests()(["def add(a, b): return a + b", "add = max"], tests=["assert add(1, 2) == 3"] * 2)
        [1.0, 0.0]
    """

    column: str | None = None
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
        """One reward per completion.

        Raises:
            TypeError, ValueError: a row's tests have no known form, or cannot fail. Raised before any completion runs.
        """
        jobs = self._jobs(range(len(completions)), columns)
        for row, (job, completion) in enumerate(zip(jobs, completions, strict=True)):
            prompt = columns["prompts"][row] if "prompts" in columns else None
            job |= program_of(code_of(completion_text(completion)), prompt, job.pop("entry"))
        return self._each(self._reward, jobs)

    def _each(self, function: Callable[[Any, set[Child]], T], items: Iterable[Any]) -> list[T]:
        """Call a function for each item, in threads; it adds the processes that it starts to a set."""
        workers = self.processes or min(8, os.cpu_count() or 1)
        running: set[Child] = set()
        with ThreadPoolExecutor(workers, thread_name_prefix="python_tests") as pool:
            try:
                return list(pool.map(lambda item: function(item, running), items))
            except BaseException:  # the stop button: the pool would wait for what runs, and for what waits
                pool.shutdown(wait=False, cancel_futures=True)
                for child in list(running):
                    child.kill()
                raise

    def check(self, dataset: Any) -> None:
        """Read the tests of every row, and run each once without the code; before a run.

        Args:
            dataset: rows in any form that `PromptLoader` takes, but no stream.

        Raises:
            TypeError, ValueError: the first row whose tests have no known form, or cannot fail.
        """
        rows = any_rows(dataset, "PythonTests.check")
        given = [rows[row] for row in range(len(rows))]
        self._jobs(range(len(given)), {name: [row.get(name) for row in given] for name in given[0]})

    def _jobs(self, rows: range, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """For each row its tests, what runs before and after the code, and the name of the function."""
        jobs = [self._job(row, columns) for row in rows]
        sources = [tuple(case["source"] for case in job["tests"] if "source" in case) for job in jobs]
        keys = dict.fromkeys((job["after"], tests) for job, tests in zip(jobs, sources, strict=True) if tests)
        passed = dict(zip(keys, self._each(lambda key, _: _passed_by_stubs(self, *key), keys), strict=True))
        for row, (job, tests) in enumerate(zip(jobs, sources, strict=True)):
            if tests:
                try:
                    job["after"], job["tests"] = settle(job["after"], tests, passed[job["after"], tests])
                except ValueError as error:
                    raise ValueError(f"PythonTests: row {row}, column {self._column(columns)!r}: {error}") from None
        return jobs

    def _column(self, columns: Mapping[str, Any]) -> str:
        column = self.column or next((name for name in COLUMNS if name in columns), COLUMNS[0])
        if column not in columns:
            raise ValueError(f"PythonTests: there is no column {column!r}. Name it: PythonTests(column=...).")
        return column

    def _job(self, row: int, columns: Mapping[str, Any]) -> dict[str, Any]:
        """One of `_jobs`, before its tests were run without the code."""
        column = self._column(columns)

        def value(name: str) -> Any:
            return columns[name][row] if name in columns else None

        entry = value("entry_point") or value("fn_name")
        setup = [*(value("test_imports") or []), value("test_setup_code") or ""]
        try:
            after, tests = cases_of(columns[column][row], entry=entry, setup="\n".join(setup))
        except (TypeError, ValueError) as error:
            raise type(error)(f"PythonTests: row {row}, column {column!r}: {error}") from None
        return {"after": after, "tests": tests, "entry": entry}

    def _reward(self, job: dict[str, Any], running: set[Child]) -> float | None:
        if not job["tests"]:
            return None
        if not job["code"].strip():
            return 0.0
        passed = self._run(job, running)
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    def _run(self, job: dict[str, Any], running: set[Child]) -> list[bool]:
        """Which tests passed; none of them if the process did not report."""
        token, tests, output = secrets.token_hex(16), job["tests"], longest_output(job["tests"])
        job = job | {
            "tests": without_answers(tests),
            "output": output,
            "token": token,
            "seconds": self.timeout,
            "memory": self.memory_mb << 20,
            "file_size": FILE_SIZE,
            "filter": system_calls().hex(),
        }
        with _own_folder() as folder:
            child = Child(
                [*own_namespaces(), sys.executable, "-I", str(RUNNER)],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                stderr=subprocess.DEVNULL,
            )
            running.add(child)
            try:
                _warn_of(_started(child, json.dumps(job).encode()))
                limit = REPORT + JSON_BYTES * output * len(tests)
                watch = functools.partial(_within_limits, child, folder)
                report = child.ask(b"", self.timeout, limit=limit, watch=watch)
            except (TimedOut, Died):
                return [False] * len(tests)
            finally:
                running.discard(child)
                child.close()
        text = report.decode("utf-8", "replace")
        if not text.startswith(token):
            return [False] * len(tests)
        passed = verdicts(text.removeprefix(token), tests)
        for test, one in zip(tests, passed, strict=True):
            if one is None:
                _warn_of_nothing_checked(test["source"])
        return [bool(one) for one in passed]


@functools.lru_cache(maxsize=4096)
def _passed_by_stubs(reward: PythonTests, setup: str, sources: tuple[str, ...]) -> list[bool]:
    """What `settle` reads; once for each distinct tests."""
    return replace(reward, timeout=min(reward.timeout, STUBS_SECONDS))._run(stub_job(setup, sources), set())


def _started(child: Child, job: bytes) -> bytes:
    """Send the job and wait until the code starts; what this machine does not protect, in JSON."""
    try:
        line = child.ask(job, START_SECONDS)
    except Died as error:
        raise RuntimeError(
            f"PythonTests: the process for the code ended before it started ({error}). Expected "
            f"{sys.executable} to run {RUNNER} within memory_mb."
        ) from None
    return line.removeprefix(STARTED)


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """An empty folder, removed at the end with all that is in it."""
    folder = tempfile.mkdtemp(prefix="rlkit-code-")
    try:
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:  # not empty. `rm` also removes folders that are nested deeper than shutil.rmtree can follow
            subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _within_limits(child: Child, folder: str) -> bool:
    return _used(folder) <= DISK and _threads(child.pid) <= THREADS


def _used(folder: str) -> int:
    """KiB of the files in a folder, however deep."""
    said = subprocess.run(["du", "-sk", folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    return int(said.split()[0]) if said else 0


def _threads(number: int) -> int:
    """Threads of a process and its children; 0 where there is no /proc."""
    try:
        children = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="ascii").split()
        return sum(len(os.listdir(f"/proc/{one}/task")) for one in (number, *children))
    except OSError:  # it has ended, too
        return 0


@functools.lru_cache(maxsize=1024)
def _warn_of_nothing_checked(test: str) -> None:
    """Say once for a test; the code may be the reason (`for x in solve(): assert ...`), or the test."""
    shown = re.sub(rf" *{CHECKED}\(\)\n", "", test)
    logger.warning("python_tests: a test ended before any of its checks, which pays 0: %r", shown[:200])


@functools.cache
def _warn_of(missing: bytes) -> None:
    """Say once what this machine does not protect."""
    lacks = {
        "files": "Landlock (Linux 5.13): completions can read, change and delete the files that you can",
        "system calls": "a seccomp filter (libseccomp.so.2): completions can start processes"
        + ("" if own_namespaces() else ", reach the network, signal your processes and read their environment"),
    }
    named = json.loads(missing)
    if named:
        logger.warning(
            "python_tests: THIS MACHINE IS NOT PROTECTED from the code of completions. It lacks %s. Run in a container "
            "or a virtual machine that you can lose. See docs/rewards.md.",
            "; ".join(lacks.get(name, name) for name in named),
        )


@functools.cache
def own_namespaces() -> tuple[str, ...]:
    """The command that gives a process its own user, network and process namespaces; empty where it is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    tried = subprocess.run([*command, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return command if tried.returncode == 0 else ()


python_tests = PythonTests()
