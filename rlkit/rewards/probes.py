"""`probe`: what a reward gives for shortcuts, before a policy finds them: an empty completion, the prompt again, the
answer many times over, tags with nothing in them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlkit.engine import Completion
from rlkit.engines.rollout_assembly import assemble
from rlkit.prompts import make_batch
from rlkit.record import text_of
from rlkit.scoring import RewardFunction, score
from rlkit.types import Rollout, SamplingParams

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.policy import Policy

Write = Callable[[Mapping[str, Any]], str]

FORMAT_ONLY = "<think>\n</think>\n<answer></answer> \\boxed{}"


def probe(
    policy: "Policy",
    rows: Sequence[Mapping[str, Any]],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    answer: str = "answer",
    extra: Mapping[str, Write] | None = None,
) -> "pd.DataFrame":
    """Mean reward of hand-written completions, one kind per line.

    Kinds: the right answer, that of the next row (wrong where the two differ), nothing, the prompt again, the answer
    twenty times, and empty tags and box.

    Args:
        policy: whose tokenizer gives the reward functions their token ids. Nothing is sampled.
        rows: dataset rows with `prompt` and `answer`; a handful will do.
        reward_funcs: as in `score`.
        answer: column of the right answer.
        extra: further kinds by name: a function that writes a completion for a row.

    Returns:
        A table with a line per kind and a column per reward function, and their weighted sum as `reward`; NaN where a
        function abstained on every row.

    Raises:
        ValueError: no rows, or rows without an answer.

    Example: `rl.rewards.probe(policy, task.test.select(range(8)), task.rewards)`
    """
    import pandas as pd

    plain = [dict(row) for row in rows]
    if not plain or any(row.get(answer) is None for row in plain):
        raise ValueError(f"probe: expected rows with a column {answer!r}, got {len(plain)} rows, one of them without.")
    following = {id(row): plain[(place + 1) % len(plain)] for place, row in enumerate(plain)}
    kinds: dict[str, Write] = {
        "right answer": lambda row: str(row[answer]),
        "another row's answer": lambda row: str(following[id(row)][answer]),
        "empty": lambda row: "",
        "echoed prompt": lambda row: text_of(row["prompt"]),
        "repeated answer": lambda row: f"{row[answer]} " * 20,
        "format only": lambda row: FORMAT_ONLY,
    }
    lines = []
    for write in (kinds | dict(extra or {})).values():
        scores = score(_rollout(policy, plain, [write(row) for row in plain]), reward_funcs)
        means = {name: scores.parts[:, k].nanmean().item() for k, name in enumerate(scores.names)}
        lines.append(means | {"reward": scores.reward.nanmean().item()})
    return pd.DataFrame(lines, index=pd.Index([*kinds, *(extra or {})], name="completion"))


def _rollout(policy: "Policy", rows: list[dict[str, Any]], texts: list[str]) -> Rollout:
    """A rollout with these texts as completions; their tokens may decode to slightly different text."""
    safe = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
    made = [policy.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in safe]
    ids = [list(one) or [policy.eos_ids[0]] for one in made]
    completions = [[Completion(one, [0.0] * len(one), "eos")] for one in ids]
    rollout = assemble(policy, make_batch(policy, rows), completions, SamplingParams(), "probe")
    forms = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    return replace(rollout, completions=tuple(forms))
