"""Every kind of reward function, on plain and on conversational prompts, in the process and under a time limit."""

import asyncio
import dataclasses
import functools

import pytest
import torch
from builders import make_rollout
from tolerances import EXACT

import rlkit as rl

TEXTS = ("3", "four", "", "<b>\x00\n")
WANT = [float(len(text)) for text in TEXTS]
PLAIN = make_rollout((3, 1, 2, 3), completions=TEXTS)
MESSAGES = make_rollout(
    (3, 1, 2, 3),
    prompts=[
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"{row}+1="}] for row in range(4)
    ],
    completions=[[{"role": "assistant", "content": text}] for text in TEXTS],
)
ROLLOUTS = {"plain": PLAIN, "messages": MESSAGES}


def size(completion):
    return float(len(rl.rewards.completion_text(completion)))


def sync(completions, **kwargs):
    return [size(c) for c in completions]


async def awaited(completions, **kwargs):
    await asyncio.sleep(0)
    return [size(c) for c in completions]


class Judge:
    def __init__(self):
        self.calls = 0

    def __call__(self, completions):
        return [size(c) for c in completions]

    def method(self, completions):
        return [size(c) for c in completions]

    @classmethod
    def of_class(cls, completions):
        return [size(c) for c in completions]

    @staticmethod
    def static(completions):
        return [size(c) for c in completions]

    async def async_method(self, completions):
        return [size(c) for c in completions]


class AsyncJudge:
    async def __call__(self, completions):
        await asyncio.sleep(0)
        return [size(c) for c in completions]


class AsyncOnce(AsyncJudge):
    """An object whose plain function gives an awaitable: what a decorator makes of an async function."""

    def plain(self, completions):
        return self(completions)


def scaled(completions, scale, offset=0.0):
    return [scale * size(c) + offset for c in completions]


async def async_scaled(completions, scale):
    return [scale * size(c) for c in completions]


def positional(completions, /):
    return [size(c) for c in completions]


def keyword_only(*, completions):
    return [size(c) for c in completions]


def defaults(completions, strict=False):
    return [size(c) for c in completions]


@functools.wraps(sync)
def wrapped(*args, **kwargs):
    return sync(*args, **kwargs)


@functools.lru_cache(maxsize=None)  # noqa: UP033
def anything():
    return tuple(WANT)


KINDS = {
    "function": sync,
    "lambda": lambda completions: [size(c) for c in completions],
    "positional only": positional,
    "keyword only": keyword_only,
    "with a default": defaults,
    "wrapped": wrapped,
    "object": Judge(),
    "bound method": Judge().method,
    "class method": Judge.of_class,
    "static method": Judge.static,
    "partial": functools.partial(scaled, scale=1.0),
    "partial of a partial": functools.partial(functools.partial(scaled, offset=0.0), scale=1.0),
    "partial of an object": functools.partial(Judge()),
    "built-in wrapper": anything,
    "async function": awaited,
    "async object": AsyncJudge(),
    "async method": Judge().async_method,
    "partial of async": functools.partial(async_scaled, scale=1.0),
    "partial of an async object": functools.partial(AsyncJudge()),
    "plain function that gives an awaitable": AsyncOnce().plain,
}


@pytest.mark.parametrize("form", ROLLOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_every_format(kind, form):
    """The oracle is the length of each text."""
    scores = rl.score(ROLLOUTS[form], KINDS[kind])
    torch.testing.assert_close(scores.reward, torch.tensor(WANT), **EXACT)


@pytest.mark.parametrize("form", ROLLOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_a_timeout(kind, form):
    """In a subprocess, in a thread or on the loop: the same rewards and no lost row."""
    scores = rl.score(ROLLOUTS[form], KINDS[kind], timeout=60.0)
    torch.testing.assert_close(scores.reward, torch.tensor(WANT), **EXACT)
    assert scores.metrics == {f"rewards/{scores.names[0]}/timeouts": 0.0}


def test_all_kinds_at_once_come_back_in_their_order():
    functions = [functools.partial(scaled, scale=float(k)) for k in range(6)]
    mixed = [awaited if k % 2 else function for k, function in enumerate(functions)]
    got = rl.score(PLAIN, mixed, timeout={"scaled_2": 60.0}).parts
    want = torch.tensor([[size * (1.0 if k % 2 else k) for k in range(6)] for size in WANT])
    torch.testing.assert_close(got, want, **EXACT)


def test_a_built_in_that_needs_something_else_says_what_it_was_offered():
    with pytest.raises(RuntimeError, match=r"'len' failed with TypeError: missing a required argument: 'obj'.*offered"):
        rl.score(PLAIN, len)


def test_what_a_partial_has_bound_is_not_overwritten_by_a_column():
    """A column of the same name as a bound argument."""
    rollout = make_rollout((1, 1), columns={"scale": (100.0, 100.0)}, completions=("a", "bb"))
    assert rl.score(rollout, functools.partial(scaled, scale=2.0)).reward.tolist() == [2.0, 4.0]


def test_group_ids_are_the_rollouts():
    """A function can see its whole group: rank within the group."""

    def rank_in_group(completions, group_ids):
        lengths = [len(c) for c in completions]
        return [
            float(sum(other < own for other, g in zip(lengths, group_ids, strict=True) if g == group))
            for own, group in zip(lengths, group_ids, strict=True)
        ]

    rollout = make_rollout((1,) * 6, completions=("aaa", "b", "cc", "d", "eee", "ff"), group_id=[7, 7, 7, 2, 2, 2])
    assert rl.score(rollout, rank_in_group).reward.tolist() == [2.0, 0.0, 1.0, 0.0, 2.0, 1.0]
    mixed = rollout.select([0, 3, 1, 4, 2, 5])  # groups are ids, not places
    assert rl.score(mixed, rank_in_group).reward.tolist() == [2.0, 0.0, 0.0, 2.0, 1.0, 1.0]


def test_constant_rewards_are_exact_zero_spread_and_none_is_skipped():
    """Mean and std of a function skip None; by hand, mean of 1 and 3 is 2 and their std is sqrt(2)."""
    scores = rl.score(PLAIN, lambda completions: [1.0, None, 3.0, None])
    metrics = rl.metrics.score_metrics(scores)
    assert metrics["rewards/lambda/mean"] == 2.0 and metrics["rewards/lambda/std"] == pytest.approx(2**0.5)


def test_an_empty_share_calls_nothing():
    """A rank without rows: nothing is called, and its metrics have the names of the other ranks'."""

    def never(completions):
        raise AssertionError("called")

    async def never_awaited(completions, a_column):  # which a share without rows does not have
        raise AssertionError("awaited")

    empty = PLAIN.select(slice(0, 0))
    scores = rl.score(empty, [never, never_awaited], timeout=5.0, on_error="none")
    assert scores.parts.shape == (0, 2)
    names = {f"rewards/{name}/{what}" for name in ("never", "never_awaited") for what in ("errors", "timeouts")}
    assert scores.metrics == dict.fromkeys(names, 0.0)


def test_shares_of_failures_are_joined_over_processes_by_rows():
    """1 of 3 rows here and 0 of 1 there are 1 of 4."""

    def picky(completions):
        return [1 / len(c) for c in completions]

    whole = make_rollout((1,) * 4, completions=("a", "", "b", "c"))
    scores = [rl.score(whole.select(rows), picky, on_error="none") for rows in ([0, 1, 2], [3])]
    joined = rl.Scores.join(scores)
    assert joined.metrics == {"rewards/picky/errors": 0.25}
    assert joined.extra["failures/picky"] == (None, "ZeroDivisionError: division by zero", None, None)


def test_an_empty_share_without_columns_asks_for_none():
    """With fewer prompts than processes one has no row, and so no column: a function that needs one is not called."""
    rollout = dataclasses.replace(make_rollout([1, 1]).select([]), columns={})
    scores = rl.score(rollout, lambda completions, answer: [1.0] * len(completions))
    assert len(scores) == 0 and scores.names == ("lambda",)
