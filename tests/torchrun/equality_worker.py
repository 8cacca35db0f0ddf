"""The same training on any number of processes: each scenario trains a tiny policy and keeps what it came to.

python equality_worker.py OUT [SCENARIO ...]
RLKIT_STRATEGY=fsdp2 torchrun --nproc_per_node 2 equality_worker.py OUT
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts import ROWS, liked, make_policy, rows_of, whole_parameters, write
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import rlkit as rl
from rlkit.distributed import collectives

# AdamW divides the gradient by its own size: near a gradient of 0 that is noise by noise, and float32's rounding (1e-8
# here) comes out as a step of a whole learning rate. SGD passes rounding on as it is. AdamW with eps 1e-3 divides by
# at least 1e-3, so lr / eps = 1 times the rounding; the default eps 1e-8 would hide every comparison behind 1e-3.
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3, weight_decay=0.1)
STEPS = 3
G = 4


@dataclass(frozen=True)
class Scenario:
    """One way to train; the defaults are the plain RLOO step on 5 groups, an odd number on 2 ranks."""

    model: str = "llama"
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    rows: int = len(ROWS)
    batch_size: int = 5
    micro_batch_size: int | None = None
    loss: Any = None
    normalize: bool = False
    beta: float = 0.05
    max_grad_norm: float | None = 1.0
    updates: int = 1
    cut: Callable[[rl.Rollout], rl.Rollout] = lambda rollout: rollout
    mask_truncated: bool = False
    scheduler: bool = False
    prepared_reference: bool = False
    reference: bool = True
    unequal_start: bool = False
    reward: Callable[..., list] = liked


def cut_second_share(rollout: rl.Rollout) -> rl.Rollout:
    """Mark as truncated what rank 1 of 2 holds: groups 3 and 4 of each 5."""
    return dataclasses.replace(rollout, truncated=rollout.group_id % 5 >= 3)


def per_token(x):
    """A user's own loss with one value per token: its mean is over tokens, not rows."""
    return -x.logp * x.advantages[:, None]


def same(completions, **kwargs):
    """A reward that teaches nothing."""
    return [1.0] * len(completions)


SCENARIOS = {
    "uneven": Scenario(),
    "adamw": Scenario(optimizer=ADAMW, normalize=True, batch_size=4),
    "accumulation": Scenario(micro_batch_size=3, normalize=True, prepared_reference=True),  # 12 rows: 4 passes; 8: 3
    "accumulation_adamw": Scenario(optimizer=ADAMW, micro_batch_size=2, max_grad_norm=None),
    "one_group": Scenario(batch_size=1, micro_batch_size=3),  # rank 1 of 2 has nothing, ever
    "last_batch": Scenario(rows=7, batch_size=3, scheduler=True),  # 3, 3, 1
    "truncated": Scenario(cut=cut_second_share, mask_truncated=True),
    "truncated_accumulation": Scenario(cut=cut_second_share, mask_truncated=True, micro_batch_size=3),
    "lora": Scenario(model="lora", optimizer=ADAMW),
    "lora_accumulation": Scenario(model="lora", micro_batch_size=3),
    "tied": Scenario(model="tied", micro_batch_size=5),
    "gpt2": Scenario(model="gpt2", micro_batch_size=5),
    "checkpointing": Scenario(model="checkpointing", micro_batch_size=5),
    "a2po": Scenario(loss=rl.AStarPO(beta2=0.1), micro_batch_size=3),
    "per_token": Scenario(loss=per_token, micro_batch_size=3),
    "two_updates": Scenario(updates=2, micro_batch_size=4, scheduler=True, max_grad_norm=0.3),
    "unequal_start": Scenario(unequal_start=True),
    "unequal_start_alone": Scenario(unequal_start=True, reference=False),
    "nothing_to_learn": Scenario(batch_size=1, beta=0.0, reward=same),
}


def count_exchanges(policy: rl.Policy) -> list[int]:
    """A list that grows with each exchange of gradients under DDP."""
    exchanges: list[int] = []
    if isinstance(policy.scorer, torch.nn.parallel.DistributedDataParallel):

        def hook(group, bucket):
            exchanges.append(bucket.index())
            return default_hooks.allreduce_hook(group, bucket)

        policy.scorer.register_comm_hook(None, hook)
    return exchanges


def train(folder: Path, name: str, plan: Scenario) -> None:
    """Train on a scenario and keep what it came to."""
    seed = int(os.environ.get("RANK", "0")) if plan.unequal_start else 0  # before rl.setup, which seeds all alike
    policy = make_policy(plan.model, seed=seed)
    world = rl.setup(seed=1)
    reference = policy.reference() if plan.reference else None
    if plan.prepared_reference:
        reference = world.prepare(reference)
    policy, optimizer = world.prepare(policy, lambda params: plan.optimizer(params))
    exchanges = count_exchanges(policy)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4) if plan.scheduler else None
    rows = ROWS[: plan.rows]
    prompts = rl.PromptLoader(rows, policy, batch_size=plan.batch_size, seed=0)
    table = None
    if isinstance(plan.loss, rl.AStarPO):
        table = rl.estimate_vstar(reference, rows, liked, num_value_samples=3, max_completion_length=8, progress=False)
    run = rl.Run(folder / f"run-{name}")
    seen: list[list[int]] = []  # group sizes in each call of the reward function

    def reward(completions, **kwargs):
        seen.append(len(completions))
        return plan.reward(completions=completions, **kwargs)

    found: dict[str, Any] = {"rows": [], "lines": [], "groups": [], "row_ids": [], "first_kl": None}
    for step, batch in run.steps(prompts, STEPS):
        rollout = plan.cut(rl.sample(policy, batch, num_generations=G, max_completion_length=8))
        scores = rl.score(rollout, reward)
        ref_logps = rl.compute_logps(reference or policy, rollout, micro_batch_size=5)
        kl = rl.compute_kl(rollout, ref_logps)
        if table is None:
            advantages = rl.compute_loo_advantage(scores, kl=kl, beta=plan.beta, normalize=plan.normalize)
        else:
            advantages = rl.compute_optimal_advantage(scores, table(rollout))
        old_logps = None
        for _ in range(plan.updates):
            update = rl.loss_step(
                policy,
                optimizer,
                rollout,
                advantages,
                loss=plan.loss,
                ref_logps=ref_logps,
                old_logps=old_logps,
                micro_batch_size=plan.micro_batch_size,
                max_grad_norm=plan.max_grad_norm,
                scheduler=scheduler,
                mask_truncated=plan.mask_truncated,
            )
            old_logps = update.logp if old_logps is None else old_logps
        found["lines"].append(run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps, extra=kl))
        found["rows"].append(rows_of(rollout))
        found["groups"].append(batch.group_id.tolist())
        found["row_ids"].append(batch.row_id.tolist())
        if found["first_kl"] is None:
            found["first_kl"] = kl.abs().sum().item()
    found |= {
        "parameters": whole_parameters(policy),
        "file": (run.path / "metrics.jsonl").read_text(encoding="utf-8"),
        "timing_lines": len((run.path / "timings.jsonl").read_text(encoding="utf-8").splitlines()),
        "reward_calls": seen,
        "kind": type(policy.scorer).__name__,
        "exchanges": len(exchanges),
        "updates": plan.updates,
    }
    write(folder, name, found)


def measure(folder: Path) -> None:
    """evaluate and estimate_vstar, with uneven shares, duplicates and an empty share; export of the whole policy."""
    world = rl.setup(seed=1)
    policy = make_policy("llama")
    reference = policy.reference()
    policy, _ = world.prepare(policy, lambda params: SGD(params))
    seven = [ROWS[place] for place in (0, 1, 2, 3, 4, 5, 1)]  # one row twice, on different ranks
    found = {}
    for name, rows in {"seven": seven, "one": ROWS[:1]}.items():
        evaluation = rl.evaluate(policy, rows, liked, num_generations=3, max_completion_length=8)
        table = rl.estimate_vstar(
            policy, rows, liked, num_value_samples=5, max_completion_length=8, batch_size=2, progress=False
        )
        found[name] = {
            "prompts": list(evaluation.rollout.prompts),
            "completions": list(evaluation.rollout.completions),
            "table_prompts": evaluation.to_pandas()["prompt"].tolist(),
            "reward": evaluation.scores.reward,
            "metrics": dict(evaluation.metrics),
            "v_rows": table.row_id,
            "v_rewards": table.rewards,
            "v_prompts": table.prompts,
            "v_calls": table.reward_calls,
        }
    frozen = rl.evaluate(reference, seven, liked, num_generations=3, max_completion_length=8)
    found["frozen"] = list(frozen.rollout.completions)
    write(folder, "measure", found)


def export(folder: Path) -> None:
    """save_pretrained from any strategy gives the whole model."""
    world = rl.setup(seed=1)
    for kind in ("tied", "lora"):
        policy = make_policy(kind)
        policy.reference()  # beside a pretrained adapter this is a second adapter, which is no part of the result
        policy, _ = world.prepare(policy, lambda params: SGD(params))
        policy.save_pretrained(folder / f"export-{kind}")
        collectives.barrier()
        write(folder, f"export-{kind}", {"parameters": whole_parameters(policy)})


def dynamic(folder: Path) -> None:
    """Groups are filtered, refilled and trained on; the ranks are left with different numbers, once with none."""
    world = rl.setup(seed=1)
    policy, optimizer = world.prepare(make_policy("llama"), lambda params: SGD(params))
    prompts = rl.PromptLoader(ROWS, policy, batch_size=4, seed=0)

    def only(groups: set[int]) -> Callable[[rl.PromptBatch], tuple[rl.Rollout, rl.Scores]]:
        def draw(batch: rl.PromptBatch) -> tuple[rl.Rollout, rl.Scores]:
            rollout = rl.sample(policy, batch, num_generations=G, max_completion_length=8)
            reward = torch.arange(len(rollout)) % 2 * torch.tensor([g in groups for g in rollout.group_id.tolist()])
            scores = rl.score(rollout, lambda completions: reward.tolist())
            return rl.drop_uninformative_groups(rollout, scores)

        return draw

    found: dict[str, Any] = {"kept": [], "local": [], "skipped": [], "metrics": []}
    for step, groups in enumerate([{0, 1, 2, 8}, {10, 11}, set()]):  # first 3 and 1, then all with one rank, then none
        drawn = rl.accumulate(only(groups), prompts.next_batch(), prompts, groups=4, max_batches=3)
        advantages = rl.compute_loo_advantage(drawn.scores)
        update = rl.loss_step(policy, optimizer, drawn.rollout, advantages, micro_batch_size=3)
        line = rl.Run(folder / "dynamic").log(step, drawn.rollout, drawn.scores, advantages, update)
        local = list(dict.fromkeys(drawn.rollout.group_id.tolist()))
        found["local"].append(local)
        found["kept"].append(
            (drawn.groups, drawn.drawn, drawn.exhausted, [g for ids in collectives.gather(local) for g in ids])
        )
        found["skipped"].append(update.skipped)
        found["metrics"].append(line)
    write(folder, "dynamic", found | {"parameters": whole_parameters(policy), "served": prompts.served})


def main() -> None:
    """Run the scenarios that were named, or everything."""
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    for name, plan in SCENARIOS.items():
        if not chosen or name in chosen:
            train(folder, name, plan)
    if not chosen or "measure" in chosen:
        measure(folder)
    if not chosen or "dynamic" in chosen:
        dynamic(folder)
    if not chosen or "export" in chosen:
        export(folder)


if __name__ == "__main__":
    main()
