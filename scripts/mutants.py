# ruff: noqa: E501 - one fault a line reads as a table
"""Apply one-line faults to a copy of rlkit, one at a time; a test must turn red for each.

    make mutants                      all of them, some 10 minutes on 2 idle cores
    make mutants ARGS='-k probe'      those whose name or file holds "probe"
    make mutants ARGS=--new           those that docs/mutants.md does not yet show as noticed, so also the rest after a stop

Every run enters what it found into docs/mutants.md, with the commit that it tested. A fault that no test notices, or whose line is no
longer in the code, makes the command fail.

Most of a test's time is the import of torch and transformers, so Python's fork server has them ready, and each fault gets a fork of it and
a compiled copy of rlkit, taken once at the start. The test that noticed a fault the last time goes first. At the end of each batch, the
tests that turned red must be green without a fault.
"""

import argparse
import atexit
import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mutants.md"
PRELOADED = [
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
    "datasets",
    "pandas",
]
PRELOADED += ["jaxtyping", "beartype", "hypothesis.strategies", "anyio.pytest_plugin", "xdist.plugin"]
TIERS = "not slow and not browser and not torchrun and not vllm"  # the fast and the integration tests
BATCH = 20  # faults between two writes of the page
PATIENCE = 600.0  # seconds for the tests of one fault; one that makes them hang belongs to the machine, not to a test


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` (which must stand there exactly once) becomes `new`; `tests` should notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


ROWS, ROLLOUTS, READER, LINES = "run/rollout_rows.py", "run/rollouts.py", "run/reader.py", "run/line_files.py"
ADV, LOSS, STEP, LOGPS = "advantages.py", "losses.py", "step.py", "logps.py"
DECODE, CHOOSE = "engines/transformers_engine.py", "engines/token_sampler.py"
CONVERSATIONS, IDENTITY = "prompts/conversations.py", "prompts/identity.py"
DRAW, ASSEMBLE = CHOOSE, "engines/rollout_assembly.py"
SAMPLING = (
    "test_sampling.py engines/test_transformers_engine.py engines/test_token_sampler.py engines/test_architectures.py"
)
EXPORT = "export/test_scripts.py export/test_codes.py export/test_wild.py export/runtime/test_flags.py"

MUTANTS = [
    # the maths
    Mutant("KL added to the reward", ADV, "return total - beta * kl", "return total + beta * kl", "test_advantages.py"),
    Mutant("baseline holds the row itself", ADV, "value - (group_sum - value) / (count - 1)", "value - group_sum / count", "test_advantages.py"),
    Mutant("G for G-1", ADV, "/ (count - 1).clamp(min=1)", "/ count.clamp(min=1)", "test_advantages.py"),
    Mutant("rows without a reward counted in the baseline", ADV, "0, group, scorable.to(total.dtype)", "0, group, torch.ones_like(total)", "test_advantages.py"),
    Mutant("groups by position", ADV, "return torch.unique(group_id, return_inverse=True)[1].reshape(group_id.shape)", "return torch.arange(len(group_id)) // 2", "test_advantages.py"),
    Mutant("V*: sum for mean", ADV, "torch.log1p(weight.sum(-1) / count.clamp(min=1))", "torch.log1p(weight.sum(-1))", "test_advantages.py"),
    Mutant("V*: N counts unscored samples", ADV, "count = scored.sum(-1)", "count = torch.full_like(scored.sum(-1), value.shape[-1])", "test_advantages.py"),
    Mutant("V*: beta1 upside down", ADV, "torch.expm1((value - top) / beta1)", "torch.expm1((value - top) * beta1)", "test_advantages.py"),
    Mutant("V* - r for r - V*", ADV, "(reward.detach().double() - v_star.detach().double().to(reward.device))", "(v_star.detach().double().to(reward.device) - reward.double())", "test_advantages.py"),
    Mutant("equal rewards leave a rounding error", ADV, "torch.where(scorable, total - lowest[group], 0.0)", "torch.where(scorable, total, 0.0)", "test_advantages.py"),
    Mutant("advantages computed in the rewards' own dtype", ADV, "rewards = as_rewards(rewards, torch.float64)", "rewards = as_rewards(rewards, dtype)", "test_advantages.py"),
    Mutant("lone rows in the normalisation", ADV, 'advantage[scorable & (count > 1)]})', 'advantage[scorable]})', "test_advantages.py"),
    Mutant("rows without a reward in the normalisation", ADV, 'advantage[scorable & (count > 1)]})', 'advantage[count > 1]})', "test_advantages.py"),
    Mutant("a difference that overflows becomes NaN", ADV, "if not bool(result.isfinite().all()):", "if False:", "test_advantages.py"),
    Mutant("KL counts masked tokens", "kl.py", "delta = torch.where(mask, logp.detach().to(dtype) - ref_logps.detach().to(dtype), 0.0)", "delta = logp.detach().to(dtype) - ref_logps.detach().to(dtype)", "test_advantages.py"),
    Mutant("k3 with the sign of the ratio turned", "kl.py", "torch.expm1(-delta) + delta", "torch.expm1(delta) - delta", "test_advantages.py"),
    Mutant("max for min in the clipped loss", LOSS, "-torch.minimum(ratio * advantages", "-torch.maximum(ratio * advantages", "test_losses.py"),
    Mutant("loss with the wrong sign", LOSS, "loss = -torch.minimum", "loss = torch.minimum", "test_losses.py"),
    Mutant("epsilon_high ignored", LOSS, "return 1 - epsilon, 1 + high", "return 1 - epsilon, 1 + epsilon", "test_losses.py"),
    Mutant("log-ratio not bounded", LOSS, ".clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()", ".exp()", "test_losses.py"),
    Mutant("loss counts masked tokens", LOSS, "kept = torch.where(mask, logp.to(dtype), 0.0) - torch.where(mask, other.to(dtype), 0.0)", "kept = logp.to(dtype) - other.to(dtype)", "test_losses.py"),
    Mutant("token mean for sum", LOSS, "return kept.sum(-1)", "return kept.sum(-1) / mask.sum(-1).clamp(min=1)", "test_losses.py"),
    Mutant("A*-PO's target with the wrong sign", LOSS, "(implicit - advantages).square()", "(implicit + advantages).square()", "test_losses.py"),
    Mutant("clip ratio counts rows that are not clipped", LOSS, "(ratio < low) & (x.advantages < 0)", "(ratio < low)", "test_losses.py test_step.py"),
    # log-probabilities
    Mutant("temperature forgotten in the log-probabilities", "token_scorer.py", "logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature", "logits = logits.to(torch.promote_types(logits.dtype, torch.float32))", "test_step.py engines/test_transformers_engine.py engines/test_architectures.py"),
    Mutant("off by one: each token scored by its own position", "token_scorer.py", ".last_hidden_state[rows, columns - 1]", ".last_hidden_state[rows, columns]", "test_step.py engines/test_transformers_engine.py engines/test_architectures.py"),
    Mutant("dropout left on", "causal_lm.py", "    model.eval()\n    for module in model.modules():", "    for module in model.modules():", "test_step.py"),
    Mutant("layerdrop left on", "causal_lm.py", 'if "drop" in name and', 'if "dropout" in name and', "test_step.py"),
    Mutant("mode not restored", "causal_lm.py", "for module in was_training:\n            module.training = True", "for module in was_training:\n            pass", "test_step.py test_policy.py"),
    Mutant("entropy without its normaliser", "token_scorer.py", "return logp, normaliser - expected", "return logp, -expected", "test_step.py"),
    # the loop
    Mutant("mean of means over micro-batches", "update_means.py", ".sum() / totals.rows", ".sum() / x.mask.any(-1).sum()", "test_step.py"),
    Mutant("token mean per micro-batch", "update_means.py", ".sum() / totals.tokens", ".sum() / x.mask.sum()", "test_step.py"),
    Mutant("masked rows in the divisor", "update_means.py", '"rows": float(mask.any(-1).sum())', '"rows": float(len(mask))', "test_step.py"),
    Mutant("truncated completions not masked", STEP, "mask = mask & ~rollout.truncated.to(device)[:, None]", "pass", "test_step.py"),
    Mutant("rows without a target in the loss", STEP, "rollout.completion_mask.to(device) & ~advantages.isnan()[:, None]", "rollout.completion_mask.to(device)", "test_step.py"),
    Mutant("old log-probabilities with gradient", STEP, "old_logps.to(device)).detach(), 0.0)", "old_logps.to(device)), 0.0)", "test_step.py"),
    Mutant("old log-probabilities recomputed", STEP, "(scores.logp if old_logps is None else old_logps.to(device))", "scores.logp", "test_step.py"),
    Mutant("gradients of an earlier step kept", STEP, "    updater = updater_of(policy, optimizer)\n    updater.zero_grad()\n", "    updater = updater_of(policy, optimizer)\n", "test_step.py"),
    Mutant("policy version not counted", STEP, "policy.version += 1", "policy.version += 0", "test_step.py"),
    Mutant("gradient not clipped", STEP, "updater.clip(math.inf if max_grad_norm is None else max_grad_norm)", "updater.clip(math.inf)", "test_step.py"),
    Mutant("a gradient of 0 stepped", STEP, "if not 0 < grad_norm < math.inf:", "if not grad_norm < math.inf:", "test_step.py"),
    Mutant("weights that stopped being finite not noticed", STEP, "    check_weights(policy, updater)\n", "", "test_step.py"),
    Mutant("mixed precision in float16", "policy.py", "if autocast == torch.float16:", "if False:", "test_step.py"),
    Mutant("a bias of -inf taken for an accident", "step_checks.py", "if n > known.get(name, 0)}", "if n > 0}", "test_step.py"),
    Mutant("16-bit weights: warned at every step", STEP, "    if policy.not_finite is None:\n        policy", "    if True:\n        policy", "test_step.py"),
    Mutant("frozen 16-bit weights warned of", "strategies/updater.py", "self.policy.model.named_parameters() if id(p) in trained}", "self.policy.model.named_parameters()}", "test_step.py"),
    Mutant("sampler gap of a later update from its own log-probabilities", STEP, "gap = (inputs.old_logp - sampler_logp).abs()", "gap = (inputs.logp - sampler_logp).abs()", "test_step.py"),
    Mutant("sampler gap over masked tokens", STEP, "sampler_logp = torch.where(mask, rollout.sampler_logp.to(device), 0.0)", "sampler_logp = rollout.sampler_logp.to(device)", "test_step.py"),
    Mutant("sampler gap per row", STEP, 'float(gap.sum()) / totals.tokens', 'float(gap.sum()) / totals.rows', "test_step.py"),
    Mutant("logged numbers weighted by shares", "types.py", "sum(part.metrics[n] * len(part) for part in parts if n in part.metrics) / max(1, weight[n])", "sum(part.metrics[n] for part in parts if n in part.metrics) / max(1, sum(n in part.metrics for part in parts))", "test_types.py"),
    Mutant("logged numbers divided by all rows", "types.py", "sum(len(part) for part in parts if name in part.metrics)", "sum(len(part) for part in parts)", "test_types.py"),
    Mutant("shares of different scores joined", "types.py", "if unlike := [part for part in parts if (part.names, *part.weights) != (parts[0].names, *parts[0].weights)]:", "if unlike := []:", "test_types.py"),
    Mutant("another rollout's scores logged", "step_checks.py", "rollout.group_id.tolist() != scores.group_id.tolist()", "len(rollout) != len(scores)", "test_types.py"),
    Mutant("another rollout's update logged", "step_checks.py", "fits = not bool((loss_mask & ~mask).any())", "fits = True", "test_types.py"),
    Mutant("log-probabilities without a rollout dropped", "step_checks.py", "if alone := [name for name, values in logps.items() if values is not None]:", "if alone := []:", "test_types.py"),
    Mutant("scheduler of another optimizer stepped", "step_checks.py", 'if getattr(scheduler, "optimizer", optimizer) is not optimizer:', "if False:", "test_step.py"),
    Mutant("min_completion_length not counted as truncation", "sampling_params.py", "truncated or self.min_completion_length > 0 or", "truncated or", "test_types.py"),
    Mutant("NaN loss stepped", STEP, "if not math.isfinite(metrics[\"loss\"]):", "if False:", "test_step.py"),
    # the sampler
    Mutant("end token dropped", CHOOSE, "columns = (self._tokens, self._logp, self._lengths, self._reasons)", "columns = (self._tokens, self._logp, (self._lengths - (self._reasons > 0).long()).clamp(min=1), self._reasons)", SAMPLING),
    Mutant("only one end token known", CHOOSE, "self._eos = torch.tensor(policy.eos_ids, device=device)", "self._eos = torch.tensor(policy.eos_ids[:1], device=device)", SAMPLING),
    Mutant("ids without a token drawn", CHOOSE, "if len(self._unused):", "if False:", "engines/test_architectures.py"),
    Mutant("a recurrent model reads its neighbours", DECODE, "if not self._can_generate_batches:", "if False:", "engines/test_architectures.py"),
    Mutant("a recurrent model goes on from the last call's states", DECODE, "    lm(input_ids=ids[:1, :1], use_cache=False)\n", "", "engines/test_architectures.py"),
    Mutant("sampled without the temperature", CHOOSE, "self._processors(self._tokens[rows], scores / temperature)", "self._processors(self._tokens[rows], scores)", SAMPLING),
    Mutant("sampler's log-probability without the temperature", CHOOSE, "(logits / temperature).log_softmax(-1)", "logits.log_softmax(-1)", SAMPLING),
    Mutant("sampler's log-probability of the truncated distribution", CHOOSE, "(logits / temperature).log_softmax(-1)", "scores.log_softmax(-1)", SAMPLING),
    Mutant("positions off by one", DECODE, "    position = mask.sum(-1)\n", "    position = mask.sum(-1) + 1\n", SAMPLING),
    Mutant("every group gets the same noise", DRAW, "SeedSequence([*seed_words(seed), *seed_words(group), g])", "SeedSequence([*seed_words(seed), g])", SAMPLING),
    Mutant("every completion of a group gets the same noise", DRAW, "SeedSequence([*seed_words(seed), *seed_words(group), g])", "SeedSequence([*seed_words(seed), *seed_words(group)])", SAMPLING),
    Mutant("tied head left out of the weights", "engines/weights.py", "yield from _tensors(child, f\"{prefix}{name}.\")", "yield from () if name == \"lm_head\" else _tensors(child, f\"{prefix}{name}.\")", "engines/test_weights.py"),
    Mutant("adapter not merged", "engines/weights.py", "        twin.merge()\n", "        twin.eval()\n", "engines/test_weights.py"),
    Mutant("merged in place", "engines/weights.py", "twin = copy.deepcopy(module)", "twin = module", "engines/test_weights.py"),
    Mutant("a stale engine draws", "sampling.py", "    sync(engine)\n    completions", "    completions", "engines/test_sync.py"),
    Mutant("weights changed by hand are not noticed", "engines/sync.py", "engine.version != policy.version or changed)", "engine.version != policy.version)", "engines/test_sync.py"),
    Mutant("truncated log-probabilities kept", "sampling.py", "if not engine.renormalises(params):", "if True:", "engines/test_sync.py"),
    Mutant("prefix cache kept after a load", "engines/vllm/lifecycle.py", '        self._wake("kv_cache")\n        self._forget_cache()\n', '        self._wake("kv_cache")\n', "engines/vllm/test_lifecycle.py"),
    Mutant("asleep while loading", "engines/vllm/lifecycle.py", '        self._wake("weights")\n        load()', "        load()", "engines/vllm/test_lifecycle.py"),
    Mutant("a failed load counts", "engines/vllm/lifecycle.py", 'self.version, self.trouble = None, "the last transfer of weights failed"', 'self.trouble = ""', "engines/vllm/test_lifecycle.py"),
    Mutant("cut-off completions accepted", "engines/vllm/sampling_requests.py", 'not in ("stop", "length")', 'in ()', "engines/vllm/test_sampling_requests.py"),
    Mutant("noise of another position", CHOOSE, "self._noise[rows, step]", "self._noise[rows, step * 0]", SAMPLING),
    Mutant("continuous batching: attention not put back", "engines/continuous_batching.py", "        if lm.config._attn_implementation != attention:\n", "        if False:\n", "engines/test_continuous_batching.py"),
    Mutant("continuous batching: random state not put back", "engines/continuous_batching.py", "torch.random.fork_rng(devices=devices),", "contextlib.nullcontext(devices),", "engines/test_continuous_batching.py"),
    Mutant("continuous batching: float32 under mixed precision", "engines/continuous_batching.py", "    if policy.autocast is None:\n        yield", "    if True:\n        yield", "engines/test_continuous_batching.py"),
    Mutant("the probe asks at another temperature", "engines/vllm/probe.py", "(1.0 if raw else TEMPERATURE)", "1.0", "engines/test_sync.py"),
    Mutant("tokens of probability 0 drawn", DRAW, "right=True)", "right=False)", SAMPLING),
    Mutant("mask from the pad id", ASSEMBLE, "_pad([torch.ones_like(row) for row in rows], side).bool()", "_pad(rows, side, pad_id) != pad_id", SAMPLING),
    Mutant("truncated flag turned", ASSEMBLE, 'c.finish_reason == "length"', 'c.finish_reason != "length"', SAMPLING),
    Mutant("end ids of the configs ignored", "causal_lm.py", "for value in [tokenizer.eos_token_id, *(getattr(config, \"eos_token_id\", None) for config in configs if config)]:", "for value in [tokenizer.eos_token_id]:", "test_policy.py"),
    Mutant("reference is the policy itself", "policy.py", "model = copy.deepcopy(self.model).requires_grad_(False)", "model = self.model", "test_policy.py test_step.py"),
    # the run folder
    Mutant("padding stored with the tokens", ROWS, "flat | {\"token_ids\": rollout.completion_ids.cpu()[mask]", "flat | {\"token_ids\": rollout.completion_ids.cpu().reshape(-1)[: int(mask.sum())]", "run/test_rollouts.py"),
    Mutant("log-ratio to the reference turned", ROWS, "flat[\"sampler_logp\"].astype(np.float64) - flat[\"ref_logp\"]", "flat[\"ref_logp\"].astype(np.float64) - flat[\"sampler_logp\"]", "run/test_rollouts.py"),
    Mutant("clip state turned", STEP, "measured[CLIPPED_HIGH] - measured[CLIPPED_LOW]", "measured[CLIPPED_LOW] - measured[CLIPPED_HIGH]", "test_step.py run/test_rollouts.py"),
    Mutant("a record of other rows taken", ROWS, "if values is not None and len(values) == len(mask)", "if values is not None", "run/test_rollouts.py"),
    Mutant("surrogates not replaced", "record.py", "return cell.encode(\"utf-16-le\", \"surrogatepass\").decode(\"utf-16-le\", \"replace\")", "return cell", "run/test_rollouts.py"),
    Mutant("the last rollouts dropped", ROLLOUTS, "return steps[1 + gaps.index(min(gaps))]", "return steps[-1]", "run/test_rollouts.py"),
    Mutant("rollouts after a checkpoint kept", ROLLOUTS, "if step >= steps:", "if step > steps:", "run/test_rollouts.py"),
    Mutant("a torn line left out in silence", LINES, "self._torn = end < len(data)", "self._torn = False", "run/test_reader.py"),
    Mutant("a replaced log read on", LINES, "replaced = handle.read(len(self._tail)) != self._tail", "replaced = len(handle.read(len(self._tail))) != len(self._tail)", "run/test_reader.py"),
    Mutant("a metric that pauses moves up", READER, 'column.extend(array("d", [ABSENT]) * (before - len(column)))', "pass", "run/test_reader.py"),
    # prompts, rewards, V*, run
    Mutant("None counted as 0", "reward_calls/return_values.py", "        return math.nan\n", "        return 0.0\n", "test_scoring.py"),
    Mutant("rows known by their prompt alone", "prompts/identity.py", "json.dumps(_canonical(row), sort_keys", 'json.dumps(_canonical(row["prompt"]), sort_keys', "vstar/test_vstar.py prompts/test_loader.py"),
    Mutant("every epoch in the same order", "prompts/supply.py", '{"prompt": [self.seed, epoch]}', '{"prompt": [self.seed]}', "prompts/test_loader.py"),
    Mutant("two beginning-of-sequence tokens", "prompts/tokens.py", "special=not templated", "special=True", "prompts/test_loader.py"),
    Mutant("position not restored", "prompts/loader.py", 'state["epoch"], state["position"], state["served"]', 'state["epoch"], 0, state["served"]', "prompts/test_loader.py"),
    Mutant("truncation drops the beginning-of-sequence token", "prompts/lengths.py", "return front + list(ids[len(ids) - (self.limit - len(front)) :])", "return list(ids[len(ids) - self.limit :])", "prompts/test_conversations.py"),
    Mutant("a resumed stream starts over", "prompts/supply.py", "itertools.islice(rows, position, None)", "itertools.islice(rows, 0, None)", "prompts/test_sources.py"),
    Mutant("groups without signal kept", "dynamic_sampling.py", "(spread > tolerance)[group]", "(spread >= 0)[group]", "test_dynamic_sampling.py"),
    Mutant("groups of different prompts merged", "dynamic_sampling.py", "if len(prompts_of_groups) > len(whole.group_id.unique()):", "if False:", "test_dynamic_sampling.py"),
    Mutant("one accepted group lost", "dynamic_sampling.py", "kept = set(accepted[:groups])", "kept = set(accepted[: groups - 1])", "test_dynamic_sampling.py"),
    Mutant("pass@k with replacement", "evaluation/statistics.py", "1 - math.comb(n - c, k) / math.comb(n, k)", "1 - (1 - c / n) ** k", "evaluation/test_evaluate.py"),
    Mutant("before and after not paired", "evaluation/compare.py", "change = (new - old)[both]", "change = (new - old.flip(0))[both]", "evaluation/test_evaluate.py"),
    Mutant("gold and answer swapped", "rewards/math_worker.py", "verify(gold=gold, target=answer, timeout_seconds=None)", "verify(gold=answer, target=gold, timeout_seconds=None)", "rewards/test_accuracy.py"),
    Mutant("an open box counts", "rewards/answers.py", "found = text[start : match.start()]", "found = text[start:]", "rewards/test_answers.py"),
    Mutant("weights ignored", "scoring.py", "parts.double() * weights.double())", "parts.double())", "test_scoring.py"),
    Mutant("wrong number of rewards accepted", "reward_calls/return_values.py", "if len(returned) != count:", "if False:", "test_scoring.py"),
    Mutant("a hanging completion takes its siblings along", "reward_calls/isolation.py", "    if len(units) == 1 or (isinstance(why, TimedOut) and not caller.killable):", "    if True:", "reward_calls/test_limits.py"),
    Mutant("groups split when tried again", "reward_calls/arguments.py", "        if not by_group:", "        if True:", "reward_calls/test_limits.py"),
    Mutant("errors not counted", "reward_calls/call.py", "len(self.errors) / count", "0.0 / count", "reward_calls/test_limits.py"),
    Mutant("memory not limited", "reward_calls/worker_main.py", "        soft = used + extra if hard == resource.RLIM_INFINITY else min(used + extra, hard)", "        pass", "reward_calls/test_limits.py"),
    Mutant("async rewards awaited in turn", "reward_calls/concurrency.py", "        tasks = {asyncio.ensure_future(self._one(place)) for place in self._jobs}\n", "        tasks = {asyncio.ensure_future(asyncio.sleep(0))}\n        for place in self._jobs:\n            await self._one(place)\n", "reward_calls/test_async.py"),
    Mutant("the clock of an async reward runs on while another blocks", "reward_calls/isolation.py", "            left -= min(time.monotonic() - begun, 2 * seconds / SLICES)\n", "            left -= time.monotonic() - begun\n", "reward_calls/test_async.py"),
    Mutant("a function that blocks the event loop is waited for without end", "reward_calls/concurrency.py", "if self._loop.blocked() > shortest + loops.PATIENCE_SECONDS:", "if False:", "reward_calls/test_async.py"),
    Mutant("a timeout for each completion that hangs math-verify", "rewards/math_accuracy.py", "                if left <= 0:\n", "                if False:\n", "rewards/test_accuracy.py"),
    Mutant("the last number of a right answer that is more than a number", "rewards/numerals.py", "    return values[0] if len(values) == 1 else None\n", "    return values[-1] if values else None\n", "rewards/test_answers.py"),
    Mutant("reward model padded on the left", "reward_calls/reward_model.py", '[*row, *[pad if name == "input_ids" else 0] * (width - len(row))]', '[*[pad if name == "input_ids" else 0] * (width - len(row)), *row]', "reward_calls/test_reward_model.py"),
    Mutant("pad id of the reward model's config not in step", "reward_calls/reward_model.py", "config.pad_token_id = pad = _pad_id(", "pad = _pad_id(", "reward_calls/test_reward_model.py"),
    Mutant("a text's end taken for the reward model's padding", "reward_calls/reward_model.py", "key=lambda token: (token in last, token in used)", "key=lambda token: token not in last", "reward_calls/test_reward_model.py"),
    Mutant("the reward model's own pad id replaced", "reward_calls/reward_model.py", "if own is not None and 0 <= own < config.vocab_size:", "if False:", "reward_calls/test_reward_model.py"),
    Mutant("dropout of the reward model left on", "reward_calls/reward_model.py", "    model.eval()\n", "", "reward_calls/test_reward_model.py"),
    Mutant("a column overwrites what a partial has bound", "reward_calls/arguments.py", "    names = [name for name in offered if name not in _bound(function)]", "    names = list(offered)", "reward_calls/test_kinds.py"),
    Mutant("unsolved decided by the sum", "vstar/table.py", "torch.where(self.rewards.isnan(), -math.inf, self.rewards).amax(-1) > self.success_threshold", "self.rewards.nansum(-1) != 0", "vstar/test_vstar.py"),
    Mutant("nearly equal rewards counted as equal", "metrics.py", "float((spread <= 0).double().mean())", "float((spread <= 1e-5).double().mean())", "test_metrics.py"),
    Mutant("the spread of equal rewards rounded", "metrics.py", "float((known - known[0]).std())", "float(known.std())", "test_metrics.py"),
    Mutant("float64 rewards compared in float32", "metrics.py", 'reward[known].double(), "amax")', 'reward[known].float().double(), "amax")', "test_metrics.py"),
    Mutant("interrupt in the middle of a step", "run/signals.py", '        self.reason = "interrupted"\n', "        raise KeyboardInterrupt\n", "run/test_run.py"),
    # notebook to script
    Mutant("a continued line cut", "export/analysis.py", "last = ends[group[-1].end_lineno or 0] if", "last = (group[-1].end_lineno or 0) if", EXPORT),
    Mutant("a continued line joined to the next statement", "export/writing.py", '        kept.append("")\n', "        pass\n", EXPORT),
    Mutant("a counted name counts as given", "export/analysis.py", "(binds, binds - (changed - given), now, later)", "(binds, binds, now, later)", EXPORT),
    Mutant("a parameter taken for a function of its name", "export/functions.py", "name not in {*body.own, *found}", "name not in found", EXPORT),
    Mutant("what follows an early return runs in any case", "export/functions.py", "        if any(isinstance(part, LEAVES) for part in ast.walk(statement)):\n            break\n", "", EXPORT),
    Mutant("a late future import changes earlier cells", "export/checks.py", "before = [other for other in annotated if other < number]", "before = []", EXPORT),
    Mutant("null metadata ends the export", "export/reading.py", "return value if isinstance(value, Mapping) else {}", "return value", "export/test_reading.py"),
    Mutant("half a surrogate pair written into the script", "export/reading.py", "        source = _writable(source)\n", "        pass\n", "export/test_reading.py"),
    Mutant("notebook-only cells exported", "export/tags.py", '"remove-cell": "notebook-only",', '"remove-cell": "loop",', EXPORT),
    Mutant("tag in a comment not seen", "export/tags.py", 'if words[:1] == ["ok"]:', "if words:", EXPORT),
    Mutant("magic left out that changes the program", "export/magics.py", "if name in DROPPED and all(argument in wanted for argument in arguments):", "if True:", EXPORT),
    Mutant("lines shift where a magic stood", "export/magics.py", '[stand_in + "\\n"] + ["#\\n"] * (span - 1)', '[stand_in + "\\n"]', EXPORT),
    Mutant("await left in the script", "export/awaits.py", 'edits += [(begin, after, CALL.encode()), (end, end, b")")]', "pass", EXPORT),
    Mutant("await by characters, not bytes", "export/awaits.py", "starts.append(starts[-1] + len(line) + 1)", "starts.append(starts[-1] + len(line.decode()) + 1)", EXPORT),
    Mutant("what may depend on time moves up", "export/movable.py", "return root(node) not in TIMED", "return True", EXPORT),
    Mutant("function that needs run cells at module level", "export/placement.py", "_without_unneeded(_sent_back(decisions, handed_on(program).keys()))", "_without_unneeded(decisions)", EXPORT),
    Mutant("text inside a string indented", "export/writing.py", "if number not in code.layout.inside_strings:", "if True:", EXPORT),
    Mutant("hash without tags", "export/writing.py", "[cell.cell.source, sorted(cell.cell.roles)]", "[cell.cell.source]", EXPORT),
    Mutant("guard left out", "export/writing.py", "'if __name__ == \"__main__\":', INDENT + start]", "'if True:', INDENT + start]", EXPORT),
    Mutant("parameter given twice", "export/parameters.py", "if one.name in declared:", "if False:", EXPORT),
    Mutant("unknown name in a config file ignored", "export/runtime/flags.py", "        if name not in known:\n            raise ValueError", "        if name not in known:\n            continue\n            raise ValueError", "export/runtime/test_flags.py"),
    Mutant("config file above the command line", "export/runtime/flags.py", "values |= {name: value for name, value in vars(given).items() if name in known}", "values = {name: value for name, value in vars(given).items() if name in known} | values", "export/runtime/test_flags.py"),
    Mutant("commands of an earlier loop obeyed", "run/commands.py", "if self._has_history:", "if False:", "run/test_commands.py"),
    Mutant("a pause that does not hold", "run/loop.py", "if state.stopped is not None or not self._paused:", "if True:", "run/test_commands.py"),
    Mutant("a number without its bounds", "run/commands.py", "if (low is not None and value < low) or", "if False and", "run/test_commands.py run/test_knobs.py"),
    Mutant("a live change lost by a restart", "run/knobs.py", 'self.set(name, saved["value"])', "pass", "run/test_knobs.py"),
    Mutant("a line that did not fit stays in the log", "run/folder.py", "handle.truncate(end)", "pass", "run/test_damage.py"),
    Mutant("a deleted folder is made again", "run/folder.py", "if not folder.is_dir():", "if False:", "run/test_damage.py"),
    Mutant("changes after a checkpoint lost", "run/knob_changes.py", "and change.step >= step]", "and False]", "run/test_knobs.py"),
    Mutant("an old change after a newer one", "run/knob_changes.py", "change.step + 1)", "10**9)", "run/test_knobs.py"),
    Mutant("a zombie holds its lock", "run/lock.py", 'not in (b"Z", b"X")', 'not in ()', "run/test_damage.py"),
    Mutant("the background loop without the cell's grad mode", "run/background.py", "stack.enter_context(torch.set_grad_enabled(grad))", "pass", "run/test_background.py"),
    Mutant("a phase inside a phase counted twice", "support/timing.py", "if clock.busy:", "if False:", "run/test_commands.py"),
    # the view
    Mutant("view: the mean of the others holds the row itself", "view/arithmetic.py", "values - (total - values) / (count - 1)", "values - total / count", "view/test_data.py"),
    Mutant("view: a large common reward hides the rule", "view/arithmetic.py", "group.reward[known] - mean - group.stored[known]", "group.reward[known] - group.stored[known]", "view/test_data.py"),
    Mutant("view: any advantage is called leave-one-out", "view/arithmetic.py", "return bool(np.all(np.abs(left - right) <= TOLERANCE * size)) if len(left) else True", "return True", "view/test_data.py"),
    Mutant("view: refreshes that nothing is charged for", "view/budget.py", "+ seconds / SHARE", "+ seconds", "view/test_budget.py"),
    Mutant("view: masked tokens set the scale", "view/lens.py", "used = np.abs(sizes[counts & np.isfinite(sizes)])", "used = np.abs(sizes[np.isfinite(sizes)])", "view/test_data.py"),
    Mutant("view: credit forgets the sign of the advantage", "view/lens.py", "float(advantage) * change", "abs(float(advantage)) * change", "view/test_data.py"),
    Mutant("view: NaN in an answer", "view/json_values.py", 'return "NaN" if math.isnan(value) else', "return value if math.isnan(value) else", "view/test_data.py view/test_panel.py"),
    Mutant("view: a cut text hides its length", "view/json_values.py", '"length": len(text)}', '"length": limit}', "view/test_data.py"),
    Mutant("view: a closed panel stays alive", "view/panel.py", "layout.close()", "layout.open()", "view/test_panel.py"),
    # vLLM as a server
    Mutant('server: prefix cache not reset', 'engines/vllm/weight_transfer.py', 'if not remote.call("POST", "/reset_prefix_cache")["success"]:', 'if False:', 'engines/vllm/test_connection.py'),
    Mutant("server: not resumed after a failed load", "engines/vllm/connection.py", 'self.call("POST", "/resume", deadline=min(RESUME_SECONDS, self.deadline))', "pass", "engines/vllm/test_connection.py"),
    Mutant('server: weights of another client not noticed', 'engines/vllm/client.py', 'elif found != self._tag(self._version):', 'elif False:', 'engines/vllm/test_connection.py'),
    Mutant('server: a restart not noticed', 'engines/vllm/client.py', '            if found == FRESH:\n                fresh = True', '            if found == FRESH:\n                fresh = False', 'engines/vllm/test_connection.py'),
    Mutant('server: valid after a failed sync', 'engines/vllm/client.py', 'self.distrust("the last transfer of weights failed")', 'pass', 'engines/vllm/test_connection.py'),
    Mutant('server: completions cut off are kept', 'engines/vllm/sampling_requests.py', 'if finish_reason not in ("stop", "length"):', 'if finish_reason is None:', 'engines/vllm/test_connection.py'),
    Mutant('server: a changed prompt accepted', 'engines/vllm/completions.py', 'if seen is not None and list(seen) != list(prompt):', 'if False:', 'engines/vllm/test_connection.py'),
    Mutant('server: completions in the order of arrival', 'engines/vllm/completions.py', 'choices = sorted(answer["choices"], key=lambda choice: choice["index"])', 'choices = answer["choices"]', 'engines/vllm/test_connection.py'),
    Mutant('server: silence is patience', 'engines/vllm/completions.py', 'if left <= 0:', 'if False:', 'engines/vllm/test_connection.py'),
    Mutant('server: another dtype accepted', 'engines/vllm/handshake.py', 'if server.dtype not in fitting:', 'if False:', 'engines/vllm/test_connection.py'),
    Mutant('server: the proxy of the environment asked', 'engines/vllm/connection.py', '                trust_env=False,\n', '                trust_env=True,\n', 'engines/vllm/test_connection.py'),
    Mutant("a process without a share is asked for columns", 'scoring.py', 'if not len(offer):', 'if False:', 'reward_calls/test_kinds.py'),
    Mutant("guard: web pages may ask", "engines/vllm/guard.py", 'if values(b"origin"):', 'if values(b"origin") == [b"null"]:', "engines/vllm/test_guard.py"),
    Mutant("guard: a sandboxed page may ask", "engines/vllm/guard.py", 'if values(b"origin"):', 'if values(b"origin") not in ([], [b"null"]):', "engines/vllm/test_guard.py"),
    Mutant("guard: any name of the server", "engines/vllm/guard.py", 'if not _is_known(values(b"host"), self._hosts):', 'if False:', "engines/vllm/test_guard.py"),
    Mutant("guard: names that begin with a known one", "engines/vllm/guard.py", "HOST.fullmatch(given[0]", "HOST.match(given[0]", "engines/vllm/test_guard.py"),
    Mutant("guard: the first of two Host headers", "engines/vllm/guard.py", 'if len(given) == 1 else None', 'if given else None', "engines/vllm/test_guard.py"),
    Mutant("guard: no secret asked for", "engines/vllm/guard.py", "if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):", "if False:", "engines/vllm/test_guard.py"),
    Mutant("guard: a part of the secret will do", "engines/vllm/guard.py", "not hmac.compare_digest(given[0], self._expected)", "not self._expected.startswith(given[0])", "engines/vllm/test_guard.py"),
    Mutant("guard: OPTIONS without the secret", "engines/vllm/guard.py", 'method == "GET" and path == "/health"', 'method == "OPTIONS" or path == "/health"', "engines/vllm/test_guard.py"),
    Mutant("guard: what begins like the health is free", "engines/vllm/guard.py", 'path == "/health"', 'path.startswith("/health")', "engines/vllm/test_guard.py"),
    Mutant("guard: web sockets not asked", "engines/vllm/guard.py", 'scope["type"] in ("http", "websocket") else None', 'scope["type"] == "http" else None', "engines/vllm/test_guard.py"),
    Mutant("guard: bodies of any type", "engines/vllm/guard.py", 'types != [b"application/json"]', 'not types', "engines/vllm/test_guard.py"),
    Mutant("guard: the secret's file readable by all", "engines/vllm/guard.py", "os.O_EXCL, 0o600)", "os.O_EXCL, 0o644)", "engines/vllm/test_guard.py"),
    Mutant("guard: a stranger's folder believed", "engines/vllm/guard.py", "if folder.lstat().st_uid == os.getuid():", "if True:", "engines/vllm/test_guard.py"),
    Mutant("guard: this machine's secret sent elsewhere", "engines/vllm/connection.py", "(secret_for(self.port) if self.is_here else os.environ.get(SECRET))", "secret_for(self.port)", "engines/vllm/test_guard.py"),
    Mutant("guard: not in the command", "engines/vllm/server_settings.py", '        "middleware": MIDDLEWARE,\n', "", "engines/vllm/test_server.py"),
    Mutant("guard: the secret in the repr of the settings", "engines/vllm/server_settings.py", "field(default_factory=new_secret, repr=False)", "field(default_factory=new_secret)", "engines/vllm/test_guard.py"),
    Mutant("a changed element leaves an engine stale", "engines/weights.py", "0 if parameter.is_inference() else parameter._version", "0", "engines/test_weights.py"),
    Mutant("a changed buffer leaves an engine stale", "engines/weights.py", "[*policy.model.parameters(), *buffers]", "policy.model.parameters()", "engines/test_weights.py"),
    Mutant("a disabled adapter leaves an engine stale", "engines/weights.py", "parts.append((module._disable_adapters, getattr(", "parts.append((0, getattr(", "engines/test_weights.py"),
    Mutant("scratch buffers change the mark", "engines/weights.py", "module._buffers.keys() - module._non_persistent_buffers_set", "module._buffers.keys()", "engines/test_weights.py"),
    Mutant("modules of a disabled adapter go over", "engines/weights.py", "off = module.disable_adapters or not module.active_adapters", "off = not module.active_adapters", "engines/test_weights.py"),
    Mutant("layers of a disabled adapter merged", "engines/weights.py", "if module.disable_adapters or module.merged:", "if module.merged:", "engines/test_weights.py"),
    Mutant("NaN go over", "engines/weights.py", "if not (low >= -limit and high <= limit):", "if low < -limit or high > limit:", "engines/test_weights.py"),
    Mutant("-inf is sent", "engines/weights.py", "if not (low >= -limit and high <= limit):", "if not high <= limit:", "engines/test_weights.py"),
    Mutant("numbers too large for the engine go over", "engines/weights.py", "kind = dtype or tensor.dtype", "kind = tensor.dtype", "engines/test_weights.py"),
    Mutant("server: NaN sent", "engines/vllm/weight_transfer.py", 'checked = finite(tensors, "VLLMServer", narrowest(self.servers))', "checked = tensors", "engines/vllm/test_connection.py"),
    Mutant("server: the cache of an earlier client kept", "engines/vllm/connection.py", "self.unclean = True", "self.unclean = False", "engines/vllm/test_connection.py"),
    Mutant("server: NaN of a draw kept", "engines/vllm/completions.py", "            server.remote.unclean = True\n", "            pass\n", "engines/vllm/test_connection.py"),
    Mutant("server: drawn with again after NaN", "engines/vllm/client.py", "        except NotFiniteError as error:\n            self.distrust(str(error))\n", "        except NotFiniteError as error:\n", "engines/vllm/test_connection.py"),
    Mutant("a refused transfer counts as done", "engines/sync.py", "mark != policy.marks.get(engine)", "mark != policy.marks.get(engine, mark)", "engines/vllm/test_connection.py"),
    Mutant("server: an adapter on replaced base weights", "engines/vllm/weight_transfer.py", '    if any(one["replaced"] for one in answer["results"]) or', '    if', "engines/vllm/test_connection.py"),
    Mutant("server: base weights replaced after attaching", "engines/vllm/weight_transfer.py", "        for server in self.servers:  # another client may have come in between\n            check_base(server.remote)\n", "", "engines/vllm/test_connection.py"),
    Mutant('files of a living process deleted', 'engines/vllm/cleanup.py', ' or Path("/proc", number).exists():', ':', 'engines/vllm/test_cleanup.py'),
    Mutant("files of another container's process deleted", 'engines/vllm/cleanup.py', 'os.stat(NAMESPACE).st_ino if NAMESPACE.exists() else 0', '0', 'engines/vllm/test_cleanup.py'),
    Mutant('server: what a killed server leaves stays', 'engines/vllm/launcher.py', 'os.killpg(child.pid, signal.SIGKILL)', 'pass', 'engines/vllm/test_server.py'),
    Mutant('server: outlives the process that asked', 'engines/vllm/launcher.py', 'if parent is not None and os.getppid() != parent:', 'if False:', 'engines/vllm/test_server.py'),
    Mutant('server: sampling defaults of the checkpoint', 'engines/vllm/server_settings.py', '"generation-config": "vllm",', '"generation-config": "auto",', 'engines/vllm/test_server.py'),
    # the run folder: locks, checkpoints, resume
    Mutant("a run that came and went is written into", "run/folder.py", 'if all(file.name == "lock" for file in folder.iterdir()):', "if True:", "run/test_damage.py"),
    Mutant("a lock of another host taken for dead", "run/lock.py", '(other["host"] != mine["host"] or lives(other["pid"]))', 'lives(other["pid"])', "run/test_folder.py"),
    Mutant("a dead one's lock taken over by two at once", "run/lock.py", "fcntl.flock(handle, fcntl.LOCK_EX)", "pass", "run/test_folder.py"),
    Mutant("the lock of another process taken away", "run/lock.py", 'if (read_json(file) or {}).get("pid") == os.getpid():', "if True:", "run/test_folder.py"),
    Mutant("resume goes on in the first of several folders", "run/folder.py", "sorted(found, reverse=True)", "sorted(found)", "run/test_run.py run/test_checkpoint.py"),
    Mutant("the step after a checkpoint stays in the log", "run/folder.py", 'is_step(line.get("step")) and line["step"] < steps', 'is_step(line.get("step")) and line["step"] <= steps', "run/test_damage.py run/test_checkpoint.py"),
    Mutant("the log not cut back at a resume", "run/state.py", "        cut_back(self.path, self.step)\n", "", "run/test_checkpoint.py"),
    Mutant("counters start over at a resume", "run/state.py", 'Counters(counters["tokens"], counters["reward_calls"])', "Counters(0, 0)", "run/test_checkpoint.py"),
    Mutant("a checkpoint of the loop's own without the step", "run/state.py", "self.step + 1 if log.step == self.step else self.step", "self.step", "run/test_checkpoint.py"),
    Mutant("a step logged twice", "run/step_log.py", "if self.step is not None and step <= self.step:", "if False:", "run/test_run.py"),
    Mutant("random states not restored", "run/checkpoint.py", "            set_random_state(torch.load(handle", "            dict(torch.load(handle", "run/test_checkpoint.py"),
    Mutant("random state of Python not restored", "run/checkpoint.py", "    random.setstate((version", "    tuple((version", "run/test_checkpoint.py"),
    Mutant("random state of numpy not restored", "run/checkpoint.py", "    np.random.set_state((kind", "    tuple((kind", "run/test_checkpoint.py"),
    Mutant("numpy's second normal forgotten", "run/checkpoint.py", "position, has_gauss, cached]", "position, 0, cached]", "run/test_checkpoint.py"),
    Mutant("random state of torch not restored", "run/checkpoint.py", '    torch.set_rng_state(state["torch"])', "    pass", "run/test_checkpoint.py"),
    Mutant("weights and optimizer not restored", "run/checkpoint.py", "        set_state_dict(\n", "        dict(\n", "run/test_checkpoint.py"),
    Mutant("state of the optimizer dropped where there are gradients", "run/checkpoint.py", "        parameter.grad = None\n", "        pass\n", "run/test_checkpoint_damage.py"),
    Mutant("an index of a checkpoint unpickled", "run/storage.py", "found = _Index(file).load()", "found = pickle.load(file)", "run/test_checkpoint_damage.py"),
    Mutant("values of a checkpoint unpickled", "run/storage.py", "super().load_bytes(read_item, _plain(value))", "super().load_bytes(read_item, value)", "run/test_checkpoint_damage.py"),
    Mutant("shards outside the checkpoint read", "run/storage.py", "if Path(shard).name != shard:", "if False:", "run/test_checkpoint_damage.py"),
    Mutant("weights of a checkpoint left unread", "run/storage.py", "        if unread:", "        if False:", "run/test_checkpoint_damage.py"),
    Mutant("flipped bits loaded", "run/manifest.py", "if found != sums:", "if False:", "run/test_checkpoint_damage.py"),
    Mutant("a checkpoint rounded to the model's type", "run/storage.py", "here.dtype != properties.dtype", "False", "run/test_checkpoint_damage.py"),
    Mutant("a state without its owner dropped", "run/storage.py", "if key not in self.state_dict]", "if key[:6] == 'model.' and key not in self.state_dict]", "run/test_checkpoint_damage.py"),
    Mutant("a save before the loop over the run's own", "run/state.py", 'self.resume_if_asked()  # a save', "pass  # a save", "run/test_resume_orders.py"),
    Mutant("the data begun anew after a resume", "run/checkpointer.py", "            self.prompts = prompts\n            self._put_back()", "            self.prompts = prompts", "run/test_resume_orders.py"),
    Mutant("a changed run.json believed", "run/manifest.py", '!= _digest(counters):', "== 0:", "run/test_checkpoint_damage.py"),
    Mutant("a checkpoint of a left past preferred", "run/manifest.py", "(numbers[name] > last, -numbers[name])", "-numbers[name]", "run/test_checkpoint_damage.py"),
    Mutant("half a checkpoint left on a full disk", "run/checkpoint.py", "except Exception as error:\n        if main:", "except Exception as error:\n        if False:", "run/test_checkpoint_damage.py"),
    Mutant("half a file left on a full disk", "support/files.py", "            partial.unlink(missing_ok=True)\n        if", "            pass\n        if", "run/test_checkpoint_damage.py run/test_fifos.py"),
    Mutant("a FIFO blocks its reader", "support/files.py", "if not stat.S_ISREG(os.fstat(handle).st_mode):", "if False:", "run/test_fifos.py"),
    Mutant("a script that writes early splits its run", "run/location.py", "if self.folder is None and (found := self._resumed()) is not None:", "if found := None:", "run/test_resume_orders.py"),
    Mutant("a new run below an older one", "run/folder.py", "max(taken) + 1", "min(taken) + 1", "run/test_resume_orders.py"),
    Mutant("schedule not restored", "run/checkpoint.py", 'tracked.scheduler.load_state_dict(state["scheduler"])', "pass", "run/test_checkpoint.py"),
    Mutant("policy version not restored", "run/checkpoint.py", 'tracked.policy.version = counters["version"]', "pass", "run/test_checkpoint.py"),
    Mutant("a state that torch invented for the optimizer kept", "run/checkpoint.py", "    if untouched:", "    if False:", "run/test_checkpoint.py"),
    Mutant("position in the data not restored", "run/checkpointer.py", "self.prompts.load_state_dict(self.position)", "pass", "run/test_checkpoint.py"),
    Mutant("another table of V* accepted", "run/checkpoint.py", "table.digest != saved:", "False:", "run/test_run.py"),
    Mutant("the worst checkpoint kept as the best", "run/checkpoint.py", 'score >= _score_of(folder, "best")', 'score <= _score_of(folder, "best")', "run/test_checkpoint.py"),
    Mutant("the best checkpoint deleted", "run/checkpoint.py", "if path.name not in pointers:", "if True:", "run/test_checkpoint.py"),
    Mutant("the newest checkpoints deleted", "run/checkpoint.py", "whole[: max(0, len(whole) - keep)]", "whole[keep:]", "run/test_checkpoint.py"),
    Mutant("half a checkpoint loaded", "run/manifest.py", "    if not file.exists():", "    if False:", "run/test_checkpoint.py"),
    Mutant("a checkpoint of a killed save not mended", "run/manifest.py", "if not found.exists() and (other / FILE).exists():", "if False:", "run/test_folder.py run/test_checkpoint.py"),
    Mutant("prompts of a step that failed are lost", "run/loop.py", "prompts.load_state_dict(position)", "pass", "run/test_run.py"),
    Mutant("a learning rate set by hand lost at the next step of its schedule", "run/knobs.py", "schedule.base_lrs = [scaled(float(old)) for old in schedule.base_lrs]", "pass", "run/test_knobs.py"),
    Mutant("a fraction for a whole number", "run/commands.py", "if kind is int and number != value:", "if False:", "run/test_knobs.py"),
    Mutant("a tracker that fails stops the training", "run/trackers.py", "stop a training\n                _warn(target, error)", "stop a training\n                raise", "run/test_trackers.py"),
    Mutant("an evaluation logged twice", "run/evaluations.py", "!= (name, step))", "!= ())", "run/test_evaluations.py"),
    # rewards
    Mutant("one function that abstains takes the reward of the others", "scoring.py", "(parts.isnan() | (weights == 0)).all(-1)", "(parts.isnan() | (weights == 0)).any(-1)", "test_scoring.py"),
    Mutant("a metric of weight 0 makes a row scorable", "scoring.py", "(parts.isnan() | (weights == 0)).all(-1)", "parts.isnan().all(-1)", "test_scoring.py"),
    Mutant("clip range ignored", "scoring.py", "reward = reward.clamp(*settings.clip_range)", "pass", "test_scoring.py"),
    Mutant("a timeout for a function that is not there", "reward_calls/settings.py", "        if unknown:\n", "        if False:\n", "test_scoring.py"),
    Mutant("an infinite reward accepted", "reward_calls/return_values.py", "if abs(number) > torch.finfo(torch.float32).max:", "if False:", "test_scoring.py"),
    Mutant("a completion that ran out of time has reward 0", "reward_calls/call.py", "self.values[row] = math.nan if value is None else value", "self.values[row] = value or 0.0", "reward_calls/test_limits.py"),
    Mutant("timeouts not counted", "reward_calls/call.py", "len(self.late) / count", "0.0 / count", "reward_calls/test_limits.py"),
    Mutant("an error of a reward function swallowed", "reward_calls/call.py", 'elif self.job.limits.on_error == "raise":', "elif False:", "reward_calls/test_limits.py test_scoring.py"),
    Mutant("what a function does to its arguments reaches the next one", "reward_calls/arguments.py", "copy.deepcopy(whole[row]) if isinstance(whole[row], (list, dict)) else whole[row]", "whole[row]", "test_scoring.py"),
    Mutant("columns of the first rows for any rows", "reward_calls/arguments.py", "else whole[row] for row in rows]", "else whole[row] for row in range(len(rows))]", "reward_calls/test_limits.py"),
    Mutant("no right answer counts as a wrong one", "rewards/matching.py", "None if right is None else float(self._plain", "0.0 if right is None else float(self._plain", "rewards/test_answers.py"),
    Mutant("the working of GSM8K's answer taken for the answer", "rewards/matching.py", '_, marked, after = text.rpartition("####")', 'after, marked, _ = text.rpartition("####")', "rewards/test_answers.py"),
    Mutant("a second closing tag is a format", "rewards/formats.py", ' or "</think>" in answer:', ":", "rewards/test_formats_and_lengths.py"),
    Mutant("length reward goes up again beyond the maximum", "rewards/lengths.py", "min(tokens / self.max_length, 1.0)", "tokens / self.max_length", "rewards/test_formats_and_lengths.py"),
    Mutant("numbers used twice in countdown", "tasks/countdown.py", " and sorted(found[1]) == sorted(given)", "", "tasks/test_countdown.py"),
    Mutant("code that ends early has passed", "rewards/code_tests.py", "            except (TimedOut, Died):\n                return [False] * len(tests)", "            except (TimedOut, Died):\n                return [True] * len(tests)", "rewards/test_python_tests.py"),
    Mutant("code changes files outside its folder", "rewards/sandbox.py", 'missing = [] if _restrict_files(libc, folder) else ["files"]', "missing = []", "rewards/test_sandbox.py"),
    Mutant("code starts processes through libc", "rewards/sandbox.py", 'rule("clone", (0, THREAD, THREAD))', 'rule("clone")', "rewards/test_sandbox.py"),
    Mutant("a file's owner gets signals from code", "rewards/sandbox.py", "5, 6, 7, 36,", "5, 6, 7, 8, 10, 36,", "rewards/test_sandbox.py"),
    Mutant("code sends to an address from one end of a pair", "rewards/sandbox.py", 'rule("sendto", (4, ALL, 0))', 'rule("sendto")', "rewards/test_sandbox.py"),
    Mutant("code fills the disk", "rewards/code_tests.py", "_used(folder) <= DISK and _threads", "_threads", "rewards/test_sandbox.py"),
    Mutant("tests that cannot fail are tests", "rewards/code_stubs.py", '["drops"] * len(sources)', '["checks"] * len(sources)', "rewards/test_code_cases.py"),
    Mutant("a comparison without assert among tests", "rewards/code_cases.py", "if drops and not marked:", "if False:", "rewards/test_code_cases.py"),
    Mutant("tests that fail only for what equals nothing are refused", "rewards/code_stubs.py", "return equal or (", "return False or (", "rewards/test_code_cases.py"),
    Mutant("a test that reached no check has passed", "rewards/code_runner.py", "return None if not checks else not failed", "return not failed", "rewards/test_code_cases.py"),
    Mutant("a program that ends with an error has passed", "rewards/code_runner.py", "error.code in (None, 0)", "True", "rewards/test_code_cases.py"),
    Mutant("a number in a box that was cut", "rewards/matching.py", "None if cut else last_number(part)", "last_number(part)", "rewards/test_answers.py"),
    Mutant("reasoning that was begun again is an answer", "rewards/answers.py", 'if "<think>" in after:', 'if "<think>" in text and "</think>" not in text:', "rewards/test_answers.py"),
    Mutant("two boxes near each other are one answer", "rewards/math_accuracy.py", "[_answer(completion_text(completion))", "[answer_part(completion_text(completion))", "rewards/test_accuracy.py"),
    Mutant("tildes do not fence", "rewards/answers.py", "(`{3,}|~{3,})", "(`{3,})", "rewards/test_code_cases.py"),
    # evaluation
    Mutant("pass@k of too few completions is 0", "evaluation/statistics.py", "math.nan if n < k else", "0.0 if n < k else", "evaluation/test_evaluate.py"),
    Mutant("interval of the sum per prompt", "evaluation/statistics.py", "/ weight[drawn].sum(-1))", "/ count)", "evaluation/test_evaluate.py"),
    Mutant("interval of 90 per cent", "evaluation/statistics.py", "[(1 - level) / 2, (1 + level) / 2]", "[1 - level, level]", "evaluation/test_evaluate.py"),
    Mutant("a reward at the threshold has passed", "evaluation/evaluate.py", "(scores.reward[known] > threshold)", "(scores.reward[known] >= threshold)", "evaluation/test_evaluate.py"),
    Mutant("greedy draws", "evaluation/evaluate.py", 'sampling |= {"top_k": 1, "temperature": 1.0}', "pass", "evaluation/test_evaluate.py"),
    Mutant("evaluations of other rows compared", "evaluation/compare.py", "if first.keys() != second.keys():", "if False:", "evaluation/test_evaluate.py"),
    Mutant("a row that stands twice counted once", "evaluation/compare.py", 'seen.get(line["row_id"], -1) + 1', "0", "evaluation/test_evaluate.py"),
    # prompts
    Mutant("an end token closes the prompt", "prompts/tokens.py", "return ids[:-1] if closed else ids", "return ids", "prompts/test_loader.py prompts"),
    Mutant("the generation prompt forgotten", CONVERSATIONS, '"add_generation_prompt": True', '"add_generation_prompt": False', "prompts/test_loader.py prompts"),
    Mutant("a message that the template leaves out accepted", CONVERSATIONS, "if place < 0:", "if False:", "prompts/test_templates.py"),
    Mutant("a message that the template moves accepted", CONVERSATIONS, "if place < end:", "if False:", "prompts/test_templates.py"),
    Mutant("marks of one shape taken for another", CONVERSATIONS, "key = hash(repr((marked, kwargs)))", "key = 0", "prompts/test_templates.py"),
    Mutant("the template rewrites what the assistant is to continue", CONVERSATIONS, "if start == shown:", "if True:", "prompts/test_templates.py"),
    Mutant("a think block opened twice", CONVERSATIONS, "if tag and start.startswith(shown) and", "if False and", "prompts/test_templates.py"),
    Mutant("today's date whatever the date is", CONVERSATIONS, '"strftime_now": self.date.strftime', '"strftime_now": datetime.date.today().strftime', "prompts/test_templates.py"),
    Mutant("the date of a checkpoint forgotten", "prompts/loader.py", "self._template.date = self._policy.date = ", "self._policy.date = ", "prompts/test_templates.py"),
    Mutant("a reference with a date of its own", "policy.py", "frozen.version, frozen.date = self.version, self.date", "frozen.version = self.version", "prompts/test_templates.py"),
    Mutant("keys of other rows in the prompt", IDENTITY, "{key: without_none(item) for key, item in value.items() if item is not None}", "{key: without_none(item) for key, item in value.items()}", "prompts/test_sources.py"),
    Mutant("keys of other rows in a row's id", IDENTITY, " if (form := _canonical(item)) is not None}", " if (form := _canonical(item)) is not ...}", "prompts/test_sources.py"),
    Mutant("a number that a table widened is another row", IDENTITY, "return int(value) if isinstance(value, float) and value.is_integer() else value", "return value", "prompts/test_sources.py"),
    Mutant("texts of JSON that look like dates become dates", "prompts/rows.py", 'if kind == "json" and', "if False and", "prompts/test_sources.py"),
    Mutant("a row of a list without a column that others have", "prompts/rows.py", "if any(not columns.keys() <= row.keys() for row in dataset):", "if False:", "prompts/test_sources.py"),
    Mutant("token ids of templated and plain prompts mixed up", "prompts/tokens.py", "for place, one in zip(places, found, strict=True):", "for place, one in enumerate(found):", "prompts/test_loader.py prompts"),
    Mutant("a row's own template settings below the loader's", "prompts/tokens.py", "self.kwargs | _checked_kwargs(own_kwargs or {})", "_checked_kwargs(own_kwargs or {}) | self.kwargs", "prompts/test_loader.py prompts"),
    Mutant("truncation cuts what the model continues", "prompts/lengths.py", "return front + list(ids[len(ids) - (self.limit - len(front)) :])", "return list(ids[: self.limit])", "prompts/test_conversations.py"),
    Mutant("a position of another dataset accepted", "prompts/loader.py", "if state[name] != own:", "if False:", "prompts/test_loader.py"),
    Mutant("groups numbered from 0 in every batch", "prompts/loader.py", "range(self.served, self.served + taken.total)[mine]", "range(taken.total)[mine]", "prompts/test_loader.py"),
    Mutant("ids that depend on the order of columns", "prompts/identity.py", "json.dumps(_canonical(row), sort_keys=True", "json.dumps(_canonical(row), sort_keys=False", "prompts/test_loader.py vstar/test_vstar.py"),
    Mutant("a stream's position without the rows that were left out", "prompts/supply.py", "position += len(read)", "position = position + len(rows)", "prompts/test_sources.py"),
    Mutant("rows that were skipped for their length served", "prompts/supply.py", "return [place for place in range(len(self.rows)) if place not in left_out]", "return range(len(self.rows))", "prompts/test_loader.py prompts"),
    # engines
    Mutant("an engine of another shape accepted", "engines/weights.py", "    if shapes:\n", "    if False:\n", "engines/test_weights.py engines/test_sync.py"),
    Mutant("an engine with further weights accepted", "engines/weights.py", "    if missing:\n", "    if False:\n", "engines/test_weights.py"),
    Mutant("buffers left out of the weights", "engines/weights.py", "[*module._parameters.items(), *module._buffers.items()]", "module._parameters.items()", "engines/test_weights.py"),
    Mutant("an adapter that unties the head handed over", "engines/weights.py", "if hasattr(model, \"peft_config\") and is_tied(policy):", "if False:", "engines/test_weights.py"),
    Mutant("the probe judges by the best token", "engines/vllm/probe.py", "return bool(gap.max() <= MAX_GAP[self._dtype])", "return bool(gap.min() <= MAX_GAP[self._dtype])", "engines/test_sync.py"),
    Mutant("a small step that never arrived passes the probe", "engines/vllm/probe.py", "if same_as_before or not self._close(gap):", "if not self._close(gap):", "engines/test_sync.py"),
    Mutant("stale weights told only where nothing rounds otherwise", "engines/vllm/probe.py", "self._close((answer.engine - before.engine).abs())", "torch.equal(answer.engine, before.engine)", "engines/test_sync.py"),
    Mutant("an engine that failed the probe draws on", "engines/vllm/probe.py", "            self._engine.distrust(str(error))\n", "", "engines/test_sync.py"),
    Mutant("weights of a level-2 sleep drawn with", "engines/vllm/lifecycle.py", 'self.version, self.trouble = None, "its weights were discarded by a level-2 sleep"', "pass", "engines/vllm/test_lifecycle.py"),
    Mutant("a cache that could not be reset drawn with", "engines/vllm/lifecycle.py", "if not self._calls.reset_cache():", "if self._calls.reset_cache() is None:", "engines/vllm/test_lifecycle.py"),
    # the view: what a completion may do to a page, and what thinning may hide
    Mutant("view: a completion ends its script", "view/report.py", 'return text.replace("<", "\\\\u003c")', "return text", "view/test_report.py"),
    Mutant("view: a completion is markup", "support/text.py", "html.escape(visible(text, limit))", "visible(text, limit)", "view/test_data.py view/test_terminal.py view/test_figure.py view/test_dashboard.py"),
    Mutant("view: a completion repaints the terminal", "support/text.py", 'if letter.isprintable() or letter == " ":', "if True:", "view/test_terminal.py"),
    Mutant("view: a record's headline is markup", "support/text.py", "<p>{as_html(heading)}</p>", "<p>{heading}</p>", "test_types.py support/test_text.py"),
    Mutant("a table's text typeset by MathJax", "support/text.py", 'UNTYPESET = "mathjax_ignore tex2jax_ignore"', 'UNTYPESET = "mathjax"', "support/test_text.py"),
    Mutant("a table's control characters sent", "support/text.py", "else visible(str(value), limit)", "else str(value)", "support/test_text.py"),
    Mutant("a letter that the terminal lacks ends the program", "support/text.py", 'return text.encode(encoding, "backslashreplace").decode(encoding)', "return text", "support/test_text.py"),
    Mutant("None in the log ends the loop", "support/scalars.py", "    if value is None:\n        return math.nan\n", "", "support/test_scalars.py"),
    Mutant("an array without an axis is not a number", "support/scalars.py", 'return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value', "return value", "support/test_scalars.py"),
    Mutant("a column of letters logged", "reward_calls/arguments.py", "isinstance(values, str | bytes | Mapping)", "False", "support/test_scalars.py"),
    Mutant("view: thinning loses the peaks", "view/series.py", "np.where(finite, rows[..., 2], -np.inf).argmax(1)", "np.where(finite, rows[..., 2], np.inf).argmin(1)", "view/test_series.py"),
    Mutant("view: thinning loses the gaps", "view/series.py", "merged[:, 6] = pairs[..., 6].sum(1)", "pass", "view/test_series.py"),
    Mutant("view: a long curve never thinned", "view/series.py", "while len(self._done) > self.buckets:", "while False:", "view/test_series.py"),
    Mutant("view: a log that was cut goes on", "view/series.py", "if curve is None or not _continues(curve, steps, values):", "if curve is None:", "view/test_series.py"),
    Mutant("view: a filter keeps what is missing", "view/table_query.py", "return hits & ~missing", "return hits | missing", "view/test_data.py"),
    Mutant("view: a bundle without bound", "view/panel_data.py", "if cost > budget:", "if False:", "view/test_data.py"),
    Mutant("view: anybody on the machine may stop the run", "view/serve.py", '"port_retries": 0, "token": token}', '"port_retries": 0, "token": ""}', "view/test_serve.py"),
    # several processes, as far as one process can tell
    Mutant("shares that leave something out", "distributed/collectives.py", "slice(start, start + each + (r < rest))", "slice(start, start + each)", "test_world.py"),
    Mutant("gradients that differ between processes accepted", "strategies/updater.py", "spread > 1e-6 * max(1.0, abs(mine[1])):", "False:", "test_world.py"),
    Mutant("a gradient that is missing on one process accepted", "strategies/updater.py", "len({count for count, _ in everyone}) > 1 or", "False or", "test_world.py"),
]  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What came of a fault: "killed" by the test `detail`; "SURVIVED" or "BROKEN", and `detail` says why."""

    word: str
    detail: str
    commit: str
    seconds: float = 0.0


def verdict(mutant: Mutant, clean: Path, before: str, commit: str) -> Verdict:
    """Apply a fault in a copy of `clean` and run its tests, `before` (the test that noticed it the last time) first."""
    with copy_of(clean) as folder:
        file = folder / "rlkit" / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return Verdict("BROKEN", f"its line stands {text.count(mutant.old)} times in rlkit/{mutant.file}", commit)
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
        started = time.perf_counter()
        status, red, output = run_tests(folder, mutant.tests.split(), "-x", first=before)
        seconds = time.perf_counter() - started
    if status == pytest.ExitCode.TESTS_FAILED and red:
        return Verdict("killed", red[0], commit, seconds)
    if status == pytest.ExitCode.OK:
        return Verdict("SURVIVED", "no test turned red", commit, seconds)
    return Verdict("BROKEN", (output.strip().splitlines() or ["no output"])[-1], commit, seconds)


def red_without_a_fault(tests: list[str], clean: Path) -> list[str]:
    """Which of these tests would notice anything, since they are red in a copy without a fault; all, if they cannot be run."""
    with copy_of(clean) as folder:
        status, red, output = run_tests(folder, tests)
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return red
    print(output[-2000:])
    return tests


def clean_copy(folder: Path, tests: list[str]) -> Path:
    """What the tests need of this repository as it is now, compiled."""
    for name in ("rlkit", "tests", "notebooks", "tutorials"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    run_tests(folder, tests, "--collect-only")
    return folder


@contextmanager
def copy_of(clean: Path) -> Iterator[Path]:
    """A copy of it, with the times of its files, by which Python knows that what is compiled is of today."""
    with tempfile.TemporaryDirectory(dir=clean.parent, ignore_cleanup_errors=True) as name:
        yield shutil.copytree(clean, Path(name), dirs_exist_ok=True)


def run_tests(folder: Path, tests: list[str], *options: str, first: str = "") -> tuple[int | None, list[str], str]:
    """Run pytest on tests of a copy, in a fork of its own: exit status (None: it hung), the red tests, the output."""
    fork = multiprocessing.get_context("forkserver").Process(target=pytest_in, args=(folder, tests, options, first))
    fork.start()
    fork.join(PATIENCE)
    if fork.is_alive():
        fork.kill()
        return None, [], f"hung for {PATIENCE:.0f} seconds"
    found = folder / "red.json"
    red = json.loads(found.read_text(encoding="utf-8")) if found.exists() else []
    return fork.exitcode, red, (folder / "output.txt").read_text(encoding="utf-8", errors="replace")


def pytest_in(folder: Path, tests: list[str], options: tuple[str, ...], first: str) -> None:
    """The fork: pytest in `folder`, whose rlkit comes before any other; what it prints goes into a file there."""
    gc.freeze()  # what was imported before stays: not to be looked through again and again saves a third of the time
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.dont_write_bytecode = "--collect-only" not in options
    sys.path.insert(0, str(folder))
    with open("output.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    order = Order(first)
    arguments = "-q --tb=line --show-capture=no -p no:cacheprovider -o testpaths=tests".split()
    arguments += ["-m", TIERS, *options, *(f"tests/{name}" for name in tests)]
    status = pytest.main(arguments, plugins=[order])
    Path("red.json").write_text(json.dumps(order.red), encoding="utf-8")
    atexit._run_exitfuncs()  # multiprocessing leaves them out; rlkit ends its worker processes there
    sys.exit(status)


class Order:
    """A pytest plugin: one test goes first; which tests were red, without their parameters."""

    def __init__(self, first: str):
        self.first, self.red = first, []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: plain(item.nodeid) != self.first)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and plain(report.nodeid) not in self.red:
            self.red.append(plain(report.nodeid))


def plain(nodeid: str) -> str:
    """A test as the page names it: tests/test_step.py::test_any[RLOO-1] is test_step.py::test_any."""
    return nodeid.removeprefix("tests/").partition("[")[0]


def batches(chosen: list[Mutant], known: dict[str, Verdict], at_once: int) -> Iterator[list[tuple[Mutant, Verdict]]]:
    """The verdicts, a batch at a time; a test that is red without a fault notices none."""
    log = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", "rlkit", "tests"], cwd=ROOT, capture_output=True, text=True
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "rlkit", "tests"], cwd=ROOT, capture_output=True, text=True
    )
    commit = log.stdout.strip() + ("+" if changed.stdout else "")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ThreadPoolExecutor(at_once) as pool:
        clean = clean_copy(Path(name, "clean"), sorted({file for mutant in chosen for file in mutant.tests.split()}))
        for start in range(0, len(chosen), BATCH):
            some = chosen[start : start + BATCH]
            found = []
            before = [known[m.name].detail if m.name in known else "" for m in some]
            results = pool.map(lambda m, b: verdict(m, clean, b, commit), some, before)
            for mutant, result in zip(some, results, strict=True):
                print(f"{result.word:9} {result.seconds:5.1f} s  {mutant.name}: {result.detail}", flush=True)
                found.append((mutant, result))
            red = red_without_a_fault(sorted({v.detail for _, v in found if v.word == "killed"}), clean)
            if red:
                print(f"red without a fault: {', '.join(red)}")
            yield [
                (m, Verdict("BROKEN", f"{v.detail} is red without a fault", v.commit) if v.detail in red else v)
                for m, v in found
            ]


def read_page() -> dict[str, Verdict]:
    """The faults that docs/mutants.md shows as noticed, by their names."""
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    return {
        row[0]: Verdict("killed", row[2].strip("`"), row[3]) for row in rows[2:] if len(row) == 4 and "::" in row[2]
    }


def write_page(known: dict[str, Verdict]) -> None:
    """One row for each fault of the list, in its order."""
    noticed = sum(m.name in known for m in MUTANTS)
    lines = [HEADING.format(count=len(MUTANTS), noticed=noticed)]
    lines += ["| fault | in `rlkit/` | noticed first by `tests/` | commit |", "|---|---|---|---|"]
    for m in MUTANTS:
        test, commit = (f"`{known[m.name].detail}`", known[m.name].commit) if m.name in known else ("not noticed", "")
        lines.append(f"| {m.name} | `{m.file}` | {test} | {commit} |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run the mutants; 0 if every one was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only mutants whose name or file holds this text")
    parser.add_argument("--new", action="store_true", help="only mutants that docs/mutants.md does not show as noticed")
    parser.add_argument("-j", type=int, default=max(1, os.cpu_count() or 1), help="how many at once")
    arguments = parser.parse_args()
    known = read_page()
    wanted = arguments.k.lower()
    chosen = [m for m in MUTANTS if wanted in f"{m.name} {m.file}".lower() and not (arguments.new and m.name in known)]
    if not chosen:
        print("no fault to run")
        return 0 if arguments.new else 1
    os.environ |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    killed, started = 0, time.perf_counter()
    for batch in batches(chosen, known, arguments.j):
        for mutant, result in batch:
            known.pop(mutant.name, None)
            if result.word == "killed":
                known[mutant.name] = result
                killed += 1
        write_page(known)
    print(f"{killed} of {len(chosen)} faults were noticed, in {(time.perf_counter() - started) / 60:.0f} minutes")
    return 0 if killed == len(chosen) else 1


HEADING = """# Mutants

`make mutants` puts each of these one-line faults into a copy of rlkit, and a test must turn red: {noticed} of {count} were noticed. The page is
written by `scripts/mutants.py`, which keeps the rows that it did not run again. The last column is the commit whose code was tested (with + : and
changes since).
"""

if __name__ == "__main__":
    sys.exit(main())
