"""The process in which a completion's code runs: limits first, then the code, then its tests. Started by `code_tests`
as `python -I code_runner.py`, with a job in JSON on its standard input and nothing of rlkit.
"""

import json
import os
import resource
import sys
import threading
import time

# A hook cannot be taken away again. It stops what tests of a function have no need of: the network and other processes.
REFUSED = (
    "socket.connect",
    "socket.bind",
    "socket.send",
    "socket.get",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.",
    "pty.",
)

STARTED = b"started\n"  # from here on the time counts


def refuse(event, arguments):
    """Audit hook."""
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not allowed here")


def limit(job):
    """Time, memory, files: enforced by the kernel."""
    seconds, memory = int(job["seconds"]) + 1, job["memory"]
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, job["file_size"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def end_after(seconds):
    """Code that only waits uses no processor time; this ends it, also if whoever started this process is gone."""
    end, wait = os._exit, time.sleep
    threading.Thread(target=lambda: (wait(seconds), end(1)), daemon=True).start()


def run(code, tests):
    """For each test, whether it passed."""
    names = {"__name__": "completion"}
    try:
        exec(compile(code, "<completion>", "exec"), names)
    except BaseException:  # also SystemExit: code that ends the process has passed nothing
        return [False] * len(tests)
    passed = []
    for test in tests:
        try:
            exec(compile(test, "<test>", "exec"), names)
            passed.append(True)
        except BaseException:
            passed.append(False)
    return passed


def main():
    """Read the job, run it, write what passed to where only this function knows."""
    job = json.load(sys.stdin)
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    limit(job)
    os.write(report, STARTED)
    end_after(job["seconds"])
    sys.addaudithook(refuse)
    passed = run(job["code"], job["tests"])
    os.write(report, (job["token"] + json.dumps(passed)).encode())
    os._exit(0)  # no exit handlers, no threads that go on


if __name__ == "__main__":
    main()
