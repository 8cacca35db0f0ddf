"""The records of a step: PromptBatch -> Rollout -> Scores -> (advantages) -> Update.

Axis letters as in `rlkit/__init__.py`. In every mask True counts. All four are frozen, and no step function changes its
inputs. Groups are explicit ids: rows need not be ordered, nor groups of equal size. Each record is shown as a table at
the end of a cell, converts to a pandas frame, and can be saved and read back without a model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.record import Prompt, Record, Selection, check_lengths, frame, select_rows, text_of
from rlkit.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class PromptBatch(Record):
    """The prompts of one step.

    Attributes:
        rows: P dataset rows, each with its `prompt` and every other column.
        token_ids: P prompts as token ids, exactly as the engine gets them (no padding).
        row_id: (P,) int64, a hash of the row's content: the same row has the same id in every dataset and run.
        group_id: (P,) int64, unique within a run: the group of the prompt's completions.
    """

    rows: tuple[dict[str, Any], ...]
    token_ids: tuple[tuple[int, ...], ...]
    row_id: Int[Tensor, " P"]
    group_id: Int[Tensor, " P"]

    def __post_init__(self) -> None:
        check_lengths(
            "PromptBatch", len(self.rows), token_ids=self.token_ids, row_id=self.row_id, group_id=self.group_id
        )

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: Sequence[int]) -> "PromptBatch":
        """The batch of some prompts, in the given order, with their ids."""
        return select_rows(self, places)

    def _headline(self) -> str:
        longest = max((len(ids) for ids in self.token_ids), default=0)
        return f"PromptBatch: {len(self)} prompts, the longest of {longest} tokens"

    def to_pandas(self) -> "pd.DataFrame":
        """One row per prompt: group, prompt text, its length in tokens, and the other columns."""
        own: dict[str, Any] = {
            "group_id": self.group_id.tolist(),
            "prompt": [text_of(row["prompt"]) for row in self.rows],
            "prompt_tokens": [len(ids) for ids in self.token_ids],
        }
        names = dict.fromkeys(name for row in self.rows for name in row if name != "prompt")
        return frame(own, {name: [row.get(name) for row in self.rows] for name in names})


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Record):
    """Completions of one step, with everything that later steps need besides the model.

    Attributes:
        prompt_ids: (B,L) prompt tokens, padded on the left.
        prompt_mask: (B,L) True for prompt tokens.
        completion_ids: (B,T) completion tokens, the end-of-sequence token included, padded on the right.
        completion_mask: (B,T) True from the first token up to and including the one that ended the completion.
        sampler_logp: (B,T) log-probability of each token in nats, softmax(logits / temperature) over the whole
            vocabulary, as the engine saw it; 0 in masked slots.
        group_id: (B,) rows with one id are completions of one prompt.
        row_id: (B,) content hash of the dataset row.
        truncated: (B,) True where the length limit, not an end token or stop string, ended the completion.
        prompts: B prompts as the dataset has them (text or messages).
        completions: B completions in the same form (text, or a list with one assistant message).
        columns: the dataset's other columns, one value per row.
        sampling: the settings they were drawn with.
        policy_version: number of optimizer steps the policy had taken.
        engine: name of the engine that drew them.
        pieces: the text of each token id in the completions, for the view.
        logp_recomputed: True if `sampler_logp` is the policy's, because the engine's was of a truncated distribution.
    """

    prompt_ids: Int[Tensor, "B L"]
    prompt_mask: Bool[Tensor, "B L"]
    completion_ids: Int[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]
    sampler_logp: Float[Tensor, "B T"]
    group_id: Int[Tensor, " B"]
    row_id: Int[Tensor, " B"]
    truncated: Bool[Tensor, " B"]
    prompts: tuple[Prompt, ...]
    completions: tuple[Prompt, ...]
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    policy_version: int = 0
    engine: str = "transformers"
    pieces: Mapping[int, str] = field(default_factory=dict)
    logp_recomputed: bool = False

    def __post_init__(self) -> None:
        check_lengths(
            "Rollout",
            len(self.completion_ids),
            prompt_ids=self.prompt_ids,
            group_id=self.group_id,
            row_id=self.row_id,
            truncated=self.truncated,
            prompts=self.prompts,
            completions=self.completions,
            **{f"columns[{name!r}]": values for name, values in self.columns.items()},
        )
        if not self.completion_ids.shape == self.completion_mask.shape == self.sampler_logp.shape:
            raise ValueError("Rollout: completion_ids, completion_mask and sampler_logp must have one (B,T) shape.")
        if self.prompt_ids.shape != self.prompt_mask.shape:
            raise ValueError("Rollout: prompt_ids and prompt_mask must have one (B,L) shape.")

    @classmethod
    def _from_plain(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values | {"sampling": SamplingParams(**values["sampling"])}

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """(B,) completion tokens of each row."""
        return self.completion_mask.sum(-1)

    @property
    def texts(self) -> list[str]:
        """B completions as plain text, whatever the form of the prompts."""
        return [text_of(completion) for completion in self.completions]

    def select(self, rows: Selection) -> "Rollout":
        """The rollout of some rows, as in `rollout.select(rollout.group_id == 3)`. Groups may become incomplete."""
        return select_rows(self, rows, ("sampling", "policy_version", "engine", "pieces", "logp_recomputed"))

    def _headline(self) -> str:
        groups = len(torch.unique(self.group_id))
        return (
            f"Rollout: {len(self)} completions of {groups} prompts, mean length "
            f"{self.lengths.float().mean() if len(self) else 0.0:.1f}, {int(self.truncated.sum())} truncated, "
            f"engine {self.engine}, policy version {self.policy_version}"
        )

    def to_pandas(self) -> "pd.DataFrame":
        """One row per completion: group, texts, length, summed log-probability, and the dataset's other columns."""
        own = {
            "group_id": self.group_id.tolist(),
            "prompt": [text_of(prompt) for prompt in self.prompts],
            "completion": self.texts,
            "length": self.lengths.tolist(),
            "truncated": self.truncated.tolist(),
            "sampler_logp": torch.where(self.completion_mask, self.sampler_logp, 0.0).sum(-1).tolist(),
        }
        return frame(own, self.columns)


@dataclass(frozen=True, eq=False, repr=False)
class Scores(Record):
    """Rewards of a rollout.

    Attributes:
        parts: (B,K) what each reward function returned, NaN where it abstained.
        names: K unique names.
        weights: (K,) weights of the sum.
        reward: (B,) weighted sum over the functions that did not abstain, clipped if asked; NaN if all abstained.
        group_id: (B,) as in the rollout.
        extra: columns that reward functions logged (`log_extra`), one value per row.
        metrics: numbers that reward functions logged (`log_metric`), averaged.
    """

    parts: Float[Tensor, "B K"]
    names: tuple[str, ...]
    weights: Float[Tensor, " K"]
    reward: Float[Tensor, " B"]
    group_id: Int[Tensor, " B"]
    extra: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, functions = self.parts.shape
        extra = {f"extra[{name!r}]": values for name, values in self.extra.items()}
        check_lengths("Scores", rows, reward=self.reward, group_id=self.group_id, **extra)
        check_lengths("Scores", functions, names=self.names, weights=self.weights)

    def __len__(self) -> int:
        return len(self.reward)

    def select(self, rows: Selection) -> "Scores":
        """The scores of some rows, as in `Rollout.select`; the logged numbers stay."""
        return select_rows(self, rows, ("names", "weights", "metrics"))

    def cpu(self) -> "Scores":
        """The same scores on the CPU."""
        tensors = {name: getattr(self, name).cpu() for name in ("parts", "weights", "reward", "group_id")}
        return replace(self, **tensors)

    @classmethod
    def join(cls, parts: Sequence["Scores"]) -> "Scores":
        """Concatenate scores of several shares of one step; logged numbers are averaged by rows.

        Raises:
            ValueError: the shares come from different reward functions or weights.
        """
        if unlike := [part for part in parts if (part.names, *part.weights) != (parts[0].names, *parts[0].weights)]:
            raise ValueError(
                f"Scores.join: expected shares of one score, got reward functions {list(parts[0].names)} with weights "
                f"{parts[0].weights.tolist()} and {list(unlike[0].names)} with {unlike[0].weights.tolist()}."
            )
        blank: tuple[Any, ...] = (None,)
        weight = {
            name: sum(len(part) for part in parts if name in part.metrics) for part in parts for name in part.metrics
        }
        return cls(
            parts=torch.cat([part.parts for part in parts]),
            names=parts[0].names,
            weights=parts[0].weights,
            reward=torch.cat([part.reward for part in parts]),
            group_id=torch.cat([part.group_id for part in parts]),
            extra={
                name: tuple(cell for part in parts for cell in part.extra.get(name, blank * len(part)))
                for name in dict.fromkeys(name for part in parts for name in part.extra)
            },
            metrics={
                n: sum(part.metrics[n] * len(part) for part in parts if n in part.metrics) / max(1, weight[n])
                for n in weight
            },
        )

    @property
    def scorable(self) -> Bool[Tensor, " B"]:
        """(B,) True where at least one reward function gave a reward."""
        return ~self.reward.isnan()

    def _headline(self) -> str:
        mean = self.reward[self.scorable].mean() if bool(self.scorable.any()) else math.nan
        return f"Scores: {len(self)} rewards, mean {mean:.4f}, {int((~self.scorable).sum())} without a reward"

    def to_pandas(self) -> "pd.DataFrame":
        """One row per completion: group, reward, each part, and the logged columns."""
        parts = {f"rewards/{name}": self.parts[:, k].tolist() for k, name in enumerate(self.names)}
        own = {"group_id": self.group_id.tolist(), "reward": self.reward.tolist(), **parts}
        return frame(own, self.extra)


@dataclass(frozen=True, eq=False, repr=False)
class Update(Record):
    """Result of one `loss_step`.

    Attributes:
        loss: mean over the rows (or tokens) that count; NaN if the update was skipped.
        metrics: every number the step measured; names and meanings in `rlkit.metrics`.
        logp: (B,T) log-probabilities of the policy before this update, without gradient; pass them as `old_logps` to
            further updates on the same rollout.
        entropy: (B,T) entropy of the policy before this update, in nats; 0 in masked slots.
        loss_mask: (B,T) True for tokens that counted in the loss.
        skipped: None, or the reason why the optimizer was not stepped.
        old_logp: (B,T) log-probabilities that the ratio was measured against: `logp` itself on a first update.
        ratio: (B,) probability of each completion's loss tokens by `logp` over that by `old_logp`.
        clipped: (B,) int8, -1 where the loss clipped the ratio below, 1 where above, else 0; None if it has no clip.
        epsilon, epsilon_high: lower and upper clip range of the loss, or None.
    """

    loss: float
    metrics: Mapping[str, float]
    logp: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    skipped: str | None = None
    old_logp: Float[Tensor, "B T"] | None = None
    ratio: Float[Tensor, " B"] | None = None
    clipped: Int[Tensor, " B"] | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None

    def _headline(self) -> str:
        what = f"skipped: {self.skipped}" if self.skipped else f"loss {self.loss:.5g}"
        return f"Update: {what}, {int(self.loss_mask.sum())} tokens in the loss"

    def to_pandas(self) -> "pd.DataFrame":
        """One row per metric: name and value."""
        return frame({"metric": list(self.metrics), "value": list(self.metrics.values())})
