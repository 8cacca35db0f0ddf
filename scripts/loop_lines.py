"""Count the lines of rlkit that one iteration of the loop enters: `python scripts/loop_lines.py`.

Traces an iteration of the loop of notebooks/01_rloo.ipynb on tiny-add, from the start of its body to the start of the
next one, and counts the lines, docstrings included, of every function that is entered. tests/test_reading.py asserts
the bound.
"""

import inspect
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

BOUND = 2500


def entered_lines() -> Counter[str]:
    """Lines of the functions that one iteration enters, by module."""
    import torch

    import rlkit as rl

    root = f"{Path(rl.__file__).parent}{os.sep}"
    entered: set[CodeType] = set()

    def tracer(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(root):
            entered.add(frame.f_code)

    policy = rl.load_policy("tiny-add")
    world = rl.setup(seed=0)
    reference = policy.reference()
    policy, optimizer = world.prepare(policy, lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
    task = rl.tasks.load("addition")
    prompts = rl.PromptLoader(task.train, policy, batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        run = rl.Run(Path(folder, "run"))
        for step, batch in run.steps(prompts, 4, progress=False):
            if step == 3:
                sys.settrace(None)
            elif step == 2:
                sys.settrace(tracer)
            rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
            scores = rl.score(rollout, task.rewards)
            ref_logps = rl.compute_logps(reference, rollout)
            kl = rl.compute_kl(rollout, ref_logps)
            advantages = rl.compute_loo_advantage(scores, kl=kl, beta=0.02)
            update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO())
            run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)
    lines = {
        (code.co_filename.removeprefix(root), code.co_firstlineno + number)
        for code in entered
        if not code.co_name.startswith("<")  # lambdas and comprehensions are lines of the function around them
        for number in range(len(inspect.getsourcelines(code)[0]))
    }
    return Counter(module for module, _ in lines)


if __name__ == "__main__":
    found = entered_lines()
    for module, count in found.most_common():
        print(f"{count:5} {module}")
    print(f"{found.total():5} lines of {len(found)} modules; at most {BOUND}")
