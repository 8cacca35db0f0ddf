"""Code is run within bounds of time, memory, network and processes, and nothing is left behind."""

import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from waiting import LONG, until

from rlkit.rewards import PythonTests, python_tests
from rlkit.rewards import code_tests as module
from rlkit.rewards.code_tests import code_of, own_namespaces

pytestmark = pytest.mark.integration

RAN = "assert type(globals()) is dict"  # the code came to its end; without code the names are of another type
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


@pytest.fixture(params=["namespaces", "limits only"])
def isolation(request, monkeypatch):
    """With the kernel's namespaces, and as on a machine that does not allow them."""
    if request.param == "limits only":
        monkeypatch.setattr(module, "own_namespaces", tuple)
        module._warn_of.cache_clear()
    elif not own_namespaces():
        pytest.skip("unshare is not allowed here")
    return request.param


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the folders of the code are made: not among those of other tests that run at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leftovers(folder):
    """Processes that have the folder in their command line or environment, where each of ours has it as its home."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            state = (process / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if f"{folder}/rlkit-code-".encode() in text and state not in (b"Z", b"X"):
            found.append(int(process.name))
    return found


def nothing_is_left(folder):
    """No process, at the latest when the kernel has ended what was killed, and no folder."""
    until(lambda: not leftovers(folder), "the end of what was killed")
    return not list(folder.glob("rlkit-code-*"))


def test_code_is_judged_by_its_tests(isolation):
    codes = {
        "def add(a, b): return a + b": 1.0,
        "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.": 1.0,
        "<think>```python\nadd = max\n```</think>```py\nadd = lambda a, b: a + b\n```": 1.0,
        "def add(a, b): return 3": 0.0,
        "def add(a, b) return": 0.0,
        "": 0.0,
        "import sys; sys.exit(0)": 0.0,
        "import os; os._exit(0)": 0.0,
        "print('x' * 1000000)\ndef add(a, b): return a + b": 1.0,
        "import asyncio\nasync def f(a, b): return a + b\ndef add(a, b): return asyncio.run(f(a, b))": 1.0,
        "\x00": 0.0,
        "def add(a, b): raise SystemExit": 0.0,
    }
    assert python_tests(list(codes), tests=[ADD] * len(codes)) == list(codes.values())
    messages = [[{"role": "assistant", "content": code}] for code in codes]
    assert python_tests(messages[:3], tests=[ADD[0]] * 3) == [1.0] * 3


def test_a_surrogate_is_no_code():
    assert python_tests(["x = '\ud800'"], tests=[RAN]) in ([0.0], [1.0])


def test_rows_without_tests_abstain_and_part_of_them_counts_if_asked():
    half = "def add(a, b): return 3"
    assert python_tests([half] * 3, tests=[None, [], ""]) == [None] * 3
    assert PythonTests(partial=True)([half], tests=[ADD]) == [0.5]
    assert PythonTests("checks")([half], checks=["assert add(1, 2) == 3"]) == [1.0]
    with pytest.raises(ValueError, match="there is no column 'tests'"):
        python_tests([half], checks=ADD)
    for bad in ({"timeout": 0}, {"memory_mb": 1}, {"processes": 0}):
        with pytest.raises(ValueError, match="expected timeout > 0"):
            PythonTests(**bad)


SLOW = {
    "a loop": "while True: pass",
    "a sleep": "import time\nwhile True: time.sleep(1)",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "a loop that catches": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "one long call": "sum(range(10**12))",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", SLOW.values(), ids=SLOW.keys())
def test_endless_code_costs_its_time_and_no_more(isolation, code, folder):
    """Compared with a sleep that ends by itself, on the same machine at the same time."""
    start = time.perf_counter()
    assert PythonTests(timeout=1)([code], tests=[RAN]) == [0.0]
    took = time.perf_counter() - start
    start = time.perf_counter()
    assert PythonTests(timeout=LONG)(["import time; time.sleep(1)"], tests=[RAN]) == [1.0]
    assert took < 10 * (time.perf_counter() - start) + 60  # and not for ever
    assert nothing_is_left(folder)


def test_memory_is_bounded(isolation):
    hog = "x = []\nwhile True: x.append(bytes(10 << 20))"
    assert PythonTests(memory_mb=128)([hog, "x = 1"], tests=[RAN] * 2) == [0.0, 1.0]
    assert PythonTests(memory_mb=256)(["x = bytes(100 << 20)"], tests=["assert len(x) > 1"]) == [1.0]


def test_there_is_no_network(isolation):
    """A server of ours listens on the loopback: the code cannot reach it, and we can."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"import socket\ns = socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        exec(reach, {})
        datagram = f"import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))"
        name = "import socket\nsocket.getaddrinfo('localhost', 80)"
        assert python_tests([reach, datagram, name], tests=[RAN] * 3) == [0.0] * 3


def test_nothing_is_left_behind(isolation, folder):
    """Children, sessions of their own, files; what sleeps is not waited for."""
    escape = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(600)\n  os._exit(0)\n"
    spawn = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)"
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()"
    write = "open('left.txt', 'w').write('x')"
    big = "f = open('big', 'wb')\nfor _ in range(100): f.write(bytes(1 << 20))"
    start = time.perf_counter()
    got = PythonTests(timeout=60)([escape, spawn, thread, write, big], tests=[RAN] * 5)
    assert got == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert time.perf_counter() - start < 600
    assert nothing_is_left(folder)


def test_the_environment_is_empty(isolation, monkeypatch):
    """What is not given cannot be read: no tokens, no path of ours."""
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    code = "import os, sys\nleft = 'SECRET_TOKEN' in os.environ\nours = 'rlkit' in sys.modules"
    assert python_tests([code], tests=["assert not left and not ours"]) == [1.0]


def test_code_is_the_last_block():
    assert code_of("```\na\n```\n```python\nb\n```") == "b\n"
    assert code_of("```bash\npip install x\n```\nand then\n```python\nb\n```") == "b\n"
    assert code_of("```Python\nb\n```\nwhich prints\n```\n1\n```\n```text\n2\n```") == "b\n"
    assert code_of("```python\r\nb\r\n```") == "b\n"
    assert code_of("x = 1") == "x = 1" and code_of("```python\nnever closed") == "```python\nnever closed"


def test_a_report_without_end_is_not_read_to_its_end(isolation, monkeypatch):
    """Code that finds the pipe of the report could otherwise fill the memory of the run, for all of its time."""
    read = []

    def counting(number, size):
        read.append(os_read(number, size))
        return read[-1]

    os_read = os.read
    monkeypatch.setattr(module.os, "read", counting)
    loop = "while True: os.write(number, b'x' * 65536)"
    flood = f"import os\nfor number in range(3, 10):\n  try:\n    {loop}\n  except OSError: pass"
    assert PythonTests(timeout=60)([flood], tests=[RAN]) == [0.0]
    assert module.REPORT < sum(map(len, read)) <= module.REPORT + 2**17


def test_a_forged_report_does_not_end_the_run():
    """Code can find the token in the frames above it: documented. What it writes must not raise in our process."""
    find = (
        "import os, sys\nframe = sys._getframe()\nwhile 'job' not in frame.f_locals: frame = frame.f_back\n"
        "job = frame.f_locals['job']\n"
    )
    texts = (b"", b"[", b"7", b"[true, true]", b"{}")
    forged = [find + f"os.write(3, job['token'].encode() + {text!r} + b'\\n'); os._exit(0)" for text in texts]
    assert python_tests(forged, tests=[RAN] * len(forged)) == [0.0] * len(forged)


def test_tests_that_are_no_texts_are_named():
    with pytest.raises(TypeError, match="expected tests as one text or a list of texts, got \\[1\\]"):
        python_tests(["x = 1"], tests=[[1]])


def test_the_stop_button_does_not_wait_for_the_code(sigint_guard):
    """Neither for what runs nor for what waits: the code would run for an hour each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hour = PythonTests(timeout=3600, processes=2)
    threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        hour(["import time; time.sleep(3600)"] * 6, tests=[RAN] * 6)
    assert python_tests(["x = 1"], tests=["assert x == 1"]) == [1.0]
