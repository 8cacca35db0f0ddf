"""Engines with a copy of the weights on several processes: each has its own, all take the weights together.

python engines_worker.py OUT ENGINE KIND ...
RLKIT_STRATEGY=fsdp2 torchrun --nproc_per_node 2 engines_worker.py OUT ENGINE KIND ...

ENGINE is "copy" (transformers alone) or "vllm" (in each process). KIND is "full" or "lora"; each writes its own file.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from builders import lora_config, vllm_policy
from copy_engine import CopyEngine

import rlkit as rl
from rlkit.distributed import collectives
from rlkit.engines.weights import named_weights
from rlkit.prompts import make_batch

PROMPTS = ["12+3=", "7", "a-b="]


def digits(completions, **columns):
    return [sum(character.isdigit() for character in text) / 8 for text in completions]


def main(folder: Path, kind_of_engine: str, kind: str) -> None:
    torch.set_num_threads(1)
    world = rl.setup(seed=0)
    config = None
    if kind == "lora":
        torch.manual_seed(1)
        config = lora_config()
    policy = vllm_policy(peft_config=config)
    copied = CopyEngine(policy) if kind_of_engine == "copy" else None
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.SGD(params, lr=0.1))
    engine = copied or rl.VLLMColocate(policy, max_model_length=400, max_num_seqs=16, probe_every=1)
    policy.use(engine)
    everyone = make_batch(policy, PROMPTS)
    gaps, tokens = [], []
    for step in range(3):
        # Step 1 has one prompt: the other process's share is empty.
        batch = everyone if step != 1 else everyone.select([0])
        share = collectives.share(len(batch))
        mine = batch.select(list(range(share.start, share.stop)))
        rollout = rl.sample(policy, mine, num_generations=4, max_completion_length=8, seed=step)
        advantages = rl.compute_loo_advantage(rl.score(rollout, digits))
        update = rl.loss_step(policy, optimizer, rollout, advantages)
        gaps.append(update.metrics["sampler_gap/max"])
        tokens.append(collectives.gather(rollout.completion_ids.tolist()))
    weights = {name: tensor.clone() for name, tensor in named_weights(policy)}
    initialized = torch.distributed.is_initialized()
    engine.close()
    kept = torch.distributed.is_initialized() == initialized
    total = collectives.sums({"ranks": 1.0})["ranks"]
    result = {"gaps": gaps, "tokens": tokens, "weights": weights, "kept": kept, "ranks": total}
    torch.save(result, folder / f"{kind}-rank{world.rank}.pt")


if __name__ == "__main__":
    for kind in sys.argv[3:]:
        main(Path(sys.argv[1]), sys.argv[2], kind)
