"""`evaluate`: rewards of a policy on a dataset, without training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit import collectives
from rlkit.metrics import score_metrics
from rlkit.prompts import check_prompt_column, make_batch
from rlkit.record import Record, with_columns
from rlkit.rewards.score import RewardFunction, score
from rlkit.rollout import Rollout, Scores
from rlkit.sampling.assemble import join
from rlkit.sampling.engine import Engine
from rlkit.sampling.sample import owner_and_engine, sample
from rlkit.sampling.transformers_engine import TransformersEngine
from rlkit.timing import phase

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.policy import Policy


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Record):
    """Completions and scores of a dataset.

    Attributes:
        rollout: the completions.
        scores: their rewards.
        metrics: reward, reward_std and those of each reward function.
    """

    rollout: Rollout
    scores: Scores
    metrics: Mapping[str, float]

    @classmethod
    def _from_plain(cls, values: dict[str, Any]) -> dict[str, Any]:
        rollout = Rollout(**Rollout._from_plain(values["rollout"]))
        return values | {"rollout": rollout, "scores": Scores(**values["scores"])}

    @property
    def reward(self) -> float:
        """Mean reward over the completions that have one; accuracy for a 0/1 reward."""
        return self.metrics["reward"]

    def _headline(self) -> str:
        return f"Evaluation: reward {self.reward:.4f} over {len(self.rollout)} completions"

    def to_pandas(self) -> "pd.DataFrame":
        """One row per completion: texts, columns and rewards."""
        import pandas as pd

        scores = self.scores.to_pandas().drop(columns="group_id")
        rollout = self.rollout.to_pandas()
        return pd.DataFrame(
            with_columns({str(n): v for n, v in scores.items()}, {str(n): v for n, v in rollout.items()})
        )


@phase("evaluate")
def evaluate(
    policy: "Policy | Engine",
    dataset: Any,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    num_generations: int = 1,
    greedy: bool = False,
    seed: int = 0,
    batch_size: int = 256,
    weights: Sequence[float] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Evaluation:
    """Sample completions for every row of a dataset and score them; several processes share the rows.

    The fixed seed gives each prompt the same noise every time, so that two policies are compared on equal luck.

    Args:
        policy: what to measure, with its own engine; or an engine.
        dataset: `datasets.Dataset` or list of rows with a `prompt` column.
        reward_funcs: as in `score`.
        num_generations: completions per prompt.
        greedy: always take the likeliest token.
        seed: of the samples.
        batch_size: completions that the transformers engine decodes side by side; others have a queue of their own.
        weights: one weight per reward function, as in `score`.
        chat_template_kwargs: as in `PromptLoader`.
        **sampling: further settings of `sample` (max_completion_length, temperature, ...).

    Raises:
        ValueError: empty dataset, no prompt column, bad settings.

    Example: `rl.evaluate(policy, task.test, task.rewards, max_completion_length=8).reward`
    """
    check_prompt_column(dataset, "evaluate")
    if greedy:
        sampling |= {"top_k": 1, "temperature": 1.0}  # the likeliest token is that of every temperature
    owner, engine = owner_and_engine(policy)
    if isinstance(engine, TransformersEngine) and engine.max_rows is None:  # the default one has no bound
        engine = TransformersEngine(owner, max_rows=batch_size)
    mine = collectives.share(len(dataset))
    rows = [dataset[place] for place in range(mine.start, mine.stop)]
    rollout = sample(
        engine,
        make_batch(owner, rows, first_group_id=mine.start, **(chat_template_kwargs or {})),
        num_generations=num_generations,
        seed=seed,
        **sampling,
    )
    scores = score(rollout, reward_funcs, weights=weights)
    if collectives.is_many():
        parts = collectives.gather((join([rollout], owner.pad_id), scores.cpu()))
        rollout = join([part for part, _ in parts], owner.pad_id)
        scores = Scores.join([part for _, part in parts])
    return Evaluation(rollout=rollout, scores=scores, metrics=score_metrics(scores))
