"""ValueTable: rewards of reference samples per dataset row, and V* derived from them.

The table keeps rewards, never V* itself, so another beta1 or fewer samples cost nothing. Rows are known by the hash of
their content, not by prompt text: two rows with one prompt and different answers are two rows.

What it cannot do: V* from N samples cannot pass the reference's pass@N. A prompt that the reference never solved in N
tries looks unsolvable, whatever training could make of it.
"""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.advantages import optimal_value
from rlkit.prompts import as_rows, content_id
from rlkit.record import frame
from rlkit.support.text import say
from rlkit.types import Record, Rollout, text_of

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class ValueTable(Record):
    """Rewards of N reference samples for each of R dataset rows.

    Attributes:
        row_id: (R,) content hashes of the rows, unique.
        rewards: (R,N) reward of each sample, NaN where it has none.
        prompts: R prompt texts, for people.
        beta1: temperature of V*, in units of reward.
        success_threshold: a sample is a success if its reward is above this.
        reward_calls: completions scored to make the table.
    """

    row_id: Int[Tensor, " R"]
    rewards: Float[Tensor, "R N"]
    prompts: tuple[str, ...]
    beta1: float = 0.5
    success_threshold: float = 0.0
    reward_calls: int = 0

    def __post_init__(self) -> None:
        if len(self.row_id) != len(self.rewards) or len(self.row_id) != len(self.prompts):
            raise ValueError("ValueTable: row_id, rewards and prompts must have one entry per dataset row.")
        if len(torch.unique(self.row_id)) != len(self.row_id):
            raise ValueError("ValueTable: a row id occurs twice.")
        optimal_value(self.rewards[:0], beta1=self.beta1)  # checks beta1 and N

    def __len__(self) -> int:
        return len(self.row_id)

    @property
    def values(self) -> Float[Tensor, " R"]:
        """(R,) V* of each row; NaN where no sample has a reward."""
        return optimal_value(self.rewards, beta1=self.beta1)

    @property
    def standard_errors(self) -> Float[Tensor, " R"]:
        """(R,) standard error of V* by the delta method: beta1 * std(w) / (mean(w) sqrt(N)), w = exp(r / beta1).

        NaN below two scored samples. It is 0 where all samples agree, which says little at small N.
        """
        scored = ~self.rewards.isnan()
        count = scored.sum(-1)
        top = torch.where(scored, self.rewards, -math.inf).amax(-1, keepdim=True)
        weight = torch.where(scored, ((self.rewards - top) / self.beta1).exp(), 0.0)
        mean = weight.sum(-1) / count.clamp(min=1)
        variance = torch.where(scored, (weight - mean[:, None]).square(), 0.0).sum(-1) / (count - 1).clamp(min=1)
        error = self.beta1 * variance.sqrt() / (mean * count.clamp(min=1).sqrt())
        return torch.where(count >= 2, error, math.nan)

    @property
    def scorable(self) -> Bool[Tensor, " R"]:
        """(R,) True where at least one sample has a reward."""
        return ~self.rewards.isnan().all(-1)

    @property
    def solved(self) -> Bool[Tensor, " R"]:
        """(R,) True where some scored sample is above the success threshold."""
        return torch.where(self.rewards.isnan(), -math.inf, self.rewards).amax(-1) > self.success_threshold

    @property
    def digest(self) -> str:
        """A hash of what the values follow from: row ids, rewards and beta1."""
        found = hashlib.blake2b(repr((self.beta1, self.success_threshold)).encode(), digest_size=16)
        for tensor in (self.row_id, self.rewards):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def __call__(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """(B,) V* of each row's prompt.

        Raises:
            KeyError: rows that are not in the table. Rewards of new prompts can be measured without V*; only the loss
                needs it.
        """
        place = {row: i for i, row in enumerate(self.row_id.tolist())}
        wanted = rollout.row_id.tolist()
        missing = [row for row in dict.fromkeys(wanted) if row not in place]
        if missing:
            first = rollout.prompts[wanted.index(missing[0])]
            raise KeyError(
                f"ValueTable: {len(missing)} prompt(s) of the rollout have no V*, the first is "
                f"{text_of(first)[:80]!r}. Estimate them with estimate_vstar on the dataset that you train on (a "
                "changed column makes another row)."
            )
        index = torch.tensor([place[row] for row in wanted], dtype=torch.int64)
        return self.values[index].to(rollout.completion_ids.device)

    def keep_solvable(self, dataset: Any) -> Any:
        """The rows of a dataset that the reference solved at least once; says how many were dropped, and why.

        Args:
            dataset: a `datasets.Dataset` or a list of rows; rows keep their columns and their ids.

        Raises:
            KeyError: rows that are not in the table.
            ValueError: nothing is left.
        """
        dataset = as_rows(dataset, "keep_solvable")
        place = {row: i for i, row in enumerate(self.row_id.tolist())}
        ids = [content_id(row) for row in dataset]
        missing = [i for i, row in enumerate(ids) if row not in place]
        if missing:
            raise KeyError(
                f"keep_solvable: row(s) {missing[:5]} of the dataset ({len(missing)} in all) have no V*: call "
                "estimate_vstar on this dataset. A row with a changed column is another row."
            )
        solved, scorable = self.solved.tolist(), self.scorable.tolist()
        kept = [i for i, row in enumerate(ids) if solved[place[row]]]
        unscored = [i for i, row in enumerate(ids) if not scorable[place[row]]]
        unsolved = len(ids) - len(kept) - len(unscored)
        samples = self.rewards.shape[-1]
        if unscored:
            logger.warning(
                "keep_solvable: %d row(s) have no reward at all and are left out, e.g. rows %s: every reward function "
                "returned None for all their samples.",
                len(unscored),
                unscored[:5],
            )
        say(
            f"keep_solvable: kept {len(kept)} of {len(ids)} rows; {unsolved} were never solved in {samples} samples "
            f"(reward > {self.success_threshold:g})."
        )
        if not kept and len(unscored) == len(ids):
            raise ValueError(
                f"keep_solvable: no row is left: no sample of any of {len(ids)} rows has a reward, every reward "
                "function returned None. Look at the reward functions and at the columns that they need."
            )
        if not kept:
            raise ValueError(
                f"keep_solvable: no row is left: none of {samples} reference samples of any of {len(ids)} rows has a "
                f"reward above success_threshold={self.success_threshold}. Start from a stronger reference, sample "
                "more (num_value_samples), use easier prompts or a shaped reward, or lower success_threshold."
            )
        if hasattr(dataset, "select"):
            return dataset.select(kept)
        return [dataset[i] for i in kept]

    def _headline(self) -> str:
        values = self.values[self.scorable]
        mean = float(values.mean()) if len(values) else math.nan
        never = int((self.scorable & ~self.solved).sum())
        return (
            f"ValueTable: {len(self)} prompts x {self.rewards.shape[-1]} samples, beta1={self.beta1:g}, mean V* "
            f"{mean:.4f}; never solved: {never} ({never / max(1, len(self)):.1%}), without a reward: "
            f"{int((~self.scorable).sum())}"
        )

    def to_pandas(self) -> "pd.DataFrame":
        """One row per prompt: V*, its standard error, mean and maximum reward, scored samples, solved."""
        scored = ~self.rewards.isnan()
        return frame(
            {
                "prompt": list(self.prompts),
                "v_star": self.values.tolist(),
                "standard_error": self.standard_errors.tolist(),
                "mean_reward": self.rewards.nanmean(-1).tolist(),
                "max_reward": torch.where(scored, self.rewards, -math.inf)
                .amax(-1)
                .masked_fill(~self.scorable, math.nan)
                .tolist(),
                "scored": scored.sum(-1).tolist(),
                "solved": self.solved.tolist(),
            }
        )

    def curve(self, beta1s: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)) -> "pd.DataFrame":
        """Mean V* against beta1, from the same samples: between the mean and the maximum of the rewards."""
        import pandas as pd

        means = [float(optimal_value(self.rewards, beta1=beta1).nanmean()) for beta1 in beta1s]
        return pd.DataFrame({"beta1": list(beta1s), "mean_v_star": means})
