"""Translates rlkit's sampling settings into a vLLM request, and vLLM's output into a `Completion`.

The same plain dict is used in the process and over HTTP, so the same (seed, group, completion) gives the same tokens in
both. A prompt is one request with n = G: vLLM gives its G completions the seeds s, s+1, ..., s+G-1. Every setting is
explicit; no default of the checkpoint or the server applies.

Left out: stop token ids beyond the policy's, beam search, and everything that `SamplingParams` does not have.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.engine import Completion, EngineError, FinishReason
from rlkit.engines.token_sampler import seed_words
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to 0.01, and refuses more than 2."""
MAX_BIASED_IDS = 1024
"""Up to this many unused ids are excluded by a bias on each; more by the list of all allowed ids."""

REGEX_HINT = (
    "With regex=: vLLM's grammar does not know the expression, or a completion came to where no token of the policy's "
    "tokenizer can go on matching it."
)


def request_seed(seed: int, group_id: int) -> int:
    """Seed of a group's first completion; those of the others follow it.

    A hash, because torch's CPU generator uses the lowest 32 bits only: with P groups of G completions, two groups of a
    step share noise with a probability of about P^2 G / 2^32.

    Example:
        >>> request_seed(0, 1) == request_seed(0, 1), request_seed(0, 1) == request_seed(0, 2)
        (True, False)
    """
    words = np.random.SeedSequence([*seed_words(seed), *seed_words(group_id)]).generate_state(1, np.uint64)
    return int(words[0]) >> 2


def vllm_request(
    policy: "Policy", params: SamplingParams, *, num_generations: int, seed: int, group_id: int
) -> dict[str, Any]:
    """The settings of one prompt's request, as fields of POST /v1/completions.

    They are also the keywords of `vllm.SamplingParams`, except that `structured_outputs`, a dict with the key "regex",
    becomes a `StructuredOutputsParams`. `ValueError` for a temperature that vLLM would change or refuse.
    """
    if not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"sample: vLLM draws at temperatures from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, got {params.temperature}."
            " Choose one of those, or use the transformers engine."
        )
    request: dict[str, Any] = {
        "n": num_generations,
        "seed": request_seed(seed, group_id),
        "max_tokens": params.max_completion_length,
        "min_tokens": params.min_completion_length,
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": params.top_k,
        "min_p": float(params.min_p or 0.0),
        "repetition_penalty": float(params.repetition_penalty),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(policy.eos_ids),
        "ignore_eos": False,
        "skip_special_tokens": False,  # a stop string may contain them
        "logprobs": 0,
    }
    unused = policy.unused_ids
    if 0 < len(unused) <= MAX_BIASED_IDS:
        request["logit_bias"] = dict.fromkeys(unused, -100.0)
    elif unused:
        request["allowed_token_ids"] = sorted(set(range(policy.vocab_size)) - set(unused))
    if params.regex is not None:
        request["structured_outputs"] = {"regex": params.regex}
    return request


def truncates_in_vllm(policy: "Policy", params: SamplingParams) -> bool:
    """True if vLLM's processed log-probabilities differ from log softmax(logits / temperature) over all tokens."""
    return params.truncates or bool(policy.unused_ids)


class NotFiniteError(EngineError):
    """An engine returned NaN log-probabilities; its KV cache may hold NaN."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: log-probabilities are NaN though the weights are finite: numbers in between overflow the dtype "
            "(float16 ends at 65504), or the cache of keys and values holds NaN of older weights. None of the step is "
            "kept. sample again clears the cache first; if NaN come again, use an engine in bfloat16 or float32."
        )


def completion_of(
    policy: "Policy",
    token_ids: Sequence[int],
    logp: Sequence[float | None],
    finish_reason: str | None,
    *,
    version: int | None,
    where: str,
) -> Completion:
    """Convert one output of vLLM; `EngineError` if it is cut off, lacks a log-probability, or is of another model."""
    if finish_reason == "error":
        raise EngineError(f"{where}: vLLM ended a completion with an internal error; its log says which. {REGEX_HINT}")
    if finish_reason not in ("stop", "length"):
        raise EngineError(
            f"{where}: a completion ended with {finish_reason!r}: it was cut off before it was done (the engine was "
            "paused, aborted or is shutting down). None of the step is kept; sample again."
        )
    if any(value is not None and math.isnan(value) for value in logp):
        raise NotFiniteError(where)
    if len(logp) != len(token_ids) or None in logp:
        raise EngineError(
            f"{where}: {len(token_ids)} tokens came with {sum(v is not None for v in logp)} log-probabilities; expected"
            " one each. The engine must run with logprobs_mode='processed_logprobs'."
        )
    ids = [int(token) for token in token_ids]
    if not ids:
        raise EngineError(f"{where}: a completion came without a single token.")
    if max(ids) >= policy.vocab_size or min(ids) < 0:
        raise EngineError(
            f"{where}: token {max(ids)} is beyond the policy's vocabulary of {policy.vocab_size}: the engine serves "
            "another model."
        )
    reason: FinishReason = "length"
    if ids[-1] in policy.eos_ids:
        reason = "eos"
    elif finish_reason == "stop":
        reason = "stop"
    return Completion(ids, [float(value) for value in logp if value is not None], reason, version)
