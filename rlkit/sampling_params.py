"""`SamplingParams`: how completions are drawn. Part of every rollout, because later passes need its temperature."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIN_TEMPERATURE = 1e-4
"""Below this, logits / temperature may overflow in float32."""
GREEDY = (
    " Temperature 0 (greedy) has no distribution to learn from; use a small one such as 0.1, or evaluate(...,"
    " greedy=True) to measure greedy answers."
)


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. The defaults are neutral: the policy's own distribution, at temperature 1.

    A checkpoint's own generation_config is never consulted for these.

    Attributes:
        max_completion_length: most tokens of a completion, the end-of-sequence token included.
        temperature: divides the logits, >= 1e-4; the same in every pass over the rollout (sampler, policy, reference).
        top_p: keep the smallest set of tokens with this mass, in (0, 1]; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1]; None or 0 keeps all.
        repetition_penalty: > 1 makes tokens that occurred before less likely; 1 changes nothing.
        min_completion_length: tokens before an end of sequence can be drawn; above 0 it changes the distribution.
        stop_strings: a completion ends after the token that completes one of these texts.
        regex: a completion is forced to match this regular expression as a whole; None does not force anything.
    """

    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    min_completion_length: int = 0
    stop_strings: tuple[str, ...] = ()
    regex: str | None = None

    def __post_init__(self) -> None:
        stops = self.stop_strings or ()
        object.__setattr__(self, "stop_strings", (stops,) if isinstance(stops, str) else tuple(stops))
        for name in ("max_completion_length", "top_k", "min_completion_length"):
            self._need(isinstance(getattr(self, name), int), name, "a whole number")
        for name in ("temperature", "top_p", "repetition_penalty"):
            self._need(isinstance(getattr(self, name), (int, float)), name, "a number")
        self._need(self.max_completion_length >= 1, "max_completion_length", "at least 1")
        is_hot = self.temperature >= MIN_TEMPERATURE and math.isfinite(self.temperature)
        self._need(is_hot, "temperature", f"a finite number > 0 (at least {MIN_TEMPERATURE})", GREEDY)
        self._need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        self._need(self.top_k >= 0, "top_k", "0 (off) or a positive number")
        self._need(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "in [0, 1] or None")
        self._need(self.repetition_penalty > 0, "repetition_penalty", "> 0 (1 is neutral)")
        shorter, limit = 0 <= self.min_completion_length <= self.max_completion_length, self.max_completion_length
        self._need(shorter, "min_completion_length", f"between 0 and max_completion_length={limit}")
        self._need(all(self.stop_strings), "stop_strings", "texts that are not empty")
        if self.regex is not None:
            alone = self.min_completion_length == 0
            self._need(alone, "min_completion_length", "0 beside regex, which alone says when a completion may end")
            self._need(isinstance(self.regex, str) and self.regex != "", "regex", "a text or None")

    def _need(self, ok: bool, name: str, expected: str, advice: str = "") -> None:
        if not ok:
            raise ValueError(f"sample: {name} must be {expected}, got {getattr(self, name)!r}.{advice}")

    @property
    def truncates(self) -> bool:
        """True if samples come from another distribution than the policy's, so that they are not on-policy."""
        truncated = self.top_p < 1 or self.top_k > 0 or bool(self.min_p) or self.repetition_penalty != 1
        return truncated or self.min_completion_length > 0 or self.regex is not None

    @property
    def is_greedy(self) -> bool:
        """True if only the likeliest token can be drawn."""
        return self.top_k == 1


ALIASES = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "min_new_tokens": "min_completion_length",
    "min_tokens": "min_completion_length",
    "stop": "stop_strings",
    "guided_decoding_regex": "regex",
    "structured_outputs_regex": "regex",
    "vllm_structured_outputs_regex": "regex",
}
"""Names of transformers' GenerationConfig, vLLM's SamplingParams and TRL's trainers for fields of `SamplingParams`."""
NEUTRAL = {
    "do_sample": True,
    "num_beams": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "typical_p": 1,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1,
}
"""Settings that rlkit does not have, with the value that changes nothing."""


def from_generation_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` from the `generation_kwargs` of a TRL trainer's config.

    Raises:
        ValueError: a name that rlkit does not have (with another value than the neutral one), or one setting twice.

    Example:
        >>> from_generation_kwargs({"max_new_tokens": 32, "top_k": -1, "do_sample": True})
        {'max_completion_length': 32, 'top_k': 0}
    """
    fields: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in NEUTRAL and value == NEUTRAL[name]:
            continue
        field = ALIASES.get(name, name)
        if field not in SamplingParams.__dataclass_fields__:
            raise ValueError(
                f"sample: generation_kwargs has {name}={value!r}, which rlkit does not have. It knows "
                f"{', '.join(sorted({*SamplingParams.__dataclass_fields__, *ALIASES}))}. Leave it out, or use a reward "
                "function in its place."
            )
        if field in fields:
            raise ValueError(f"sample: generation_kwargs sets {field} twice, also as {name}.")
        fields[field] = 0 if field == "top_k" and value in (-1, None) else value
    return fields
