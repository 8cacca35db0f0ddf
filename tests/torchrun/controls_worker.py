"""A loop on several processes that someone outside pauses, changes, saves and stops; and one that a signal ends early.

python controls_worker.py OUT
"""

import os
import signal
import sys
import time
from pathlib import Path

from equality_worker import ADAMW
from parts import ROWS, liked, make_policy, whole_parameters, write

import rlkit as rl
from rlkit.distributed import collectives
from rlkit.export.runtime import script

MANY = 6000  # an end, if nobody stops it


def train(path: Path, max_steps: int) -> dict:
    """Train, and keep what each step saw."""
    policy = make_policy("llama")
    policy, optimizer = rl.setup(seed=1).prepare(policy, lambda params: ADAMW(params))
    prompts = rl.PromptLoader(ROWS, policy, batch_size=4, seed=0)
    run = rl.Run(path)
    run.track(policy, optimizer, prompts=prompts)
    knobs = run.knobs(beta=0.05, learning_rate=optimizer, bounds={"beta": (0, 1)})
    run.dashboard()
    print(f"said by rank {collectives.rank()}")
    seen, ended = [], None
    try:
        for step, batch in run.steps(prompts, max_steps):
            rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=8)
            scores = rl.score(rollout, liked)
            update = rl.loss_step(policy, optimizer, rollout, rl.compute_loo_advantage(scores))
            run.log(step, rollout, scores, update=update)
            seen.append((step, knobs.beta, optimizer.param_groups[0]["lr"]))
            time.sleep(0.02)
    except SystemExit as stop:
        ended = stop.code
    return {
        "seen": seen,
        "ended": ended,
        "step": run.step,
        "stopped": run.stopped,
        "parameters": whole_parameters(policy),
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    script.start(__file__, notebook="n.ipynb", sha256="0")
    rl.setup(seed=1)
    if (
        collectives.rank() == collectives.size() - 1
    ):  # a preemption while a model is loaded; it reaches one process only
        os.kill(os.getpid(), signal.SIGTERM)
    write(out, "early", train(out / "early", MANY))
    write(out, "controlled", train(out / "run", MANY))
