"""Before and after on the same prompts: each prompt is its own control, so the interval is that of the differences.

A paired bootstrap over prompts: the hard prompts are hard in both evaluations, and what they share cancels.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.evaluation.statistics import bootstrap_interval
from rlkit.record import Record

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


@runtime_checkable
class Evaluated(Protocol):
    """What `compare` reads of an `Evaluation`."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """By name."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """How it was made."""
        ...

    def per_prompt(self) -> "pd.DataFrame":
        """One line per prompt, with its row id, place, text, mean reward and pass@k."""
        ...


MEASURED = ("policy", "policy_version")  # what two evaluations may differ in without a word


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
        frame = pd.DataFrame(table, index=pd.Index(self.place.tolist(), name="place"))
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


def compare(before: Evaluated, after: Evaluated, *, seed: int = 0) -> Comparison:
    """Compare two evaluations of the same rows; the rows are known by their content, in whatever order they stand.

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
        for field, values in {"before": old[both], "after": new[both], "difference": change}.items():
            metrics[f"{name}/{field}"] = float(values.mean()) if len(values) else math.nan
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


def _keyed(evaluation: Evaluated) -> dict[tuple[int, int], dict[str, Any]]:
    """Each prompt's line by the row's id and, for rows that stand twice, its number among them."""
    seen: dict[int, int] = {}
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for line in evaluation.per_prompt().reset_index().to_dict("records"):
        number = seen[line["row_id"]] = seen.get(line["row_id"], -1) + 1
        found[(line["row_id"], number)] = {str(name): value for name, value in line.items()}
    return found
