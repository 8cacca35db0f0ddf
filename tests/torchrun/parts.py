"""What the workers share: tiny policies, prompts, rewards, and one file per check and rank."""

import json
from pathlib import Path

import torch
from builders import character_tokenizer, completion_tokens, gpt2_with_dropout, llama, lora_config
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import rlkit as rl
from rlkit.distributed import collectives

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
SUMS = [
    f"{a}+{b}=" for a, b in [(1, 2), (31, 4), (5, 66), (77, 8), (9, 1), (23, 45), (6, 7), (88, 99), (3, 3), (41, 5)]
]
ROWS = [{"prompt": prompt, "likes": "0123456789+-=?"[place::2]} for place, prompt in enumerate(SUMS)]


def make_policy(kind: str, *, seed: int = 0) -> rl.Policy:
    """A random policy of a few thousand parameters."""
    if kind == "gpt2":  # dropout everywhere, tied embeddings
        model = gpt2_with_dropout(seed=seed)
    else:
        model = llama(seed=seed, tied=kind == "tied")
    if kind == "lora":
        from peft import get_peft_model

        torch.manual_seed(seed)
        model = get_peft_model(model, lora_config(target_modules=["q_proj", "v_proj", "down_proj"]))
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
    return rl.load_policy(model, tokenizer=character_tokenizer(), device="cpu")


def liked(completions, likes, **kwargs):
    """Share of the characters that the row likes, so that rewards differ within a group; None for long completions."""
    return [
        None if len(text) == 7 else sum(c in good for c in text) / (1 + len(text))
        for text, good in zip(completions, likes, strict=True)
    ]


def whole_parameters(policy: rl.Policy) -> dict[str, torch.Tensor]:
    """The policy's weights, whole, on the CPU of every rank. Every rank calls it."""
    return {name: value.clone() for name, value in _whole(get_model_state_dict(policy.model, options=WHOLE)).items()}


def whole_optimizer(policy: rl.Policy, optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's state, whole, by parameter name. Every rank calls it."""
    return _whole(get_optimizer_state_dict(policy.model, optimizer, options=WHOLE))


def _whole(state: dict) -> dict:
    """torch hands whole state dicts to rank 0 only."""
    return collectives.from_main(state)


def write(folder: Path, name: str, values: dict) -> None:
    """Keep what this rank found in a check; tensors allowed."""
    torch.save(values, folder / f"{name}-rank{collectives.rank()}.pt")


def write_json(folder: Path, name: str, values: dict) -> None:
    """Keep what this rank found in a check, as plain data."""
    (folder / f"{name}-rank{collectives.rank()}.json").write_text(json.dumps(values), encoding="utf-8")


def rows_of(rollout: rl.Rollout) -> list[tuple[int, list[int]]]:
    """(group id, tokens) of each completion, without padding."""
    return list(zip(rollout.group_id.tolist(), completion_tokens(rollout), strict=True))
