"""What goes wrong on two processes.

torchrun --nproc_per_node 2 faults_worker.py OUT caught          mistakes that every rank is told of
torchrun --nproc_per_node 2 faults_worker.py OUT reward STEP     a reward function that raises on rank 1 only
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from builders import llama, tiny_policy
from parts import ROWS, liked, write_json

import rlkit as rl
from rlkit.distributed import collectives


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


def one_update(policy: rl.Policy, optimizer: torch.optim.Optimizer) -> None:
    batch = rl.PromptLoader(ROWS, policy, batch_size=4).next_batch()
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=8)
    rl.loss_step(policy, optimizer, rollout, rl.compute_loo_advantage(rl.score(rollout, liked)))


def wrong_strategy(world: rl.World) -> None:
    world.prepare(tiny_policy(), sgd, strategy="fdsp2")  # type: ignore[call-overload]


def single_on_two(world: rl.World) -> None:
    world.prepare(tiny_policy(), sgd, strategy="single")


def other_seed(world: rl.World) -> None:
    rl.setup(seed=7 + world.rank)


def other_model(world: rl.World) -> None:
    world.prepare(tiny_policy(llama(layers=1 + world.rank)), sgd)


def other_parameters_trained(world: rl.World) -> None:
    policy = tiny_policy()
    policy.model.lm_head.weight.requires_grad_(world.rank == 0)
    world.prepare(policy, sgd)


def other_precision(world: rl.World) -> None:
    world.prepare(tiny_policy(), sgd, precision="fp32" if world.rank else "bf16")


def other_strategy(world: rl.World) -> None:
    world.prepare(tiny_policy(), sgd, strategy="ddp" if world.rank else "fsdp2")


def reference_too_late(world: rl.World) -> None:
    policy, _ = world.prepare(tiny_policy(), sgd)
    policy.reference()


def prepared_twice(world: rl.World) -> None:
    policy, _ = world.prepare(tiny_policy(), sgd)
    world.prepare(policy, sgd)


def bypass(world: rl.World) -> None:
    policy, optimizer = world.prepare(tiny_policy(), sgd, strategy="ddp")
    policy.scorer = policy.local_scorer  # as a loop of one's own that calls policy.model
    one_update(policy, optimizer)


def bypass_after_resume(world: rl.World) -> None:
    policy, optimizer = world.prepare(tiny_policy(), sgd, strategy="ddp")
    policy.version = 5  # what run.resume sets
    policy.scorer = policy.local_scorer
    one_update(policy, optimizer)


CHECKS: list[Callable[[rl.World], Any]] = [
    wrong_strategy,
    single_on_two,
    other_seed,
    other_model,
    other_parameters_trained,
    other_precision,
    other_strategy,
    reference_too_late,
    prepared_twice,
    bypass,
    bypass_after_resume,
]


def caught(folder: Path) -> None:
    """Each mistake, and what every rank was told; the ranks are in step again afterwards."""
    for check in CHECKS:
        world = rl.setup(seed=1)
        found = {"type": None, "message": ""}
        try:
            check(world)
        except (ValueError, RuntimeError) as error:
            found = {"type": type(error).__name__, "message": str(error)}
        write_json(folder, check.__name__, found)
        collectives.barrier()


def reward(folder: Path, when: int) -> None:
    """Train with a reward function that raises on rank 1 only; what follows must not be waited for."""
    world = rl.setup(seed=1)
    policy, optimizer = world.prepare(tiny_policy(), sgd)
    prompts = rl.PromptLoader(ROWS, policy, batch_size=4)
    run = rl.Run(folder / "run")
    run.track(policy, optimizer, prompts=prompts)

    def judge(completions, **kwargs):
        if world.rank == 1 and run.step == when:
            write_json(folder, "raised", {"at": time.time()})
            raise ZeroDivisionError("the judge of rank 1 is broken")
        return [float(len(text) % 3) for text in completions]

    for step, batch in run.steps(prompts, 4):
        rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=8)
        scores = rl.score(rollout, judge)
        advantages = rl.compute_loo_advantage(scores)
        update = rl.loss_step(policy, optimizer, rollout, advantages)
        run.log(step, rollout, scores, advantages, update)


if __name__ == "__main__":
    if sys.argv[2] == "caught":
        caught(Path(sys.argv[1]))
    else:
        reward(Path(sys.argv[1]), int(sys.argv[3]))
