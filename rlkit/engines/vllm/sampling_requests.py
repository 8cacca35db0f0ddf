"""From rlkit's sampling settings to a request that vLLM understands, in the process and over HTTP, and back again.

One plain dict serves both ways, so that the same (seed, group, completion) gives the same tokens in both. A prompt is
one request with n = G: vLLM gives its G completions the seeds s, s+1, ..., s+G-1. Nothing is left to a default of the
checkpoint or the server.

Left out: stop token ids beyond the policy's, beam search, and everything that `SamplingParams` does not name.
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
"""vLLM draws at 0.01 when asked for less, without an error, and refuses more than 2."""
MAX_BIASED_IDS = 1024
"""Unused ids up to this many are ruled out by a bias on each; more by the list of all allowed ids."""


REGEX_HINT = (
    "With regex=: vLLM's grammar does not know the expression, or a completion came to where no token of the policy's "
    "tokenizer can go on matching it."
)


def request_seed(seed: int, group_id: int) -> int:
    """The seed of a group's first completion; the others follow it.

    Torch's CPU generator looks at the lowest 32 bits only, so it is a hash, not a multiple of some spacing: with P
    groups of G, two of a step share noise with a probability of about P^2 G / 2^32.

    Example:
        >>> request_seed(0, 1) == request_seed(0, 1), request_seed(0, 1) == request_seed(0, 2)
        (True, False)
    """
    words = np.random.SeedSequence([*seed_words(seed), *seed_words(group_id)]).generate_state(1, np.uint64)
    return int(words[0]) >> 2


def vllm_request(
    policy: "Policy", params: SamplingParams, *, num_generations: int, seed: int, group_id: int
) -> dict[str, Any]:
    """The settings of one prompt's request as plain numbers, with vLLM's names.

    They are the keywords of `vllm.SamplingParams` and the fields of POST /v1/completions alike, except
    `structured_outputs`, a dict with the key "regex", which in the process becomes a `StructuredOutputsParams`.

    Raises:
        ValueError: a temperature that vLLM would change or refuse.
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
        "skip_special_tokens": False,  # a stop string may be written with them
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
    """True if vLLM's processed log-probabilities are not those of softmax(logits / temperature) over all tokens."""
    return params.truncates or bool(policy.unused_ids)


class NotFiniteError(EngineError):
    """An engine drew NaN; its cache of keys and values may hold some."""

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
    """One output of vLLM, checked.

    Args:
        policy: whose completion it is.
        token_ids: the sampled tokens; the end-of-sequence token is among them.
        logp: one log-probability a token.
        finish_reason: vLLM's word: "stop" or "length".
        version: of the weights, if the engine said.
        where: name of the engine, for messages.

    Raises:
        NotFiniteError: a log-probability is NaN.
        EngineError: aborted, cut off, a missing log-probability, or an id that no tokenizer has.
    """
    if finish_reason == "error":
        raise EngineError(f"{where}: vLLM ended a completion by an error of its own; its log says which. {REGEX_HINT}")
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
