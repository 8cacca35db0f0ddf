"""`Evaluation`, and the comparison of two on the same prompts by a paired bootstrap of the differences.

The hard prompts are hard in both evaluations, so the interval of the differences is narrower than those of the means.
"""

import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.evaluation.statistics import bootstrap_interval, pass_at_k
from rlkit.record import Record, printable, text_of, with_columns
from rlkit.step_checks import check_pairing
from rlkit.types import Rollout, Scores

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


MEASURED = ("policy", "policy_version")  # two evaluations may differ in these without a warning


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Record):
    """Two evaluations of the same P rows.

    Attributes:
        place: (P,) place of each row in the dataset of the second evaluation.
        prompts: P prompt texts.
        before, after: (P,) mean reward of each prompt, NaN where no completion has one.
        metrics: for the reward and each pass@k that both have: `NAME/before`, `NAME/after`, `NAME/difference`, and
            `NAME/low` and `NAME/high`, the 95 % interval of the difference; how many prompts are better, worse, equal.
    """

    place: Int[Tensor, " P"]
    prompts: tuple[str, ...]
    before: Float[Tensor, " P"]
    after: Float[Tensor, " P"]
    metrics: Mapping[str, float]

    @property
    def difference(self) -> float:
        """Mean over the prompts of after minus before."""
        return self.metrics["reward/difference"]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference, by a paired bootstrap over prompts."""
        return self.metrics["reward/low"], self.metrics["reward/high"]

    def _headline(self) -> str:
        m = self.metrics
        return (
            f"Comparison: reward {m['reward/before']:.4f} -> {m['reward/after']:.4f}, difference "
            f"{self.difference:+.4f} [{self.interval[0]:+.4f}, {self.interval[1]:+.4f}], {m['better']:.0f} prompts "
            f"better, {m['worse']:.0f} worse, {m['equal']:.0f} equal"
        )

    def to_pandas(self) -> "pd.DataFrame":
        """One row per prompt: reward before, after, and the difference."""
        import pandas as pd

        table = {"prompt": self.prompts, "before": self.before.tolist(), "after": self.after.tolist()}
        frame = pd.DataFrame(with_columns(table, {}), index=pd.Index(self.place.tolist(), name="place"))
        return frame.assign(difference=frame["after"] - frame["before"])

    def summary(self) -> "pd.DataFrame":
        """One row per measure: before, after, difference, and its interval."""
        import pandas as pd

        names = [name.removesuffix("/difference") for name in self.metrics if name.endswith("/difference")]
        fields = ("before", "after", "difference", "low", "high")
        return pd.DataFrame(
            [{field: self.metrics[f"{name}/{field}"] for field in fields} for name in names],
            index=pd.Index(names, name="measure"),
        )


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
                "prompt": printable(text_of(self.rollout.prompts[rows[0]])),
                "completions": len(rows),
                "scored": len(known),
                "reward": statistics.fmean(known) if known else math.nan,
                "passed": passed,
                **{f"pass@{k}": pass_at_k(len(known), passed, k) for k in ks},
                "mean_length": statistics.fmean(lengths[row] for row in rows),
                "truncated": statistics.fmean(cut[row] for row in rows),
            }
            columns = {name: cells[rows[0]] for name, cells in self.rollout.columns.items()}
            table.append(
                own | {(f"column:{name}" if name in own else name): printable(cell) for name, cell in columns.items()}
            )
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


def compare(before: Evaluation, after: Evaluation, *, seed: int = 0) -> Comparison:
    """Compare two evaluations of the same rows, which are matched by content, in any order.

    Args:
        before, after: from `evaluate`.
        seed: of the bootstrap.

    Raises:
        ValueError: the two are of different rows.
    """
    first, second = _keyed(before), _keyed(after)
    if first.keys() != second.keys():
        raise ValueError(
            f"compare: the evaluations are of different rows: {len(first.keys() - second.keys())} only before, "
            f"{len(second.keys() - first.keys())} only after, {len(first.keys() & second.keys())} in both. Evaluate "
            "both on the same dataset; a row with a changed column is another row."
        )
    names = {*before.settings, *after.settings} - {*MEASURED}
    unlike = [name for name in sorted(names) if before.settings.get(name) != after.settings.get(name)]
    if unlike:
        logger.warning("compare: the evaluations were made with different settings: %s.", ", ".join(unlike))
    keys = list(second)
    measures = ["reward", *(n for n in after.metrics if n.startswith("pass@") and n in before.metrics)]
    metrics: dict[str, float] = {}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in measures:
        old, new = (torch.tensor([side[key][name] for key in keys], dtype=torch.float64) for side in (first, second))
        pairs[name] = (old, new)
        both = ~(old.isnan() | new.isnan())
        change = (new - old)[both]
        low, high = bootstrap_interval(change, torch.ones_like(change), seed=seed)
        for when, values in {"before": old[both], "after": new[both], "difference": change}.items():
            metrics[f"{name}/{when}"] = float(values.mean()) if len(values) else math.nan
        metrics |= {f"{name}/low": low, f"{name}/high": high}
    old, new = pairs["reward"]
    metrics |= {"better": float((new > old).sum()), "worse": float((new < old).sum())}
    metrics["equal"] = float((new == old).sum())
    return Comparison(
        place=torch.tensor([second[key]["place"] for key in keys], dtype=torch.int64),
        prompts=tuple(second[key]["prompt"] for key in keys),
        before=old,
        after=new,
        metrics=metrics,
    )


def _keyed(evaluation: Evaluation) -> dict[tuple[int, int], dict[str, Any]]:
    """Each prompt's line by the row's id and, for identical rows, its number among them."""
    seen: dict[int, int] = {}
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for line in evaluation.per_prompt().reset_index().to_dict("records"):
        number = seen[line["row_id"]] = seen.get(line["row_id"], -1) + 1
        found[(line["row_id"], number)] = {str(name): value for name, value in line.items()}
    return found
