r"""The token lens: six quantities of each token of one completion, from the stored columns, without a model.

- credit: A * (log pi_new - log pi_old), what the update did to the token in the direction of its advantage; where the
  loop did not log `new_logp`, A * (log pi - log pi_ref), the sum of all updates so far. The label says which.
- log-ratio to the reference: log pi - log pi_ref.
- entropy of the policy before the token.
- ratio: pi / pi_old per token, as the last update saw it, shaded by its logarithm, so that double and half are equally
  strong; RLOO clips the *row's* ratio, the product of all, so the clip state is a row's.
- sampler gap: log pi - log pi_sampler, which is 0 for an exact engine.
- surprise: -log pi.

The scale of a colour belongs to the whole completion, so its pages can be compared.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.record import printable
from rlkit.view.json_values import number, plain, short

if TYPE_CHECKING:
    import pandas as pd

PAGE = 400  # tokens a page
TOKEN = 64  # characters of a token's text
ABOUT = ("reward", "advantage", "kl", "ratio", "clipped", "epsilon", "epsilon_high")  # of the completion itself


def lens(row: "pd.Series", *, page: int) -> dict[str, Any]:
    """One page of the tokens of a completion, with every quantity that the step stored.

    Returns:
        {"tokens": [...], "ids", "mask", "quantities": [{"name", "label", "unit", "kind", "values", "scale", "total",
        "why"}], "page", "pages", "length", "truncated", ...}. A quantity that was not stored has no values, and `why`.
        Its kind is "signed" (around 0), "size" (from 0 up) or "factor" (around 1): `scale` is that of its logarithms
        and `total` the product; the total of the other kinds is the sum.
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
        "about": {name: number(row.get(name)) for name in ABOUT},
    }


def quantities(row: "pd.Series", length: int) -> list[dict[str, Any]]:
    """All quantities of a completion: {"name", "label", "unit", "kind", "values" (length,) or None, "why"}."""
    sampler, logp, ref, entropy, old, new = (
        _list(row, name, length) for name in ("sampler_logp", "logp", "ref_logp", "entropy", "old_logp", "new_logp")
    )
    policy = logp if logp is not None else sampler
    factor = _minus(logp, old)
    if factor is not None:
        with np.errstate(over="ignore"):
            factor = np.exp(factor)
    return [
        _credit(row.get("advantage"), _minus(new, old if old is not None else policy), _minus(policy, ref)),
        _quantity("log-ratio", "log π − log π_ref", "nats", "signed", _minus(policy, ref),
                  "the loop logged no reference (ref_logps=)"),
        _quantity("entropy", "entropy of the policy", "nats", "size", entropy, "the step stored no entropy"),
        _quantity("ratio", "π / π_old of the token", "1 = unchanged", "factor", factor,
                  "the step stored no log-probabilities from before the update"),
        _quantity("sampler gap", "log π − log π_sampler", "nats", "signed", _minus(logp, sampler),
                  "the step stored no log-probabilities of both sampler and policy"),
        _quantity("surprise", "−log π", "nats", "size", None if policy is None else -policy,
                  "the step stored no log-probabilities"),
    ]  # fmt: skip


def _credit(advantage: Any, update: np.ndarray | None, sum_of_updates: np.ndarray | None) -> dict[str, Any]:
    label, change, why = "A · (log π after the update − log π before)", update, ""
    if advantage is None or math.isnan(float(advantage)):
        label, change, why = "A · Δlog π", None, "this row has no advantage"
    elif change is None:
        label = "A · (log π − log π_ref); log π after the update is not stored"
        change, why = sum_of_updates, "neither new_logp nor a reference is stored"
    values = None if change is None else float(advantage) * change
    return _quantity("credit", label, "reward·nats", "signed", values, why)


def _minus(left: np.ndarray | None, right: np.ndarray | None) -> np.ndarray | None:
    return None if left is None or right is None else left - right


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
    return ["" if text is None else printable(str(text)) for text in found]


def _list(row: "pd.Series", name: str, length: int) -> np.ndarray | None:
    """A column with one number a token; None where it was not stored or does not fit the tokens."""
    found = row.get(name)
    if found is None or isinstance(found, float) or len(found) != length:
        return None
    return np.array([math.nan if value is None else value for value in found], dtype=float)
