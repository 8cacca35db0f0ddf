"""The process in which a completion's code runs: limits first, then the code, then its tests. Started by `code_tests`
as `python -I code_runner.py`, with a job in JSON on its standard input and nothing of rlkit but `sandbox.py`.
"""

import atexit
import json
import os
import resource
import sys
import threading
import time

# A second layer under `sandbox`, with readable errors; where that is missing the only one. A hook cannot be removed.
REFUSED: tuple[str, ...] = ("socket.connect", "socket.bind", "socket.send", "socket.get", "os.fork", "os.exec")
REFUSED += ("os.posix_spawn", "os.spawn", "os.system", "subprocess.", "pty.")

STARTED = b"started "  # then, in JSON, what the machine does not protect, and a line end; from here on the time counts
CHECKED = "_rlkit_checked"  # the function that tests call before each of their checks; see `code_cases`


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
    """End this process after a wall time: waiting uses no processor time, and the parent may have ended."""
    end, wait = os._exit, time.sleep
    watchdog = threading.Thread(target=lambda: (wait(seconds), end(1)), daemon=True)
    watchdog.start()


def module(name):
    """A namespace that can also be imported, which dataclasses and `from solution import f` need."""
    made = sys.modules[name] = type(sys)(name)
    return made.__dict__


def passes(source, names):
    """Whether a test ends without an error, in its threads too; None where it has checked nothing on its way."""
    checks: list[bool] = []
    failed: list[object] = []
    names[CHECKED] = lambda: checks.append(True)
    threading.excepthook = failed.append
    exec(compile(source, "<test>", "exec"), names)
    return None if not checks else not failed


def returns(case, names):
    """What a call returns, in JSON."""
    owner = names["Solution"]() if case["call"] not in names and "Solution" in names else None
    function = names[case["call"]] if owner is None else getattr(owner, case["call"])
    return json.dumps(function(*case["arguments"]))


def prints(case, code):
    """What a program that reads the input writes, white space at the ends of lines aside; False after an error."""
    with open("stdin", "w+b") as given, open("stdout", "w+b") as got, open(os.devnull, "r+b") as nothing:
        os.unlink("stdin")
        os.unlink("stdout")
        given.write(case["stdin"].encode("utf-8", "surrogatepass"))
        given.seek(0)
        os.dup2(given.fileno(), 0)
        os.dup2(got.fileno(), 1)
        sys.stdin = open(0, encoding="utf-8", closefd=False)
        sys.stdout = standard = open(1, "w", encoding="utf-8", closefd=False)
        names, others = module("__main__"), set(threading.enumerate())
        try:
            try:
                exec(code, names)
                ended = True
            except SystemExit as error:
                ended = error.code in (None, 0)
            for thread in set(threading.enumerate()) - others:
                if not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, standard):
                if not stream.closed:
                    stream.flush()
            got.seek(0)
            lines = got.read().decode("utf-8", "replace").strip().splitlines()
            return ended and "\n".join(" ".join(line.split()) for line in lines)
        finally:
            names.clear()  # closes what the program has opened, `open(0)` too, before the next one gets its input
            for number in (0, 1, 2):
                os.dup2(nothing.fileno(), number)


def run(job):
    """For each test, whether it passed; of a program or a call what it gave, which only the parent can judge."""
    names, tests = module("solution"), job["tests"]
    names[CHECKED] = lambda: None  # before the tests nothing counts
    try:
        code = compile(job["code"], "<completion>", "exec")
        if not all("stdin" in test for test in tests):
            for source in (job["before"], code, job["after"]):
                exec(source, names)
    except BaseException:  # also SystemExit: code that ends the process has passed nothing
        return [False] * len(tests)
    passed = []
    for test in tests:
        try:
            if "source" in test:
                passed.append(passes(test["source"], names))
            else:
                found = prints(test, code) if "stdin" in test else returns(test, names)
                passed.append(found if found is not False and len(found) <= job["output"] else False)
        except BaseException:
            passed.append(False)
    return passed


def main():
    """Read the job, run it, and write the results to a descriptor that the code is not given."""
    job = json.loads(sys.stdin.readline())
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    limit(job)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # `-I` leaves it out
    import sandbox  # type: ignore[import-not-found]

    del sys.path[0]
    missing = sandbox.confine(bytes.fromhex(job["filter"]))
    os.write(report, STARTED + json.dumps(missing).encode() + b"\n")
    end_after(job["seconds"])
    sys.addaudithook(refuse)
    passed = run(job)
    os.write(report, (job["token"] + json.dumps(passed) + "\n").encode())
    os._exit(0)  # no exit handlers, no threads that go on


if __name__ == "__main__":
    main()
