r"""The token lens: what each token of one completion has to say, from the folder, without a model.

Five quantities, each a number per token, and which stored columns they come from:

- credit: A * (log pi_new - log pi_old), what the update did to the token in the direction of its advantage; where the
  loop did not log `new_logp`, A * (log pi - log pi_ref), the sum of all updates so far. The label says which.
- log-ratio to the reference: log pi - log pi_ref.
- entropy of the policy before the token.
- ratio: pi / pi_old per token, as the last update saw it, shaded by its logarithm, so that double and half are equally
  strong; RLOO clips the *row's* ratio, the product of all, so the clip state is a row's.
- sampler gap: log pi - log pi_sampler, which is 0 for an exact engine.

And the surprise -log pi, which explains most of the others. The scale of a colour belongs to the whole completion, so
pages of one completion compare.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.view.json_values import clean, number, plain, short

if TYPE_CHECKING:
    import pandas as pd

PAGE = 400
"""Tokens a page."""
ABOUT = ("reward", "advantage", "kl", "ratio", "clipped", "epsilon", "epsilon_high")
"""Numbers of the completion itself that stand above its tokens."""
TOKEN = 64
"""Characters of a token's text."""


def lens(row: "pd.Series", *, page: int) -> dict[str, Any]:
    """One page of the tokens of a completion, with every quantity that the step stored.

    Returns:
        {"tokens": [...], "ids", "mask", "quantities": [{"name", "label", "unit", "kind", "values", "scale", "total",
        "why"}], "page", "pages", "length", "truncated", ...}. A quantity that cannot be had has no values, and `why`.
        Its kind is "signed" (around 0), "size" (from 0 up) or "factor" (around 1; `scale` is of its logarithms, `total`
        the product, and else the sum).
    """
    texts = _tokens(row)
    length = len(texts)
    pages = max(1, math.ceil(length / PAGE))
    page = min(max(page, 0), pages - 1)
    part = slice(page * PAGE, (page + 1) * PAGE)
    mask = _list(row, "loss_mask", length)
    counts = np.ones(length, dtype=bool) if mask is None else mask.astype(bool)
    ids = _list(row, "token_ids", length)
    return {
        "tokens": [short(text, TOKEN) for text in texts[part]],
        "ids": None if ids is None else [int(value) for value in ids[part]],
        "mask": None if mask is None else [bool(value) for value in counts[part]],
        "first": page * PAGE,
        "page": page,
        "pages": pages,
        "length": length,
        "truncated": plain(row.get("truncated")) is True,
        "quantities": [_packed(one, part, counts) for one in quantities(row, length)],
        "row": {name: number(row.get(name)) for name in ABOUT},
    }


def quantities(row: "pd.Series", length: int) -> list[dict[str, Any]]:
    """All quantities of a completion: {"name", "label", "unit", "kind", "values" (length,) or None, "why"}."""
    sampler, logp, ref, entropy, old, new = (
        _list(row, name, length) for name in ("sampler_logp", "logp", "ref_logp", "entropy", "old_logp", "new_logp")
    )
    policy = logp if logp is not None else sampler
    before = old if old is not None else policy
    advantage = row.get("advantage")
    advantage = float(advantage) if advantage is not None and not math.isnan(float(advantage)) else None
    return [
        _credit(advantage, new, before, policy, ref),
        _difference("log-ratio", "log π − log π_ref", policy, ref, "the loop logged no reference (ref_logps=)"),
        _quantity("entropy", "entropy of the policy", "nats", "size", entropy, "the step stored no entropy"),
        _ratio(logp, old),
        _difference("sampler gap", "log π − log π_sampler", logp, sampler,
                    "the step stored no log-probabilities of both sampler and policy"),
        _quantity("surprise", "−log π", "nats", "size", None if policy is None else -policy,
                  "the step stored no log-probabilities"),
    ]  # fmt: skip


def _credit(
    advantage: float | None,
    new: np.ndarray | None,
    before: np.ndarray | None,
    policy: np.ndarray | None,
    ref: np.ndarray | None,
) -> dict[str, Any]:
    if advantage is None:
        return _quantity("credit", "A · Δlog π", "reward·nats", "signed", None, "this row has no advantage")
    if new is not None and before is not None:
        label = "A · (log π after the update − log π before)"
        return _quantity("credit", label, "reward·nats", "signed", advantage * (new - before), "")
    label = "A · (log π − log π_ref); log π after the update is not stored"
    values = None if policy is None or ref is None else advantage * (policy - ref)
    return _quantity("credit", label, "reward·nats", "signed", values, "neither new_logp nor a reference is stored")


def _difference(name: str, label: str, left: np.ndarray | None, right: np.ndarray | None, why: str) -> dict[str, Any]:
    values = None if left is None or right is None else left - right
    return _quantity(name, label, "nats", "signed", values, why)


def _ratio(logp: np.ndarray | None, old: np.ndarray | None) -> dict[str, Any]:
    values = None
    if logp is not None and old is not None:
        with np.errstate(over="ignore"):
            values = np.exp(logp - old)
    why = "the step stored no log-probabilities from before the update"
    return _quantity("ratio", "π / π_old of the token", "1 = unchanged", "factor", values, why)


def _quantity(name: str, label: str, unit: str, kind: str, values: np.ndarray | None, why: str) -> dict[str, Any]:
    why = why if values is None else ""
    return {"name": name, "label": label, "unit": unit, "kind": kind, "values": values, "why": why}


def _packed(quantity: dict[str, Any], part: slice, counts: np.ndarray) -> dict[str, Any]:
    values = quantity["values"]
    if values is None:
        return quantity
    factor = quantity["kind"] == "factor"
    with np.errstate(divide="ignore", over="ignore"):
        sizes = np.log(values) if factor else values
        total = float(np.exp(sizes[counts].sum()) if factor else values[counts].sum())
    used = np.abs(sizes[counts & np.isfinite(sizes)])
    scale = float(np.quantile(used, 0.98)) if len(used) else 0.0
    scale = scale if scale > 0 else float(used.max(initial=0.0))
    return quantity | {
        "values": [number(value) for value in values[part]],
        "scale": number(scale),
        "total": number(total),
    }


def _tokens(row: "pd.Series") -> list[str]:
    """The text of every token; where the folder has none, the ids as text."""
    found = row.get("tokens")
    if found is None or isinstance(found, float):
        found = row.get("token_ids")
    if found is None or isinstance(found, float):
        return []
    return ["" if text is None else clean(str(text)) for text in found]


def _list(row: "pd.Series", name: str, length: int) -> np.ndarray | None:
    """A column with one number a token; None where it was not stored or does not fit the tokens."""
    found = row.get(name)
    if found is None or isinstance(found, float) or len(found) != length:
        return None
    return np.array([math.nan if value is None else value for value in found], dtype=float)
