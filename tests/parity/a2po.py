"""A*-PO on both sides: TRL's A2POTrainer, and rlkit's loop, over one script."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from builders import PAD, character_tokenizer
from parity.harness import (
    LIMIT,
    RewardFunction,
    ScriptedEngine,
    Tokens,
    Trace,
    draw_script,
    left_padded_tokenizer,
    make_optimizer,
    run_trainer,
    shared_arguments,
)
from torch import Tensor

import rlkit as rl


@dataclass(frozen=True)
class Settings:
    """One cell of the A*-PO matrix; the defaults are the plain case."""

    temperature: float = 1.0
    beta1: float = 0.5
    beta2: float = 1e-3
    num_value_samples: int = 4
    filter_unsolved: bool = True
    rows: int = 4
    steps: int = 1
    accumulation: int = 1
    weights: tuple[float, ...] | None = None
    max_grad_norm: float = 1.0
    learning_rate: float = 0.05
    optimizer: str = "sgd"


@dataclass(frozen=True)
class Script:
    """Dataset rows with what is sampled for each: N completions of the reference, and one per visit in training.

    Rows may share a prompt: then their completions are handed out in turn.
    """

    dataset: tuple[dict[str, Any], ...]
    reference: tuple[tuple[tuple[int, ...], ...], ...]  # R rows of N completions
    training: tuple[tuple[tuple[int, ...], ...], ...]  # R rows, each with one completion per visit
    reward_funcs: tuple[RewardFunction, ...]


@dataclass
class A2POTrace(Trace):
    """What one side did, step by step; `rows` are the dataset rows of each step, in TRL's order."""

    rows: list[list[dict[str, Any]]] = field(default_factory=list)
    completions: list[list[Tokens]] = field(default_factory=list)
    v_star: dict[str, float] = field(default_factory=dict)  # TRL's, by prompt text
    table: rl.ValueTable | None = None  # rlkit's
    kept: list[dict[str, Any]] = field(default_factory=list)  # dataset rows after the filter


class Deck:
    """Hands out what was written for each prompt, visit by visit."""

    def __init__(self, prompts: Sequence[Sequence[int]], cards: Sequence[Any]) -> None:
        self.cards: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        for prompt, card in zip(prompts, cards, strict=True):
            self.cards[tuple(prompt)].append(card)

    def deal(self, prompt: Sequence[int]) -> Any:
        return self.cards[tuple(prompt)].pop(0)


def scripted_generate(deck: Deck) -> Any:
    """A stand-in for `model.generate`: the prompts as they came, each with its completions, padded on the right."""

    def generate(*, input_ids: Tensor, attention_mask: Tensor, generation_config: Any) -> Tensor:
        prompts, completions = [], []
        for prompt, mask in zip(input_ids, attention_mask, strict=True):
            rows = deck.deal(prompt[mask.bool()].tolist())
            assert len(rows) == generation_config.num_return_sequences
            prompts += [prompt] * len(rows)
            completions += rows
        width = max(len(row) for row in completions)
        padded = torch.tensor([list(row) + [PAD] * (width - len(row)) for row in completions])
        return torch.cat([torch.stack(prompts), padded], dim=1)

    return generate


def train_trl_a2po(
    folder: Path, model: Any, script: Script, settings: Settings, *, tokenizer: Any = None, **options: Any
) -> A2POTrace:
    """TRL's A2POTrainer over the script; `options` are further fields of its config."""
    from datasets import Dataset
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    trace = A2POTrace()

    class ScriptedTrainer(A2POTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            output = super()._prepare_inputs(inputs)
            width = output["logits_to_keep"]
            trace.rows.append([dict(row) for row in inputs])
            tokens, mask = output["input_ids"], output["attention_mask"].bool()
            trace.prompt_ids.append([t[:-width][m[:-width]].tolist() for t, m in zip(tokens, mask, strict=True)])
            trace.completions.append([t[-width:][m[-width:]].tolist() for t, m in zip(tokens, mask, strict=True)])
            trace.advantages.append(output["rewards"] - output["v_star"])
            return output

        def compute_loss(self, *arguments: Any, **options: Any) -> Tensor:
            loss = super().compute_loss(*arguments, **options)
            trace.losses.append(loss.item())
            return loss

    tokenizer = tokenizer or left_padded_tokenizer()
    arguments = A2POConfig(
        **shared_arguments(folder, settings.rows, settings, settings.steps),
        beta1=settings.beta1,
        beta2=settings.beta2,
        num_value_samples=settings.num_value_samples,
        filter_all_incorrect=settings.filter_unsolved,
        reward_weights=None if settings.weights is None else list(settings.weights),
        **options,
    )
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate)
    trace.trainer = ScriptedTrainer(
        model=model,
        reward_funcs=list(script.reward_funcs),
        args=arguments,
        train_dataset=Dataset.from_list(list(script.dataset)),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
    )
    as_seen = {"add_special_tokens": False, "truncation": True, "max_length": arguments.max_prompt_length}
    prompts = [tokenizer(row["prompt"], **as_seen)["input_ids"] for row in script.dataset]
    trace.trainer.ref_model.generate = scripted_generate(Deck(prompts, script.reference))
    visits = [(prompt, [row]) for prompt, rows in zip(prompts, script.training, strict=True) for row in rows]
    trace.trainer.model.generate = scripted_generate(Deck(*zip(*visits, strict=True)))
    run_trainer(trace, optimizer, model)
    trace.v_star = trace.trainer._optimal_values
    trace.kept = [dict(row) for row in trace.trainer.train_dataset]
    return trace


def make_table(policy: rl.Policy, script: Script, settings: Settings) -> rl.ValueTable:
    """rlkit's stage 1 over the script."""
    prompts = rl.make_batch(policy, list(script.dataset)).token_ids
    deck = Deck(prompts, script.reference)
    policy.engine = ScriptedEngine(policy, lambda place, prompt: deck.deal(prompt))
    return rl.estimate_vstar(
        policy,
        list(script.dataset),
        script.reward_funcs,
        num_value_samples=settings.num_value_samples,
        beta1=settings.beta1,
        weights=settings.weights,
        max_completion_length=LIMIT,
        temperature=settings.temperature,
        progress=False,
    )


def train_rlkit_a2po(
    folder: Path, model: Any, script: Script, settings: Settings, theirs: A2POTrace, *, tokenizer: Any = None
) -> A2POTrace:
    """rlkit's loop over the script: the rows and completions of each step are those that TRL's sampler drew."""
    trace = A2POTrace()
    trace.policy = policy = rl.load_policy(model, tokenizer=tokenizer or character_tokenizer(), device="cpu")
    reference = policy.reference()
    trace.table = table = make_table(reference, script, settings)
    trace.kept = table.keep_solvable(list(script.dataset)) if settings.filter_unsolved else list(script.dataset)
    optimizer = make_optimizer(model, settings.optimizer, settings.learning_rate)
    trace.watch(optimizer, model)
    with contextlib.redirect_stdout(None):
        run = rl.Run(folder / "rlkit")
    for step in range(settings.steps):
        part = slice(step * settings.accumulation, (step + 1) * settings.accumulation)
        rows = [row for micro_batch in theirs.rows[part] for row in micro_batch]
        completions = [tokens for micro_batch in theirs.completions[part] for tokens in micro_batch]
        batch = rl.make_batch(policy, rows)
        rollout = draw_script(policy, batch, completions, settings.temperature)
        trace.prompt_ids.append([list(ids) for ids in batch.token_ids])
        scores = rl.score(rollout, script.reward_funcs, weights=settings.weights)
        ref_logps = rl.compute_logps(reference, rollout)
        v_star = table(rollout)
        advantages = rl.compute_optimal_advantage(scores, v_star)
        update = rl.loss_step(
            policy,
            optimizer,
            rollout,
            advantages,
            loss=rl.AStarPO(beta2=settings.beta2),
            ref_logps=ref_logps,
            micro_batch_size=len(rollout) // settings.accumulation,
            max_grad_norm=settings.max_grad_norm,
        )
        trace.rollouts.append(rollout)
        trace.scores.append(scores)
        trace.ref_logps.append(ref_logps)
        trace.advantages.append(advantages)
        trace.updates.append(update)
        trace.losses.append(update.loss)
        trace.logs.append(run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps, v_star=v_star))
    return trace
