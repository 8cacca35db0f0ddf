"""The scenarios of equality_worker.py, and what is ZeRO-3's own, as one process or with `strategy="zero3"` on several.

python zero3_worker.py OUT [CHECK ...]
RLKIT_STRATEGY=zero3 torchrun --nproc_per_node 2 zero3_worker.py OUT [CHECK ...]
"""

import sys
from pathlib import Path

import equality_worker
import torch
from equality_worker import ADAMW, SCENARIOS, SGD, Scenario, train
from parts import ROWS, liked, make_policy, rows_of, write

import rlkit as rl
from rlkit import logps, token_scorer
from rlkit.distributed import collectives
from rlkit.distributed.sharding import gathered

TRAIN = {name: SCENARIOS[name] for name in ("uneven", "accumulation", "accumulation_adamw", "one_group", "last_batch")}
TRAIN |= {name: SCENARIOS[name] for name in ("lora", "lora_accumulation", "tied", "gpt2", "checkpointing")}
TRAIN |= {name: SCENARIOS[name] for name in ("a2po", "per_token", "two_updates", "nothing_to_learn")}
# The head over chunks of 4 tokens: each rank another number of them, in each pass another.
CHUNKED = {"chunked": Scenario(micro_batch_size=3), "chunked_tied": Scenario(model="tied", micro_batch_size=3)}


def whole_parameters(policy: rl.Policy) -> dict[str, torch.Tensor]:
    """The policy's weights, whole, on every rank. Every rank calls it."""
    with gathered(policy.local_scorer):
        return {name: value.detach().clone() for name, value in policy.model.state_dict().items()}


equality_worker.whole_parameters = whole_parameters


def chunked(folder: Path) -> None:
    """Ranks with another number of head calls."""
    before = token_scorer.MAX_CHUNK_ELEMENTS
    token_scorer.MAX_CHUNK_ELEMENTS = 4 * logps.vocabulary_size(make_policy("llama").model)
    for name, plan in CHUNKED.items():
        train(folder, name, plan)
    token_scorer.MAX_CHUNK_ELEMENTS = before


def persistent(folder: Path) -> None:
    """Small parameters stay whole, as in real use."""
    from rlkit.strategies import zero3

    before, zero3.PERSISTENCE_THRESHOLD = zero3.PERSISTENCE_THRESHOLD, 100_000
    train(folder, "persistent", Scenario(micro_batch_size=3))
    train(folder, "persistent_tied", Scenario(model="tied", micro_batch_size=3))
    zero3.PERSISTENCE_THRESHOLD = before


def loop(run, policy, optimizer, scheduler, prompts, steps, save_every=None):
    """A few steps of RLOO; the rows that were sampled and the metrics."""
    rows, lines = [], []
    for step, batch in run.steps(prompts, steps, save_every=save_every):
        rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=8)
        scores = rl.score(rollout, liked)
        update = rl.loss_step(
            policy,
            optimizer,
            rollout,
            rl.compute_loo_advantage(scores),
            micro_batch_size=3,
            scheduler=scheduler,
        )
        lines.append(run.log(step, rollout, scores, update=update))
        rows.append(rows_of(rollout))
    return rows, lines


def start(folder: Path, kind: str, name: str):
    """A run with everything that a checkpoint holds."""
    world = rl.setup(seed=3)
    policy, optimizer = world.prepare(make_policy(kind), lambda params: ADAMW(params))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
    prompts = rl.PromptLoader(ROWS, policy, batch_size=3, seed=0)
    run = rl.Run(folder / name)
    run.track(policy, optimizer, scheduler=scheduler, prompts=prompts)
    return run, policy, optimizer, scheduler, prompts


def resume(folder: Path) -> None:
    """4 steps, against 2 steps, a checkpoint, and 2 steps with everything made again."""
    for kind in ("tied", "lora"):
        whole = start(folder, kind, f"{kind}-whole")
        rows, lines = loop(*whole, 4)
        first = start(folder, kind, f"{kind}-cut")
        first_rows, first_lines = loop(*first, 2)
        second = start(folder, kind, f"{kind}-cut")
        done = second[0].resume("auto")
        second_rows, second_lines = loop(*second, 4)
        found = {
            "done": done,
            "rows": [rows, first_rows + second_rows],
            "lines": [lines, first_lines + second_lines],
            "parameters": [whole_parameters(whole[1]), whole_parameters(second[1])],
            "learning_rate": [whole[2].param_groups[0]["lr"], second[2].param_groups[0]["lr"]],
            "files": sorted(str(p.relative_to(second[0].path)) for p in second[0].path.glob("ckpt/*/*")),
        }
        write(folder, f"resume-{kind}", found)


def export(folder: Path) -> None:
    """save_pretrained gives the whole model, which then samples as the sharded one does."""
    world = rl.setup(seed=1)
    for kind in ("tied", "lora"):
        policy, _ = world.prepare(make_policy(kind), lambda params: SGD(params))
        policy.save_pretrained(folder / f"export-{kind}")
        collectives.barrier()
        empty = sum(parameter.numel() for parameter in policy.model.parameters())  # 0: everything lies in shards
        found = {"parameters": whole_parameters(policy), "repr": repr(policy), "between": empty}
        write(folder, f"export-{kind}", found)


def follow(folder: Path) -> None:
    """A reference that follows the policy: prepared too, whole beside the shards, and an adapter of the same model."""
    world = rl.setup(seed=1)
    for name, kind in {"prepared": "tied", "whole": "tied", "adapter": "lora"}.items():
        policy = make_policy(kind)
        reference = policy.reference()
        policy, optimizer = world.prepare(policy, lambda params: SGD(params))
        if name != "whole":
            reference = world.prepare(reference)
        rollout, advantages = draw(policy)
        at_start = rl.compute_logps(reference, rollout)
        rl.loss_step(policy, optimizer, rollout, advantages)
        before = rl.compute_logps(reference, rollout)
        rl.update_reference(reference, policy, mixing_alpha=0.6)
        after = rl.compute_logps(reference, rollout)
        rl.update_reference(reference, policy, mixing_alpha=1.0)
        found = {
            "unmoved": torch.equal(at_start, before),
            "moved": collectives.gather_rows({"by": (after - before).abs().sum(-1)})["by"],
            "arrived": (rl.compute_logps(reference, rollout) - rl.compute_logps(policy, rollout)).abs().max().item(),
        }
        write(folder, f"follow-{name}", found)


def draw(policy: rl.Policy) -> tuple[rl.Rollout, torch.Tensor]:
    """This rank's share of a step: 3 of 5 groups on rank 0, 2 on rank 1."""
    batch = rl.make_batch(policy, ROWS[:5])
    mine = batch.select([*range(5)][collectives.share(5)])
    rollout = rl.sample(policy, mine, num_generations=4, max_completion_length=8, seed=0)
    return rollout, rl.compute_loo_advantage(rl.score(rollout, liked))


def skipped(folder: Path) -> None:
    """A gradient that is not finite steps nothing; the next update is as if it had not been."""
    world = rl.setup(seed=1)
    policy, optimizer = world.prepare(make_policy("llama"), lambda params: SGD(params))
    rollout, advantages = draw(policy)
    start_weights = whole_parameters(policy)

    def explode(x):
        """A finite loss with an infinite derivative."""
        total = x.logp.sum(-1)
        return (total - total.detach()).abs().sqrt()

    update = rl.loss_step(policy, optimizer, rollout, advantages, loss=explode, micro_batch_size=3)
    after = whole_parameters(policy)
    good = rl.loss_step(policy, optimizer, rollout, advantages, micro_batch_size=3)
    found = {
        "skipped": update.skipped,
        "unchanged": all(torch.equal(start_weights[name], after[name]) for name in after),
        "norm": good.metrics["grad_norm"],
        "parameters": whole_parameters(policy),
    }
    write(folder, "skipped", found)


def bf16(folder: Path) -> None:
    """Autocast reaches the passes inside DeepSpeed's engine, which would turn it off."""
    world = rl.setup(seed=1)
    policy, optimizer = world.prepare(make_policy("llama"), lambda params: SGD(params), precision="bf16")
    rollout, advantages = draw(policy)
    half = rl.compute_logps(policy, rollout)
    policy.autocast = None
    full = rl.compute_logps(policy, rollout)
    policy.autocast = torch.bfloat16
    update = rl.loss_step(policy, optimizer, rollout, advantages)
    found = {"to_half": (update.logp - half).abs().max().item(), "to_full": (update.logp - full).abs().max().item()}
    write(folder, "bf16", found | {"parameters": whole_parameters(policy)})


def main() -> None:
    """Run the checks that were named, or everything."""
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    import rlkit.strategies.zero3

    rlkit.strategies.zero3.PERSISTENCE_THRESHOLD = 0  # nothing of these tiny models would be sharded
    for name, plan in TRAIN.items():
        if not chosen or name in chosen:
            train(folder, name, plan)
    for check in (chunked, persistent, resume, export, follow, skipped, bf16):
        if not chosen or check.__name__ in chosen:
            check(folder)


if __name__ == "__main__":
    main()
