"""What keeping rollouts costs, as a share of a step: in a process of its own, where types are not checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOAL = 0.02
MACHINES_DIFFER = 2.0

LOOP = """
import statistics, sys, time
import torch, rlkit as rl
torch.set_num_threads(1)
world = rl.setup(seed=0)
policy = rl.load_policy("tiny-add")
reference = policy.reference()
policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=3e-4))
task = rl.tasks.load("addition")
stream = iter(rl.PromptLoader(task.train, policy, batch_size=32, seed=0))
kept, bare = rl.Run("kept"), rl.Run("bare", rollouts_every=None)
shares = []
for step in range(25):
    start = time.thread_time()
    rollout = rl.sample(policy, next(stream), num_generations=8, max_completion_length=6)
    scores = rl.score(rollout, task.rewards)
    ref_logps = rl.compute_logps(reference, rollout)
    advantages = rl.compute_loo_advantage(scores, kl=rl.compute_kl(rollout, ref_logps), beta=0.02)
    update = rl.loss_step(policy, optimizer, rollout, advantages)
    records = (step, rollout, scores, advantages, update)
    stepped = time.thread_time()
    kept.log(*records, ref_logps=ref_logps)
    with_rollouts = time.thread_time()
    bare.log(*records, ref_logps=ref_logps)
    without = time.thread_time()
    shares.append(((with_rollouts - stepped) - (without - with_rollouts)) / (stepped - start))
print(statistics.median(shares[5:]))
"""


@pytest.mark.slow
def test_rollouts_cost_a_small_share_of_a_step(tmp_path):
    """The notebook's loop on tiny-add, with and without in turns; CPU time, so that other work counts little."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOP], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    share = float(done.stdout.split()[-1])
    assert 0 < share < MACHINES_DIFFER * GOAL, share
    assert len(list((tmp_path / "kept" / "rollouts").iterdir())) == 25
