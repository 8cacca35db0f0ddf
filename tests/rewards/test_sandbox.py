# ruff: noqa: E501 - an attack a line reads as a table
"""What a completion's code must not be able to do, tried: each attack is run, and what it was after is looked at."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from waiting import LONG, until

from rlkit.rewards import PythonTests, code_tests, sandbox

RAN = "assert type(globals()) is dict"  # the code came to its end; without code the names are of another type

needs_sandbox = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or not sandbox.system_calls()
    or sandbox.ctypes.CDLL(None).syscall(sandbox.CREATE_RULESET, None, sandbox.ctypes.c_size_t(0), 1) < 1,
    reason="no Landlock, or no libseccomp",
)
pytestmark = [needs_sandbox, pytest.mark.integration]


@pytest.fixture(params=["with namespaces", "without"], autouse=True)
def namespaces(request, monkeypatch):
    """In a container there are often none: everything must hold without them."""
    if request.param == "without":
        monkeypatch.setattr(code_tests, "own_namespaces", tuple)
    elif not code_tests.own_namespaces():
        pytest.skip("unshare is not allowed here")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """(what is to be protected, where the folders of the code are made)."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    (mine / "inner").mkdir(parents=True)
    theirs.mkdir()
    (mine / "inner" / "file").write_text("content")
    (mine / "secret").write_text("s3cret")
    monkeypatch.setattr(tempfile, "tempdir", str(theirs))
    return mine, theirs


def seen(folder):
    """All that can change in a folder."""
    return {
        str(path): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.lstat().st_uid,
            path.read_bytes() if path.is_file() else 0,
        )
        for path in [folder, *folder.rglob("*")]
        if path.exists()
    }


LIBC = "import ctypes, os, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
FILES = {
    "write": "open(F, 'w').write('x')",
    "append": "open(F, 'a').write('x')",
    "truncate": "os.truncate(F, 0)",
    "open and truncate": "os.open(F, os.O_RDONLY | os.O_TRUNC)",
    "a new file": "open(D + '/new', 'w')",
    "a new folder": "os.mkdir(D + '/new')",
    "chmod": "os.chmod(F, 0)",
    "chmod of an open folder": "os.fchmod(os.open('/usr', os.O_RDONLY), 0o700)",
    "chown": "os.chown(F, 1, 1)",
    "utime": "os.utime(F, (1, 1))",
    "setxattr": "os.setxattr(F, 'user.x', b'x')",
    "unlink": "os.unlink(F)",
    "rmdir and rmtree": "import shutil; shutil.rmtree(D)",
    "rename out": "os.rename(F, D + '/other')",
    "rename into its own folder": "os.rename(F, 'mine')",
    "replace": "open('x', 'w').write('x'); os.replace('x', F)",
    "a hard link": "os.link(F, 'link'); open('link', 'w').write('x')",
    "a symbolic link": "os.symlink(F, 'link'); open('link', 'w').write('x')",
    "a relative path": "open(os.path.relpath(F), 'w').write('x')",
    "libc's open": "number = libc.open(F.encode(), 1); libc.write(number, b'x', 1)",
    "libc's creat": "libc.creat(F.encode(), 0o777)",
    "libc's truncate": "libc.truncate(F.encode(), 0)",
    "system call 257, openat": "libc.syscall(257, -100, F.encode(), 0o1000, 0)",
    "mount": "libc.mount(b'none', D.encode(), b'tmpfs', 0, None)",
    "chroot": "os.chroot(D)",
    "unshare": "libc.unshare(0x10000000)",
    "a thread": "import threading\nt = threading.Thread(target=lambda: open(F, 'w')); t.start(); t.join()",
    "a device": "os.mknod('x', 0o060666, os.stat('/').st_dev); open('x', 'r+b').write(b'x')",
}


def test_files_outside_of_its_folder_stay_as_they_are(folders):
    """The oracle is the folder itself: content, mode, owner, times, names."""
    mine, theirs = folders
    names = f"{LIBC}D, F = {str(mine)!r}, {str(mine / 'inner' / 'file')!r}\n"
    before = seen(mine)
    PythonTests(timeout=LONG)([names + code for code in FILES.values()], tests=[RAN] * len(FILES))
    assert seen(mine) == before and not list(theirs.iterdir())


def test_every_attack_on_files_would_work_without_protection(folders):
    """So that the test above can fail: the same code, in a process of ours. Left out: what only some users may do."""
    mine, theirs = folders
    names = f"{LIBC}D, F = {str(mine)!r}, {str(mine / 'inner' / 'file')!r}\n"
    for name in (
        "write",
        "truncate",
        "chmod",
        "utime",
        "unlink",
        "rmdir and rmtree",
        "rename out",
        "a hard link",
        "libc's open",
    ):
        shutil.rmtree(mine, ignore_errors=True)
        (mine / "inner").mkdir(parents=True)
        (mine / "inner" / "file").write_text("content")
        before = seen(mine)
        subprocess.run([sys.executable, "-I", "-c", names + FILES[name]], cwd=theirs, check=True)
        assert seen(mine) != before, name


def test_its_own_folder_is_its_own(folders):
    code = (
        "import os, shutil, tempfile, sqlite3\nfrom pathlib import Path\n"
        "Path('a/b/c').mkdir(parents=True); Path('a/b/c/f').write_text('x'); shutil.copytree('a', 'd')\n"
        "shutil.copy2('a/b/c/f', 'g'); os.rename('g', 'a/g'); os.truncate\nopen('a/g', 'r+').truncate(0)\n"
        "os.symlink('a/b/c/f', 's'); os.chmod('s', 0o600)\n"
        "with tempfile.TemporaryDirectory() as t: Path(t, 'x').write_text('y')\n"
        "with tempfile.NamedTemporaryFile() as t: t.write(b'z')\n"
        "shutil.make_archive('z', 'zip', 'a'); shutil.unpack_archive('z.zip', 'un'); shutil.rmtree('d')\n"
        "sqlite3.connect('x.db').execute('create table a (b)')"
    )
    check = "assert open('s').read() == 'x' and open('un/b/c/f').read() == 'x' and not os.path.exists('d')"
    assert PythonTests(timeout=LONG)([code], tests=[check]) == [1.0]


def test_nothing_outside_can_be_read(folders):
    mine, _ = folders
    parent = os.getpid()
    reads = [f"open({str(mine / 'secret')!r}).read()", f"os.listdir({str(mine)!r})", "open('/etc/shadow').read()"]
    reads += [
        f"open('/proc/{parent}/environ', 'rb').read()",
        f"open('/proc/{parent}/mem', 'rb')",
        f"os.listdir({str(Path.home())!r})",
    ]
    reads += [
        "open('/proc/self/environ', 'rb').read()",
        f"os.listdir('/proc/{parent}/fd')",
        "os.listdir('/root')",
        "os.listdir('/tmp')",
    ]
    reads += [f"import rlkit.rewards; open({code_tests.__file__!r}).read()"] * (
        not code_tests.__file__.startswith(sys.prefix)
    )
    assert PythonTests(timeout=LONG)([f"import os\n{read}" for read in reads], tests=[RAN] * len(reads)) == [0.0] * len(
        reads
    )


PROCESSES = {
    "fork of libc": "for _ in range(40):\n    if libc.fork() == 0: (time.sleep(30), libc._exit(0))",
    "vfork": "if libc.vfork() == 0: (time.sleep(30), libc._exit(0))",
    "the system call fork": "for number in (57, 58, 220):\n    if libc.syscall(number, 17, 0, 0, 0, 0) == 0: (time.sleep(30), libc._exit(0))",
    "clone3": "a = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)\nif libc.syscall(435, a, 88) == 0: (time.sleep(30), libc._exit(0))",
    "fork_exec": (
        "import _posixsubprocess as p\nr, w = os.pipe()\n"
        "p.fork_exec([b'/bin/sleep', b'30'], [b'/bin/sleep'], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, "
        "False, True, 0, None, None, None, -1, None, True)"
    ),
    "posix_spawn": "argv = (ctypes.c_char_p * 3)(b'sleep', b'30', None)\nlibc.posix_spawnp(ctypes.byref(ctypes.c_int()), b'sleep', None, None, argv, None)",
    "system": "libc.system(b'sleep 30 &')",
    "execve": "argv = (ctypes.c_char_p * 3)(b'/bin/sleep', b'30', None)\nlibc.execve(b'/bin/sleep', argv, None)",
    "another session, no end with the parent": "libc.prctl(1, 0); libc.setsid(); libc.setpgid(0, 0)\nctypes.PyDLL(None).pause()",
    "multiprocessing": "import multiprocessing as m\nm.get_context('fork').Process(target=time.sleep, args=(30,)).start()",
}


def test_no_process_is_started_and_none_is_left(folders):
    """The oracle is the table of processes: nothing with the folder of the code as its own."""
    _, theirs = folders
    code = [f"{LIBC}import time\n{attack}" for attack in PROCESSES.values()]
    ours = {process.pid for process in psutil.process_iter()}
    PythonTests(timeout=1)(code, tests=[RAN] * len(code))

    def left():
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.pid not in ours and (
                    str(theirs) in process.cwd() or str(theirs) in str(process.environ())
                )
                found += [process.pid] if mine and process.status() != psutil.STATUS_ZOMBIE else []
            except psutil.Error:
                continue
        return found

    until(lambda: not left(), "the end of what was killed")


def test_forks_fail_one_by_one():
    # Were a fork allowed, its child must end at once: children that go on in the loop would double with every turn.
    code = f"{LIBC}tried = []\nfor _ in range(40):\n    tried.append(libc.fork())\n    if tried[-1] == 0: libc._exit(0)"
    assert PythonTests(timeout=LONG)([code], tests=["assert tried == [-1] * 40"]) == [1.0]


def test_our_processes_get_no_signal_and_keep_their_limits():
    """To the parent, to all, through files that signal their owner; limits, priority and processors of the parent too."""
    got = []
    for number in (signal.SIGTERM, signal.SIGIO, signal.SIGUSR1):
        signal.signal(number, lambda *which: got.append(which))
    parent, before = (
        psutil.Process(),
        (psutil.Process().nice(), psutil.Process().cpu_affinity(), psutil.Process().rlimit(psutil.RLIMIT_NOFILE)),
    )
    attacks = [
        "os.kill({0}, signal.SIGTERM)", "os.kill(-1, signal.SIGTERM)", "os.kill(0, signal.SIGTERM)", "os.killpg(os.getpgid({0}), 15)",
        "libc.syscall(234, {0}, {0}, 15)", "libc.syscall(200, {0}, 15)", "f = libc.syscall(434, {0}, 0); libc.syscall(424, f, 15, 0, 0)",
        "import socket, fcntl\na, b = socket.socketpair()\nfcntl.fcntl(a, fcntl.F_SETOWN, {0})\nfcntl.fcntl(a, fcntl.F_SETSIG, 15)\n"
        "fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)\nb.send(b'x')",
        "import resource; resource.prlimit({0}, resource.RLIMIT_NOFILE, (3, 3))",
        "os.setpriority(os.PRIO_PROCESS, {0}, 19)", "os.sched_setaffinity({0}, [0])", "libc.ptrace(16, {0}, 0, 0)",
        "libc.process_vm_readv({0}, 0, 0, 0, 0, 0)",
    ]  # fmt: skip
    try:
        PythonTests(timeout=LONG)(
            [LIBC + attack.format(os.getppid() if "-1" in attack else os.getpid()) for attack in attacks],
            tests=[RAN] * len(attacks),
        )
        time.sleep(0.1)
        assert not got
        assert before == (parent.nice(), parent.cpu_affinity(), parent.rlimit(psutil.RLIMIT_NOFILE))
    finally:
        for number in (signal.SIGTERM, signal.SIGIO, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)


def test_no_listener_is_reached(folders):
    """TCP on the loopback, and sockets of Unix: by name, by path, from one end of a pair."""
    mine, _ = folders
    path, name = str(mine / "s"), f"rlkit-test-{os.getpid()}"
    pair = "import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); "
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as box,
    ):
        unix.bind(path)
        unix.listen()
        box.bind(f"\0{name}")
        port = tcp.getsockname()[1]
        address = f"ctypes.create_string_buffer(b'\\x02\\0' + ({port}).to_bytes(2, 'big') + bytes([127, 0, 0, 1]) + bytes(8), 16)"
        attacks = [
            f"s = libc.socket(2, 1, 0); libc.connect(s, {address}, 16)",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)",
            f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r})",
            pair + f"a.sendto(b'x', '\\0{name}')",
            pair + f"a.sendmsg([b'x'], [], 0, '\\0{name}')",
            pair + f"libc.sendto(a.fileno(), b'x', 1, 0, b'\\1\\0\\0{name}', {len(name) + 3})",
            pair + f"libc.connect(a.fileno(), b'\\1\\0\\0{name}', {len(name) + 3}); libc.send(a.fileno(), b'x', 1, 0)",
        ]
        PythonTests(timeout=LONG)([LIBC + attack for attack in attacks], tests=[RAN] * len(attacks))
        for listener in (tcp, unix, box):
            listener.setblocking(False)
        receivers = (tcp.accept, unix.accept, lambda: box.recv(1))
        for receive in receivers:
            with pytest.raises(BlockingIOError):
                receive()
        for attack, receive in zip(attacks, [receivers[k] for k in (0, 0, 1, 2, 2, 2, 2)], strict=True):
            subprocess.run([sys.executable, "-I", "-c", LIBC + attack], check=True)
            receive()  # without protection it arrives


def test_the_disk_is_not_filled(folders, monkeypatch):
    """Many files of the size that one may have, and folders nested deeper than Python can remove."""
    fill = "import time\nfor n in range(8): open(str(n), 'wb').write(bytes(1 << 22))\ntime.sleep(3)"  # 32 MiB, and right code
    deep = "import os\nfor n in range(1200):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('x')"
    _, theirs = folders
    monkeypatch.setattr(code_tests, "DISK", 1 << 14)
    start = time.monotonic()
    assert PythonTests(timeout=LONG)([fill, deep], tests=[RAN] * 2) == [0.0, 1.0]
    assert time.monotonic() - start < LONG
    assert not list(theirs.iterdir())


def test_a_folder_into_which_nobody_can_look_is_not_made(folders):
    """Where we are not root, its files would not be counted, and it would stay when the code's folder is removed."""
    for mode in ("os.mkdir('d', 0o300)", "os.umask(0o700); os.mkdir('d')", "libc.mkdirat(-100, b'd', 0o500)"):
        code = f"{LIBC}try: {mode}\nexcept OSError: pass\nfound = os.path.exists('d') and oct(os.stat('d').st_mode & 0o700)"
        assert PythonTests(timeout=LONG)([code], tests=["assert found in (False, '0o700')"]) == [1.0], mode
    usual = "import os\nos.umask(0o077); os.makedirs('a/b', 0o755); os.mkdir('c', 0o700)"
    assert PythonTests(timeout=LONG)([usual], tests=["assert os.path.isdir('a/b') and os.path.isdir('c')"]) == [1.0]


def test_threads_are_counted_also_while_something_is_sent(monkeypatch):
    monkeypatch.setattr(code_tests, "THREADS", 8)
    many = "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
    send = "import os\nfor _ in range(30):\n    os.write(3, b' '); time.sleep(0.1)\nwhile True: time.sleep(1)"
    start = time.monotonic()
    assert PythonTests(timeout=LONG)([many.format(12) + send, many.format(3)], tests=[RAN] * 2) == [0.0, 1.0]
    assert time.monotonic() - start < LONG


def test_nothing_stays_in_the_kernel():
    """Shared memory of System V outlives its process; the limits cannot be lifted again, by root neither."""
    attacks = [
        "assert libc.shmget(0x726c6b, 1 << 20, 0o1666) == -1",
        "assert libc.mq_open(b'/rlkit', 0o102, 0o666, None) == -1",
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); raise SystemExit\nexcept OSError: pass",
        "assert libc.syscall(425, 8, ctypes.create_string_buffer(256)) == -1",  # io_uring_setup
        "assert libc.prctl(22, 0, 0, 0, 0) == -1 and libc.syscall(317, 0, 0, 0) == -1",  # another seccomp filter
    ]
    assert PythonTests(timeout=LONG)([LIBC + attack for attack in attacks], tests=[RAN] * len(attacks)) == [1.0] * len(
        attacks
    )


def test_what_code_needs_still_works():
    """Threads, an event loop, numeric libraries, time zones, the type of a file."""
    works = [
        "import asyncio\nasync def f(): return await asyncio.to_thread(lambda: 1)\nasyncio.run(f())",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool: list(pool.map(str, range(9)))",
        "import numpy as np\nassert (np.eye(200) @ np.eye(200)).sum() == 200",
        "import mimetypes, zoneinfo, uuid, getpass, platform\nmimetypes.guess_type('x.png'); uuid.uuid1(); platform.platform()",
        "import resource, sys, threading\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 26, -1))\nthreading.stack_size(1 << 26)",
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: None)\nsignal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)",
        "import queue, random, decimal, ssl, sqlite3, logging, pickle, multiprocessing, subprocess, tempfile, unittest, doctest",
    ]
    assert PythonTests(timeout=LONG, memory_mb=2048)(works, tests=[RAN] * len(works)) == [1.0] * len(works)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become somebody else")
def test_it_holds_for_a_user_without_privileges_too(tmp_path):
    """The runner by itself, with the system's Python, since ours may lie in a folder that only root can enter."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("there is no Python of the system")
    attack = "import os, ctypes\nassert ctypes.CDLL(None).fork() == -1\nfor path in PATHS:\n    try: open(path); raise SystemExit\n    except PermissionError: pass"
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        for file in ("code_runner.py", "sandbox.py"):
            shutil.copy(code_tests.RUNNER.with_name(file), folder)
        work = folder / "work"
        work.mkdir()
        work.chmod(0o777)
        (folder / "secret").write_text("s3cret")
        job = {
            "code": f"PATHS = ['/proc/{os.getpid()}/environ', {str(folder / 'secret')!r}]\n{attack}",
            "before": "",
            "after": "",
            "token": "T",
            "seconds": LONG,
        }
        job |= {
            "tests": [{"source": "_rlkit_checked()\nopen('x', 'w').write('y')"}],
            "memory": 1 << 29,
            "file_size": 1 << 20,
            "filter": sandbox.system_calls().hex(),
        }
        command = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            *code_tests.own_namespaces(),
            python,
            "-I",
            str(folder / "code_runner.py"),
        ]
        done = subprocess.run(
            command, input=code_tests.json.dumps(job).encode(), stdout=subprocess.PIPE, cwd=work, check=False
        )
    assert done.stdout == b"started []\nT[true]\n"
