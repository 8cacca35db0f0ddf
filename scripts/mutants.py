# ruff: noqa: E501 - one fault a line reads as a table
"""Apply one-line faults to a copy of rlkit, one at a time; a test must turn red for each.

    make mutants                      all of them, about 10 minutes on 2 cores; writes docs/mutants.md
    make mutants ARGS='-k kl'         those whose name holds "kl"; writes nothing

A fault that no test notices, or whose line is no longer in the code, makes the command fail.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` (which must stand there exactly once) becomes `new`; `tests` should notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


ROWS, ROLLOUTS, READER, LINES = "run/rows.py", "run/rollouts.py", "run/reader.py", "run/lines.py"
ADV, LOSS, STEP, LOGPS = "advantages.py", "losses.py", "step.py", "logps.py"
DECODE, CHOOSE = "sampling/decode.py", "sampling/choose.py"
DRAW, ASSEMBLE = "sampling/draw.py", "sampling/assemble.py"
SAMPLING = "sampling"
EXPORT = "export/test_scripts.py export/test_codes.py export/test_wild.py export/test_flags.py"

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
    Mutant("V* - r for r - V*", ADV, "advantage = reward - v_star.detach().to(reward)", "advantage = v_star.detach().to(reward) - reward", "test_advantages.py"),
    Mutant("KL counts masked tokens", ADV, "delta = torch.where(mask, logp.detach().to(dtype) - ref_logps.detach().to(dtype), 0.0)", "delta = logp.detach().to(dtype) - ref_logps.detach().to(dtype)", "test_advantages.py"),
    Mutant("k3 with the sign of the ratio turned", ADV, "torch.expm1(-delta) + delta", "torch.expm1(delta) - delta", "test_advantages.py"),
    Mutant("max for min in the clipped loss", LOSS, "-torch.minimum(ratio * advantages", "-torch.maximum(ratio * advantages", "test_losses.py"),
    Mutant("loss with the wrong sign", LOSS, "loss = -torch.minimum", "loss = torch.minimum", "test_losses.py"),
    Mutant("epsilon_high ignored", LOSS, "return 1 - epsilon, 1 + high", "return 1 - epsilon, 1 + epsilon", "test_losses.py"),
    Mutant("log-ratio not bounded", LOSS, ".clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()", ".exp()", "test_losses.py"),
    Mutant("loss counts masked tokens", LOSS, "kept = torch.where(mask, logp.to(dtype), 0.0) - torch.where(mask, other.to(dtype), 0.0)", "kept = logp.to(dtype) - other.to(dtype)", "test_losses.py"),
    Mutant("token mean for sum", LOSS, "return kept.sum(-1)", "return kept.sum(-1) / mask.sum(-1).clamp(min=1)", "test_losses.py"),
    Mutant("A*-PO's target with the wrong sign", LOSS, "(implicit - advantages).square()", "(implicit + advantages).square()", "test_losses.py"),
    Mutant("clip ratio counts rows that are not clipped", LOSS, "(ratio < low) & (x.advantages < 0)", "(ratio < low)", "test_losses.py test_step.py"),
    # log-probabilities
    Mutant("temperature forgotten in the log-probabilities", LOGPS, "logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature", "logits = logits.to(torch.promote_types(logits.dtype, torch.float32))", "test_step.py sampling"),
    Mutant("off by one: each token scored by its own position", LOGPS, ".last_hidden_state[rows, columns - 1]", ".last_hidden_state[rows, columns]", "test_step.py sampling"),
    Mutant("dropout left on", LOGPS, "    model.eval()\n    for module in model.modules():", "    for module in model.modules():", "test_step.py"),
    Mutant("layerdrop left on", LOGPS, 'if "drop" in name and', 'if "dropout" in name and', "test_step.py"),
    Mutant("mode not restored", LOGPS, "for module in was_training:\n            module.training = True", "for module in was_training:\n            pass", "test_step.py test_policy.py"),
    Mutant("entropy without its normaliser", LOGPS, "return logp, normaliser - expected", "return logp, -expected", "test_step.py"),
    # the loop
    Mutant("mean of means over micro-batches", STEP, ".sum() / totals.rows", ".sum() / x.mask.any(-1).sum()", "test_step.py"),
    Mutant("token mean per micro-batch", STEP, ".sum() / totals.tokens", ".sum() / x.mask.sum()", "test_step.py"),
    Mutant("masked rows in the divisor", STEP, '"rows": float(mask.any(-1).sum())', '"rows": float(len(mask))', "test_step.py"),
    Mutant("truncated completions not masked", STEP, "mask = mask & ~rollout.truncated.to(device)[:, None]", "pass", "test_step.py"),
    Mutant("rows without a target in the loss", STEP, "rollout.completion_mask.to(device) & ~advantages.isnan()[:, None]", "rollout.completion_mask.to(device)", "test_step.py"),
    Mutant("old log-probabilities with gradient", STEP, "old_logps.to(device)).detach(), 0.0)", "old_logps.to(device)), 0.0)", "test_step.py"),
    Mutant("old log-probabilities recomputed", STEP, "(scores.logp if old_logps is None else old_logps.to(device))", "scores.logp", "test_step.py"),
    Mutant("gradients of an earlier step kept", STEP, "    updater = updater_of(policy, optimizer)\n    updater.zero_grad()\n", "    updater = updater_of(policy, optimizer)\n", "test_step.py"),
    Mutant("policy version not counted", STEP, "policy.version += 1", "policy.version += 0", "test_step.py"),
    Mutant("gradient not clipped", STEP, "updater.clip(math.inf if max_grad_norm is None else max_grad_norm)", "updater.clip(math.inf)", "test_step.py"),
    Mutant("NaN loss stepped", STEP, "if not math.isfinite(value):", "if False:", "test_step.py"),
    # the sampler
    Mutant("end token dropped", DECODE, "lengths[rows[ended | stopped]] = step + 1", "lengths[rows[ended | stopped]] = max(step, 1)", SAMPLING),
    Mutant("only one end token known", DECODE, "eos_ids = torch.tensor(policy.eos_ids, device=device)", "eos_ids = torch.tensor(policy.eos_ids[:1], device=device)", SAMPLING),
    Mutant("sampled without the temperature", CHOOSE, "self.processors(so_far, scores / self.params.temperature)", "self.processors(so_far, scores)", SAMPLING),
    Mutant("sampler's log-probability without the temperature", CHOOSE, "return token, tempered.log_softmax(-1)", "return token, logits.log_softmax(-1)", SAMPLING),
    Mutant("sampler's log-probability of the truncated distribution", CHOOSE, "return token, tempered.log_softmax(-1)", "return token, scores.log_softmax(-1)", SAMPLING),
    Mutant("positions off by one", DECODE, "    position = mask.sum(-1)\n", "    position = mask.sum(-1) + 1\n", SAMPLING),
    Mutant("every group gets the same noise", DRAW, "SeedSequence([*seed_words(seed), *seed_words(group), g])", "SeedSequence([*seed_words(seed), g])", SAMPLING),
    Mutant("every completion of a group gets the same noise", DRAW, "SeedSequence([*seed_words(seed), *seed_words(group), g])", "SeedSequence([*seed_words(seed), *seed_words(group)])", SAMPLING),
    Mutant("tied head left out of the weights", "engines/weights.py", "in module.named_parameters(remove_duplicate=False):", "in module.named_parameters():", "engines/test_weights.py"),
    Mutant("adapter not merged", "engines/weights.py", "        twin.merge()\n", "        twin.eval()\n", "engines/test_weights.py"),
    Mutant("merged in place", "engines/weights.py", "twin = copy.deepcopy(layer)", "twin = layer", "engines/test_weights.py"),
    Mutant("a stale engine draws", "sampling/sample.py", "    sync(engine)\n    completions", "    completions", "engines/test_sync.py"),
    Mutant("truncated log-probabilities kept", "sampling/sample.py", "if not engine.renormalises(params):", "if True:", "engines/test_sync.py"),
    Mutant("prefix cache kept after a load", "engines/lifecycle.py", '        self._wake("kv_cache")\n        self._forget_cache()\n', '        self._wake("kv_cache")\n', "engines/test_lifecycle.py"),
    Mutant("asleep while loading", "engines/lifecycle.py", '        self._wake("weights")\n        load()', "        load()", "engines/test_lifecycle.py"),
    Mutant("a failed load counts", "engines/lifecycle.py", 'self.version, self.trouble = None, "the last transfer of weights failed"', 'self.trouble = ""', "engines/test_lifecycle.py"),
    Mutant("cut-off completions accepted", "engines/requests.py", 'not in ("stop", "length")', 'in ()', "engines/test_requests.py"),
    Mutant("continuous batching: noise of another position", "engines/chosen.py", "self._noise[belongs, steps]", "self._noise[belongs, steps * 0]", "engines/test_continuous.py"),
    Mutant("continuous batching: attention not put back", "engines/continuous.py", "        if lm.config._attn_implementation != attention:\n", "        if False:\n", "engines/test_continuous.py"),
    Mutant("continuous batching: random state not put back", "engines/continuous.py", "    with torch.random.fork_rng(devices=devices):\n", "    with contextlib.nullcontext(devices):\n", "engines/test_continuous.py"),
    Mutant("continuous batching: float32 under mixed precision", "engines/continuous.py", "    if policy.autocast is None:\n        yield", "    if True:\n        yield", "engines/test_continuous.py"),
    Mutant("the probe asks at another temperature", "engines/probe.py", "(1.0 if raw else TEMPERATURE)", "1.0", "engines/test_sync.py"),
    Mutant("tokens of probability 0 drawn", DRAW, "right=True)", "right=False)", SAMPLING),
    Mutant("mask from the pad id", ASSEMBLE, "torch.arange(width) < lengths[:, None]", "ids.reshape(len(tokens), width) != pad_id", SAMPLING),
    Mutant("truncated flag turned", ASSEMBLE, 'c.finish_reason == "length"', 'c.finish_reason != "length"', SAMPLING),
    Mutant("end ids of the configs ignored", "policy.py", "for value in [tokenizer.eos_token_id, *(getattr(config, \"eos_token_id\", None) for config in configs if config)]:", "for value in [tokenizer.eos_token_id]:", "test_policy.py"),
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
    Mutant("a replaced log read on", LINES, "anew = handle.read(len(self._tail)) != self._tail", "anew = len(handle.read(len(self._tail))) != len(self._tail)", "run/test_reader.py"),
    Mutant("a metric that pauses moves up", READER, 'column.extend(array("d", [ABSENT]) * (before - len(column)))', "pass", "run/test_reader.py"),
    # prompts, rewards, V*, run
    Mutant("None counted as 0", "rewards/returned.py", "        return math.nan\n", "        return 0.0\n", "test_score.py"),
    Mutant("rows known by their prompt alone", "prompts/identity.py", "json.dumps(row, sort_keys", 'json.dumps(row["prompt"], sort_keys', "test_vstar.py test_prompts.py"),
    Mutant("every epoch in the same order", "prompts/supply.py", '{"prompt": [self.seed, epoch]}', '{"prompt": [self.seed]}', "test_prompts.py"),
    Mutant("two beginning-of-sequence tokens", "prompts/tokens.py", "special=not templated", "special=True", "test_prompts.py"),
    Mutant("position not restored", "prompts/loader.py", 'state["epoch"], state["position"], state["served"]', 'state["epoch"], 0, state["served"]', "test_prompts.py"),
    Mutant("truncation drops the beginning-of-sequence token", "prompts/lengths.py", "return front + list(ids[len(ids) - (self.limit - len(front)) :])", "return list(ids[len(ids) - self.limit :])", "prompts/test_conversations.py"),
    Mutant("a resumed stream begins anew", "prompts/supply.py", "itertools.islice(rows, position, None)", "itertools.islice(rows, 0, None)", "prompts/test_sources.py"),
    Mutant("groups without signal kept", "groups.py", "((high - low) > tolerance)[group]", "((high - low) >= 0)[group]", "test_groups.py"),
    Mutant("one accepted group lost", "groups.py", "kept = set(accepted[:groups])", "kept = set(accepted[: groups - 1])", "test_groups.py"),
    Mutant("pass@k with replacement", "passing.py", "1 - math.comb(n - c, k) / math.comb(n, k)", "1 - (1 - c / n) ** k", "test_evaluate.py"),
    Mutant("before and after not paired", "comparison.py", "change = (new - old)[both]", "change = (new - old.flip(0))[both]", "test_evaluate.py"),
    Mutant("gold and answer swapped", "rewards/math_worker.py", "verify(gold=gold, target=answer, timeout_seconds=None)", "verify(gold=answer, target=gold, timeout_seconds=None)", "rewards/test_accuracy.py"),
    Mutant("an open box counts", "rewards/answers.py", "found = text[start : match.start()]", "found = text[start:]", "rewards/test_answers.py"),
    Mutant("weights ignored", "rewards/score.py", "parts * weights)", "parts)", "test_score.py"),
    Mutant("wrong number of rewards accepted", "rewards/returned.py", "if len(returned) != count:", "if False:", "test_score.py"),
    Mutant("a hanging completion takes its siblings along", "rewards/isolate.py", "    if len(units) == 1 or (isinstance(why, TimedOut) and not caller.killable):", "    if True:", "rewards/test_limits.py"),
    Mutant("groups split when tried again", "rewards/arguments.py", "        if not by_group:", "        if True:", "rewards/test_limits.py"),
    Mutant("errors not counted", "rewards/job.py", "len(self.errors) / count", "0.0 / count", "rewards/test_limits.py"),
    Mutant("memory not limited", "rewards/worker_main.py", "        soft = used + extra if hard == resource.RLIM_INFINITY else min(used + extra, hard)", "        pass", "rewards/test_limits.py"),
    Mutant("async rewards awaited in turn", "rewards/isolate.py", "        return list(await asyncio.gather(*tasks))", "        return [await run_async(job) for job in jobs]", "rewards/test_async.py"),
    Mutant("reward model padded on the left", "rewards/reward_model.py", 'padding_side="right"', 'padding_side="left"', "rewards/test_reward_model.py"),
    Mutant("pad id of the reward model's config not in step", "rewards/reward_model.py", "    config.pad_token_id = pad_id\n", "    pass\n", "rewards/test_reward_model.py"),
    Mutant("dropout of the reward model left on", "rewards/reward_model.py", "    model.eval()\n", "", "rewards/test_reward_model.py"),
    Mutant("a column overwrites what a partial has bound", "rewards/arguments.py", "    names = [name for name in offered if name not in _bound(function)]", "    names = list(offered)", "rewards/test_kinds.py"),
    Mutant("unsolved decided by the sum", "vstar/table.py", "torch.where(self.rewards.isnan(), -math.inf, self.rewards).amax(-1) > self.success_threshold", "self.rewards.nansum(-1) != 0", "test_vstar.py"),
    Mutant("one NaN wipes an average", "metrics.py", "if value is not None and not math.isnan(value)]", "if value is not None]", "test_metrics.py"),
    Mutant("interrupt in the middle of a step", "run/stopping.py", '        self.reason = "interrupted"\n', "        raise KeyboardInterrupt\n", "test_run.py"),
    Mutant("an earlier run written over", "run/folder.py", "while folder.exists() and any(folder.iterdir()):", "while False:", "test_run.py"),
    # notebook to script
    Mutant("notebook-only cells exported", "export/tags.py", '"remove-cell": "notebook-only",', '"remove-cell": "loop",', EXPORT),
    Mutant("tag in a comment not seen", "export/tags.py", 'return [] if words[:1] == ["ok"] else [_plain(word) for word in words]', "return []", EXPORT),
    Mutant("magic left out that changes the program", "export/magics.py", "if name in DROPPED and all(argument in wanted for argument in arguments):", "if True:", EXPORT),
    Mutant("lines shift where a magic stood", "export/magics.py", '[stand_in + "\\n"] + ["#\\n"] * (span - 1)', '[stand_in + "\\n"]', EXPORT),
    Mutant("await left in the script", "export/awaits.py", 'edits += [(begin, after, CALL.encode()), (end, end, b")")]', "pass", EXPORT),
    Mutant("await by characters, not bytes", "export/awaits.py", "starts.append(starts[-1] + len(line) + 1)", "starts.append(starts[-1] + len(line.decode()) + 1)", EXPORT),
    Mutant("what may depend on time moves up", "export/placement.py", "return root(node) not in TIMED", "return True", EXPORT),
    Mutant("function that needs run cells at module level", "export/placement.py", "        self._put_back()\n", "", EXPORT),
    Mutant("text inside a string indented", "export/writing.py", "if number not in code.inside_strings:", "if True:", EXPORT),
    Mutant("hash without tags", "export/writing.py", "[cell.cell.source, sorted(cell.cell.roles)]", "[cell.cell.source]", EXPORT),
    Mutant("guard left out", "export/writing.py", "'if __name__ == \"__main__\":', INDENT + start]", "'if True:', INDENT + start]", EXPORT),
    Mutant("parameter given twice", "export/parameters.py", "if isinstance(one, Declared) and one.name in declared:", "if False:", EXPORT),
    Mutant("unknown name in a config file ignored", "flags.py", "        if name not in known:\n            raise ValueError", "        if name not in known:\n            continue\n            raise ValueError", "export/test_flags.py"),
    Mutant("config file above the command line", "flags.py", "values |= {name: value for name, value in vars(given).items() if name in known}", "values = {name: value for name, value in vars(given).items() if name in known} | values", "export/test_flags.py"),
    Mutant("commands of an earlier loop obeyed", "run/controls.py", "len(before), before.count", "0, before.count", "run/test_controls.py"),
    Mutant("a pause that does not hold", "run/loop.py", "if run.stopped is not None or not self._paused:", "if True:", "run/test_controls.py"),
    Mutant("a number without its bounds", "run/controls.py", "if (low is not None and value < low) or", "if False and", "run/test_controls.py run/test_knobs.py"),
    Mutant("a live change lost by a restart", "run/knobs.py", 'notes += self._take_over(name, saved["value"])', "pass", "run/test_knobs.py"),
    Mutant("a line that did not fit stays in the log", "run/folder.py", "handle.truncate(end)", "pass", "run/test_damage.py"),
    Mutant("a deleted folder made anew", "run/folder.py", "if not folder.is_dir():", "if False:", "run/test_damage.py"),
    Mutant("changes after a checkpoint lost", "run/changes.py", "if change.step >= step]", "if False]", "run/test_knobs.py"),
    Mutant("an old change after a newer one", "run/changes.py", "change.step + 1)", "10**9)", "run/test_knobs.py"),
    Mutant("a zombie holds its lock", "run/folder.py", 'not in (b"Z", b"X")', 'not in ()', "run/test_damage.py"),
    Mutant("the background loop without the cell's grad mode", "run/background.py", "stack.enter_context(torch.set_grad_enabled(grad))", "pass", "run/test_background.py"),
    Mutant("a phase inside a phase counted twice", "timing.py", "if _clock.busy:", "if False:", "run/test_controls.py"),
    # the view
    Mutant("view: the mean of the others holds the row itself", "view/arithmetic.py", "values - (total - values) / (count - 1)", "values - total / count", "view/test_data.py"),
    Mutant("view: any advantage is called leave-one-out", "view/arithmetic.py", "return bool(np.all(np.abs(left - right) <= TOLERANCE * size)) if len(left) else True", "return True", "view/test_data.py"),
    Mutant("view: looks that nobody pays for", "view/budget.py", "+ seconds / SHARE", "+ seconds", "view/test_budget.py"),
    Mutant("view: waiting for a core pays for looks", "view/budget.py", "passed - waited)", "passed)", "view/test_budget.py"),
    Mutant("view: masked tokens set the scale", "view/lens.py", "used = np.abs(sizes[counts & np.isfinite(sizes)])", "used = np.abs(sizes[np.isfinite(sizes)])", "view/test_data.py"),
    Mutant("view: credit forgets the sign of the advantage", "view/lens.py", "advantage * (new - before)", "abs(advantage) * (new - before)", "view/test_data.py"),
    Mutant("view: NaN in an answer", "view/values.py", 'return "NaN" if math.isnan(value) else', "return value if math.isnan(value) else", "view/test_data.py view/test_panel.py"),
    Mutant("view: a cut text hides its length", "view/values.py", '"length": len(text)}', '"length": limit}', "view/test_data.py"),
    Mutant("view: a closed panel stays alive", "view/panel.py", "layout.close()", "layout.open()", "view/test_panel.py"),
    # vLLM as a server
    Mutant('server: prefix cache not reset', 'engines/handover.py', 'if not remote.call("POST", "/reset_prefix_cache")["success"]:', 'if False:', 'engines/test_server_client.py'),
    Mutant("server: not resumed after a failed load", "engines/handover.py", 'remote.call("POST", "/resume", deadline=min(RESUME_SECONDS, remote.deadline))', "pass", "engines/test_server_client.py"),
    Mutant('server: weights of another client not noticed', 'engines/server.py', 'elif found != self._tag(self._version):', 'elif False:', 'engines/test_server_client.py'),
    Mutant('server: a restart not noticed', 'engines/server.py', '            if found == FRESH:\n                fresh = True', '            if found == FRESH:\n                fresh = False', 'engines/test_server_client.py'),
    Mutant('server: valid after a failed sync', 'engines/server.py', 'self.distrust("the last transfer of weights failed")', 'pass', 'engines/test_server_client.py'),
    Mutant('server: completions cut off are kept', 'engines/requests.py', 'if finish_reason not in ("stop", "length"):', 'if finish_reason is None:', 'engines/test_server_client.py'),
    Mutant('server: a changed prompt accepted', 'engines/completions.py', 'if seen is not None and list(seen) != list(prompt):', 'if False:', 'engines/test_server_client.py'),
    Mutant('server: completions in the order of arrival', 'engines/completions.py', 'choices = sorted(answer["choices"], key=lambda choice: choice["index"])', 'choices = answer["choices"]', 'engines/test_server_client.py'),
    Mutant('server: silence is patience', 'engines/completions.py', 'if left <= 0:', 'if False:', 'engines/test_server_client.py'),
    Mutant('server: another dtype accepted', 'engines/attach.py', 'if server.dtype not in fitting:', 'if False:', 'engines/test_server_client.py'),
    Mutant('server: the proxy of the environment asked', 'engines/remote.py', '                trust_env=False,\n', '                trust_env=True,\n', 'engines/test_server_client.py'),
    Mutant("a process without a share is asked for columns", 'rewards/score.py', 'if not len(offer):', 'if False:', 'rewards/test_kinds.py'),
    Mutant('files of a living process deleted', 'engines/leftovers.py', ' or Path("/proc", number).exists():', ':', 'engines/test_leftovers.py'),
    Mutant("files of another container's process deleted", 'engines/leftovers.py', 'os.stat(NAMESPACE).st_ino if NAMESPACE.exists() else 0', '0', 'engines/test_leftovers.py'),
    Mutant('server: what a killed server leaves stays', 'engines/supervise.py', 'os.killpg(child.pid, signal.SIGKILL)', 'pass', 'engines/test_serve.py'),
    Mutant('server: outlives the process that asked', 'engines/supervise.py', 'if parent is not None and os.getppid() != parent:', 'if False:', 'engines/test_serve.py'),
    Mutant('server: sampling defaults of the checkpoint', 'engines/server_settings.py', '"generation-config": "vllm",', '"generation-config": "auto",', 'engines/test_serve.py'),
]  # fmt: skip


def run_one(mutant: Mutant, workspace: Path) -> tuple[str, str, float]:
    """Apply a fault in a fresh copy and run its tests: ("killed", first red test) or ("SURVIVED"/"BROKEN", why)."""
    copy = fresh_copy(workspace)
    file = copy / "rlkit" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return "BROKEN", f"its line stands {text.count(mutant.old)} times in rlkit/{mutant.file}", 0.0
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    started = time.perf_counter()
    status, output = run_tests(copy, mutant.tests.split())
    seconds = time.perf_counter() - started
    shutil.rmtree(copy)
    if status == 1:
        red = next((line.split(" ")[1] for line in output.splitlines() if line.startswith("FAILED ")), "?")
        return "killed", red.removeprefix("tests/"), seconds
    if status == 0:
        return "SURVIVED", "no test turned red", seconds
    return "BROKEN", output.strip().splitlines()[-1], seconds


def fresh_copy(workspace: Path) -> Path:
    """What the tests need of this repository, in a folder of its own."""
    copy = Path(tempfile.mkdtemp(dir=workspace))
    for folder in ("rlkit", "tests", "notebooks", "tutorials"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def red_without_a_fault(tests: list[str], workspace: Path) -> str:
    """Tests that fail in a copy without a fault would notice anything: the end of their output, or nothing."""
    status, output = run_tests(fresh_copy(workspace), tests)
    return output[-2000:] if status else ""


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Run pytest on some test files of a copy, stopping at the first red one."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "testpaths=tests"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in tests)], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    """Run the mutants; 0 if every one was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only mutants whose name holds this text")
    parser.add_argument("-j", type=int, default=max(1, os.cpu_count() or 1), help="how many at once")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.k.lower() in mutant.name.lower()]
    if not chosen:
        print(f"no fault's name holds {arguments.k!r}")
        return 1
    rows, bad = [], 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.j) as pool:
        files = sorted({file for mutant in chosen for file in mutant.tests.split()})
        if output := red_without_a_fault(files, Path(name)):
            print(f"{output}\nThe tests are not green without a fault; see above.")
            return 1
        results = pool.map(lambda mutant: run_one(mutant, Path(name)), chosen)
        for mutant, (verdict, detail, seconds) in zip(chosen, results, strict=True):
            print(f"{verdict:9} {seconds:5.1f} s  {mutant.name}: {detail}", flush=True)
            bad += verdict != "killed"
            rows.append(f"| {mutant.name} | `{mutant.file}` | `{detail}` |")
    print(f"{len(chosen) - bad} of {len(chosen)} faults were noticed")
    if not arguments.k and not bad:
        table = ["| fault | in `rlkit/` | noticed first by `tests/` |", "|---|---|---|", *rows]
        text = PAGE.format(count=len(chosen), table="\n".join(table))
        (ROOT / "docs" / "mutants.md").write_text(text, encoding="utf-8")
    return 1 if bad else 0


PAGE = """# Mutants

Each of these {count} one-line faults was put into a copy of rlkit by `make mutants`, and a test turned red. The page is written by
`scripts/mutants.py`; a fault that no test notices makes the command fail.

{table}
"""

if __name__ == "__main__":
    sys.exit(main())
