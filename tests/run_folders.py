"""Run folders made by hand, in the format of the run folder: for the view, where texts and numbers must be chosen."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PROMPTS = ["What is 2+3? ", "What is 9+1? ", "What is 4+4? ", "What is 7+0? "]

HOSTILE = {
    "script": "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>",
    "think": "<think>hidden?</think> &amp; $x$ and \\(y\\) and $5 and $6",
    "ansi": "\x1b[31mred\x1b[0m and \x07 bell",
    "nul": "a\x00b",
    "right to left": "price \u202e 001 \u202c end \u2066 \u05d0\u05d1\u05d2 \u2069 \u200f",
    "surrogate": "broken \ufffd\ufffd emoji \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "tags": "tag \U000e0041\U000e0042 soft\u00adhyphen zero\u200bwidth",
    "zalgo": "Z\u0351\u036b\u0343\u036a\u0302a\u0321\u034al\u0334\u0302g\u0350\u0300o\u0322" * 3,
    "lines": "one\ntwo\r\n\tthree\u2028four",
    "long": "a" * 1_000_000,
    "quotes": "\"'`</textarea></style><!-- ]]> {{x}} ${y}",
    "empty": "",
}


def pieces(text: str, size: int = 3) -> list[str]:
    """The text in pieces of a few characters, as a tokenizer would cut it."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def rows(
    step: int,
    *,
    prompts: list[str] = PROMPTS,
    first_row_id: int = 0,
    num_generations: int = 4,
    beta: float = 0.02,
    texts: list[str] | None = None,
    seed: int | None = None,
) -> list[dict[str, Any]]:
    """The completions of one step, as the run folder holds them: leave-one-out with the KL in the reward."""
    draw = np.random.default_rng(step if seed is None else seed)
    found: list[dict[str, Any]] = []
    for p, prompt in enumerate(prompts):
        for g in range(num_generations):
            text = texts[p * num_generations + g] if texts else f"The answer is {draw.integers(0, 12)}."
            tokens = [*pieces(text), "<|im_end|>"]
            if len(tokens) > 3000:
                tokens = [*tokens[:3000]]
            n = len(tokens)
            ref = -draw.gamma(1.0, 0.7, n)
            logp = np.minimum(ref + draw.normal(0.03 * step / 10, 0.15, n), -1e-4)
            truncated = bool((p + g) % 7 == 6)
            correct = float(draw.random() < 0.2 + 0.02 * step)
            found.append(
                {
                    "step": step,
                    "row": len(found),
                    "group_id": p,
                    "row_id": first_row_id + p,
                    "prompt": prompt,
                    "completion": text,
                    "truncated": truncated,
                    "length": n,
                    "prompt_length": len(prompt),
                    "prompt_token_ids": list(range(len(prompt))),
                    "token_ids": [int(value) for value in draw.integers(0, 50000, n)],
                    "tokens": tokens,
                    "sampler_logp": logp + draw.normal(0, 0.002, n),
                    "logp": logp,
                    "old_logp": logp,
                    "ref_logp": ref,
                    "new_logp": logp + draw.normal(0, 0.02, n),
                    "entropy": draw.gamma(2.0, 0.4, n),
                    "loss_mask": [not (truncated and t >= n - 2) for t in range(n)],
                    "reward": correct + 0.25 * float(draw.random() < 0.5),
                    "rewards/correct": correct,
                    "rewards/format": float(draw.random() < 0.5),
                    "kl": float((logp - ref).sum()),
                    "ratio": 1.0 + 0.05 * float(draw.normal()),
                    "clipped": int(draw.integers(-1, 2)) if step else 0,
                    "epsilon": 0.2,
                    "answer": str(draw.integers(0, 12)),
                }
            )
    for p in range(len(prompts)):
        members = [row for row in found if row["group_id"] == p]
        own = np.array([row["reward"] - beta * row["kl"] for row in members])
        for i, row in enumerate(members):
            others = np.delete(own, i)
            row["advantage"] = float(own[i] - others.mean()) if len(others) else 0.0
    return found


def write_rollout(folder: Path, step: int, table: list[dict[str, Any]]) -> Path:
    """`rollouts/step-....parquet`, with the types of the run folder."""
    lists = {
        "prompt_token_ids": pa.int32(), "token_ids": pa.int32(), "tokens": pa.string(), "sampler_logp": pa.float32(),
        "logp": pa.float32(), "old_logp": pa.float32(), "ref_logp": pa.float32(), "new_logp": pa.float32(),
        "entropy": pa.float32(), "loss_mask": pa.bool_(),
    }  # fmt: skip
    plain = dict.fromkeys(("reward", "advantage", "kl", "ratio"), pa.float32()) | {"clipped": pa.int8()}
    columns = {}
    for name in dict.fromkeys(name for row in table for name in row):
        values = [row.get(name) for row in table]
        if name in lists:
            values = [None if value is None else list(value) for value in values]
            columns[name] = pa.array(values, pa.list_(lists[name]))
        else:
            columns[name] = pa.array(values, pa.float32() if name.startswith("rewards/") else plain.get(name))
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    file = folder / "rollouts" / f"step-{step:08d}.parquet"
    pq.write_table(pa.table(columns), file.with_suffix(".partial"))
    return file.with_suffix(".partial").replace(file)


def write_state(folder: Path, step: int, *, status: str = "running", taken: int = 0, beta: float = 0.02) -> None:
    """`state.json` of a loop that is in `step`."""
    state = {
        "step": step,
        "max_steps": 60,
        "stopped": None,
        "status": status,
        "numbers": {"beta": beta, "learning_rate": 3e-4},
        "taken": taken,
        "time": time.time(),
    }
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


def write_metrics(folder: Path, step: int, table: list[dict[str, Any]], **more: float) -> None:
    """One more line of `metrics.jsonl`."""
    line = {"step": step, "reward": float(np.nanmean([row["reward"] for row in table]))} | more
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def write_run(folder: Path, *, steps: int = 5, beta: float = 0.02, status: str = "running", **options: Any) -> Path:
    """A run of `steps` steps, all of them kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"parameters": {"beta": beta, "seed": 0}}), encoding="utf-8")
    (folder / "metrics.jsonl").touch()
    for step in range(steps):
        add_step(folder, step, beta=beta, **options)
    write_state(folder, steps, status=status, beta=beta)
    return folder


def add_step(folder: Path, step: int, **options: Any) -> None:
    """One more step: its rollout, its line of metrics and where the run stands."""
    table = rows(step, **options)
    write_rollout(folder, step, table)
    write_metrics(folder, step, table)
    write_state(folder, step + 1, beta=options.get("beta", 0.02))


def hostile_rows(step: int) -> list[dict[str, Any]]:
    """One step whose completions are the hostile texts; some numbers are NaN, infinite or missing."""
    table = rows(step, prompts=["<b>bold?</b> $x$ "] * 3, num_generations=4, texts=list(HOSTILE.values()))
    table[0]["reward"], table[1]["kl"], table[2]["ratio"], table[3]["advantage"] = np.nan, np.inf, -np.inf, None
    table[1]["reward"] = None
    for row in table:
        row["<img src=x onerror=alert(1)>"] = "column"
    return table
