"""`RewardSettings`: how reward functions are weighted, clipped and limited; the same for every call that scores."""

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from rlkit.support.text import did_you_mean

OnError = Literal["raise", "none"]


@dataclass(frozen=True)
class Limits:
    """The limits of one function."""

    timeout: float | None = None
    on_timeout: float | None = None
    on_error: OnError = "raise"
    memory: int | None = None

    @property
    def any(self) -> bool:
        """True if the call must be bounded."""
        return self.timeout is not None or self.memory is not None


@dataclass(frozen=True)
class RewardSettings:
    """How `score`, `evaluate` and `estimate_vstar` treat the reward functions; each also takes these as keywords.

    Attributes:
        weights: K weights; None means 1 each. Weight 0 keeps a function as a metric only.
        clip_range: (low, high) bounds of the weighted sum.
        timeout: seconds that a function may take for the B completions, > 0; or seconds by function name. If they pass,
            the completions are tried again one by one and only those that hang are lost. None: no limit. Reward
            models have none.
        on_timeout: reward of a completion that was lost to the timeout; None abstains.
        on_error: what a function's exception does: "raise", or "none": the completions on which it fails get None.
        memory: bytes that a call may take beyond what the function needs when it is loaded (Linux).

    Raises:
        ValueError: a weight that is not finite, a bad limit or clip range.
        TypeError: weights that are not a list.

    Example:
        >>> RewardSettings(timeout=5.0, on_error="none").limits(["judge"])
        [Limits(timeout=5.0, on_timeout=None, on_error='none', memory=None)]
    """

    weights: Sequence[float] | None = None
    clip_range: tuple[float, float] | None = None
    timeout: float | Mapping[str, float] | None = None
    on_timeout: float | None = None
    on_error: OnError = "raise"
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            if not isinstance(self.weights, Sequence):
                raise TypeError(
                    f"score: weights must be a list with one number per reward function, got {self.weights!r}."
                )
            if not all(isinstance(weight, numbers.Real) and math.isfinite(weight) for weight in self.weights):
                raise ValueError(f"score: weights must be finite numbers, got {list(self.weights)}.")
        if self.clip_range is not None and (None in self.clip_range or not self.clip_range[0] < self.clip_range[1]):
            raise ValueError(
                f"score: clip_range must be (low, high) with low < high, got {self.clip_range}; float('-inf') and "
                "float('inf') leave a side open."
            )
        for seconds in self.timeout.values() if isinstance(self.timeout, Mapping) else [self.timeout]:
            if seconds is not None and not (isinstance(seconds, numbers.Real) and 0 < float(seconds) < math.inf):
                raise ValueError(f"score: timeout must be seconds above 0 or None, got {seconds!r}.")
        if self.on_timeout is not None and not math.isfinite(self.on_timeout):
            raise ValueError(f"score: on_timeout must be a finite reward or None, got {self.on_timeout}.")
        if self.on_error not in ("raise", "none"):
            raise ValueError(f"score: on_error must be 'raise' or 'none', got {self.on_error!r}.")
        if self.memory is not None and self.memory <= 0:
            raise ValueError(f"score: memory must be bytes above 0 or None, got {self.memory}.")

    @classmethod
    def merge(
        cls,
        settings: "RewardSettings | None",
        keywords: Mapping[str, Any],
        where: str = "score",
        name: str = "settings",
    ) -> "RewardSettings":
        """Settings from an object or keywords, not both, for the function `where` with the parameter `name`."""
        given = {one.name: keywords[one.name] for one in fields(cls) if keywords[one.name] is not one.default}
        if settings is None:
            return cls(**given)
        if given:
            raise TypeError(f"{where}: give {sorted(given)} as keywords or in {name}=RewardSettings(...), not both.")
        return settings

    @classmethod
    def split(
        cls, settings: "RewardSettings | None", keywords: Mapping[str, Any], where: str, others: Collection[str]
    ) -> tuple["RewardSettings", dict[str, Any]]:
        """`merge`, and the other keywords, which must be among `others`: the parameters of the function they go to."""
        own = {one.name: keywords.get(one.name, one.default) for one in fields(cls)}
        rest = {name: value for name, value in keywords.items() if name not in own}
        for name in rest.keys() - {*others}:
            hint = did_you_mean(name, [*own, *others])
            raise TypeError(f"{where}: unexpected keyword argument {name!r}.{hint}")
        return cls.merge(settings, own, where, "reward_settings"), rest

    def weights_of(self, names: Sequence[str]) -> list[float]:
        """One weight per function, 1 by default."""
        if self.weights is None:
            return [1.0] * len(names)
        if len(self.weights) != len(names):
            raise ValueError(
                f"score: expected one weight per reward function ({len(names)}: {list(names)}), got "
                f"{len(self.weights)}."
            )
        return list(self.weights)

    def limits(self, names: Sequence[str], unlimited: Collection[str] = ()) -> list[Limits]:
        """The limits of each function. A timeout for one that is unlimited or not there is a ValueError."""
        limited = [name for name in names if name not in unlimited]
        by_name = self.timeout if isinstance(self.timeout, Mapping) else dict.fromkeys(limited, self.timeout)
        unknown = by_name.keys() - {*limited}
        if unknown:
            raise ValueError(
                f"score: timeout names {sorted(unknown)}, but the functions that can have one are {limited}."
            )
        return [
            Limits(by_name.get(name), self.on_timeout, self.on_error, self.memory if name in limited else None)
            for name in names
        ]
