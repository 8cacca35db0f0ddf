"""Dynamic sampling: groups that teach are kept whole, nothing accepted is lost, and no search is endless."""

import itertools

import pytest
import torch
from builders import make_rollout, make_scores, tiny_policy
from hypothesis import given
from hypothesis import strategies as st

import rlkit as rl
from rlkit.dynamic_sampling import informative_rows
from rlkit.metrics import frac_zero_std

ROWS = [{"prompt": f"{row}+1=", "likes": "0123456789"[row % 3 :: 3]} for row in range(12)]


def liked(completions, likes, **kwargs):
    return [float(text[:1] in like) for text, like in zip(completions, likes, strict=True)]


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1, 1, 0, 1], [2, 3]),
        ([1, 1, 0, 0], []),
        ([None, 1, 0, 1], [2, 3]),  # one reward cannot differ from another
        ([None, None, 0, 1], [2, 3]),
        ([None, None, None, None], []),
        ([-1, 1, 0.5, 0.5], [0, 1]),  # the sum is 0, and yet there is something to learn
        ([0, 1e-9, 0, 1e-3], [2, 3]),
    ],
)
def test_groups_are_kept_if_two_rewards_differ(rewards, kept):
    scores = make_scores(rewards, group_id=[7, 7, -2, -2])
    rollout = make_rollout(group_id=[7, 7, -2, -2])
    assert informative_rows(scores).nonzero().flatten().tolist() == kept
    some, some_scores = rl.drop_uninformative_groups(rollout, scores)
    assert some.group_id.tolist() == some_scores.group_id.tolist() == [[7, 7, -2, -2][row] for row in kept]
    assert some.completions == tuple(rollout.completions[row] for row in kept)
    assert some_scores.parts.shape == (len(kept), 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, None])), min_size=1, max_size=12))
def test_what_is_dropped_has_advantage_0_and_what_is_kept_has_not(rows):
    """The oracle is the advantage itself, whatever the order and size of the groups."""
    scores = make_scores([reward for _, reward in rows], group_id=[group for group, _ in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *a, **k: None)
        try:
            advantages = rl.compute_loo_advantage(scores)
        except ValueError:  # every group has one row
            advantages = torch.zeros(len(rows))
    informative = informative_rows(scores)
    assert not advantages[~informative].any()
    for group in set(scores.group_id[informative].tolist()):
        assert advantages[scores.group_id == group].abs().max() > 0


def test_scores_of_another_rollout_are_refused():
    with pytest.raises(ValueError, match=r"the scores \(4 rows\) are not those of the rollout \(4 rows\)"):
        rl.drop_uninformative_groups(make_rollout(), make_scores([1, 0, 1, 0]))
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        informative_rows(make_scores([1, 0]), tolerance=-1)


def test_with_two_generations_most_groups_are_silent():
    """p = 0.1819 and G = 2 leave p^2 + (1-p)^2 = 0.702 of the groups without signal; the metric counts them.

    200,000 groups: the standard error is 0.001, the bound of 0.005 has a false-alarm rate below 1e-5, and the seed is
    fixed.
    """
    generator = torch.Generator().manual_seed(0)
    reward = (torch.rand(400_000, generator=generator) < 0.1819).float()
    group = torch.arange(200_000).repeat_interleave(2)
    share = frac_zero_std(reward, group)
    assert share == pytest.approx(0.1819**2 + 0.8181**2, abs=0.005) == pytest.approx(0.702, abs=0.006)
    scores = rl.Scores(reward[:, None], ("r",), torch.ones(1), reward, group)
    assert informative_rows(scores).float().mean() == pytest.approx(1 - share, abs=1e-6)


# --- accumulate ---


def fake_draw(plan):
    """Accept as many groups of each batch as planned."""
    plan = iter(plan)

    def draw(batch):
        keep = next(plan)
        rewards = [[1, 0] if place < keep else [0, 0] for place in range(len(batch))]
        group = batch.group_id.repeat_interleave(2)
        row_id = batch.row_id.repeat_interleave(2).tolist()
        rollout = make_rollout([2] * (2 * len(batch)), group_id=group.tolist(), row_id=row_id)
        return rl.drop_uninformative_groups(
            rollout, make_scores([one for pair in rewards for one in pair], group_id=group.tolist())
        )

    return draw


def batches(policy, size=3, count=4):
    loader = rl.PromptLoader(ROWS, policy, batch_size=size, shuffle=False)
    return [loader.next_batch() for _ in range(count)]


def test_what_was_accepted_is_handed_back_when_the_data_ends(frozen_policy):
    """Accepted, rejected, accepted, no more data: two groups and the word that it ended."""
    first, *more = batches(frozen_policy, size=1, count=3)
    found = rl.accumulate(fake_draw([1, 0, 1]), first, more, groups=3)
    assert found.rollout.group_id.tolist() == [0, 0, 2, 2] and len(found.scores) == 4
    assert (found.groups, found.drawn, found.exhausted, found.data_ended) == (2, 3, True, True)
    assert "2 groups from 3 batches, the data ended" in repr(found)


def test_the_search_is_bounded(frozen_policy):
    """A loader never ends; max_batches does."""
    loader = rl.PromptLoader(ROWS, frozen_policy, batch_size=3, shuffle=False)
    found = rl.accumulate(fake_draw(itertools.repeat(0)), loader.next_batch(), loader, groups=3, max_batches=5)
    assert (found.groups, found.drawn, found.exhausted, found.data_ended) == (0, 5, True, False)
    assert len(found.rollout) == len(found.scores) == 0
    assert loader.served == 15  # what was drawn was served, for the checkpoint


def test_enough_is_enough_and_the_first_are_kept(frozen_policy):
    first, *more = batches(frozen_policy)
    found = rl.accumulate(fake_draw([1, 3, 3, 3]), first, more, groups=3)
    assert found.rollout.group_id.tolist() == [0, 0, 3, 3, 4, 4]
    assert found.scores.group_id.tolist() == [0, 0, 3, 3, 4, 4]
    assert (found.groups, found.drawn, found.exhausted) == (3, 2, False)


def test_groups_of_different_prompts_are_not_merged(frozen_policy):
    """Batches made from lists are both numbered from 0; leave-one-out would compare different prompts."""
    first, more = (rl.make_batch(frozen_policy, prompts) for prompts in (["1+1=", "2+2="], ["3+1=", "4+1="]))
    with pytest.raises(ValueError, match="accumulate: two batches give one group id to different prompts"):
        rl.accumulate(fake_draw([2, 2]), first, [more], groups=4)
    more = rl.make_batch(frozen_policy, ["3+1=", "4+1="], first_group_id=2)
    assert rl.accumulate(fake_draw([2, 2]), first, [more], groups=4).groups == 4


@pytest.mark.parametrize(("groups", "max_batches"), [(0, 1), (1, 0)])
def test_bounds_below_one_are_refused(frozen_policy, groups, max_batches):
    with pytest.raises(ValueError, match="groups and max_batches must be at least 1"):
        rl.accumulate(fake_draw([]), batches(frozen_policy)[0], groups=groups, max_batches=max_batches)


def test_a_loop_with_dynamic_sampling_learns_from_what_it_found(tmp_path):
    """The real functions: sampled, filtered, joined over batches of different widths, trained and logged; also on
    nothing."""
    policy = tiny_policy()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    loader = rl.PromptLoader(ROWS, policy, batch_size=4)
    run = rl.Run(tmp_path / "run")

    def draw(batch):
        rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
        return rl.drop_uninformative_groups(rollout, rl.score(rollout, liked))

    def draw_nothing(batch):
        rollout, scores = draw(batch)
        return rollout.select([]), scores.select([])

    torch.manual_seed(0)
    for step, batch in run.steps(loader, 4, progress=False):
        found = rl.accumulate(draw_nothing if step == 3 else draw, batch, loader, groups=4)
        kl = rl.compute_kl(found.rollout, rl.compute_logps(policy, found.rollout))
        advantages = rl.compute_loo_advantage(found.scores, kl=kl, beta=0.01)
        update = rl.loss_step(policy, optimizer, found.rollout, advantages)
        run.log(step, found.rollout, found.scores, advantages, update, batches_drawn=found.drawn)
        assert (update.skipped is None) == (step < 3)
    table = run.metrics
    assert (table["frac_reward_zero_std"][:3] == 0).all() and table["frac_reward_zero_std"].isna()[3]
    assert table["num_tokens"].is_monotonic_increasing and table["batches_drawn"][3] == 8
    assert policy.version == 3
