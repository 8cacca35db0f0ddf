"""The order in which an engine sleeps, wakes, loads weights and generates, in one place.

    wake the memory of the weights -> load -> wake the memory of the KV cache -> reset the prefix cache -> generate

Each arrow prevents a fault: writing weights into memory that sleeps; generating after a level-2 sleep, which discards
the weights, with memory that a wake-up only allocated; KV cache entries made with older weights. After a failed load
the engine has no weights until a whole load succeeds.
"""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from rlkit.engine import EngineError

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")


@runtime_checkable
class Calls(Protocol):
    """The engine's own calls."""

    def sleep(self, level: int) -> None:
        """Release memory: level 1 keeps the weights on the host, level 2 discards them."""

    def wake(self, part: Part) -> None:
        """Allocate the memory of one part."""

    def reset_cache(self) -> bool:
        """Reset the prefix cache; False if that failed."""

    def set_version(self, version: int) -> None:
        """Record the version of the weights."""


class Lifecycle:
    """The state of one engine.

    Attributes:
        version: policy version of its weights; None if it may not generate.
        resident: the parts whose memory is allocated.
        trouble: why `version` is None.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self.version: int | None = None
        self.resident: set[Part] = set(PARTS)
        self.trouble = "it has not been given the policy's weights yet"
        self._calls, self._name = calls, name

    def load(self, load: Callable[[], None], version: int) -> None:
        """Call `load` between the wake-ups of the two parts, then reset the cache."""
        self.version, self.trouble = None, "the last transfer of weights failed"
        self._wake("weights")
        load()
        self._wake("kv_cache")
        self._forget_cache()
        self._calls.set_version(version)
        self.version = version

    def before_generate(self) -> None:
        """Wake what sleeps; `EngineError` without valid weights."""
        if self.version is None:
            raise EngineError(
                f"{self._name}: cannot generate, {self.trouble}. rl.sample transfers the weights by itself; call it "
                "instead of engine.generate."
            )
        if self.resident != set(PARTS):
            for part in PARTS:
                self._wake(part)
            self._forget_cache()

    def distrust(self, why: str) -> None:
        """Refuse to generate until the next load."""
        self.version, self.trouble = None, why

    def sleep(self, level: int) -> None:
        """Release memory until the next load (level 2), or the next load or generation (level 1).

        Raises:
            ValueError: another level.
        """
        if level not in (1, 2):
            raise ValueError(f"{self._name}: sleep level must be 1 or 2, got {level}.")
        if level == 2:
            self.version, self.trouble = None, "its weights were discarded by a level-2 sleep"
        self.resident.clear()
        self._calls.sleep(level)

    def _wake(self, part: Part) -> None:
        if part not in self.resident:
            self._calls.wake(part)
            self.resident.add(part)

    def _forget_cache(self) -> None:
        if not self._calls.reset_cache():
            self.version, self.trouble = None, "its prefix cache of older weights could not be reset"
            raise EngineError(
                f"{self._name}: {self.trouble}, requests are still alive in it. Close the engine and make a new one."
            )
