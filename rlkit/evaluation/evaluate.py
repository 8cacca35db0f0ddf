"""`evaluate`: rewards of a policy on a dataset, without training.

Rows are sampled in batches and kept on the CPU, so that a test set of any size fits. The fixed seed gives each prompt
the same noise every time: two policies are compared on equal luck, prompt by prompt (`Evaluation.compare`).
"""

import functools
import inspect
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rlkit.distributed import collectives
from rlkit.engine import Engine
from rlkit.engines.assembly import join
from rlkit.engines.transformers_engine import TransformersEngine
from rlkit.evaluation.compare import Comparison, compare
from rlkit.evaluation.statistics import bootstrap_interval, pass_at_k
from rlkit.metrics import length_metrics, score_metrics
from rlkit.prompts import as_rows, make_batch
from rlkit.record import Record, text_of, with_columns
from rlkit.reward_calls.settings import RewardSettings
from rlkit.sampling import owner_and_engine, sample
from rlkit.scoring import RewardFunction, score
from rlkit.support.timing import phase
from rlkit.types import Rollout, Scores, check_pairing

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

USUAL_K = (1, 4, 8)


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Record):
    """Completions and scores of a dataset.

    Attributes:
        rollout: the completions; `group_id` is the place of the row in the dataset.
        scores: their rewards.
        metrics: reward with its 95 % interval (reward_low, reward_high), reward_std, those of each reward function,
            pass@k, and the lengths.
        settings: what the numbers depend on: policy, its version, seed, greedy, num_generations, success_threshold, k,
            and the sampling settings that were given.
    """

    rollout: Rollout
    scores: Scores
    metrics: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pairing("Evaluation", self.rollout, self.scores)

    @classmethod
    def _from_plain(cls, values: dict[str, Any]) -> dict[str, Any]:
        rollout = Rollout(**Rollout._from_plain(values["rollout"]))
        return values | {"rollout": rollout, "scores": Scores(**values["scores"])}

    @property
    def reward(self) -> float:
        """Mean reward over the completions that have one; accuracy for a 0/1 reward."""
        return self.metrics["reward"]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean reward, over prompts."""
        return self.metrics["reward_low"], self.metrics["reward_high"]

    def _headline(self) -> str:
        m = self.metrics
        between = f" [{m['reward_low']:.4f}, {m['reward_high']:.4f}]" if "reward_low" in m else ""
        passes = "".join(f", {name} {value:.4f}" for name, value in m.items() if name.startswith("pass@"))
        return f"Evaluation: reward {self.reward:.4f}{between}{passes} over {len(self.rollout)} completions"

    def to_pandas(self) -> "pd.DataFrame":
        """One row per completion: texts, columns and rewards."""
        import pandas as pd

        scores = self.scores.to_pandas().drop(columns="group_id")
        rollout = self.rollout.to_pandas()
        return pd.DataFrame(
            with_columns({str(n): v for n, v in scores.items()}, {str(n): v for n, v in rollout.items()})
        )

    def per_prompt(self) -> "pd.DataFrame":
        """One row per prompt, in the dataset's order: the row's id, completions, mean reward, successes, pass@k, mean
        length, share that was cut off, and the dataset's columns. Its index is the place of the row in the dataset.
        """
        import pandas as pd

        threshold, ks = self.settings.get("success_threshold", 0.5), self.settings.get("k", ())
        lengths, cut = self.rollout.lengths.tolist(), self.rollout.truncated.tolist()
        rewards = self.scores.reward.tolist()
        table = []
        for place, rows in self._rows_of_prompts().items():
            known = [rewards[row] for row in rows if not math.isnan(rewards[row])]
            passed = sum(reward > threshold for reward in known)
            own: dict[str, Any] = {
                "place": place,
                "row_id": int(self.rollout.row_id[rows[0]]),
                "prompt": text_of(self.rollout.prompts[rows[0]]),
                "completions": len(rows),
                "scored": len(known),
                "reward": statistics.fmean(known) if known else math.nan,
                "passed": passed,
                **{f"pass@{k}": pass_at_k(len(known), passed, k) for k in ks},
                "mean_length": statistics.fmean(lengths[row] for row in rows),
                "truncated": statistics.fmean(cut[row] for row in rows),
            }
            columns = {name: cells[rows[0]] for name, cells in self.rollout.columns.items()}
            table.append(own | {(f"column:{name}" if name in own else name): cell for name, cell in columns.items()})
        return pd.DataFrame(table).set_index("place")

    def _rows_of_prompts(self) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(self.rollout.group_id.tolist()):
            rows.setdefault(group, []).append(row)
        return rows

    def compare(self, before: "Evaluation", *, seed: int = 0) -> Comparison:
        """What changed since an evaluation of the same rows: differences per prompt, with paired intervals.

        Example: `after.compare(before)`

        Raises:
            ValueError: the two are of different rows.
        """
        return compare(before, self, seed=seed)


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
