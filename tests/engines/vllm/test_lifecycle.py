"""The order of sleep, wake, load, reset and generate, on a recorder of the engine's calls."""

import pytest

from rlkit.engine import EngineError
from rlkit.engines.vllm.lifecycle import Lifecycle


class Recorder:
    """Writes down what the lifecycle calls."""

    def __init__(self, resets=True):
        self.calls, self.resets = [], resets

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake(self, part):
        self.calls.append(f"wake {part}")

    def reset_cache(self):
        self.calls.append("reset")
        return self.resets

    def set_version(self, version):
        self.calls.append(f"version {version}")

    def load(self):
        self.calls.append("load")


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def life(recorder):
    return Lifecycle(recorder, "engine")


def test_a_load_while_awake(life, recorder):
    life.load(recorder.load, 3)
    life.before_generate()
    assert recorder.calls == ["load", "reset", "version 3"]
    assert life.version == 3


def test_wake_load_wake_reset_generate(life, recorder):
    life.load(recorder.load, 0)
    life.sleep(2)
    recorder.calls.clear()
    life.load(recorder.load, 1)
    life.before_generate()
    assert recorder.calls == ["wake weights", "load", "wake kv_cache", "reset", "version 1"]


def test_before_the_first_load_nothing_is_drawn(life):
    with pytest.raises(EngineError, match="it has not been given the policy's weights yet"):
        life.before_generate()


def test_after_a_level_2_sleep_nothing_is_drawn_without_a_load(life, recorder):
    life.load(recorder.load, 0)
    life.sleep(2)
    recorder.calls.clear()
    with pytest.raises(EngineError, match="discarded by a level-2 sleep"):
        life.before_generate()
    assert recorder.calls == []  # not even woken: it would be memory full of nothing


def test_after_a_level_1_sleep_it_wakes_by_itself(life, recorder):
    life.load(recorder.load, 0)
    life.sleep(1)
    recorder.calls.clear()
    life.before_generate()
    life.before_generate()
    assert recorder.calls == ["wake weights", "wake kv_cache", "reset"]


@pytest.mark.parametrize("level", [0, 3])
def test_other_levels_are_refused(life, level):
    with pytest.raises(ValueError, match="sleep level must be 1 or 2"):
        life.sleep(level)


def test_a_load_that_fails_leaves_it_dirty_and_half_awake(life, recorder):
    def fail():
        raise OSError("gone")

    life.load(recorder.load, 0)
    life.sleep(2)
    recorder.calls.clear()
    with pytest.raises(OSError, match="gone"):
        life.load(fail, 1)
    assert life.version is None
    with pytest.raises(EngineError, match="the last transfer of weights failed"):
        life.before_generate()
    life.load(recorder.load, 1)  # the weights' memory is there already, that of the cache is not
    assert recorder.calls == ["wake weights", "load", "wake kv_cache", "reset", "version 1"]


def test_a_cache_that_cannot_be_reset_is_an_error(recorder):
    recorder.resets = False
    life = Lifecycle(recorder, "engine")
    with pytest.raises(EngineError, match="could not be reset"):
        life.load(recorder.load, 0)
    assert life.version is None and "version 0" not in recorder.calls


def test_distrust_asks_for_a_new_load(life, recorder):
    life.load(recorder.load, 0)
    life.distrust("the probe failed")
    with pytest.raises(EngineError, match="the probe failed"):
        life.before_generate()
