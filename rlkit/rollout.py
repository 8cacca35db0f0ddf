"""What flows through a step: PromptBatch -> Rollout -> Scores -> (advantages) -> Update.

Axis letters, the same everywhere: P prompts in the step, G completions per prompt, B = P*G rows (prompt-major), T
completion tokens, L prompt tokens, K reward functions. Every mask means one thing: True counts.

All four are frozen, and no step function changes its inputs. Groups are explicit ids: nothing assumes that rows are
ordered, or that groups have equal size. Each record shows itself as a table at the end of a cell, turns into a pandas
frame, and can be saved and read back without a model.
"""

import html
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

Prompt = str | list[dict[str, Any]]
"""A prompt or completion as a person sees it: plain text, or a list of chat messages."""

FORMAT_VERSION = 1
R = TypeVar("R", bound="Record")


def text_of(value: Prompt) -> str:
    """The text of a prompt or completion: a message list becomes its contents, joined by line breaks.

    Example:
        >>> text_of([{"role": "user", "content": "2+2?"}])
        '2+2?'
    """
    if isinstance(value, str):
        return value
    parts = []
    for message in value:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        parts.append(content)
    return "\n".join(parts)


class Record:
    """What the four records share: a table for people, a file for later."""

    def to_pandas(self) -> "pd.DataFrame":
        """One row per prompt or completion."""
        raise NotImplementedError  # each record has its own

    def _headline(self) -> str:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        frame = self.to_pandas().head(8)
        return f"<p>{html.escape(self._headline())}</p>" + frame.to_html(index=False, escape=True, max_cols=16)

    def __repr__(self) -> str:
        return f"<{self._headline()}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to one file, whole or not at all.

        Raises:
            TypeError: a dataset column holds an object that is not plain data (numbers, text, lists, dicts, tensors).
        """
        state = {"kind": type(self).__name__, "format": FORMAT_VERSION, "fields": _to_plain(self)}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{type(self).__name__}.save: expected plain data (numbers, text, lists, dicts, tensors) in every "
                f"column; turn other objects into text first. torch says: {error}"
            ) from error
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(buffer.getvalue())
        os.replace(partial, path)

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read a record that `save` wrote. Nothing in the file is executed.

        Raises:
            ValueError: the file holds another kind of record.
        """
        state = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(state, dict) or state.get("kind") != cls.__name__:
            found = state.get("kind") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"{cls.__name__}.load: {path} holds a {found}.")
        return cls(**cls._from_plain(state["fields"]))

    @classmethod
    def _from_plain(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The fields as the constructor wants them; records inside records are made again."""
        return values


def _to_plain(record: object) -> dict[str, Any]:
    """A dataclass as a dict; nested ones too; tensors go to the CPU."""
    plain: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]
        value = getattr(record, item.name)
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        elif is_dataclass(value):
            value = _to_plain(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        plain[item.name] = value
    return plain


def _check_lengths(where: str, expected: int, **values: Sequence[Any] | Tensor) -> None:
    for name, value in values.items():
        if len(value) != expected:
            raise ValueError(f"{where}: expected {expected} entries in {name}, got {len(value)}.")


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. The defaults are neutral: the policy's own distribution, at temperature 1.

    A checkpoint's own generation_config is never consulted for these.

    Attributes:
        max_completion_length: most tokens of a completion, the end-of-sequence token included.
        temperature: divides the logits, > 0; the same in every pass over the rollout (sampler, policy, reference).
        top_p: keep the smallest set of tokens with this mass, in (0, 1]; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1]; None or 0 keeps all.
        repetition_penalty: > 1 makes tokens that occurred before less likely; 1 changes nothing.
        min_completion_length: no end of sequence before so many tokens.
        stop_strings: a completion ends after the token that completes one of these texts.
    """

    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    min_completion_length: int = 0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, expected: str, advice: str = "") -> None:
            if not ok:
                raise ValueError(f"sample: {name} must be {expected}, got {getattr(self, name)!r}.{advice}")

        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        need(self.max_completion_length >= 1, "max_completion_length", "at least 1")
        need(
            self.temperature > 0 and math.isfinite(self.temperature),
            "temperature",
            "a finite number > 0",
            " Temperature 0 (greedy) has no distribution to learn from; use a small one such as 0.1, or evaluate(...,"
            " greedy=True) to measure greedy answers.",
        )
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(self.top_k >= 0, "top_k", "0 (off) or a positive number")
        need(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "in [0, 1] or None")
        need(self.repetition_penalty > 0, "repetition_penalty", "> 0 (1 is neutral)")
        need(
            0 <= self.min_completion_length <= self.max_completion_length,
            "min_completion_length",
            f"between 0 and max_completion_length={self.max_completion_length}",
        )
        need(all(self.stop_strings), "stop_strings", "texts that are not empty")

    @property
    def truncates(self) -> bool:
        """True if the sampler leaves the policy's own distribution, so that its samples are not on-policy."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p) or self.repetition_penalty != 1

    @property
    def is_greedy(self) -> bool:
        """True if only the likeliest token can be drawn."""
        return self.top_k == 1


@dataclass(frozen=True, eq=False, repr=False)
class PromptBatch(Record):
    """The prompts of one step.

    Attributes:
        rows: P dataset rows, each with its `prompt` and every other column.
        token_ids: P prompts as token ids, exactly as the engine will see them (no padding).
        row_id: (P,) int64, a hash of the row's content: the same row has the same id in every dataset, filter and run.
        group_id: (P,) int64, unique within a run: it names the group of completions that a prompt will get.
    """

    rows: tuple[dict[str, Any], ...]
    token_ids: tuple[tuple[int, ...], ...]
    row_id: Int[Tensor, " P"]
    group_id: Int[Tensor, " P"]

    def __post_init__(self) -> None:
        _check_lengths(
            "PromptBatch", len(self.rows), token_ids=self.token_ids, row_id=self.row_id, group_id=self.group_id
        )

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: Sequence[int]) -> "PromptBatch":
        """The batch of some prompts, in the given order; they keep their ids."""
        return PromptBatch(
            rows=tuple(self.rows[i] for i in places),
            token_ids=tuple(self.token_ids[i] for i in places),
            row_id=self.row_id[torch.tensor(places, dtype=torch.int64)],
            group_id=self.group_id[torch.tensor(places, dtype=torch.int64)],
        )

    def _headline(self) -> str:
        longest = max((len(ids) for ids in self.token_ids), default=0)
        return f"PromptBatch: {len(self)} prompts, the longest of {longest} tokens"

    def to_pandas(self) -> "pd.DataFrame":
        """One row per prompt: group, prompt text, its length in tokens, and the other columns."""
        import pandas as pd

        table: dict[str, Any] = {
            "group_id": self.group_id.tolist(),
            "prompt": [text_of(row["prompt"]) for row in self.rows],
            "prompt_tokens": [len(ids) for ids in self.token_ids],
        }
        for name in dict.fromkeys(name for row in self.rows for name in row if name != "prompt"):
            table[name] = [row.get(name) for row in self.rows]
        return pd.DataFrame(table)


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Record):
    """Completions of one step, with all that later steps need: no model, no tokenizer.

    Attributes:
        prompt_ids: (B,L) prompt tokens, padded on the left.
        prompt_mask: (B,L) True for prompt tokens.
        completion_ids: (B,T) completion tokens, padded on the right; the end-of-sequence token is part of them.
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

    def __post_init__(self) -> None:
        _check_lengths(
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

    def select(self, rows: Int[Tensor, " n"] | Bool[Tensor, " B"] | Sequence[int] | slice) -> "Rollout":
        """The rollout of some rows, in the given order. Groups may come out incomplete: their ids stay.

        Example: `rollout.select(rollout.group_id == 3)` also works, with a (B,) bool tensor.
        """
        if not isinstance(rows, slice):
            rows = torch.as_tensor(rows).cpu()
            rows = rows if rows.dtype == torch.bool else rows.long()  # an empty list would be a float tensor
        index = torch.arange(len(self))[rows]
        order = index.tolist()
        values: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = value[index.to(value.device)]
            elif isinstance(value, tuple):
                value = tuple(value[i] for i in order)
            elif item.name == "columns":
                value = {name: tuple(cells[i] for i in order) for name, cells in value.items()}
            values[item.name] = value
        return Rollout(**values)

    def _headline(self) -> str:
        groups = len(torch.unique(self.group_id))
        return (
            f"Rollout: {len(self)} completions of {groups} prompts, mean length "
            f"{self.lengths.float().mean() if len(self) else 0.0:.1f}, {int(self.truncated.sum())} truncated, "
            f"engine {self.engine}, policy version {self.policy_version}"
        )

    def to_pandas(self) -> "pd.DataFrame":
        """One row per completion: group, texts, length, summed log-probability, and the dataset's other columns."""
        import pandas as pd

        own = {
            "group_id": self.group_id.tolist(),
            "prompt": [text_of(prompt) for prompt in self.prompts],
            "completion": self.texts,
            "length": self.lengths.tolist(),
            "truncated": self.truncated.tolist(),
            "sampler_logp": torch.where(self.completion_mask, self.sampler_logp, 0.0).sum(-1).tolist(),
        }
        # A dataset column that has one of these names gets a prefix: it must not hide what was sampled.
        columns = {(f"column:{name}" if name in own else name): list(cells) for name, cells in self.columns.items()}
        return pd.DataFrame(own | columns)


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
        _check_lengths("Scores", rows, reward=self.reward, group_id=self.group_id, **dict(self.extra))
        _check_lengths("Scores", functions, names=self.names, weights=self.weights)

    def __len__(self) -> int:
        return len(self.reward)

    def cpu(self) -> "Scores":
        """The same scores on the CPU."""
        tensors = {name: getattr(self, name).cpu() for name in ("parts", "weights", "reward", "group_id")}
        return replace(self, **tensors)

    @classmethod
    def join(cls, parts: Sequence["Scores"]) -> "Scores":
        """Scores of several shares of one step, one after the other; logged numbers are averaged by rows."""
        columns = dict.fromkeys(name for part in parts for name in part.extra)
        numbers = dict.fromkeys(name for part in parts for name in part.metrics)
        blank: tuple[Any, ...] = (None,)
        weight = {name: sum(len(part) for part in parts if name in part.metrics) for name in numbers}
        return cls(
            parts=torch.cat([part.parts for part in parts]),
            names=parts[0].names,
            weights=parts[0].weights,
            reward=torch.cat([part.reward for part in parts]),
            group_id=torch.cat([part.group_id for part in parts]),
            extra={n: tuple(c for part in parts for c in part.extra.get(n, blank * len(part))) for n in columns},
            metrics={
                n: sum(part.metrics[n] * len(part) for part in parts if n in part.metrics) / max(1, weight[n])
                for n in numbers
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
        import pandas as pd

        parts = {f"rewards/{name}": self.parts[:, k].tolist() for k, name in enumerate(self.names)}
        return pd.DataFrame(
            {
                "group_id": self.group_id.tolist(),
                "reward": self.reward.tolist(),
                **parts,
                **{name: list(values) for name, values in self.extra.items()},
            }
        )


@dataclass(frozen=True, eq=False, repr=False)
class Update(Record):
    """What one `loss_step` did.

    Attributes:
        loss: mean over the rows (or tokens) that count; NaN if the update was skipped.
        metrics: every number the step measured; names and meanings in `rlkit.metrics`.
        logp: (B,T) log-probabilities of the policy before this update, without gradient; pass them as `old_logps` to
            further updates on the same rollout.
        entropy: (B,T) entropy of the policy before this update, in nats; 0 in masked slots.
        loss_mask: (B,T) True for tokens that counted in the loss.
        skipped: None, or the reason why the optimizer was not stepped.
    """

    loss: float
    metrics: Mapping[str, float]
    logp: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    skipped: str | None = None

    def _headline(self) -> str:
        what = f"skipped: {self.skipped}" if self.skipped else f"loss {self.loss:.5g}"
        return f"Update: {what}, {int(self.loss_mask.sum())} tokens in the loss"

    def to_pandas(self) -> "pd.DataFrame":
        """One row per metric: name and value."""
        import pandas as pd

        return pd.DataFrame({"metric": list(self.metrics), "value": list(self.metrics.values())})
