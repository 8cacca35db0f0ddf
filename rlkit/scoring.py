"""`score`: call the reward functions on a rollout and check what they return.

A reward function gets TRL's keyword arguments (see `rlkit.reward_calls.arguments`) and returns one number or None per
completion. None (or NaN) means "no opinion": the function is left out of that row's sum. If all abstain the row has no
reward (NaN), which is not the same as a reward of 0.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlkit.reward_calls.arguments import Accepted, Offer, StepState, accepted, unique_names
from rlkit.reward_calls.call import Job, Outcome
from rlkit.reward_calls.concurrency import run_all
from rlkit.reward_calls.reward_model import RewardModel, as_reward_model
from rlkit.reward_calls.settings import Limits, OnError, RewardSettings
from rlkit.support import process_state
from rlkit.support.timing import phase
from rlkit.types import Rollout, Scores, text_of

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any] | str | os.PathLike[str] | nn.Module


@phase("score")
def score(
    rollout: Rollout,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    weights: Sequence[float] | None = None,
    clip_range: tuple[float, float] | None = None,
    timeout: float | Mapping[str, float] | None = None,
    on_timeout: float | None = None,
    on_error: OnError = "raise",
    memory: int | None = None,
    state: Any = None,
    settings: RewardSettings | None = None,
) -> Scores:
    r"""Score B completions with K reward functions.

    .. math:: R_i = \mathrm{clip}\Big(\sum_{k\ \text{not abstaining}} w_k \hat r_{ik}\Big)

    Async functions are awaited together. A function with a timeout or a memory limit runs in a subprocess that can be
    killed, if it can be pickled; what it changes in its own state then stays there. Docs: docs/rewards.md.

    Args:
        rollout: B completions.
        reward_funcs: one or K of: a function or other callable, plain or async; the name, folder or object of a
            sequence-classification model (see `RewardModel`).
        weights, clip_range, timeout, on_timeout, on_error, memory: see `RewardSettings`.
        state: passed to the functions as `trainer_state`; by default a `StepState` with the number of optimizer steps
            that the policy had taken when it drew the rollout, and the length of the `run.steps` loop around it.
        settings: the six settings as one object, instead of the keywords.

    Returns:
        `Scores` on the rollout's device. `extra["failures/NAME"]` says what went wrong in which row;
        `metrics["rewards/NAME/errors"]` and `.../timeouts` are shares of the completions.

    Raises:
        ValueError: no function, wrong number of weights, a bad limit or clip range; a function that returns another
            number of rewards than there are completions, or one that is infinite.
        TypeError: a function that returns something else than numbers, bools or None. Both name the function and row.
        RuntimeError: a reward function failed; its name, the completion on which it fails, and the original exception
            as the cause.

    Example:
        def short(completions, **kwargs):
            return [-len(text) for text in completions]

        scores = rl.score(rollout, [correct, short], weights=[1.0, 0.01], timeout={"correct": 5.0})
    """
    keywords = {"weights": weights, "clip_range": clip_range, "timeout": timeout, "on_timeout": on_timeout}
    settings = RewardSettings.merge(settings, keywords | {"on_error": on_error, "memory": memory})
    functions = _functions(reward_funcs)
    names = unique_names(functions)
    weight = torch.tensor(settings.weights_of(names), dtype=torch.float32)
    models = {name for name, function in zip(names, functions, strict=True) if isinstance(function, RewardModel)}
    limits = settings.limits(names, unlimited=models)
    offer = Offer(rollout, StepState(rollout.policy_version, process_state.loop.max_steps) if state is None else state)
    jobs = [_job(*each, offer) for each in zip(functions, names, limits, strict=True)]
    # A process without a share of the step calls nothing.
    outcomes = run_all(jobs) if len(rollout) else [Outcome(job) for job in jobs]

    parts = torch.tensor([outcome.values for outcome in outcomes], dtype=torch.float32).T.contiguous()
    reward = weighted_sum(parts, weight)
    if settings.clip_range is not None:
        reward = reward.clamp(*settings.clip_range)
    for outcome in outcomes:
        outcome.report()
    _warn_about_unscored(reward, rollout, bool((weight == 0).any()))
    device = rollout.completion_ids.device
    return Scores(
        parts=parts.to(device),
        names=names,
        weights=weight.to(device),
        reward=reward.to(device),
        group_id=rollout.group_id,
        extra=_columns(outcomes),
        metrics=_numbers(outcomes),
    )


def weighted_sum(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(B,) weighted sum over the functions that did not abstain; NaN where all did.

    A function of weight 0 is a metric: its answer alone does not make a row scorable.

    Example:
        >>> nan = float("nan")
        >>> weighted_sum(torch.tensor([[1.0, nan], [nan, nan]]), torch.tensor([0.5, 1.0]))
        tensor([0.5000,    nan])
    """
    # In float64, rounded once: equal sums of the same parts in another order are equal rewards.
    total = torch.where(parts.isnan(), 0.0, parts.double() * weights.double()).sum(-1).to(parts.dtype)
    return torch.where((parts.isnan() | (weights == 0)).all(-1), math.nan, total)


def _functions(reward_funcs: Any) -> list[Any]:
    single = isinstance(reward_funcs, (str, nn.Module)) or not isinstance(reward_funcs, Sequence)
    functions = [reward_funcs] if single else list(reward_funcs)
    if not functions:
        raise ValueError("score: expected at least one reward function, got an empty list.")
    for place, function in enumerate(functions):
        if isinstance(function, (str, os.PathLike, nn.Module)):
            functions[place] = as_reward_model(function)
        elif isinstance(function, type):
            raise TypeError(f"score: {function.__name__} is a class; pass an object of it, {function.__name__}().")
        elif not callable(function):
            raise TypeError(f"score: expected a reward function, got {type(function).__name__}: {function!r}.")
    return functions


def _job(function: Any, name: str, limits: Limits, offer: Offer) -> Job:
    if not len(offer):  # a share without rows does not know the dataset's columns, and calls nothing
        return Job(function, name, Accepted((), ()), offer, limits)
    try:
        takes = accepted(function, offer.names)
    except TypeError as error:
        offered = ", ".join(sorted(offer.names))
        raise RuntimeError(
            f"score: reward function {name!r} failed with TypeError: {error}. It was offered: {offered}."
        ) from error
    return Job(function, name, takes, offer, limits)


def _columns(outcomes: Sequence[Outcome]) -> dict[str, tuple[Any, ...]]:
    columns = {name: tuple(values) for outcome in outcomes for name, values in outcome.log.columns.items()}
    failures = {f"failures/{outcome.job.name}": tuple(outcome.failures()) for outcome in outcomes}
    return columns | {name: texts for name, texts in failures.items() if any(texts)}


def _numbers(outcomes: Sequence[Outcome]) -> dict[str, float]:
    logged: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, values in outcome.log.numbers.items():
            logged.setdefault(name, []).extend(values)
    numbers = {name: sum(values) / len(values) for name, values in logged.items()}
    for outcome in outcomes:
        numbers |= outcome.metrics()
    return numbers


def _warn_about_unscored(reward: torch.Tensor, rollout: Rollout, some_are_metrics: bool) -> None:
    unscored = reward.isnan().nonzero().flatten().tolist()
    if not unscored:
        return
    row = unscored[0]
    columns = {name: values[row] for name, values in rollout.columns.items()}
    everything = len(unscored) == len(rollout)
    logger.warning(
        "score: every reward function%s returned None for %s of %d completions%s. The first one: prompt %r, "
        "completion %r, columns %s.",
        " with a weight other than 0" if some_are_metrics else "",
        "ALL" if everything else len(unscored),
        len(rollout),
        ", so this step has nothing to learn from" if everything else "; they take no part in baseline and update",
        text_of(rollout.prompts[row])[-200:],
        text_of(rollout.completions[row])[:200],
        {name: str(value)[:80] for name, value in columns.items()},
    )
