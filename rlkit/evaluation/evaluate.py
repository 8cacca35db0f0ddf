"""`evaluate`: rewards of a policy on a dataset, without training.

Rows are sampled in batches and kept on the CPU, so that a test set of any size fits. The fixed seed gives each prompt
the same noise every time: two policies are compared on equal luck, prompt by prompt (`Evaluation.compare`).
"""

import functools
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkit.distributed import collectives
from rlkit.engine import Engine
from rlkit.engines.rollout_assembly import join
from rlkit.engines.transformers_engine import TransformersEngine
from rlkit.evaluation.compare import Evaluation
from rlkit.evaluation.statistics import bootstrap_interval, pass_at_k
from rlkit.metrics import length_metrics, score_metrics
from rlkit.prompts import as_rows, make_batch
from rlkit.reward_calls.settings import RewardSettings
from rlkit.sampling import owner_and_engine, sample
from rlkit.scoring import RewardFunction, score
from rlkit.support.timing import phase
from rlkit.types import Rollout, Scores

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

USUAL_K = (1, 4, 8)


@phase("evaluate")
def evaluate(
    policy: "Policy | Engine",
    dataset: Any,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    num_generations: int = 1,
    k: Sequence[int] | None = None,
    success_threshold: float = 0.5,
    greedy: bool = False,
    seed: int = 0,
    batch_size: int = 256,
    reward_settings: RewardSettings | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Evaluation:
    """Sample completions for every row of a dataset and score them; several processes share the rows.

    Args:
        policy: what to measure, with its own engine; or an engine.
        dataset: rows with a `prompt` column, in any form that `PromptLoader` takes, but no stream.
        reward_funcs: as in `score`.
        num_generations: completions per prompt; 1 is enough for a mean reward, no group is needed.
        k: for which k to estimate pass@k, the chance that at least one of k completions passes, such as (1, 4, 8). It
            takes at least k completions per prompt: larger ones are left out with a warning. None takes those of 1, 4
            and 8 that num_generations allows.
        success_threshold: a completion passes if its reward (weighted sum) is above this.
        greedy: always take the likeliest token.
        seed: of the samples, and of the bootstrap.
        batch_size: completions that are drawn at a time.
        reward_settings: weights and limits of the reward functions.
        chat_template_kwargs: as in `PromptLoader`.
        **sampling: further settings of `sample` (max_completion_length, temperature, ...), and those of
            `RewardSettings` by their names (weights, timeout, ...).

    Returns:
        An `Evaluation`, whole on every process. pass@k is the unbiased estimate of Chen et al. 2021, averaged over the
        prompts with at least k scored completions; the interval is a percentile bootstrap over prompts.

    Raises:
        ValueError: empty dataset, no prompt column, bad settings, every k above num_generations.

    Example: `rl.evaluate(policy, task.test, task.rewards, max_completion_length=8).reward`
    """
    reward_settings, sampling = RewardSettings.split(
        reward_settings, sampling, "evaluate", inspect.signature(sample).parameters
    )
    dataset = as_rows(dataset, "evaluate")
    ks = _checked_k(k, num_generations)
    if batch_size < 1:
        raise ValueError(f"evaluate: batch_size must be at least 1, got {batch_size}.")
    if greedy and num_generations > 1:
        raise ValueError(f"evaluate: greedy completions are all the same; num_generations={num_generations} needs 1.")
    given = dict(sampling)
    if greedy:
        sampling |= {"top_k": 1, "temperature": 1.0}  # the likeliest token is that of every temperature
    owner, engine = owner_and_engine(policy)
    if isinstance(engine, TransformersEngine) and engine.max_rows is None:  # the default one has no bound
        engine = TransformersEngine(owner, max_rows=batch_size)
    mine = collectives.share(len(dataset))
    rows = [dataset[place] for place in range(mine.start, mine.stop)]
    whole = make_batch(owner, rows, first_group_id=mine.start, **(chat_template_kwargs or {}))
    # Every process takes the same number of batches, the last of which may be empty: gathering shards is an exchange.
    at_once = max(1, batch_size // num_generations)
    count = max(1, math.ceil(math.ceil(len(dataset) / collectives.size()) / at_once))
    judge = functools.partial(score, reward_funcs=reward_funcs, settings=reward_settings)
    parts = []
    for number in range(count):
        batch = whole.select(range(len(whole))[number * at_once : (number + 1) * at_once])
        part = sample(engine, batch, num_generations=num_generations, seed=seed, **sampling)
        parts.append(join([part], owner.pad_id))  # on the CPU
        if number == 0:
            judge(part.select([]))  # calls nothing; a wrong setting is found before everything is sampled
    rollout = join(parts, owner.pad_id)
    scores = judge(rollout)
    if collectives.is_many():
        shares = collectives.gather((rollout, scores.cpu()))
        rollout = join([share for share, _ in shares], owner.pad_id)
        scores = Scores.join([share for _, share in shares])
    settings = {
        "policy": owner.name,
        "policy_version": owner.version,
        "seed": seed,
        "greedy": greedy,
        "num_generations": num_generations,
        "success_threshold": success_threshold,
        "k": ks,
        "weights": None if reward_settings.weights is None else [float(one) for one in reward_settings.weights],
        "clip_range": reward_settings.clip_range,
        **given,
    }
    return Evaluation(rollout, scores, _measure(rollout, scores, ks, success_threshold, seed), settings)


def _checked_k(k: Sequence[int] | None, num_generations: int) -> tuple[int, ...]:
    if not isinstance(num_generations, int) or num_generations < 1:
        raise ValueError(f"evaluate: num_generations must be a whole number of at least 1, got {num_generations!r}.")
    if k is None:
        return tuple(usual for usual in USUAL_K if usual <= num_generations)
    if not isinstance(k, Sequence):
        raise TypeError(f"evaluate: k must be a list of whole numbers such as (1, 4, 8), got {k!r}.")
    bad = [one for one in k if not isinstance(one, int) or isinstance(one, bool) or one < 1]
    if bad:
        raise ValueError(f"evaluate: pass@k needs whole numbers k of at least 1, got k={bad[0]!r}.")
    fit = tuple(dict.fromkeys(one for one in k if one <= num_generations))
    if len(fit) < len(set(k)):
        left_out = ", ".join(f"pass@{one}" for one in dict.fromkeys(k) if one > num_generations)
        why = f"evaluate: {left_out} needs as many completions per prompt, and num_generations is {num_generations}"
        if not fit:
            raise ValueError(f"{why}. Draw more, or ask for a smaller k.")
        logger.warning("%s; left out.", why)
    return fit


def _measure(rollout: Rollout, scores: Scores, ks: Sequence[int], threshold: float, seed: int) -> dict[str, float]:
    """The metrics of an evaluation, over the rows of all processes."""
    groups = rollout.group_id - int(rollout.group_id.min())
    known = ~scores.reward.isnan()
    size = int(groups.max()) + 1
    zeros = torch.zeros(size, dtype=torch.float64)
    total = zeros.index_add(0, groups[known], scores.reward[known].double())
    scored = zeros.index_add(0, groups[known], torch.ones(int(known.sum()), dtype=torch.float64))
    passed = zeros.index_add(0, groups[known], (scores.reward[known] > threshold).double())
    low, high = bootstrap_interval(total, scored, seed=seed)
    result = score_metrics(scores) | {"reward_low": low, "reward_high": high}
    counts = list(zip(scored.long().tolist(), passed.long().tolist(), strict=True))
    for k in ks:
        estimates = [pass_at_k(n, c, k) for n, c in counts]
        fit = [value for value in estimates if not math.isnan(value)]
        result[f"pass@{k}"] = math.fsum(fit) / len(fit) if fit else math.nan
    return result | length_metrics(rollout.lengths, rollout.truncated)
