"""In which order an engine sleeps, wakes, takes weights and draws; in one place, so that no caller can get it wrong.

    wake the memory of the weights -> load -> wake the memory of the KV cache -> reset the prefix cache -> generate

Each arrow stands for a fault that others shipped: weights written into memory that sleeps (known_faults B49), a level-2
sleep that discards the weights and a wake-up that only allocates (B48), base weights loaded again after the sync (B47),
a cache of keys and values that outlives the weights it was made from (B50). A load that fails leaves the engine
without weights until a whole one succeeds.
"""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from rlkit.engine import EngineError

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")


@runtime_checkable
class Calls(Protocol):
    """What the engine itself can do."""

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 keeps the weights on the host, level 2 forgets them."""
        ...

    def wake(self, part: Part) -> None:
        """Take the memory of one part again."""
        ...

    def reset_cache(self) -> bool:
        """Forget the prefix cache; False if it could not."""
        ...

    def set_version(self, version: int) -> None:
        """Tell the engine which version its weights are."""
        ...


class Lifecycle:
    """The state of one engine.

    Attributes:
        version: policy version of the weights that it has and may draw with, else None.
        resident: the parts whose memory is there.
        trouble: why there is no version.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self.version: int | None = None
        self.resident: set[Part] = set(PARTS)
        self.trouble = "it has not been given the policy's weights yet"
        self._calls, self._name = calls, name

    def load(self, load: Callable[[], None], version: int) -> None:
        """Take new weights by calling `load` once, between the wake-ups of the two parts, and forget the cache."""
        self.version, self.trouble = None, "the last transfer of weights failed"
        self._wake("weights")
        load()
        self._wake("kv_cache")
        self._forget_cache()
        self._calls.set_version(version)
        self.version = version

    def before_generate(self) -> None:
        """Awake and with weights, or an error.

        Raises:
            EngineError: there are no weights to draw with.
        """
        if self.version is None:
            raise EngineError(
                f"{self._name}: cannot generate, {self.trouble}. rl.sample hands the weights over by itself; call it "
                "instead of engine.generate."
            )
        if self.resident != set(PARTS):
            for part in PARTS:
                self._wake(part)
            self._forget_cache()

    def distrust(self, why: str) -> None:
        """Forget that there are valid weights."""
        self.version, self.trouble = None, why

    def sleep(self, level: int) -> None:
        """Give memory back until the next load (level 2), or the next load or generation (level 1).

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
