"""Drive TRL's own trainers and rlkit's loop over the same model, prompts, completions and rewards; keep what each did.

Only the drawing of tokens is replaced, on both sides, by a script. Everything after it is TRL's `trainer.train()` and
rlkit's public functions. Both sides leave a `Trace`. TRL is imported inside the functions: that takes seconds.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from builders import CHARACTERS, EOS, VOCABULARY, character_tokenizer, llama
from tolerances import FLOAT32
from torch import Tensor
from transformers import AutoModelForCausalLM

import rlkit as rl
from rlkit.engine import Completion, PolicyModelEngine
from rlkit.sampling import sample

PROMPTS = ("1+2=", "what is 7?", "ab")
GENERATIONS = 4
LIMIT = 6
PERTURBATION = 0.03
NAN = float("nan")

# The two sides run other kernels (left padding and a fused head; right padding and gathered rows), so numbers agree to
# float32's rounding, tolerances.FLOAT32. An element of a gradient may be a small difference of large ones: it is held
# against the largest element of its tensor. Measured on the whole matrix: at most 5.3e-6 of it.
GRADIENT_OF_LARGEST = 2e-5

Tokens = list[int]
RewardFunction = Callable[..., list[float | None]]


@dataclass
class Trace:
    """What one side did, step by step."""

    prompt_ids: list[list[Tokens]] = field(default_factory=list)  # of each generation
    advantages: list[Tensor] = field(default_factory=list)  # of each generation, (B,) in its order
    micro_batches: list[list[list[Tokens]]] = field(default_factory=list)  # of each generation: prompt + completion ids
    losses: list[float] = field(default_factory=list)  # of each forward pass (TRL) or update (rlkit)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of each update, after clipping of the norm
    parameters: list[dict[str, Tensor]] = field(default_factory=list)  # after each update
    logs: list[dict[str, Any]] = field(default_factory=list)  # of each update
    updates: list[rl.Update] = field(default_factory=list)  # rlkit's
    old_logps: list[Tensor] = field(default_factory=list)  # of each generation, (B,): summed over the loss tokens
    scores: list[rl.Scores] = field(default_factory=list)  # rlkit's
    ref_logps: list[Tensor | None] = field(default_factory=list)  # rlkit's, (B,T)
    rollouts: list[rl.Rollout] = field(default_factory=list)  # rlkit's
    policy: Any = None  # rlkit's
    optimizer: Any = None
    trainer: Any = None  # TRL's

    def watch(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """Keep gradients before and parameters after every optimizer step."""
        self.optimizer = optimizer

        def before(*_: Any) -> None:
            self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

        def after(*_: Any) -> None:
            self.parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


@dataclass(frozen=True)
class Script:
    """What is sampled and what it earns: completions of each generation in prompt-major order, and reward functions."""

    generations: tuple[tuple[tuple[int, ...], ...], ...]
    reward_funcs: tuple[RewardFunction, ...]
    prompts: tuple[str, ...] = PROMPTS
    num_generations: int = GENERATIONS


def encode(text: str, *, end: bool = True) -> tuple[int, ...]:
    """Character tokens of a text, with the end-of-sequence token unless the completion is truncated."""
    return tuple(VOCABULARY[character] for character in text) + ((EOS,) if end else ())


def write_completions(rows: int, *, seed: int, truncated: Sequence[int] = (), empty: int | None = 3) -> list[tuple]:
    """Random completions, all different: of 1 to LIMIT tokens; rows of `truncated` have LIMIT tokens and no end."""
    draw = random.Random(seed)
    texts: set[str] = {""}
    result = []
    for row in range(rows):
        if row == empty:
            result.append(encode(""))
            continue
        text = ""
        while text in texts:
            length = LIMIT if row in truncated else draw.randint(1, LIMIT - 1)
            text = "".join(draw.choice(CHARACTERS) for _ in range(length))
        texts.add(text)
        result.append(encode(text, end=row not in truncated))
    return result


def reward_table(name: str, generations: Sequence[Sequence[tuple]], values: Sequence[float | None]) -> RewardFunction:
    """A reward function that looks the completion's text up; `values` are repeated over all completions."""
    table: dict[str, float | None] = {}
    for place, tokens in enumerate(tokens for rows in generations for tokens in rows):
        table[decode(tokens)] = values[place % len(values)]

    def function(completions: list[str], **_: Any) -> list[float | None]:
        return [table[text] for text in completions]

    function.__name__ = name
    return function


def decode(tokens: Sequence[int]) -> str:
    characters = {number: character for character, number in VOCABULARY.items()}
    return "".join(characters[token] for token in tokens if token >= len(VOCABULARY) - len(CHARACTERS))


def make_models(folder: Path, model: Any = None) -> tuple[Callable[[], Any], Path]:
    """A function that makes a new model for the policy at each call, and the folder of the reference, which differs."""
    torch.manual_seed(0)
    (llama(seed=0) if model is None else model).save_pretrained(folder)

    def make_policy_model() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += PERTURBATION * torch.randn(parameter.shape, generator=noise)
        return model

    return make_policy_model, folder


def make_optimizer(model: torch.nn.Module, kind: str, learning_rate: float) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1, eps=1e-4)
    return torch.optim.SGD(model.parameters(), lr=learning_rate)


def left_padded_tokenizer(**options: Any) -> Any:
    tokenizer = character_tokenizer(**options)
    tokenizer.padding_side = "left"
    return tokenizer


def shared_arguments(folder: Path, rows: int, settings: Any, max_steps: int) -> dict[str, Any]:
    """Trainer arguments that keep TRL on the CPU, in float32, in order and silent."""
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": settings.learning_rate,
        "max_grad_norm": settings.max_grad_norm,
        "max_steps": max_steps,
        "max_completion_length": LIMIT,
        "temperature": settings.temperature,
        "per_device_train_batch_size": rows // settings.accumulation,
        "gradient_accumulation_steps": settings.accumulation,
    }


def run_trainer(trace: Trace, optimizer: torch.optim.Optimizer, model: Any) -> Trace:
    from transformers.trainer_callback import PrinterCallback

    trace.trainer.remove_callback(PrinterCallback)
    trace.watch(optimizer, model)
    trace.trainer.train()
    trace.logs = [line for line in trace.trainer.state.log_history if "loss" in line]
    return trace


class ScriptedEngine(PolicyModelEngine):
    """An engine of rlkit that gives each prompt the completions that `lookup` names."""

    name = "scripted"

    def __init__(self, policy: rl.Policy, lookup: Callable[[int, Sequence[int]], Sequence[Sequence[int]]]) -> None:
        self.policy, self.lookup = policy, lookup

    def generate(self, prompts: Any, group_ids: Any, *, num_generations: int, params: Any, seed: int) -> Any:
        groups = []
        for place, prompt in enumerate(prompts):
            rows = self.lookup(place, prompt)
            assert len(rows) == num_generations
            reasons = ["eos" if tokens[-1] == EOS else "length" for tokens in rows]
            groups.append(
                [Completion(list(tokens), [0.0] * len(tokens), end) for tokens, end in zip(rows, reasons, strict=True)]
            )
        return groups


def draw_script(policy: rl.Policy, batch: Any, rows: Sequence[Sequence[int]], temperature: float) -> rl.Rollout:
    """A rollout through `sample`, whose sampler saw exactly the policy's own log-probabilities."""
    count = len(rows) // len(batch)
    engine = ScriptedEngine(policy, lambda place, prompt: rows[place * count : (place + 1) * count])
    rollout = sample(engine, batch, num_generations=count, max_completion_length=LIMIT, temperature=temperature, seed=0)
    return replace(rollout, sampler_logp=rl.compute_logps(policy, rollout))


def assert_close(ours: Any, theirs: Any, tolerance: dict[str, float], what: str) -> None:
    """rlkit's number against TRL's. NaN, None and a missing value are one thing: nothing was measured."""
    ours, theirs = (torch.as_tensor(NAN if value is None else value).float() for value in (ours, theirs))
    torch.testing.assert_close(ours, theirs, **tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}")


def assert_gradients_agree(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Every parameter's gradient, each to a share of its own largest element; and none is 0 by accident."""
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        largest = float(gradient.abs().max())
        assert largest > 0, f"gradient of {name} is 0"
        error = float((ours[name] - gradient).abs().max())
        assert error <= GRADIENT_OF_LARGEST * largest, (
            f"gradient of {name}: {error / largest:.2e} of its largest element"
        )


def assert_parameters_agree(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert_close(ours[name], value, FLOAT32, name)


def assert_metrics_agree(ours: dict[str, Any], theirs: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        assert name in ours, f"rlkit has no {name}"
        assert name in theirs, f"TRL has no {name}"
        assert_close(ours[name], theirs[name], FLOAT32, name)
