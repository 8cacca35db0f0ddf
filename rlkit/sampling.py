"""`sample`: the first step of the loop, the same for every engine."""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkit.distributed import collectives
from rlkit.engine import Engine
from rlkit.engines.rollout_assembly import assemble, check_completions
from rlkit.engines.sync import sync
from rlkit.engines.transformers_engine import TransformersEngine
from rlkit.logps import compute_logps
from rlkit.prompts import make_batch
from rlkit.sampling_params import from_generation_kwargs
from rlkit.support.timing import phase
from rlkit.types import Prompt, PromptBatch, Rollout, SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

RECOMPUTED_ROWS = 64  # of one pass, where the log-probabilities are recomputed


@phase("sample")
def sample(
    policy: "Policy | Engine",
    batch: PromptBatch | Sequence[Prompt | dict[str, Any]],
    *,
    num_generations: int = 8,
    max_completion_length: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    min_completion_length: int = 0,
    stop_strings: Sequence[str] | str = (),
    regex: str | None = None,
    generation_kwargs: Mapping[str, Any] | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Draw G completions for each of P prompts.

    A checkpoint's own generation_config is never used. With the same seed a prompt gets the same completions, whatever
    else is in the batch.

    Args:
        policy: a policy (its own engine is used, `transformers` by default) or an engine.
        batch: P prompts from a `PromptLoader`, or a list of prompts or dataset rows.
        num_generations: G, completions per prompt; RLOO needs 2 or more, A*-PO uses 1.
        max_completion_length: most tokens per completion, the end token included.
        temperature: divides the logits, > 0; kept in the rollout and used in every later pass over it.
        top_p, top_k, min_p, repetition_penalty, min_completion_length, regex: as in `SamplingParams`. Each changes the
            distribution, so samples are no longer on-policy, which is warned about once; all are off by default.
        stop_strings: texts that end a completion; the token that completes one is kept.
        generation_kwargs: the same settings under the names of transformers, vLLM or TRL (max_new_tokens, stop, ...);
            they override the arguments above.
        seed: None draws one from `generator`, or from torch's CPU generator, which `rl.setup(seed=...)` seeds.
        generator: a CPU generator to draw the seed from.

    Returns:
        A `Rollout` of B = P*G rows, prompt-major.

    Raises:
        ValueError: a setting out of its range, no prompts, or a prompt that leaves no room for the completion.

    Example:
        rollout = rl.sample(policy, ["12+34="], num_generations=4, max_completion_length=8, seed=0)
    """
    owner, engine = owner_and_engine(policy)
    settings: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "min_completion_length": min_completion_length,
        "stop_strings": (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ()),
        "regex": regex,
    }
    if generation_kwargs:
        settings |= from_generation_kwargs(generation_kwargs)
    params = SamplingParams(**settings)
    if not isinstance(num_generations, int) or num_generations < 1:
        raise ValueError(f"sample: num_generations must be a whole number of at least 1, got {num_generations!r}.")
    if not isinstance(batch, PromptBatch):
        batch = make_batch(owner, batch)
    if not len(batch) and not collectives.is_many():
        raise ValueError("sample: the batch has no prompts.")
    check_context(owner, batch, params, engine)
    if params.truncates and not params.is_greedy:
        warnings.warn(
            "sample: top_p, top_k, min_p, repetition_penalty, min_completion_length and regex draw from another "
            "distribution than that of the policy, so the completions are not on-policy. Log-probabilities are the "
            "policy's own, not the sampler's.",
            stacklevel=3,
        )
    if seed is None:
        seed = int(torch.randint(2**62, (), generator=generator))
    sync(engine)
    completions = engine.generate(
        batch.token_ids, batch.group_id.tolist(), num_generations=num_generations, params=params, seed=seed
    )
    check_completions(completions, batch, num_generations, engine)
    rollout = assemble(owner, batch, completions, params, engine.name)
    if not engine.renormalises(params):
        return rollout
    # The engine's are of the truncated distribution; in the ratio's denominator they would bias it.
    logp = compute_logps(owner, rollout, micro_batch_size=RECOMPUTED_ROWS)
    return dataclasses.replace(rollout, sampler_logp=logp, logp_recomputed=True)


def owner_and_engine(policy: "Policy | Engine") -> "tuple[Policy, Engine]":
    """The policy and the engine that samples from it; a policy without one gets the transformers engine."""
    given: Any = policy
    if hasattr(given, "generate") and hasattr(given, "policy"):
        return given.policy, given
    if not hasattr(given, "score_tokens"):
        raise TypeError(
            f"expected a policy from rl.load_policy, or an engine, got {type(given).__name__}: {str(given)[:60]!r}. "
            "A transformers model becomes a policy by rl.load_policy(model, tokenizer=tokenizer)."
        )
    if given.engine is None:
        given.engine = TransformersEngine(given)
    return given, given.engine


def check_context(policy: "Policy", batch: PromptBatch, params: SamplingParams, engine: Engine) -> None:
    """Refuse prompts that leave no room for a completion in the context of the model, or of the engine."""
    limits = {
        "the model's context": policy.max_context,
        f"max_model_length of engine {engine.name!r}": engine.max_context,
    }
    limit, whose = min(((limit, whose) for whose, limit in limits.items() if limit is not None), default=(math.inf, ""))
    lengths = [len(ids) for ids in batch.token_ids]
    worst = max(lengths, default=0)
    if worst + params.max_completion_length > limit:
        too_long = [place for place, n in enumerate(lengths) if n + params.max_completion_length > limit]
        raise ValueError(
            f"sample: prompt(s) {too_long[:8]} of the batch do not fit: up to {worst} prompt tokens + "
            f"max_completion_length={params.max_completion_length} exceed {whose}, {limit} tokens. "
            + (f"Use max_completion_length <= {limit - worst}, or leave" if worst < limit else "Leave")
            + " out long prompts: in a loop with PromptLoader(..., max_prompt_length=..., on_long='skip'), before an "
            "evaluation with dataset.filter(...)."
        )
