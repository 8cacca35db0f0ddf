"""Count the lines of rlkit that one iteration of the loop crosses: `python scripts/loop_lines.py`.

What is counted: the functions of rlkit that are entered in one iteration of the loop in README.md (sample, score,
compute_loo_advantage, loss_step, run.log and what `run.steps` does between two steps), and of each all lines of its
source but its docstring: decorators, signature, branches not taken, messages, comments and blank lines. A line counts
once, however often it runs. The sum with docstrings, a third more, is printed too. Setup: the policy "tiny-add" on the
transformers engine, the task "addition", one process, no dashboard. tests/test_reading.py asserts the bounds.
"""

import argparse
import ast
import inspect
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

BOUND = 2500
BOUND_WITH_DOCSTRINGS = 3150


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


Lines = set[tuple[str, int]]


def lines_of(functions: set[CodeType]) -> Lines:
    """(file, line) of every line of the functions' sources; a nested function's are within those of the outer one."""
    counts = {code: len(inspect.getsourcelines(code)[0]) for code in functions}
    return {(code.co_filename, code.co_firstlineno + n) for code, count in counts.items() for n in range(count)}


def without_docstrings(lines: Lines) -> Lines:
    """The lines that are not part of a function's docstring."""
    docstrings = set()
    for file in {file for file, _ in lines}:
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
                text = node.body[0]
                docstrings |= {(file, n) for n in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    return lines - docstrings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="one line a function in place of one a module")
    functions = entered_functions()
    every = lines_of(functions)
    code = without_docstrings(every)
    if parser.parse_args().functions:
        parts = {f"{each.co_filename} {each.co_name}": len(without_docstrings(lines_of({each}))) for each in functions}
        counts = Counter(parts)
    else:
        counts = Counter(file for file, _ in code)
    for name, count in counts.most_common():
        print(f"{count:5} {name.rpartition(f'{os.sep}rlkit{os.sep}')[2]}")
    print(f"{len(code):5} lines of {len(functions)} functions; at most {BOUND}")
    print(f"{len(every):5} with docstrings; at most {BOUND_WITH_DOCSTRINGS}")
