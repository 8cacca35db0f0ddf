"""Rewards on one process or two.

[torchrun --nproc_per_node 2] rewards_worker.py OUT share          every kind of function on each rank's share
torchrun --nproc_per_node 2 rewards_worker.py OUT broken WAY       one that fails on rank 1 only
"""

import asyncio
import sys
import time
from pathlib import Path

import torch
from builders import tiny_policy, worker_pids
from parts import ROWS, liked, write, write_json

import rlkit as rl
from rlkit.distributed import collectives


def rank_in_group(completions, group_ids):
    """How many completions of its own prompt are shorter."""
    lengths = [len(text) for text in completions]
    return [
        float(sum(other < own for other, g in zip(lengths, group_ids, strict=True) if g == group))
        for own, group in zip(lengths, group_ids, strict=True)
    ]


async def judged(completions, log_metric):
    """Awaited; its number is averaged over all rows."""
    await asyncio.sleep(0.01)
    log_metric("judged", sum(len(text) for text in completions) / max(1, len(completions)))
    return [float(len(text)) for text in completions]


def picky(completions):
    """Fails on completions that hold a 1."""
    for text in completions:
        if "1" in text:
            raise ValueError("a 1")
    return [1.0] * len(completions)


def share(folder: Path) -> None:
    """Five prompts on one or two processes: rank 0 has three of them."""
    rl.setup(seed=1)
    policy = tiny_policy()
    batch = rl.PromptLoader(ROWS, policy, batch_size=5).next_batch()
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=8)
    functions = [rank_in_group, judged, picky, liked]
    scores = rl.score(
        rollout, functions, weights=[1.0, 0.1, 0.0, 1.0], timeout={"rank_in_group": 60.0}, on_error="none"
    )
    assert worker_pids()
    joined = rl.Scores.join(collectives.gather(scores))
    run = rl.Run(folder / "run")
    run.log(0, rollout, scores)
    found = {
        "rows": len(scores),
        "parts": joined.parts,
        "group_id": joined.group_id,
        "texts": rollout.texts,
        "metrics": dict(joined.metrics),
        "failures": joined.extra["failures/picky"],
    }
    write(folder, "share", found)


def broken(folder: Path, way: str) -> None:
    """What rank 0 does next, a collective, must not be waited for."""
    world = rl.setup(seed=1)
    policy = tiny_policy()
    batch = rl.PromptLoader(ROWS, policy, batch_size=4).next_batch()
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=8)
    bad = world.rank == 1

    def in_process(completions):
        if bad:
            raise ZeroDivisionError("the judge of rank 1 is broken")
        return [0.0] * len(completions)

    async def on_loop(completions):
        return in_process(completions)

    write_json(folder, "begun", {"at": time.time()})
    rl.score(rollout, on_loop if way == "async" else in_process, timeout=60.0 if way == "process" else None)
    collectives.gather(torch.zeros(1))
    write_json(folder, "ended", {"at": time.time()})


if __name__ == "__main__":
    if sys.argv[2] == "share":
        share(Path(sys.argv[1]))
    else:
        broken(Path(sys.argv[1]), sys.argv[3])
