"""Run tests with stubs in place of the code, to find tests that cannot fail.

`code_cases` sends the text of this file to the process of a completion, in the completion's place; standard library
only. Each name that the tests take from the code is a stub: every operation on it gives another stub. The tests run
five times: with stubs that are true or false, and equal to everything or to nothing but themselves, and with stubs
whose calls return None. What raises in none of them passes whatever the code returns.
"""

import builtins
import functools
import math
import sys
import threading

OPERATIONS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
OPERATIONS += ["r" + name for name in OPERATIONS]
OPERATIONS += "divmod neg pos invert abs round floor ceil trunc call getitem next enter".split()


KINDS = [(True, True, False), (True, False, False), (False, True, False), (False, False, False), (False, False, True)]


def stub_class(true, equal, none, made):
    """The class of stubs of one kind; each new stub is appended to `made`."""

    def operation(stub, name, *given, **named):
        return None if none and name == "call" else Stub(stub._path, name, given, named)

    class Stub:
        _path: int

        def __init__(self, *path):
            object.__setattr__(self, "_path", hash(repr(path)))  # two calls with the same arguments give equal stubs
            made.append(self)

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Stub(self._path, name)

        def __eq__(self, other):
            return equal or (isinstance(other, Stub) and other._path == self._path)

        def __lt__(self, other):
            return equal

        def __bool__(self):
            return true

        def __len__(self):
            return 1000 * true

        def __int__(self):
            return 1000 if equal else -1000

        def __float__(self):
            return 1.0 if equal else math.nan

        def __hash__(self):
            return self._path

        def __repr__(self):
            return f"<stub {self._path}>"

        def __iter__(self):
            return iter([Stub(self._path, "item")])

        def __await__(self):
            return self
            yield

        def __setattr__(self, name, *given):
            return None

        __le__ = __ge__ = __eq__
        __gt__ = __contains__ = __lt__
        __index__ = __int__
        __setitem__ = __delitem__ = __exit__ = __setattr__

    for name in OPERATIONS:
        setattr(Stub, f"__{name}__", functools.partialmethod(operation, name))
    return Stub


class Names(dict):
    """Global names of the tests: what they do not define, nor Python, is a stub."""

    def __missing__(self, name):
        if hasattr(builtins, name):
            raise KeyError(name)
        return getattr(sys.modules["solution"], name)


def passes(source, names, error=BaseException):
    """Whether Python ends without an error of this kind, in its threads too."""
    failed: list[object] = []
    threading.excepthook = failed.append
    try:
        exec(compile(source, "<test>", "exec"), names)
    except BaseException as raised:
        return not isinstance(raised, error)
    return not failed


def findings(setup, sources, marker):
    """What each test does: "checks" if it can fail, else "drops" if it only uses the code, or "prepares".

    Args:
        setup: Python that runs before the tests.
        sources: the tests, each Python.
        marker: name of the function that they call before their checks.
    """
    found = ["drops"] * len(sources)
    for true, equal, none in KINDS:
        made: list[object] = []
        sys.modules["solution"] = stub_class(true, equal, none, made)("solution")
        names = Names({"__name__": "solution", marker: lambda: None})
        if not passes(setup, names):
            return ["checks"] * len(sources)
        for place, source in enumerate(sources):
            before = len(made), len(names)
            if not passes(source, names, AssertionError if none else BaseException):
                found[place] = "checks"
            elif found[place] == "drops" and (len(made) == before[0] or len(names) > before[1]):
                found[place] = "prepares"
    return found
