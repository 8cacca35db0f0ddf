"""Losses against hand calculation, finite differences and REINFORCE; rows of the algorithms page by name."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import EXACT, FLOAT32, FLOAT64

from rlkit.losses import (
    RLOO,
    AStarPO,
    Loss,
    LossInputs,
    a2po_loss,
    as_loss,
    clip_range,
    implicit_reward,
    importance_ratio,
    loss_name,
    rloo_loss,
    sequence_log_ratio,
)

MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
GARBAGE = [math.nan, math.inf, -math.inf, -1e10]


def logps(seed, *, requires_grad=False, dtype=torch.float64, scale=0.1):
    """(3,3) log-probabilities around -1, close enough to one another to stay inside the clip range."""
    noise = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (-1 + scale * noise).to(dtype).requires_grad_(requires_grad)


def ratio_logps(*ratios, dtype=torch.float64):
    """One token per row: log-probabilities whose ratio to 0 is as given."""
    return torch.tensor([[math.log(ratio)] for ratio in ratios], dtype=dtype)


def rloo(ratios, advantages, **options):
    logp = ratio_logps(*ratios)
    every = torch.ones(len(ratios), 1, dtype=torch.bool)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return rloo_loss(logp, torch.zeros_like(logp), every, advantages, **options)


# --- RLOO by hand ---

CLIP_TABLE = [  # ratio, advantage, loss with epsilon 0.2: -min(ratio A, clip(ratio) A)
    (1.0, 2.0, -2.0),
    (1.1, 2.0, -2.2),
    (1.5, 1.0, -1.2),
    (1.5, -1.0, 1.5),
    (0.5, 1.0, -0.5),
    (0.5, -1.0, 0.8),
    (0.9, -2.0, 1.8),
    (3.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "want"), CLIP_TABLE)
def test_clipping_by_hand(ratio, advantage, want):
    """Formula 6 of RLOO, each side of the range with each sign of the advantage."""
    torch.testing.assert_close(rloo([ratio], [advantage]), torch.tensor([want], dtype=torch.float64), **FLOAT64)


def test_the_upper_clip_range_is_its_own():
    """Clip at 1 - 0.1 below and 1 + 0.3 above."""
    got = rloo([1.25, 1.5, 0.85], [1.0, 1.0, -1.0], epsilon=0.1, epsilon_high=0.3)
    torch.testing.assert_close(got, torch.tensor([-1.25, -1.3, 0.9], dtype=torch.float64), **FLOAT64)


def test_the_ratio_is_one_per_sequence_not_per_token():
    """Tokens +0.5 and -0.5 cancel: the sequence ratio is 1 and nothing is clipped."""
    logp = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    got = rloo_loss(logp, torch.zeros_like(logp), torch.ones(1, 2, dtype=torch.bool), ADVANTAGES[:1])
    torch.testing.assert_close(got, torch.tensor([-1.0], dtype=torch.float64), **FLOAT64)


def test_a_row_without_a_loss_token_has_loss_zero_and_no_gradient():
    """It stays in the tensor but counts for nothing."""
    logp = logps(1, requires_grad=True)
    mask = MASK.clone()
    mask[1] = False
    for loss in (rloo_loss(logp, logps(2), mask, ADVANTAGES), a2po_loss(logp, logps(2), mask, ADVANTAGES)):
        assert loss[1] == 0
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        assert not bool(gradient[1].any()) and bool(gradient[0].any())


# --- gradients of RLOO ---


def test_on_policy_ratio_is_exactly_one():
    """Formula 7: with old = the same numbers the ratio is 1, bit for bit, in each dtype."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logp = logps(3, dtype=dtype, scale=5.0)
        assert torch.equal(
            importance_ratio(logp, logp.clone(), MASK), torch.ones(3, dtype=torch.promote_types(dtype, torch.float32))
        )


def test_on_policy_gradient_is_that_of_reinforce():
    """Formula 7: d loss_i / d logp_it = -A_i m_it, exactly."""
    logp = logps(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(rloo_loss(logp, logp.detach(), MASK, ADVANTAGES).sum(), logp)
    torch.testing.assert_close(gradient, -ADVANTAGES[:, None] * MASK, **FLOAT64)


def test_rloo_gradient_matches_finite_differences():
    """Away from the corners of the clip: rows inside, above with A > 0 (flat) and above with A < 0 (steep)."""
    logp = logps(4, requires_grad=True)
    shift = torch.tensor([[0.0], [0.5], [0.3]], dtype=torch.float64)
    old = logps(4) - shift
    advantages = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rloo_loss(x, old, MASK, advantages), (logp,))


def test_gradient_is_zero_exactly_where_the_ratio_is_clipped():
    logp = ratio_logps(1.5, 1.5, 0.5, 0.5, 1.1).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    loss = rloo_loss(logp, torch.zeros(5, 1, dtype=torch.float64), torch.ones(5, 1, dtype=torch.bool), advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    want = torch.tensor([[0.0], [1.5], [-0.5], [0.0], [-1.1]], dtype=torch.float64)
    torch.testing.assert_close(gradient, want, **FLOAT64)


def test_no_gradient_through_the_old_policy_or_the_advantage():
    """The old policy is a constant, also if a tensor with gradient is given for it."""
    old, advantages, logp = (
        logps(5, requires_grad=True),
        ADVANTAGES.clone().requires_grad_(),
        logps(6, requires_grad=True),
    )
    rloo_loss(logp, old, MASK, advantages).sum().backward()
    assert advantages.grad is None and old.grad is None and bool(logp.grad.any())


def test_the_policy_itself_may_be_given_as_the_old_one():
    """rloo_loss(logp, logp, ...) is the on-policy case; an old policy with gradient would cancel it to 0."""
    logp = logps(3, requires_grad=True)
    rloo_loss(logp, logp, MASK, ADVANTAGES).sum().backward()
    torch.testing.assert_close(logp.grad, -ADVANTAGES[:, None] * MASK, **FLOAT64)


# --- extremes ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_an_unbounded_log_ratio_gives_no_nan(log_ratio, advantage, dtype):
    """Log-ratio +200 with A in {+1, 0, -1}, float32 and bfloat16: loss and gradient finite."""
    logp = torch.tensor([[log_ratio / 2, log_ratio / 2]], dtype=dtype, requires_grad=True)
    old = torch.zeros(1, 2, dtype=dtype)
    loss = rloo_loss(logp, old, torch.ones(1, 2, dtype=torch.bool), torch.tensor([advantage]))
    loss.sum().backward()
    assert bool(loss.isfinite().all()) and bool(logp.grad.isfinite().all())
    if log_ratio > 0 and advantage >= 0:  # clipped at 1.2: the honest value, not the bound
        torch.testing.assert_close(loss.detach().double(), torch.tensor([-1.2 * advantage]).double(), **FLOAT32)
    if advantage == 0:
        assert not bool(logp.grad.any())


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a2po_of_a_huge_log_ratio_is_its_square(log_ratio, dtype):
    """No exp in it: (0.001 * 200 - 1)^2 = 0.64 and (-0.2 - 1)^2 = 1.44."""
    logp = torch.tensor([[log_ratio]], dtype=dtype, requires_grad=True)
    ref = torch.zeros(1, 1, dtype=dtype)
    loss = a2po_loss(logp, ref, torch.ones(1, 1, dtype=torch.bool), torch.tensor([1.0]), beta2=1e-3)
    loss.sum().backward()
    torch.testing.assert_close(loss.item(), (1e-3 * log_ratio - 1) ** 2, **FLOAT32)
    assert bool(logp.grad.isfinite().all())


@pytest.mark.parametrize("slot", ["logp", "old"])
def test_nan_in_a_slot_that_counts_stays_visible(slot):
    """NaN is not turned into a number."""
    logp, old = logps(1), logps(2)
    (logp if slot == "logp" else old)[0, 0] = math.nan
    for loss in (rloo_loss(logp, old, MASK, ADVANTAGES), a2po_loss(logp, old, MASK, ADVANTAGES)):
        assert loss.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("loss", [rloo_loss, a2po_loss], ids=["rloo", "a2po"])
def test_masked_slots_may_hold_anything(loss, garbage):
    """NaN, inf, -1e10 in masked slots: loss and gradient are bit for bit those of the clean batch."""

    def run(fill):
        logp = logps(1).masked_fill(~MASK, fill).requires_grad_()
        values = loss(logp, logps(2).masked_fill(~MASK, -fill), MASK, ADVANTAGES)
        (gradient,) = torch.autograd.grad(values.sum(), logp)
        return values.detach(), gradient

    for dirty, clean in zip(run(garbage), run(0.0), strict=True):
        torch.testing.assert_close(dirty, clean, **EXACT)


@given(st.integers(0, 6), st.sampled_from(["rloo", "a2po"]))
def test_padding_changes_nothing(extra, name):
    """A sum over tokens that count, so the width of the padding is invisible."""
    loss = {"rloo": rloo_loss, "a2po": a2po_loss}[name]
    pad = torch.full((3, extra), -5.0, dtype=torch.float64)
    wide = loss(
        torch.cat([logps(1), pad], 1), torch.cat([logps(2), 2 * pad], 1), torch.cat([MASK, pad > 0], 1), ADVANTAGES
    )
    torch.testing.assert_close(wide, loss(logps(1), logps(2), MASK, ADVANTAGES), **EXACT)


def test_bfloat16_log_probabilities_are_summed_in_float32():
    """300 tokens of log-ratio 1/16 = 18.75; a bfloat16 sum would stop growing at 16."""
    logp = torch.full((1, 300), 1 / 16, dtype=torch.bfloat16)
    got = sequence_log_ratio(logp, torch.zeros_like(logp), logp > 0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([18.75]), **FLOAT32)


# --- A*-PO by hand ---


def test_a2po_by_hand_with_two_lengths():
    """(0.1 * (1.0 + 0.5) - 0.6)^2 = 0.2025 and (0.1 * -2 + 0.3)^2 = 0.01. A token mean would give 0.275625."""
    logp = torch.tensor([[-1.0, -1.5], [-3.0, -9.0]], dtype=torch.float64)
    ref = torch.tensor([[-2.0, -2.0], [-1.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    got = a2po_loss(logp, ref, mask, torch.tensor([0.6, -0.3], dtype=torch.float64), beta2=0.1)
    torch.testing.assert_close(got, torch.tensor([0.2025, 0.01], dtype=torch.float64), **FLOAT64)


def test_a2po_gradient_matches_finite_differences():
    logp = logps(7, requires_grad=True, scale=2.0)
    assert torch.autograd.gradcheck(lambda x: a2po_loss(x, logps(8), MASK, ADVANTAGES, beta2=0.3), (logp,))


def test_a2po_gradient_is_reinforce_with_the_remaining_advantage():
    """Formula 3 of A*-PO: -2 beta2 (A - beta2 log-ratio) on every token that counts."""
    beta2, logp = 0.3, logps(7, requires_grad=True, scale=2.0)
    (gradient,) = torch.autograd.grad(a2po_loss(logp, logps(8), MASK, ADVANTAGES, beta2=beta2).sum(), logp)
    log_ratio = ((logp.detach() - logps(8)) * MASK).sum(-1)
    want = -2 * beta2 * (ADVANTAGES - beta2 * log_ratio)[:, None] * MASK
    torch.testing.assert_close(gradient, want, **FLOAT64)


def test_a2po_gradient_flows_through_the_policy_alone():
    """Neither the reference nor the advantage (with its V*) gets a gradient."""
    ref, advantages, logp = (
        logps(1, requires_grad=True),
        ADVANTAGES.clone().requires_grad_(),
        logps(2, requires_grad=True),
    )
    a2po_loss(logp, ref, MASK, advantages).sum().backward()
    assert ref.grad is None and advantages.grad is None and logp.grad is not None


def test_a2po_is_zero_at_its_optimum():
    """pi = pi_ref exp(A / beta2) / Z with Z = 1: the log-ratio is A / beta2."""
    ref = logps(1)
    logp = ref.clone()
    logp[:, 0] += ADVANTAGES / 0.2
    torch.testing.assert_close(a2po_loss(logp, ref, MASK, ADVANTAGES, beta2=0.2), 0 * ADVANTAGES, **FLOAT64)


# --- objects ---


def inputs(**changes):
    values = {
        "logp": logps(1),
        "old_logp": logps(2),
        "ref_logp": logps(3),
        "sampler_logp": logps(2),
        "entropy": logps(4).abs(),
        "mask": MASK,
        "advantages": ADVANTAGES,
    }
    return LossInputs(**(values | changes))


def test_objects_call_the_pure_functions_with_their_settings():
    x = inputs()
    want = rloo_loss(x.logp, x.old_logp, x.mask, x.advantages, epsilon=0.01, epsilon_high=0.02)
    torch.testing.assert_close(RLOO(epsilon=0.01, epsilon_high=0.02)(x), want, **EXACT)
    want = a2po_loss(x.logp, x.ref_logp, x.mask, x.advantages, beta2=0.7)
    torch.testing.assert_close(AStarPO(beta2=0.7)(x), want, **EXACT)


def test_clip_ratios_count_only_rows_whose_gradient_is_cut():
    """TRL's rule: low with A < 0, high with A > 0. Ratios 1.5, 1.5, 0.5, 0.5, 1."""
    logp = ratio_logps(1.5, 1.5, 0.5, 0.5, 1.0)
    every = torch.ones(5, 1, dtype=torch.bool)
    x = inputs(
        logp=logp,
        old_logp=torch.zeros_like(logp),
        ref_logp=None,
        sampler_logp=logp,
        entropy=logp,
        mask=every,
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64),
    )
    measured = RLOO().row_metrics(x)
    assert measured["clip_ratio/high_mean"].tolist() == [1, 0, 0, 0, 0]
    assert measured["clip_ratio/low_mean"].tolist() == [0, 0, 0, 1, 0]
    assert measured["clip_ratio/region_mean"].tolist() == [1, 0, 0, 1, 0]


def test_implicit_reward_is_beta2_times_the_log_ratio():
    x = inputs()
    want = 0.5 * ((x.logp - x.ref_logp) * MASK).sum(-1)
    torch.testing.assert_close(AStarPO(beta2=0.5).row_metrics(x)["implicit_reward"], want, **FLOAT64)
    torch.testing.assert_close(implicit_reward(x.logp, x.ref_logp, MASK, beta2=0.5), want, **FLOAT64)


def test_losses_are_frozen():
    for loss in (RLOO(), AStarPO()):
        with pytest.raises(AttributeError):
            loss.epsilon = 0.5


def test_losses_leave_their_inputs_alone():
    x = inputs()
    before = {name: value.clone() for name, value in vars(x).items()}
    for loss in (RLOO(), AStarPO()):
        loss(x)
        loss.row_metrics(x)
    for name, value in vars(x).items():
        torch.testing.assert_close(value, before[name], **EXACT)


# --- errors ---


@pytest.mark.parametrize(
    ("epsilon", "high"),
    [(0.0, None), (1.0, None), (-0.2, None), (0.2, 0.0), (0.2, math.inf), (math.nan, None), (0.2, math.nan)],
)
def test_bad_clip_ranges_are_named(epsilon, high):
    message = (
        rf"rloo_loss: expected 0 < epsilon < 1 and epsilon_high > 0, got epsilon={epsilon}, epsilon_high={high}; 0\.2"
    )
    for make in (lambda: clip_range(epsilon, high), lambda: RLOO(epsilon=epsilon, epsilon_high=high)):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("beta2", [0.0, -1.0, math.nan, math.inf])
def test_bad_beta2_is_named(beta2):
    with pytest.raises(ValueError, match=f"AStarPO: beta2 must be a finite number > 0, got {beta2}"):
        AStarPO(beta2=beta2)
    with pytest.raises(ValueError, match=f"a2po_loss: beta2 must be a finite number > 0, got {beta2}; 1e-3"):
        a2po_loss(logps(1), logps(2), MASK, ADVANTAGES, beta2=beta2)


@pytest.mark.parametrize("loss", [rloo_loss, a2po_loss], ids=["rloo", "a2po"])
def test_shapes_that_would_broadcast_are_refused(unchecked, loss):
    """Equal shapes, never broadcastable ones."""
    with pytest.raises(
        ValueError, match=r"sequence_log_ratio: expected one \(B,T\) shape, got \(3, 3\), \(3, 1\) and mask"
    ):
        loss(logps(1), logps(2)[:, :1], MASK, ADVANTAGES)
    with pytest.raises(ValueError, match=rf"{loss.__name__}: expected one advantage per row \(3,\), got \(3, 1\)"):
        loss(logps(1), logps(2), MASK, ADVANTAGES[:, None])
    with pytest.raises(ValueError, match=rf"{loss.__name__}: expected one advantage per row \(3,\), got \(1,\)"):
        loss(logps(1), logps(2), MASK, ADVANTAGES[:1])


class OnlyAnEntropyFlag:
    needs_entropy_grad = True

    def __call__(self, x):
        return -x.entropy


def test_a_loss_that_has_only_some_attributes_gets_the_defaults_of_the_others():
    function = as_loss(lambda x: x.logp)
    assert isinstance(function, Loss) and not function.needs_reference and function.epsilon is None
    partial = as_loss(OnlyAnEntropyFlag())
    assert partial.needs_entropy_grad and not partial.zero_advantage_is_no_signal and partial.epsilon is None
    assert loss_name(partial) == "OnlyAnEntropyFlag" and loss_name(as_loss(rloo_loss)) == "rloo_loss"
    whole = RLOO()
    assert as_loss(whole) is whole and whole.zero_advantage_is_no_signal and not whole.needs_reference
    assert as_loss(AStarPO()).needs_reference


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("needs_reference", "yes", "needs_reference of the loss 'OnlyAnEntropyFlag' must be True or False, got 'yes'"),
        ("zero_advantage_is_no_signal", 1, "zero_advantage_is_no_signal of the loss .* got 1"),
        ("row_metrics", {}, "row_metrics of the loss 'OnlyAnEntropyFlag' must be a method, got {}"),
    ],
)
def test_an_attribute_of_another_type_is_refused_by_name(name, value, message):
    loss = OnlyAnEntropyFlag()
    setattr(loss, name, value)
    with pytest.raises(TypeError, match=message):
        as_loss(loss)
