"""Oracles for sampling: the model's own logits of a single row, and the sampler's definition replayed in numpy."""

import contextlib

import numpy as np
import torch
from builders import completion_tokens

from rlkit.causal_lm import causal_lm_of
from rlkit.engines.token_sampler import uniform_noise
from rlkit.types import PromptBatch


def rows_of(rollout):
    """(prompt ids, completion ids) of each row, without padding."""
    prompts = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    return list(zip(prompts, completion_tokens(rollout), strict=True))


def groups_of(rollout):
    """Completions as tuples of ids, by group id, in the order of the rows."""
    groups = {}
    for group, (_, completion) in zip(rollout.group_id.tolist(), rows_of(rollout), strict=True):
        groups.setdefault(group, []).append(tuple(completion))
    return groups


def own_logits(model, prompt, completion):
    """(T,V) float64 logits before each completion token: one row, no padding, mask or cache, the model's own head."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion], device=model.device), use_cache=False).logits[0].double()
    for module in was_training:
        module.training = True
    return logits[len(prompt) - 1 : -1]


def own_logps(model, rollout):
    """(B,T) log-probabilities at the rollout's temperature by `own_logits`; 0 in masked slots."""
    result = torch.zeros(rollout.completion_ids.shape)
    for row, (prompt, completion) in enumerate(rows_of(rollout)):
        scores = (own_logits(model, prompt, completion) / rollout.sampling.temperature).log_softmax(-1)
        result[row, : len(completion)] = scores.gather(1, torch.tensor(completion)[:, None])[:, 0].float()
    return result


def allowed_scores(logits, before, step, params, eos_ids):
    """Scores of one step by definition; -inf cannot be drawn. Penalty, least length, temperature, k, p, min-p."""
    scores = np.array(logits, dtype=np.float64)
    for token in set(before):
        scores[token] = (
            scores[token] * params.repetition_penalty
            if scores[token] < 0
            else scores[token] / (params.repetition_penalty)
        )
    if step < params.min_completion_length:
        scores[list(eos_ids)] = -np.inf
    scores = scores / params.temperature
    if params.top_k:
        scores[scores < np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]] = -np.inf
    if params.top_p < 1:
        order, probability = np.argsort(-scores, kind="stable"), softmax(scores)
        mass_before = np.concatenate([[0.0], np.cumsum(probability[order])[:-1]])
        scores[order[mass_before >= params.top_p]] = -np.inf
    if params.min_p:
        probability = softmax(scores)
        scores[probability < params.min_p * probability.max()] = -np.inf
    return scores


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def inverse_transform(scores, u):
    """The first token at which the running sum of probabilities exceeds u."""
    running = 0.0
    for token, probability in enumerate(softmax(scores)):
        running += probability
        if running > u:
            return token
    return int(np.nonzero(np.isfinite(scores))[0][-1])


def replay(policy, rollout, *, seed):
    """Check every token, every ending and every length of a rollout against the definition, row by row."""
    params, tokenizer = rollout.sampling, policy.tokenizer
    seen = {}
    for row, (prompt, completion) in enumerate(rows_of(rollout)):
        group = int(rollout.group_id[row])
        g = seen[group] = seen.get(group, -1) + 1
        noise = uniform_noise(seed, [group], g + 1, params.max_completion_length)[g].tolist()
        logits = own_logits(policy.model, prompt, completion).numpy()
        ended = False
        for step, token in enumerate(completion):
            assert not ended, f"row {row} goes on after its end"
            scores = allowed_scores(logits[step], prompt + completion[:step], step, params, policy.eos_ids)
            assert token == inverse_transform(scores, noise[step]), f"row {row}, token {step}"
            text = tokenizer.decode(completion[: step + 1])
            ended = token in policy.eos_ids or any(text.endswith(stop) for stop in params.stop_strings)
        assert ended or len(completion) == params.max_completion_length, f"row {row} stops too early"
        assert bool(rollout.truncated[row]) == (not ended)


def pick(batch, places):
    """Some prompts of a batch, in the given order, with their group ids."""
    return PromptBatch(
        rows=tuple(batch.rows[i] for i in places),
        token_ids=tuple(batch.token_ids[i] for i in places),
        row_id=batch.row_id[places],
        group_id=batch.group_id[places],
    )


@contextlib.contextmanager
def forward_shapes(policy):
    """The (rows, tokens) of every forward pass of the policy's language model, seen by a real hook."""
    shapes = []
    lm = causal_lm_of(policy.model)
    hook = lm.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()


def p_value(observed, expected):
    """Chi-square goodness of fit: how likely so bad a fit is by chance. Neighbours are merged to 5 expected or more."""
    cells, count, mass = [], 0.0, 0.0
    for seen, hoped in zip(torch.as_tensor(observed).tolist(), torch.as_tensor(expected).tolist(), strict=True):
        count, mass = count + seen, mass + hoped
        if mass >= 5:
            cells.append([count, mass])
            count, mass = 0.0, 0.0
    cells[-1] = [cells[-1][0] + count, cells[-1][1] + mass]
    statistic = sum((seen - hoped) ** 2 / hoped for seen, hoped in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    assert len(cells) > 1, "too few samples for a test"
    return float(torch.special.gammaincc(half[0], half[1]))
