"""What every test gets: shapes checked at run time, few threads, no network, and tiny real policies.

Nothing heavy is imported here: with xdist the process that hands the tests out reads this file too, and its workers
wait for it.
"""

import gc
import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # builders and tolerances, also with --import-mode=importlib

import jaxtyping

jaxtyping.install_import_hook("rlkit", "typecheck.typechecker")  # before rlkit is imported

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "rlkit",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # a time limit too: a busy machine is no fault of a test
    derandomize=True,
    max_examples=50,
    database=None,
)
settings.load_profile("rlkit")


WHOLE_RUN = {"-q", "-v", "-x"}  # arguments that leave it a run of everything
MOST = 8  # processes; each holds half a gigabyte of libraries


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """`pytest` alone takes all cores, with arguments one process: what the `-n auto` of pyproject.toml means.

    All the fast tests take one process twice as long as two. A few are soonest done in one, since each process first
    imports torch and transformers, and only in one do `-s` and breakpoint() work. A `-n` on the command line holds.
    """
    cores = yield
    arguments = config.invocation_params.args
    asked = any(argument.startswith(("-n", "--numprocesses")) for argument in arguments)
    return min(MOST, cores) if asked or WHOLE_RUN.issuperset(arguments) else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What the imports make lives to the end: no search for garbage meanwhile, and none in it afterwards.

    Measured: a fifth of the collection's time was this search. Then every full one walked hundreds of thousands of
    objects of torch and transformers; transformers' continuous batching asks for two in each call, TRL's trainer for
    one in each training. The former's tests, a quarter of the fast tests' time, are 3.5 times as fast without.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_finish():
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def policy():
    """A random Llama with a character tokenizer."""
    from builders import tiny_policy

    return tiny_policy()


@pytest.fixture(scope="session")
def frozen_policy():
    """The same, shared by the tests that only read it."""
    from builders import tiny_policy

    return tiny_policy().reference()


@pytest.fixture
def unchecked():
    """Shapes are not checked by jaxtyping: rlkit's own errors are what a user sees."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def sigint_guard():
    """A SIGINT handler of our own: it shows whether rlkit puts it back, and a stray signal fails one test."""

    def fail(number, frame):
        raise AssertionError("SIGINT reached the handler outside run.steps")

    before = signal.signal(signal.SIGINT, fail)
    yield fail
    signal.signal(signal.SIGINT, before)
