"""Advantages, V* and KL against hand calculation and brute force."""

import contextlib
import itertools
import math
from fractions import Fraction

import jaxtyping
import numpy as np
import pytest
import torch
from builders import make_rollout, make_scores
from hypothesis import given
from hypothesis import strategies as st
from tolerances import CLOSE, EXACT, FLOAT32, FLOAT64, FLOAT64_SUM, TABLE_DIGITS

from rlkit.advantages import (
    compute_loo_advantage,
    compute_optimal_advantage,
    group_index,
    optimal_value,
    penalised_reward,
)
from rlkit.kl import compute_kl

NAN, INF = math.nan, math.inf
REWARDS = st.floats(-10, 10, width=32)
OPTIONAL_REWARDS = REWARDS | st.just(NAN)


def vector(*values, dtype=torch.float64):
    return torch.tensor([NAN if value is None else value for value in values], dtype=dtype)


def loo(rewards, group_id=None, **options):
    rewards = vector(*rewards)
    return compute_loo_advantage(rewards, group_id=[0] * len(rewards) if group_id is None else group_id, **options)


def brute_force_loo(rewards, group_id):
    """The definition, row by row in Python floats: reward minus the mean reward of the other scorable rows."""
    result = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and group_id[j] == group_id[i] and not math.isnan(r)]
        result.append(0.0 if math.isnan(reward) or not others else reward - math.fsum(others) / len(others))
    return torch.tensor(result, dtype=torch.float64)


@st.composite
def grouped_rewards(draw, elements=OPTIONAL_REWARDS):
    """Rewards with interleaved group labels; at least one group has two rows."""
    count = draw(st.integers(2, 12))
    rewards = draw(st.lists(elements, min_size=count, max_size=count))
    labels = draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count))
    labels[1] = labels[0]
    return rewards, labels


# --- leave-one-out: the table ---


def test_one_success_in_four():
    """r=[1,0,0,0], G=4. The mean of the other three is 0 for the success and 1/3 for each failure."""
    torch.testing.assert_close(loo([1, 0, 0, 0]), vector(1, -1 / 3, -1 / 3, -1 / 3), **FLOAT64)


def test_rows_without_reward_are_out_of_baseline_and_divisor():
    """r=[1,None,0,None]: the abstaining rows get 0, the others are compared with each other alone."""
    torch.testing.assert_close(loo([1, None, 0, None]), vector(1, 0, -1, 0), **EXACT)


@pytest.mark.parametrize("rewards", [[None, None, 1, None], [None, None, None, None]])
def test_groups_with_fewer_than_two_scorable_rows_get_zero(rewards):
    """r=[None,None,1,None], and all None: exactly 0, never NaN."""
    torch.testing.assert_close(loo(rewards), torch.zeros(4, dtype=torch.float64), **EXACT)


def test_kl_goes_into_the_reward_before_the_baseline():
    """R=[1,0], KL=[2,0], beta=0.1: r = [0.8, 0], so [0.8, -0.8]; a raw-reward baseline gives [0.8, -1.0]."""
    torch.testing.assert_close(loo([1, 0], kl=vector(2, 0), beta=0.1), vector(0.8, -0.8), **FLOAT64)


def test_a_negative_kl_raises_the_reward():
    """k1 may be negative and is not clipped. r = [1 + 0.3, 0], so A = [1.3, -1.3]."""
    torch.testing.assert_close(loo([1, 0], kl=vector(-3, 0), beta=0.1), vector(1.3, -1.3), **FLOAT64)


@pytest.mark.parametrize(
    "group_id",
    [
        torch.tensor([2, 2, 5, 7, 5, 2, 7]),
        [2, 2, 5, 7, 5, 2, 7],
        ["b", "b", "x", "-1", "x", "b", "-1"],
        [-1, -1, -2, 0, -2, -1, 0],
        torch.tensor([-1, -1, -(2**62), 2**62, -(2**62), -1, 2**62]),
    ],
    ids=["tensor", "list", "strings", "negative", "huge"],
)
def test_groups_are_labels_and_never_positions(group_id):
    """Interleaved groups {0,1,5}, {2,4}, {3,6}.

    First group 3, 1, 2: baselines 1.5, 2.5, 2. Second 5, 1. Third 0, 4.
    """
    got = loo([3, 1, 5, 0, 1, 2, 4], group_id)
    torch.testing.assert_close(got, vector(1.5, -1.5, 4, -4, -4, 0, 4), **FLOAT64)


def test_the_loss_mask_does_not_change_the_advantages():
    """Reward [1,0,1], third row masked: advantages know only of rewards; 3-row group: 1-.5, 0-1, 1-.5."""
    torch.testing.assert_close(loo([1, 0, 1]), vector(0.5, -1, 0.5), **FLOAT64)


def test_two_generations_with_a_rare_success_carry_no_signal_in_702_of_1000_groups():
    """p=0.1819, G=2: p^2 + (1-p)^2 over the four equally grouped outcomes."""
    p, silent = 0.1819, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=2):
        probability = math.prod(p if value else 1 - p for value in outcome)
        if not bool(loo(outcome).any()):
            silent += probability
    assert round(silent, 3) == 0.702


# --- leave-one-out: relations ---


@given(grouped_rewards())
def test_matches_the_definition_row_by_row(case):
    """Brute force over ragged, interleaved groups with abstentions; the result is never NaN."""
    rewards, labels = case
    with pytest.warns(UserWarning) if 1 in [labels.count(x) for x in labels] else contextlib.nullcontext():
        got = loo(rewards, labels)
    assert not bool(got.isnan().any())
    torch.testing.assert_close(got, brute_force_loo(rewards, labels), **FLOAT64_SUM)


@given(st.lists(REWARDS, min_size=2, max_size=9))
def test_equals_the_centred_reward_times_g_over_g_minus_1(rewards):
    """Identity of the algorithms page: A_i = G/(G-1) (r_i - mean of the group)."""
    r = vector(*rewards)
    count = len(rewards)
    torch.testing.assert_close(loo(rewards), count / (count - 1) * (r - r.mean()), **FLOAT64_SUM)


@given(grouped_rewards(), st.randoms(use_true_random=False))
@pytest.mark.filterwarnings("ignore:.*single completion")
def test_permuting_rows_permutes_the_advantages(case, random):
    """Within a group and across interleaved groups."""
    rewards, labels = case
    order = list(range(len(rewards)))
    random.shuffle(order)
    permuted = loo([rewards[i] for i in order], [labels[i] for i in order])
    torch.testing.assert_close(permuted, loo(rewards, labels)[order], **FLOAT64_SUM)


@given(grouped_rewards(), st.floats(-5, 5, width=32))
@pytest.mark.filterwarnings("ignore:.*single completion")
def test_adding_a_constant_to_every_reward_changes_nothing(case, constant):
    rewards, labels = case
    torch.testing.assert_close(loo([r + constant for r in rewards], labels), loo(rewards, labels), **FLOAT64_SUM)


def test_abstaining_rows_give_what_leaving_them_out_gives():
    """The same group with and without its abstaining rows."""
    with_gaps = loo([0.5, None, 2.0, None, -1.0])
    torch.testing.assert_close(with_gaps[[0, 2, 4]], loo([0.5, 2.0, -1.0]), **FLOAT64)


EVERY_SIZE = torch.cat([torch.full((size,), size) for size in range(2, 33)])  # a group of each G from 2 to 32
DTYPES = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_equal_rewards_cancel_exactly(dtype, normalize, data):
    """Every float, every G, with and without KL, beside a group that learns: exactly 0, or AdamW steps on rounding."""
    finite = st.floats(width=DTYPES[dtype], allow_nan=False, allow_infinity=False)
    value = torch.tensor([data.draw(finite)], dtype=torch.float64).to(dtype)
    if not value.isfinite():  # beyond bfloat16
        return
    kl, beta = data.draw(st.floats(-1e3, 1e3)), data.draw(st.sampled_from([0.0, 0.04, 0.1, 3.0]))
    rewards = torch.cat([value.expand(len(EVERY_SIZE)), torch.tensor([0.1, 0.7, NAN, -0.3]).to(dtype)])
    rewards[5] = NAN
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    group_id = torch.cat([EVERY_SIZE, torch.full((4,), 99)])[order]
    got = compute_loo_advantage(
        rewards[order],
        group_id=group_id,
        kl=torch.full((len(rewards),), kl, dtype=torch.promote_types(dtype, torch.float32)),
        beta=beta,
        normalize=normalize,
    )
    assert not bool(got[group_id != 99].any())
    assert bool(got[group_id == 99].any())


@pytest.mark.parametrize("rewards", [[1e8, 1e8 + 1], torch.tensor([10**8, 10**8 + 1])], ids=["a list", "integers"])
def test_python_numbers_and_integers_keep_their_digits(rewards):
    """In float32 both are 100,000,000, and the advantages 0."""
    torch.testing.assert_close(compute_loo_advantage(rewards, group_id=[0, 0]), torch.tensor([-1.0, 1.0]), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.lists(REWARDS, min_size=2, max_size=32), st.sampled_from([0.0, 1e3, -1e6, 1e8]))
def test_a_common_offset_costs_no_digits(dtype, rewards, offset):
    """Exact fractions of the rewards as the dtype holds them. [1e6, 1e6 + 1, 1e6, 1e6 + 1] gives 2/3, not 0.6875."""
    given_rewards = torch.tensor([offset + reward for reward in rewards], dtype=dtype)
    exact = [Fraction(value) for value in given_rewards.double().tolist()]
    count, spread = len(exact), float(max(exact) - min(exact))
    want = torch.tensor([float(r - (sum(exact) - r) / (count - 1)) for r in exact], dtype=torch.float64)
    got = compute_loo_advantage(given_rewards, group_id=[0] * count)
    error = (got.double() - want).abs()
    assert bool((error <= torch.finfo(dtype).eps * want.abs() + 1e-14 * spread).all())


def test_rewards_too_far_apart_are_refused_and_never_nan():
    """The difference of 3e38 and -3e38 is no float32; of equal rewards of that size nothing is lost."""
    with pytest.raises(ValueError, match=r"further apart than torch\.float32 can hold. Bound them"):
        compute_loo_advantage(torch.tensor([3e38, -3e38, 3e38]), group_id=[0, 0, 0])
    with pytest.raises(ValueError, match=r"further apart than torch\.float64"):
        loo([1.5e308, -1.5e308, 0.0])
    assert compute_loo_advantage(torch.full((32,), 3e38), group_id=[0] * 32).tolist() == [0.0] * 32


@given(grouped_rewards())
@pytest.mark.filterwarnings("ignore:.*single completion")
def test_groups_without_a_peer_do_not_move_the_normalisation(case):
    """Rows alone in their group, and groups with one scored row, are as if they were not there."""
    rewards, labels = case
    lone = [*rewards, 7.0, 5.0, NAN], [*labels, "alone", "one scored", "one scored"]
    torch.testing.assert_close(
        loo(*lone, normalize=True)[: len(rewards)], loo(rewards, labels, normalize=True), **FLOAT64
    )


# --- leave-one-out: dtypes, gradients, options ---


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_output_is_float32_or_better(given_dtype, dtype):
    """One pinned dtype."""
    got = compute_loo_advantage(vector(1, 0, 0, 0, dtype=given_dtype), group_id=[0] * 4)
    assert got.dtype == dtype
    torch.testing.assert_close(got, vector(1, -1 / 3, -1 / 3, -1 / 3, dtype=dtype), **FLOAT32)


def test_bfloat16_rewards_are_averaged_in_float32():
    """1 and 256 ones: a bfloat16 sum would stop at 256. Mean of the others of the 0 is 1."""
    rewards = torch.tensor([0.0] + [1.0] * 300, dtype=torch.bfloat16)
    got = compute_loo_advantage(rewards, group_id=[0] * 301)
    assert got[0].item() == pytest.approx(-1.0, rel=CLOSE)


def test_advantages_carry_no_gradient():
    """Neither through the reward nor through the KL."""
    rewards, kl = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not compute_loo_advantage(rewards, group_id=[0, 0], kl=kl, beta=0.5).requires_grad


def test_scores_bring_their_own_groups():
    """From the record, and the same as with bare tensors."""
    scores = make_scores([1, 0, None, 0.5], group_id=[4, 9, 4, 9])
    with_own = compute_loo_advantage(make_scores([1, 0, 3, 0.5], group_id=[4, 9, 4, 9]))
    torch.testing.assert_close(with_own, torch.tensor([-2.0, -0.5, 2.0, 0.5]), **FLOAT32)
    torch.testing.assert_close(compute_loo_advantage(scores), torch.tensor([0.0, -0.5, 0.0, 0.5]), **FLOAT32)


def test_a_group_of_one_among_others_gets_zero_and_a_warning():
    """Ragged [[0.7], [1, 0]]: one documented rule."""
    with pytest.warns(UserWarning, match=r"1 group\(s\) with a single completion"):
        got = loo([0.7, 1, 0], [0, 1, 1])
    torch.testing.assert_close(got, vector(0, 1, -1), **EXACT)


def test_normalisation_is_over_the_batch_and_bounded():
    """A = [1,-1/3,-1/3,-1/3]: mean 0, unbiased std 2/3, so [1, -1/3, ...] / (2/3 + 1e-4). Not 1e6."""
    scale = 1 / (2 / 3 + 1e-4)
    got = loo([1, 0, 0, 0], normalize=True)
    torch.testing.assert_close(got, scale * vector(1, -1 / 3, -1 / 3, -1 / 3), **FLOAT64)


def test_normalisation_spans_groups_and_skips_rows_without_reward():
    """Two groups: A = [1,-1] and [4,0(no reward),-4]: mean 0, std = sqrt(34/3), over the four scorable rows."""
    got = loo([1, 0, 4, None, 0], [0, 0, 1, 1, 1], normalize=True)
    want = vector(1, -1, 4, 0, -4) / (math.sqrt(34 / 3) + 1e-4)
    torch.testing.assert_close(got, want, **FLOAT64)


@given(grouped_rewards())
@pytest.mark.filterwarnings("ignore:.*single completion")
def test_normalised_advantages_never_leave_the_bound_of_a_z_score(case):
    """|z| of n numbers is at most (n-1)/sqrt(n), so no division by a small spread can explode."""
    got = loo(*case, normalize=True)
    count = len(case[0])
    assert not bool(got.isnan().any())
    assert float(got.abs().max()) <= (count - 1) / math.sqrt(count) + 1e-9


@pytest.mark.parametrize("rewards", [[2, 2, 2], [None, None, None], [1, None, None]])
def test_normalising_a_batch_without_spread_gives_zero(rewards):
    torch.testing.assert_close(loo(rewards, normalize=True), torch.zeros(3, dtype=torch.float64), **EXACT)


def test_kl_of_a_row_without_reward_is_not_looked_at():
    got = loo([1, None, 0], kl=vector(1, None, 0), beta=0.5)
    torch.testing.assert_close(got, vector(0.5, 0, -0.5), **FLOAT64)


@pytest.mark.parametrize("bad", [INF, -INF])
@pytest.mark.parametrize("where", ["reward", "kl"])
def test_an_infinite_number_is_refused_or_gives_no_nan(bad, where):
    """'Never NaN': NaN means 'no target' to loss_step, which would leave the row out without a word."""
    try:
        if where == "reward":
            got = loo([bad, 0, 1])
        else:
            got = loo([1, 0, 1], kl=vector(bad, 0, 0), beta=0.1)
    except (ValueError, FloatingPointError):
        return
    assert not bool(got.isnan().any())


# --- leave-one-out: errors ---

BAD_LOO = {
    "one row per group": (
        {"rewards": [1, 0], "group_id": [0, 1]},
        r"compute_loo_advantage: every group has a single.*Expected at least 2.*num_generations",
    ),
    "no groups": ({"rewards": torch.ones(2)}, r"compute_loo_advantage: group_id is missing: give one label per reward"),
    "too few labels": (
        {"rewards": [1, 0], "group_id": [0]},
        r"compute_loo_advantage: expected one group id per reward \(2\), got 1",
    ),
    "beta without kl": (
        {"rewards": [1, 0], "group_id": [0, 0], "beta": 0.1},
        r"compute_loo_advantage: beta=0.1 needs kl=compute_kl",
    ),
    "negative beta": (
        {"rewards": [1, 0], "group_id": [0, 0], "beta": -1.0},
        r"compute_loo_advantage: beta must be a finite number >= 0, got -1.0",
    ),
    "nan beta": (
        {"rewards": [1, 0], "group_id": [0, 0], "beta": NAN},
        r"compute_loo_advantage: beta must be .*got nan",
    ),
    "kl of another shape": (
        {"rewards": [1, 0], "group_id": [0, 0], "kl": torch.ones(3), "beta": 0.1},
        r"compute_loo_advantage: kl must have the shape of the rewards \(2,\), got \(3,\)",
    ),
    "nan kl": (
        {"rewards": [1, 0], "group_id": [0, 0], "kl": torch.tensor([0.0, NAN]), "beta": 0.1},
        r"compute_loo_advantage: the KL of row\(s\) \[1\] is NaN",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_LOO.values(), ids=BAD_LOO.keys())
def test_bad_input_is_named_with_expected_got_and_advice(unchecked, arguments, message):
    """Also num_generations=1 for RLOO."""
    rewards = arguments.pop("rewards")
    rewards = rewards if isinstance(rewards, torch.Tensor) else vector(*rewards)
    with pytest.raises(ValueError, match=message):
        compute_loo_advantage(rewards, **arguments)


def test_floating_point_labels_are_refused():
    """Near-equal float labels must not be merged."""
    with pytest.raises(TypeError, match=r"group_index: group ids must be integers or strings, got a torch\.float32"):
        group_index(torch.tensor([1.0, 1.0000001]))


def test_group_index_keeps_equal_labels_equal_and_others_apart():
    assert group_index(torch.tensor([7, -3, 7, 5])).tolist() == [2, 0, 2, 1]
    assert group_index(["b", "a", "b", -1]).tolist() == [0, 1, 0, 2]


def test_shapes_are_checked_at_run_time_in_the_tests():
    """The import hook of conftest is active: without it a wrong shape would pass here."""
    with pytest.raises(jaxtyping.TypeCheckError):
        compute_loo_advantage(torch.ones(2, 1), group_id=[0, 0])


def test_penalised_reward_keeps_the_gaps():
    got = penalised_reward(vector(1, None), kl=vector(0.5, 0.5), beta=0.2)
    torch.testing.assert_close(got, vector(0.9, None), equal_nan=True, **FLOAT64)


# --- V* ---

V_STAR_TABLE = [
    ([1, 0, 0, 0], 0.5, 0.47723),
    ([1, 0, 0, 0], 1e-3, 0.99861),
    ([1, 0, 0, 0], 1e6, 0.25),
    ([-1000] * 4, 0.5, -1000.0),
    ([-1000] * 4, 1e-3, -1000.0),
    ([1, None, 0, None], 0.5, 0.71689),
    ([0, 0, 0, 0], 0.5, 0.0),
    ([1, 1, 1, 1], 0.5, 1.0),
    ([1000, 0], 0.5, 1000 - 0.5 * math.log(2)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rewards", "beta1", "want"), V_STAR_TABLE)
def test_v_star_table(rewards, beta1, want, dtype):
    """r=[1,0,0,0], r=-1000 and r=[1,None,0,None]; no overflow, N counts the scored samples."""
    got = optimal_value(vector(*rewards, dtype=dtype), beta1=beta1)
    assert got.dtype == dtype
    tolerance = TABLE_DIGITS if abs(want) < 10 else FLOAT32
    torch.testing.assert_close(got, torch.tensor(want, dtype=dtype), **tolerance)


@given(st.lists(OPTIONAL_REWARDS, min_size=1, max_size=8), st.floats(0.05, 1e6))
def test_v_star_is_the_log_mean_exp_of_the_scored_samples(rewards, beta1):
    """Formula 1 in numpy's extended precision, naive form, over scored samples only."""
    scored = np.array([r for r in rewards if not math.isnan(r)], dtype=np.longdouble)
    got = optimal_value(vector(*rewards), beta1=beta1)
    if not len(scored):
        assert math.isnan(got)
        return
    want = float(beta1 * np.log(np.mean(np.exp(scored / beta1))))
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), **FLOAT64_SUM)


@given(st.lists(REWARDS, min_size=1, max_size=8), st.floats(1e-3, 1e6))
def test_v_star_lies_between_mean_and_maximum(rewards, beta1):
    """min <= mean <= V* <= max."""
    r = vector(*rewards)
    value = float(optimal_value(r, beta1=beta1))
    assert float(r.mean()) - 1e-9 <= value <= float(r.max()) + 1e-12


@given(st.lists(REWARDS, min_size=2, max_size=8), st.floats(1e-3, 1e3), st.floats(1.01, 100))
def test_v_star_falls_as_beta1_grows(rewards, beta1, factor):
    r = vector(*rewards)
    small, large = optimal_value(r, beta1=beta1), optimal_value(r, beta1=beta1 * factor)
    assert float(large) <= float(small) + 1e-9
    if float(r.max() - r.min()) > 0.1 and beta1 < 10:
        assert float(large) < float(small)


def test_v_star_tends_to_maximum_and_mean():
    r = vector(3, 1, -1)
    assert float(optimal_value(r, beta1=1e-9)) == pytest.approx(3.0, abs=1e-8)
    assert float(optimal_value(r, beta1=1e9)) == pytest.approx(1.0, abs=1e-8)


def test_v_star_in_float32_does_not_cancel_at_large_beta1():
    """logsumexp - log N in float32 loses everything at beta1=1e6; the answer is the mean."""
    rewards = torch.tensor([0.3, 0.7, 0.1, 0.5])
    torch.testing.assert_close(optimal_value(rewards, beta1=1e6), torch.tensor(0.4), **FLOAT32)


def test_v_star_acts_on_the_last_axis():
    rewards = torch.rand(2, 3, 4, dtype=torch.float64)
    rewards[0, 1, 2] = NAN
    rewards[1, 2] = NAN
    got = optimal_value(rewards, beta1=0.5)
    assert got.shape == (2, 3)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(got[i, j], optimal_value(rewards[i, j], beta1=0.5), equal_nan=True, **EXACT)
    assert got.isnan().tolist() == [[False, False, False], [False, False, True]]


@pytest.mark.parametrize("beta1", [0.0, -0.5, NAN, INF])
def test_v_star_needs_a_positive_beta1(beta1):
    """beta1 <= 0 is an error."""
    with pytest.raises(ValueError, match=rf"optimal_value: beta1 must be a finite number > 0, got {beta1}; 0\.5"):
        optimal_value(torch.ones(2), beta1=beta1)


@pytest.mark.parametrize("rewards", [torch.ones(3, 0), torch.tensor(1.0)], ids=["no samples", "no axis"])
def test_v_star_needs_a_sample(unchecked, rewards):
    with pytest.raises(ValueError, match=r"optimal_value: expected rewards of shape \(\.\.\., N\) with N >= 1, got"):
        optimal_value(rewards, beta1=0.5)


@given(REWARDS, st.integers(1, 32), st.floats(1e-3, 1e6))
def test_the_optimal_advantage_of_equal_rewards_is_exactly_zero(reward, count, beta1):
    """V* of a prompt whose samples agree is that reward, bit for bit."""
    rewards = torch.full((count,), reward, dtype=torch.float32)
    v_star = optimal_value(rewards, beta1=beta1).expand(count)
    assert compute_optimal_advantage(make_scores([reward] * count), v_star).tolist() == [0.0] * count


def test_optimal_advantage_is_reward_minus_v_star():
    got = compute_optimal_advantage(make_scores([1, 0, None]), torch.tensor([0.25, 0.25, 0.25]))
    torch.testing.assert_close(got, torch.tensor([0.75, -0.25, NAN]), equal_nan=True, **FLOAT32)
    assert not compute_optimal_advantage(torch.ones(2, requires_grad=True), torch.ones(2)).requires_grad


def test_optimal_advantage_of_a_row_without_reward_needs_no_v_star():
    got = compute_optimal_advantage(make_scores([1, None]), torch.tensor([0.5, NAN]))
    torch.testing.assert_close(got, torch.tensor([0.5, NAN]), equal_nan=True, **FLOAT32)


def test_optimal_advantage_refuses_a_missing_v_star():
    with pytest.raises(ValueError, match=r"compute_optimal_advantage: V\* of row\(s\) \[1\] is NaN.*keep_solvable"):
        compute_optimal_advantage(torch.ones(2), torch.tensor([0.0, NAN]))


def test_optimal_advantage_refuses_another_shape(unchecked):
    with pytest.raises(ValueError, match=r"compute_optimal_advantage: expected one V\* per row \(2,\), got \(3,\)"):
        compute_optimal_advantage(torch.ones(2), torch.ones(3))


# --- KL ---

LOGP = torch.tensor([[-1.0, -2.0, -0.5], [-0.25, -3.0, -7.0]], dtype=torch.float64)
REF = torch.tensor([[-1.5, -1.0, -0.5], [-0.25, -1.0, -9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_kl_is_the_summed_log_ratio_and_may_be_negative():
    """0.5 - 1.0 + 0 and 0 - 2.0; the masked 2.0 is left out."""
    torch.testing.assert_close(compute_kl(LOGP, REF, mask=MASK), vector(-0.5, -2.0), **FLOAT64)


def test_other_kl_estimators_by_hand():
    """k2 = d^2/2: .125 + .5, 2. k3 = e^-d - 1 + d."""
    torch.testing.assert_close(compute_kl(LOGP, REF, mask=MASK, estimator="k2"), vector(0.625, 2.0), **FLOAT64)
    k3 = [(math.exp(-0.5) - 1 + 0.5) + (math.exp(1.0) - 1 - 1.0), math.exp(2.0) - 1 - 2.0]
    torch.testing.assert_close(compute_kl(LOGP, REF, mask=MASK, estimator="k3"), vector(*k3), **FLOAT64)


def test_k1_and_k3_are_unbiased_for_the_kl_of_a_distribution():
    """Sum over every token of a four-token vocabulary against the closed form sum p log(p/q)."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    true = (p * (p / q).log()).sum()
    every = torch.ones(4, 1, dtype=torch.bool)
    for estimator in ("k1", "k3"):
        values = compute_kl(p.log()[:, None], q.log()[:, None], mask=every, estimator=estimator)
        torch.testing.assert_close((p * values).sum(), true, **FLOAT64)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, -1e10])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_masked_slots_of_the_kl_may_hold_anything(garbage, estimator):
    """NaN, inf or -1e10 in masked slots changes nothing."""
    dirty, dirty_ref = LOGP.masked_fill(~MASK, garbage), REF.masked_fill(~MASK, garbage)
    for left, right in ((dirty, REF), (LOGP, dirty_ref), (dirty, dirty_ref)):
        got = compute_kl(left, right, mask=MASK, estimator=estimator)
        torch.testing.assert_close(got, compute_kl(LOGP, REF, mask=MASK, estimator=estimator), **EXACT)


def test_kl_does_not_depend_on_the_padding_width():
    pad = torch.full((2, 5), -1e10, dtype=torch.float64)
    wide = compute_kl(torch.cat([LOGP, pad], 1), torch.cat([REF, -pad], 1), mask=torch.cat([MASK, pad > 0], 1))
    torch.testing.assert_close(wide, compute_kl(LOGP, REF, mask=MASK), **EXACT)


def test_kl_of_a_rollout_uses_its_sampler_and_its_mask():
    """The log-probabilities at sampling time, without gradient."""
    rollout = make_rollout([3, 2], sampler_logp=LOGP.float())
    ref = REF.float().requires_grad_()
    got = compute_kl(rollout, ref)
    torch.testing.assert_close(got, torch.tensor([-0.5, -2.0]), **FLOAT32)
    assert not got.requires_grad


def test_kl_of_bfloat16_is_summed_in_float32():
    """300 tokens of log-ratio 1: a bfloat16 sum would stop at 256."""
    ones = torch.ones(1, 300, dtype=torch.bfloat16)
    got = compute_kl(ones, 0 * ones, mask=ones > 0)
    assert got.dtype == torch.float32 and got.item() == 300


BAD_KL = {
    "no mask": ({"logp": LOGP, "ref_logps": REF}, r"compute_kl: mask is missing: give a \(B,T\) bool tensor"),
    "other rollout": (
        {"logp": LOGP, "ref_logps": REF[:, :2], "mask": MASK},
        r"compute_kl: logp \(2, 3\), ref_logps \(2, 2\) and mask \(2, 3\)",
    ),
    "estimator": (
        {"logp": LOGP, "ref_logps": REF, "mask": MASK, "estimator": "k4"},
        r"compute_kl: estimator must be one of \('k1', 'k2', 'k3'\), got 'k4'",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_KL.values(), ids=BAD_KL.keys())
def test_bad_kl_input_is_named(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_kl(**arguments)


def test_inputs_stay_as_they_are():
    """Pure functions: bitwise copies compared."""
    rewards, kl = vector(1, None, 0, 2), vector(0.1, 0.2, 0.3, 0.4)
    before = [tensor.clone() for tensor in (rewards, kl, LOGP, REF, MASK)]
    compute_loo_advantage(rewards, group_id=[0, 0, 0, 0], kl=kl, beta=0.1, normalize=True)
    optimal_value(rewards, beta1=0.5)
    compute_optimal_advantage(rewards, kl)
    compute_kl(LOGP, REF, mask=MASK, estimator="k3")
    for now, then in zip((rewards, kl, LOGP, REF, MASK), before, strict=True):
        torch.testing.assert_close(now, then, equal_nan=True, **EXACT)
