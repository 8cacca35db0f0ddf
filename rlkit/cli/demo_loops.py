"""`rlkit demo`: the loops of notebooks 01 and 02 from the command line, with a table of answers before and after.

rlkit demo                                   RLOO and A*-PO on the offline model tiny-add
rlkit demo --algorithm rloo --seed 3
rlkit demo --model smollm2 --max-steps 3     RLOO on SmolLM2-135M-Instruct with chat prompts
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import rlkit as rl
from rlkit.support.text import say


@dataclass(frozen=True)
class Settings:
    """Settings of one demo run; the same names as in the notebooks."""

    batch_size: int
    num_generations: int
    max_completion_length: int
    learning_rate: float
    max_steps: int
    beta: float = 0.0
    epsilon: float = 0.2
    beta1: float = 0.5
    beta2: float = 1e-3
    num_value_samples: int = 8
    eval_rows: int = 500
    every: int = 10


@dataclass(frozen=True)
class Result:
    """Mean reward on held-out prompts before and after, and the seconds spent in the training loop."""

    before: float
    after: float
    seconds: float
    run: rl.Run


PRESETS: dict[tuple[str, str], Settings] = {
    ("tiny-add", "rloo"): Settings(32, 8, 6, learning_rate=3e-4, max_steps=120),
    ("tiny-add", "a2po"): Settings(128, 1, 6, learning_rate=3e-4, max_steps=150),
    ("smollm2", "rloo"): Settings(4, 4, 24, learning_rate=1e-5, max_steps=20, beta=0.01, eval_rows=16, every=1),
    ("smollm2", "a2po"): Settings(8, 1, 24, learning_rate=1e-5, max_steps=20, eval_rows=16, every=1),
}


def run_demo(
    model: str, algorithm: str, *, max_steps: int | None = None, seed: int = 0, out: str | Path = "runs"
) -> Result:
    """Train an offline model with one algorithm and print what happens.

    Args:
        model: "tiny-add" or "smollm2".
        algorithm: "rloo" or "a2po".
        max_steps: instead of the preset's.
        seed: of everything.
        out: folder for the run.

    Raises:
        ValueError: unknown model or algorithm.
    """
    if (model, algorithm) not in PRESETS:
        known = ", ".join(f"{m} with {a}" for m, a in PRESETS)
        raise ValueError(f"demo: expected one of {known}; got {model} with {algorithm}.")
    settings = PRESETS[model, algorithm]
    if max_steps is not None:
        settings = replace(settings, max_steps=max_steps)
    say(f"\n== {algorithm} on {model}: {settings}")
    rl.setup(seed=seed)
    policy = rl.load_policy(model)
    task = rl.tasks.load("addition", conversational=model != "tiny-add")
    test = task.test.select(range(min(settings.eval_rows, len(task.test))))

    def evaluate() -> rl.Evaluation:
        return rl.evaluate(policy, test, task.rewards, max_completion_length=settings.max_completion_length, seed=seed)

    before = evaluate()
    say(f"held-out accuracy before: {before.reward:.3f} over {len(test)} prompts")
    run = rl.Run(Path(out) / f"demo-{model}-{algorithm}", config=vars(settings) | {"model": model, "seed": seed})
    run.dashboard(every=settings.every)
    started = time.perf_counter()
    LOOPS[algorithm](policy, task, run, settings, seed)
    seconds = time.perf_counter() - started
    after = evaluate()
    print_table(before, after)
    say(
        f"{algorithm} on {model}: held-out accuracy {before.reward:.3f} -> {after.reward:.3f} after {run.step} updates "
        f"in {seconds:.0f} s; numbers in {run.path}/metrics.jsonl"
    )
    return Result(before.reward, after.reward, seconds, run)


def train_rloo(policy: rl.Policy, task: rl.tasks.Task, run: rl.Run, settings: Settings, seed: int) -> None:
    """RLOO: G completions per prompt, each judged against the mean of the others."""
    world = rl.setup(seed=seed)
    reference = policy.reference() if settings.beta else None
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=settings.learning_rate))
    prompts = rl.PromptLoader(task.train, policy, batch_size=settings.batch_size, seed=seed)
    for step, batch in run.steps(prompts, settings.max_steps):
        rollout = rl.sample(
            policy,
            batch,
            num_generations=settings.num_generations,
            max_completion_length=settings.max_completion_length,
        )
        scores = rl.score(rollout, task.rewards)
        ref_logps = rl.compute_logps(reference, rollout) if reference else None
        kl = rl.compute_kl(rollout, ref_logps) if ref_logps is not None else None
        advantages = rl.compute_loo_advantage(scores, kl=kl, beta=settings.beta)
        update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO(epsilon=settings.epsilon))
        run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)


def train_a2po(policy: rl.Policy, task: rl.tasks.Task, run: rl.Run, settings: Settings, seed: int) -> None:
    """A*-PO: V* of every prompt from the reference first, then one completion per prompt, regressed onto r - V*."""
    world = rl.setup(seed=seed)
    reference = policy.reference()
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=settings.learning_rate))
    rows = task.train.select(
        range(min(len(task.train), settings.batch_size * settings.max_steps))
    )  # no more than needed
    vstar = rl.estimate_vstar(
        reference,
        rows,
        task.rewards,
        num_value_samples=settings.num_value_samples,
        beta1=settings.beta1,
        max_completion_length=settings.max_completion_length,
    )
    say(vstar)
    run.count_reward_calls(vstar.reward_calls)
    prompts = rl.PromptLoader(vstar.keep_solvable(rows), policy, batch_size=settings.batch_size, seed=seed)
    for step, batch in run.steps(prompts, settings.max_steps):
        rollout = rl.sample(policy, batch, num_generations=1, max_completion_length=settings.max_completion_length)
        scores = rl.score(rollout, task.rewards)
        ref_logps = rl.compute_logps(reference, rollout)
        v_star = vstar(rollout)
        advantages = rl.compute_optimal_advantage(scores, v_star)
        loss = rl.AStarPO(beta2=settings.beta2)
        update = rl.loss_step(policy, optimizer, rollout, advantages, loss=loss, ref_logps=ref_logps)
        run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps, v_star=v_star)


LOOPS: dict[str, Callable[[rl.Policy, rl.tasks.Task, rl.Run, Settings, int], None]] = {
    "rloo": train_rloo,
    "a2po": train_a2po,
}


def print_table(before: rl.Evaluation, after: rl.Evaluation, rows: int = 8) -> None:
    """Print completions of the same prompts before and after."""
    left, right = before.to_pandas().head(rows), after.to_pandas().head(rows)
    say(f"\n{'prompt':<48}{'before':<28}{'after':<28}reward")
    for i in range(len(left)):
        prompt, old, new = (
            str(frame[name][i]).replace("\n", " ")
            for frame, name in ((left, "prompt"), (left, "completion"), (right, "completion"))
        )
        say(f"{prompt[:46]:<48}{old[:26]:<28}{new[:26]:<28}{left['reward'][i]:g} -> {right['reward'][i]:g}")
    say("")
