"""Run folders written by hand, in the layout that rlkit.run writes: long ones, odd ones, hostile ones."""

import json
import math
import random
from pathlib import Path

import run_folders

HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title = 'owned'</script><!--",
    "<think>is this $x$ or $$y$$, `z` or \\(w\\)?</think>",
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil\x07link\x1b]8;;\x07",
    "a NUL \x00 a bell \x07 a line\u2028separator \u2029",
    "left \u202etfel\u202c \u2066iso\u2069 \u200b zero",
    "[bold red]markup[/bold red] {braces} %{y} &amp; &lt;b&gt;",
    "piece of a character \ufffd\ufffd, a lone 👩‍🚀",
)


def write_run(
    folder: Path, steps: int, *, every: int = 1, rows: int = 8, characters: int = 40, seed: int = 0, first: int = 0
) -> Path:
    """A run of `steps` steps with a rollout at every `every`-th."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as metrics, open(folder / "timings.jsonl", "a") as times:
        for step in range(first, first + steps):
            metrics.write(json.dumps(numbers(step, first + steps, draw)) + "\n")
            phases = {"sample": 0.4, "score": 0.05, "compute_logps": 0.1, "loss_step": 0.3, "other": 0.02}
            phases = {name: value * draw.uniform(0.8, 1.2) for name, value in phases.items()}
            times.write(json.dumps({"step": step, "step_time": sum(phases.values()), "phases": phases}) + "\n")
    for step in range(first, first + steps, every):
        write_rollout(folder, step, rows=rows, characters=characters, seed=seed)
    state = {
        "step": first + steps,
        "max_steps": first + steps,
        "stopped": "done",
        "status": "done",
        "numbers": {"beta": 0.02},
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "config.json").write_text(
        json.dumps({"parameters": {"beta": 0.02, "learning_rate": 3e-4}, "versions": {}})
    )
    return folder


def numbers(step: int, steps: int, draw: random.Random) -> dict:
    """The metrics of a plausible step."""
    done = step / max(1, steps)
    reward = 0.4 + 0.5 * (1 - math.exp(-4 * done)) + draw.gauss(0, 0.03)
    values = {
        "step": step,
        "reward": reward,
        "reward_std": 0.3,
        "rewards/exact/mean": reward * 0.9,
        "rewards/format/mean": min(1.0, reward * 1.2),
        "frac_reward_zero_std": min(1.0, 0.1 + 0.7 * done + abs(draw.gauss(0, 0.05))),
        "frac_no_reward": 0.0,
        "kl": 0.3 * done + draw.gauss(0, 0.01) if step % 40 != 7 else None,
        "entropy": 1.2 - 0.8 * done + draw.gauss(0, 0.03),
        "grad_norm": abs(draw.gauss(0.5, 0.1)) * (12 if step == steps // 3 else 1),
        "clip_ratio/low_mean": abs(draw.gauss(0, 0.02)),
        "clip_ratio/high_mean": abs(draw.gauss(0, 0.03)),
        "sampler_gap/mean": abs(draw.gauss(0, 1e-5)),
        "completions/mean_length": 12 + 6 * done + draw.gauss(0, 0.5),
        "completions/min_length": 3.0,
        "completions/max_length": 24.0,
        "completions/clipped_ratio": 0.2 * (1 - done),
    }
    return values


def write_rollout(folder: Path, step: int, *, rows: int = 8, characters: int = 40, seed: int = 0, texts=None) -> Path:
    """The rollout of one step; `texts` instead of made-up completions."""
    draw = random.Random(seed * 100_003 + step)
    texts = list(texts or [])
    rows = len(texts) or rows
    texts = texts or ["".join(draw.choice("0123456789 +=") for _ in range(characters)) for _ in range(rows)]
    pieces = [[text[i : i + 4] for i in range(0, len(text), 4)] for text in texts]
    rewards = [float(draw.random() < 0.3 + 0.6 * step / (step + 30)) for _ in texts]

    def noise(scale):
        return [[draw.gauss(-abs(scale), scale) for _ in row] for row in pieces]

    sampler, logp, reference, entropy = noise(1.0), noise(1.0), noise(1.0), noise(0.5)
    table = [
        {
            "step": step,
            "row": row,
            "group_id": row // 4,
            "row_id": step * 2 + row // 4,
            "prompt": f"{step}+{row // 4}=",
            "completion": text,
            "truncated": row % 5 == 4,
            "length": len(pieces[row]),
            "prompt_length": 4,
            "prompt_token_ids": [1, 2, 3, 4],
            "token_ids": [5] * len(pieces[row]),
            "tokens": pieces[row],
            "sampler_logp": sampler[row],
            "logp": logp[row],
            "ref_logp": reference[row],
            "entropy": [abs(x) for x in entropy[row]],
            "loss_mask": [True] * len(pieces[row]),
            "reward": rewards[row],
            "rewards/exact": rewards[row],
            "advantage": rewards[row] - 0.5,
            "kl": draw.gauss(0.1, 0.1),
            "ratio": 1.0,
            "clipped": 0,
            "epsilon": 0.2,
        }
        for row, text in enumerate(texts)
    ]
    return run_folders.write_rollout(folder, step, table)
