"""From the records of a step to the table of its completions, for `rollouts/` (one row a completion).

    step, row, group_id, row_id        which one it is; row counts over the rows of all processes
    prompt, completion                 text, with prompt_messages and completion_messages (JSON) where conversational
    prompt_length, length, truncated
    prompt_token_ids, token_ids        without padding
    tokens                             the text of each completion token, special tokens visible
    sampler_logp, logp, old_logp, ref_logp, new_logp, entropy, loss_mask     one value a completion token
    reward, rewards/<name>, advantage, kl, ratio, clipped, epsilon, epsilon_high     one value a completion
    the dataset's columns and what reward functions logged

A column for which the step has no data is null. Each process removes its padding and sends plain values to the main
one, which builds the table. Texts are unchanged except for lone surrogates, which UTF-8 cannot hold.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlkit.record import printable, text_of, with_columns
from rlkit.types import Rollout, Scores, Update

if TYPE_CHECKING:
    import pyarrow as pa

PER_TOKEN = ("sampler_logp", "logp", "old_logp", "ref_logp", "new_logp", "entropy")
PER_ROW = ("reward", "advantage", "kl", "ratio", "clipped")
PER_TOKEN_ALL = (*PER_TOKEN, "loss_mask", "token_ids", "prompt_token_ids", "tokens")
TEXTS = ("prompt", "completion", "prompt_messages", "completion_messages")
NUMBERS = (
    *("step", "row", "group_id", "row_id", "truncated", "length", "prompt_length", "epsilon", "epsilon_high"),
    *PER_ROW,
)
UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class StepRecords:
    """What `Run.log` is given of a step."""

    rollout: Rollout | None = None
    scores: Scores | None = None
    advantages: Tensor | None = None
    update: Update | None = None
    ref_logps: Tensor | None = None
    new_logps: Tensor | None = None


@dataclass
class Rows:
    """The completions of one process: B rows, as numpy arrays and lists."""

    lengths: np.ndarray  # (B,) completion tokens
    prompt_lengths: np.ndarray  # (B,) prompt tokens
    flat: dict[str, np.ndarray]  # values of all completion tokens, row after row, by column
    prompt_ids: np.ndarray  # ids of all prompt tokens, row after row
    rows: dict[str, np.ndarray]  # one value per row, by column
    lists: dict[str, list[Any]]  # one Python value per row, by column: texts and messages
    extra: dict[str, list[Any]]  # the user's columns
    pieces: dict[int, str] = field(default_factory=dict)  # text of each token id
    epsilon: tuple[float | None, float | None] = (None, None)  # clip range of the loss, below and above 1


def rows_of(rollout: Rollout, given: StepRecords) -> Rows:
    """Return this process's rows. A record whose shape differs from the rollout's is left out."""
    scores, update = given.scores, given.update
    mask = rollout.completion_mask.cpu()
    tokens = {"sampler_logp": rollout.sampler_logp, "ref_logp": given.ref_logps, "new_logp": given.new_logps}
    rows: dict[str, Tensor | None] = {"advantage": given.advantages}
    if update is not None:
        tokens |= {"logp": update.logp, "old_logp": update.old_logp, "entropy": update.entropy}
        tokens["loss_mask"] = update.loss_mask
        rows |= {"ratio": update.ratio, "clipped": update.clipped}
    if scores is not None:
        rows["reward"] = scores.reward
        rows |= {f"rewards/{name}": scores.parts[:, k] for k, name in enumerate(scores.names)}
    flat = {
        name: _plain(values.detach().cpu()[mask])
        for name, values in tokens.items()
        if values is not None and values.shape == mask.shape
    }
    own = {
        name: _plain(values.detach().cpu())
        for name, values in rows.items()
        if values is not None and len(values) == len(mask)
    }
    lengths = mask.sum(-1).numpy()
    if "ref_logp" in flat:
        owner = np.repeat(np.arange(len(mask)), lengths)
        gap = flat["sampler_logp"].astype(np.float64) - flat["ref_logp"]
        own["kl"] = np.bincount(owner, weights=gap, minlength=len(mask)).astype(np.float32)
    prompt_mask = rollout.prompt_mask.cpu()
    lists: dict[str, list[Any]] = {"prompt": [], "completion": []}
    for name, values in (("prompt", rollout.prompts), ("completion", rollout.completions)):
        lists[name] = [text_of(value) for value in values]
        lists[f"{name}_messages"] = [None if isinstance(value, str) else value for value in values]
    extra = dict(rollout.columns)
    if scores is not None and len(scores) == len(mask):
        extra |= {(f"extra:{name}" if name in extra else name): cells for name, cells in scores.extra.items()}
    return Rows(
        lengths=lengths,
        prompt_lengths=prompt_mask.sum(-1).numpy(),
        flat=flat | {"token_ids": rollout.completion_ids.cpu()[mask].to(torch.int32).numpy()},
        prompt_ids=rollout.prompt_ids.cpu()[prompt_mask].to(torch.int32).numpy(),
        rows=own | {name: getattr(rollout, name).cpu().numpy() for name in ("group_id", "row_id", "truncated")},
        lists=lists,
        extra={name: list(cells) for name, cells in extra.items()},
        pieces=dict(rollout.pieces),
        epsilon=(None, None) if update is None else (update.epsilon, update.epsilon_high),
    )


def table_of(step: int, parts: Sequence[Rows]) -> "pa.Table":
    """Return the table of a step from the rows of all processes, in rank order."""
    import pyarrow as pa

    parts = [part for part in parts if len(part.lengths)] or list(parts[:1])
    lengths = np.concatenate([part.lengths for part in parts])
    prompt_lengths = np.concatenate([part.prompt_lengths for part in parts])
    count = len(lengths)

    def lists(values: "pa.Array", sizes: np.ndarray) -> "pa.Array":
        return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32()), values)

    def per_token(name: str, kind: "pa.DataType") -> "pa.Array":
        values = _joined([part.flat.get(name) for part in parts])
        return pa.nulls(count, pa.list_(kind)) if values is None else lists(pa.array(values, kind), lengths)

    def per_row(name: str, kind: "pa.DataType") -> "pa.Array":
        values = _joined([part.rows.get(name) for part in parts])
        return pa.nulls(count, kind) if values is None else pa.array(values, kind)

    def texts(name: str) -> "pa.Array":
        return _text_array([text for part in parts for text in part.lists[name]])

    table: dict[str, Any] = {
        "step": pa.array(np.full(count, step), pa.int64()),
        "row": pa.array(np.arange(count), pa.int32()),
        "group_id": per_row("group_id", pa.int64()),
        "row_id": per_row("row_id", pa.int64()),
        "prompt": texts("prompt"),
        "completion": texts("completion"),
    }
    for name in ("prompt_messages", "completion_messages"):
        messages = [value for part in parts for value in part.lists[name]]
        if any(value is not None for value in messages):
            table[name] = _text_array([None if value is None else _as_json(value) for value in messages])
    ids = _joined([part.flat["token_ids"] for part in parts])
    prompt_ids = _joined([part.prompt_ids for part in parts])
    pieces = {token: text for part in parts for token, text in part.pieces.items()}
    table |= {
        "truncated": per_row("truncated", pa.bool_()),
        "length": pa.array(lengths, pa.int32()),
        "prompt_length": pa.array(prompt_lengths, pa.int32()),
        "prompt_token_ids": lists(pa.array(prompt_ids, pa.int32()), prompt_lengths),
        "token_ids": lists(pa.array(ids, pa.int32()), lengths),
        "tokens": lists(_texts_of(ids, pieces), lengths) if pieces else pa.nulls(count, pa.list_(pa.string())),
    }
    table |= {name: per_token(name, pa.float32()) for name in PER_TOKEN}
    table["loss_mask"] = per_token("loss_mask", pa.bool_())
    parts_of_reward = dict.fromkeys(name for part in parts for name in part.rows if name.startswith("rewards/"))
    for name in ("reward", *parts_of_reward, "advantage", "kl", "ratio"):
        table[name] = per_row(name, pa.float32())
    table["clipped"] = per_row("clipped", pa.int8())
    for name, value in zip(("epsilon", "epsilon_high"), parts[0].epsilon, strict=True):
        table[name] = pa.array([value] * count, pa.float64())
    names = dict.fromkeys(name for part in parts for name in part.extra)
    extra = {n: [c for part in parts for c in part.extra.get(n, [None] * len(part.lengths))] for n in names}
    extra = {f"column:{name}" if name.startswith("rewards/") else name: cells for name, cells in extra.items()}
    for name, cells in with_columns(table, extra).items():
        if name not in table:
            table[printable(name)] = _cells(cells)
    return pa.table(table)


def check_columns(schema: "pa.Schema") -> None:
    """Raise ValueError if a column of one of our names holds something else: rlkit did not write the table."""
    import pyarrow.types as kinds

    def is_number(kind: "pa.DataType") -> bool:
        return kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind) or kinds.is_null(kind)

    def is_text(kind: "pa.DataType") -> bool:
        kind = kind.value_type if kinds.is_dictionary(kind) else kind
        return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_null(kind)

    for name, kind in zip(schema.names, schema.types, strict=True):
        if schema.names.count(name) > 1:
            raise ValueError(f"its column {name!r:.80} is there twice")
        if name in PER_TOKEN_ALL:
            right = kinds.is_null(kind) or (
                (kinds.is_list(kind) or kinds.is_large_list(kind))
                and (is_text if name == "tokens" else is_number)(kind.value_type)
            )
        elif name in TEXTS:
            right = is_text(kind)
        else:
            right = is_number(kind) or not (name in NUMBERS or name.startswith("rewards/"))
        if not right:
            raise ValueError(f"its column {name!r:.80} holds {kind!s:.80}, which rlkit does not write there")


def _plain(values: Tensor) -> np.ndarray:
    return (values.float() if values.is_floating_point() else values).numpy()


def _joined(arrays: Sequence[np.ndarray | None]) -> Any:
    """Concatenate, or return None if a process lacks it."""
    known = [array for array in arrays if array is not None]
    return np.concatenate(known) if len(known) == len(arrays) else None


def _texts_of(ids: np.ndarray, pieces: Mapping[int, str]) -> "pa.Array":
    import pyarrow as pa

    known, places = np.unique(ids, return_inverse=True)
    return _text_array([pieces.get(int(token), UNKNOWN) for token in known]).take(pa.array(places))


def _cells(cells: list[Any]) -> "pa.Array":
    """Return a user's column with its type if all values are text, integers, numbers or booleans; else as JSON."""
    import pyarrow as pa

    cells = [cell.item() if isinstance(cell, np.generic) else cell for cell in cells]
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds <= {str}:
        return _text_array(cells)
    if kinds == {bool}:
        return pa.array(cells, pa.bool_())
    if kinds == {int} and all(cell is None or -(2**63) <= cell < 2**63 for cell in cells):
        return pa.array(cells, pa.int64())
    if kinds <= {int, float} and float in kinds:
        return pa.array([None if cell is None else float(cell) for cell in cells], pa.float64())
    return _text_array([None if cell is None else _as_json(cell) for cell in cells])


def _text_array(texts: list[str | None]) -> "pa.Array":
    import pyarrow as pa

    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array([None if text is None else printable(text) for text in texts], pa.string())


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # keys that JSON does not allow, or a cycle
        return str(value)
