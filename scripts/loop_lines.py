"""Count the lines of rlkit that one iteration of the loop crosses: `python scripts/loop_lines.py`.

What is counted: the functions of rlkit that are entered in one iteration of the loop in README.md (sample, score,
compute_loo_advantage, loss_step, run.log and what `run.steps` does between two steps), and of each the lines of its
source, decorators, signature and docstring included. A line counts once, however often it runs. Setup: the policy
"tiny-add" on the transformers engine, the task "addition", one process, no dashboard. tests/test_reading.py asserts the
bound.
"""

import argparse
import inspect
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

BOUND = 2500


def entered_functions() -> set[CodeType]:
    """The functions of rlkit that one iteration enters, from the start of its body to the start of the next one."""
    import torch

    import rlkit as rl

    root = f"{Path(rl.__file__).parent}{os.sep}"
    entered: set[CodeType] = set()

    def tracer(frame: FrameType, event: str, argument: object) -> None:
        # Lambdas and comprehensions are lines of the function around them.
        if frame.f_code.co_filename.startswith(root) and not frame.f_code.co_name.startswith("<"):
            entered.add(frame.f_code)

    policy = rl.load_policy("tiny-add")
    world = rl.setup(seed=0)
    reference = policy.reference()
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=3e-4))
    task = rl.tasks.load("addition")
    prompts = rl.PromptLoader(task.train, policy, batch_size=4, seed=0)
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
            update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO(epsilon=0.2))
            run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)
    return entered


def lines_of(functions: set[CodeType]) -> set[tuple[str, int]]:
    """(file, line) of every line of the functions' sources; a nested function's are within those of the outer one."""
    starts = {code: (code.co_firstlineno, len(inspect.getsourcelines(code)[0])) for code in functions}
    return {(code.co_filename, first + n) for code, (first, count) in starts.items() for n in range(count)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="one line a function in place of one a module")
    by_function = parser.parse_args().functions
    functions = entered_functions()
    counts: Counter[str] = Counter()
    for code in functions:
        module = code.co_filename.rpartition(f"{os.sep}rlkit{os.sep}")[2]
        if by_function:
            counts[f"{module} {code.co_name}"] = len(inspect.getsourcelines(code)[0])
    if not by_function:
        counts.update(file.rpartition(f"{os.sep}rlkit{os.sep}")[2] for file, _ in lines_of(functions))
    for name, count in counts.most_common():
        print(f"{count:5} {name}")
    print(f"{len(lines_of(functions)):5} lines of {len(functions)} functions; at most {BOUND}")
