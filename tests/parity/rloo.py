"""RLOO on both sides: TRL's RLOOTrainer, and rlkit's loop, over one script."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from builders import PAD, character_tokenizer
from parity.harness import (
    Script,
    Tokens,
    Trace,
    draw_script,
    left_padded_tokenizer,
    make_optimizer,
    run_trainer,
    shared_arguments,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

import rlkit as rl


@dataclass(frozen=True)
class Settings:
    """One cell of the RLOO matrix; the defaults are the plain case."""

    temperature: float = 1.0
    beta: float = 0.0
    num_iterations: int = 1
    steps: int = 1
    accumulation: int = 1
    mask_truncated: bool = False
    normalize: bool = False
    epsilon: float = 0.2
    epsilon_high: float | None = None
    clip_range: tuple[float, float] | None = None
    weights: tuple[float, ...] | None = None
    max_grad_norm: float = 1.0
    learning_rate: float = 0.05
    optimizer: str = "sgd"


def train_trl_rloo(
    folder: Path, model: Any, script: Script, settings: Settings, *, tokenizer: Any = None, **options: Any
) -> Trace:
    """TRL's RLOOTrainer over the script; `options` are further fields of its config."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    trace = Trace()

    class ScriptedTrainer(RLOOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
            rows = script.generations[len(trace.prompt_ids)]
            trace.prompt_ids.append([list(ids) for ids in prompt_ids])
            return [list(tokens) for tokens in rows]

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            trace.advantages.append(output["advantages"].clone())
            trace.old_logps.append(output["old_logps"].clone())
            return output

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            if len(trace.micro_batches) < len(trace.prompt_ids):
                trace.micro_batches.append([_token_rows(part) for part in self._buffered_inputs])
            return inputs

        def compute_loss(self, *arguments: Any, **options: Any) -> Tensor:
            loss = super().compute_loss(*arguments, **options)
            trace.losses.append(loss.item())
            return loss

    rows = len(script.prompts) * script.num_generations
    arguments = RLOOConfig(
        **shared_arguments(folder, rows, settings, settings.steps * settings.num_iterations),
        shuffle_dataset=False,
        num_generations=script.num_generations,
        num_iterations=settings.num_iterations,
        beta=settings.beta,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        normalize_advantages=settings.normalize,
        reward_clip_range=settings.clip_range,
        reward_weights=None if settings.weights is None else list(settings.weights),
        mask_truncated_completions=settings.mask_truncated,
        **options,
    )
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate)
    trace.trainer = ScriptedTrainer(
        model=model,
        reward_funcs=list(script.reward_funcs),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in script.prompts]),
        processing_class=tokenizer or left_padded_tokenizer(),
        optimizers=(optimizer, None),
    )
    return run_trainer(trace, optimizer, model)


def _token_rows(part: dict[str, Tensor]) -> list[Tokens]:
    """Prompt and completion tokens of each row of a batch of TRL's, without padding."""
    rows = []
    for prompt, mask, completion in zip(part["prompt_ids"], part["prompt_mask"], part["completion_ids"], strict=True):
        tokens = completion.tolist()
        while tokens[-1] == PAD:  # no scripted completion ends in a padding token; the mask may be all 0
            tokens.pop()
        rows.append(prompt[mask.bool()].tolist() + tokens)
    return rows


def train_rlkit_rloo(
    folder: Path, model: Any, reference: Path, script: Script, settings: Settings, *, tokenizer: Any = None
) -> Trace:
    """rlkit's loop over the script."""
    trace = Trace()
    tokenizer = tokenizer or character_tokenizer()
    trace.policy = policy = rl.load_policy(model, tokenizer=tokenizer, device="cpu")
    ref_model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    ref_policy = rl.load_policy(ref_model, tokenizer=tokenizer, device="cpu").reference()
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate)
    trace.watch(optimizer, model)
    with contextlib.redirect_stdout(None):
        run = rl.Run(folder / "rlkit")
    for step in range(settings.steps):
        batch = rl.make_batch(policy, list(script.prompts))
        rollout = draw_script(policy, batch, script.generations[step], settings.temperature)
        trace.prompt_ids.append([list(ids) for ids in batch.token_ids for _ in range(script.num_generations)])
        scores = rl.score(rollout, script.reward_funcs, weights=settings.weights, clip_range=settings.clip_range)
        trace.rollouts.append(rollout)
        trace.scores.append(scores)
        trace.old_logps.append(rollout.sampler_logp.sum(-1))
        ref_logps = rl.compute_logps(ref_policy, rollout) if settings.beta else None
        trace.ref_logps.append(ref_logps)
        kl = None if ref_logps is None else rl.compute_kl(rollout, ref_logps)
        advantages = rl.compute_loo_advantage(scores, kl=kl, beta=settings.beta, normalize=settings.normalize)
        trace.advantages.append(advantages)
        old_logps = None
        for iteration in range(settings.num_iterations):
            update = rl.loss_step(
                policy,
                optimizer,
                rollout,
                advantages,
                loss=rl.RLOO(epsilon=settings.epsilon, epsilon_high=settings.epsilon_high),
                old_logps=old_logps,
                micro_batch_size=-(-len(rollout) // settings.accumulation),
                max_grad_norm=settings.max_grad_norm,
                mask_truncated=settings.mask_truncated,
            )
            old_logps = update.logp if old_logps is None else old_logps
            trace.updates.append(update)
            trace.losses.append(update.loss)
            if iteration == 0:
                trace.logs.append(run.log(step, rollout, scores, None, update, ref_logps=ref_logps))
            else:  # TRL logs what belongs to the rollout once, with its first update
                trace.logs.append(rl.metrics.for_json(update.metrics))
    return trace
