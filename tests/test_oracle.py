"""Estimators against sums over all completions, on a table of logits and on a real policy.

Most tests take the mean over *every* group of completions, so they are exact. The tests of chance fix their seed and
raise a false alarm once in a million seeds (FALSE_ALARM, for all components of a gradient together); wrong estimators
must fail them, or they would show nothing.
"""

import itertools
from functools import partial
from statistics import NormalDist

import pytest
import torch
from builders import completion_tokens
from tolerances import FLOAT32, FLOAT64

import rlkit as rl
from rlkit import oracle

FALSE_ALARM = 1e-6
BETA = 0.3


def close(got, expected, tolerance=FLOAT64):
    got, expected = (
        value.detach().double() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        for value in (got, expected)
    )
    torch.testing.assert_close(got, expected, **tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle itself


@pytest.fixture
def lm():
    """3 tokens, up to 3 of them: 15 completions, 7 prefixes."""
    return oracle.EnumerableLM(vocab_size=3, max_length=3, seed=1)


@pytest.fixture
def small():
    """3 tokens, up to 2 of them: 7 completions, so 2401 groups of 4."""
    return oracle.EnumerableLM(vocab_size=3, max_length=2, seed=1)


def reference_of(lm):
    return oracle.EnumerableLM(vocab_size=3, max_length=lm.mask.shape[1], seed=2).reference()


def rewards_of(lm, seed=3):
    return torch.rand(len(lm.completions), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("vocab_size", "max_length", "eos_ids"), [(3, 3, [0]), (4, 3, [2]), (5, 4, [4]), (4, 3, [0, 3])]
)
def test_enumeration_is_every_token_string_cut_at_its_end(vocab_size, max_length, eos_ids):
    def cut(tokens):
        ends = [place for place, token in enumerate(tokens) if token in eos_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    got = oracle.enumerate_sequences(vocab_size, eos_ids, max_length)
    assert len(got) == len(set(got))
    assert set(got) == {cut(tokens) for tokens in itertools.product(range(vocab_size), repeat=max_length)}


@pytest.mark.parametrize("eos_id", [0, 1, 2])
def test_table_is_a_distribution_with_the_product_of_its_softmaxes(eos_id):
    lm = oracle.EnumerableLM(vocab_size=3, max_length=3, eos_id=eos_id, seed=4)
    assert lm.logits.shape == (1 + 2 + 4, 3)
    close(lm.probabilities().sum(), 1.0)
    close(lm.token_logps()[~lm.mask], torch.zeros(int((~lm.mask).sum())))
    table = lm.logits.softmax(-1)
    inner = [token for token in range(3) if token != eos_id]
    place = lm.completions.index((inner[1], inner[0], eos_id))  # rows: (), then 2 of one token, then 4 of two tokens
    close(lm.probabilities()[place], table[0, inner[1]] * table[2, inner[0]] * table[5, eos_id])
    assert lm.truncated.tolist() == [tokens[-1] != eos_id for tokens in lm.completions]
    assert lm.mask.sum(-1).tolist() == [len(tokens) for tokens in lm.completions]


def test_same_seed_same_model_and_reference_is_frozen(lm):
    assert torch.equal(lm.logits, oracle.EnumerableLM(3, 3, seed=1).logits)
    reference = lm.reference()
    with torch.no_grad():
        lm.logits += 1.0
    assert not torch.equal(reference.logits, lm.logits) and not reference.logits.requires_grad


def test_with_distribution_inverts_sequence_logps(lm):
    logps = torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    before = lm.logits.detach().clone()
    close(lm.with_distribution(logps).sequence_logps(), logps)
    assert torch.equal(lm.logits, before)


def test_gradient_is_the_slope_of_the_objective(lm):
    """Central differences with h = 1e-5: truncation error h^2 = 1e-10, rounding 1e-16/h = 1e-11."""
    rewards, ref_logps, h = rewards_of(lm), reference_of(lm).sequence_logps(), 1e-5
    exact = oracle.policy_gradient(lm, rewards, ref_logps=ref_logps, beta=BETA)
    slope = torch.zeros_like(exact)
    for row, token in itertools.product(*map(range, exact.shape)):
        values = []
        for sign in (1, -1):
            moved = lm.reference()
            moved.logits[row, token] += sign * h
            values.append(oracle.expected_reward(moved.sequence_logps(), rewards, ref_logps=ref_logps, beta=BETA))
        slope[row, token] = (values[0] - values[1]) / (2 * h)
    close(slope, exact, {"rtol": 0, "atol": 1e-9})


def test_kl_is_that_of_the_token_distributions():
    """Chain rule: the sequence KL is the sum of the KLs of each prefix's softmax, each weighted by its prefix."""
    lm, ref = oracle.EnumerableLM(2, 2, seed=1), oracle.EnumerableLM(2, 2, seed=2)
    p, q = lm.logits.softmax(-1), ref.logits.softmax(-1)
    by_prefix = (p * (p / q).log()).sum(-1)
    close(oracle.kl_divergence(lm.sequence_logps(), ref.sequence_logps()), by_prefix[0] + p[0, 1] * by_prefix[1])
    close(oracle.kl_divergence(lm.sequence_logps(), lm.sequence_logps()), 0.0)


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_groups_are_every_tuple_with_the_product_of_its_probabilities(small, group_size):
    p = small.probabilities().detach()
    groups = oracle.enumerate_groups(small.sequence_logps(), group_size)
    assert groups.places.tolist() == [list(places) for places in itertools.product(range(7), repeat=group_size)]
    close(groups.probability, torch.stack([p[list(places)].prod() for places in groups.places.tolist()]))
    close(groups.probability.sum(), 1.0)


def test_oracle_refuses_what_it_cannot_enumerate(unchecked, lm):
    with pytest.raises(ValueError, match="max_length"):
        oracle.enumerate_sequences(3, [0], 0)
    with pytest.raises(ValueError, match="end token"):
        oracle.enumerate_sequences(3, [3], 2)
    with pytest.raises(ValueError, match="smaller vocabulary"):
        oracle.enumerate_sequences(50_000, [0], 3)
    with pytest.raises(ValueError, match="groups of 6"):
        oracle.enumerate_groups(lm.sequence_logps(), 6)
    with pytest.raises(ValueError, match="needs ref_logps"):
        oracle.expected_reward(lm.sequence_logps(), rewards_of(lm), beta=0.1)
    for wrong in (torch.ones(1).double(), torch.ones(15, 1).double()):  # both would broadcast
        for call in (oracle.expected_reward, oracle.kl_divergence, partial(oracle.optimal_value, beta1=0.5)):
            with pytest.raises(ValueError, match=r"expected two \(C,\) tensors, got \(15,\) and"):
                call(lm.sequence_logps(), wrong)
    with pytest.raises(ValueError, match="beta1"):
        oracle.optimal_policy(lm.sequence_logps(), rewards_of(lm), beta=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# RLOO: estimators of the policy gradient, right and wrong, by one signature


def rloo(logp, ref_logp, mask, rewards, group_id):
    """The real code: KL into the reward, leave-one-out, clipped loss; (B,) losses."""
    kl = rl.compute_kl(logp, ref_logp, mask=mask)
    advantages = rl.compute_loo_advantage(rewards, group_id=group_id, kl=kl, beta=BETA)
    return rl.rloo_loss(logp, logp.detach(), mask, advantages)


def own_sample_in_baseline(logp, ref_logp, mask, rewards, group_id):
    reward = (rewards - BETA * rl.compute_kl(logp, ref_logp, mask=mask)).reshape(int(group_id.max()) + 1, -1)
    advantages = (reward - reward.mean(-1, keepdim=True)).flatten()
    return rl.rloo_loss(logp, logp.detach(), mask, advantages)


def kl_sign_flipped(logp, ref_logp, mask, rewards, group_id):
    kl = rl.compute_kl(ref_logp, logp, mask=mask)
    return rl.rloo_loss(
        logp, logp.detach(), mask, rl.compute_loo_advantage(rewards, group_id=group_id, kl=kl, beta=BETA)
    )


def mean_over_tokens(logp, ref_logp, mask, rewards, group_id):
    kl = rl.compute_kl(logp, ref_logp, mask=mask)
    advantages = rl.compute_loo_advantage(rewards, group_id=group_id, kl=kl, beta=BETA)
    return -advantages * logp.sum(-1) / mask.sum(-1)


def k3_in_the_reward(logp, ref_logp, mask, rewards, group_id):
    kl = rl.compute_kl(logp, ref_logp, mask=mask, estimator="k3")
    return rl.rloo_loss(
        logp, logp.detach(), mask, rl.compute_loo_advantage(rewards, group_id=group_id, kl=kl, beta=BETA)
    )


def kl_in_the_loss(logp, ref_logp, mask, rewards, group_id):
    """Differentiates the k1 estimate instead of weighting the score with it: the mean gradient of that is 0."""
    advantages = rl.compute_loo_advantage(rewards, group_id=group_id)
    return rl.rloo_loss(logp, logp.detach(), mask, advantages) + BETA * (logp - ref_logp).sum(-1)


WRONG = [own_sample_in_baseline, kl_sign_flipped, mean_over_tokens, k3_in_the_reward, kl_in_the_loss]


def losses_of_groups(lm, estimator, places, logp):
    """(M,G) losses of groups given by their places in the enumeration; `logp` is (M*G,T)."""
    rows, group_id = places.flatten(), torch.arange(len(places)).repeat_interleave(places.shape[1])
    ref_logp = reference_of(lm).token_logps()[rows]
    return estimator(logp, ref_logp, lm.mask[rows], rewards_of(lm)[rows], group_id).reshape(places.shape)


def exact_mean_gradient(lm, estimator, group_size):
    """Mean over all groups of the ascent direction that an estimator takes, (R,V): a sum, no sampling."""
    places, probability = oracle.enumerate_groups(lm.sequence_logps(), group_size)
    losses = losses_of_groups(lm, estimator, places, lm.token_logps()[places.flatten()])
    return torch.autograd.grad(-(probability * losses.mean(-1)).sum(), lm.logits)[0]


def sampled_gradients(lm, estimator, group_size, num_groups, seed):
    """One gradient estimate per sampled group, (M,R*V), by the chain rule through the tokens' log-probabilities."""
    places = lm.sample(num_groups * group_size, generator=torch.Generator().manual_seed(seed)).reshape(-1, group_size)
    logp = lm.token_logps().detach()[places.flatten()].requires_grad_()
    losses = losses_of_groups(lm, estimator, places, logp)
    by_token = torch.autograd.grad(-losses.sum() / group_size, logp)[0].reshape(*places.shape, -1)

    def token_logps(logits):
        return torch.func.functional_call(Call(lm), {"lm.logits": logits}, ())

    jacobian = torch.autograd.functional.jacobian(token_logps, lm.logits).flatten(2)  # (C,T,R*V)
    return torch.einsum("mgt,mgtk->mk", by_token, jacobian[places])


class Call(torch.nn.Module):
    """`token_logps` as a forward, for torch.func."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self):
        return self.lm.token_logps()


def assert_mean(estimates, expected, *, false_alarm=FALSE_ALARM):
    """z-test of each of K components at false_alarm / K (Bonferroni): a right estimator fails with that probability.

    The estimates (M,K) are independent rows; the mean of 20,000 of them is normal enough for a limit of 5 to 6 sigma.
    """
    count, components = estimates.shape
    limit = NormalDist().inv_cdf(1 - false_alarm / (2 * components))
    error = (estimates.mean(0) - expected).abs()
    standard_error = estimates.std(0) / count**0.5
    worst = int((error / standard_error.clamp(min=1e-15)).argmax())
    assert bool((error <= limit * standard_error + 1e-12).all()), (
        f"component {worst}: mean {estimates[:, worst].mean():.5f}, expected {expected[worst]:.5f}, "
        f"standard error {standard_error[worst]:.5f}, limit {limit:.2f} of them"
    )


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_rloo_gradient_is_unbiased(small, group_size):
    """Over all 49, 343 and 2401 groups: the mean is the gradient of E[r] - beta KL, to 1e-12."""
    exact = oracle.policy_gradient(small, rewards_of(small), ref_logps=reference_of(small).sequence_logps(), beta=BETA)
    close(exact_mean_gradient(small, rloo, group_size), exact)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_estimators_are_biased(small, wrong):
    exact = oracle.policy_gradient(small, rewards_of(small), ref_logps=reference_of(small).sequence_logps(), beta=BETA)
    with pytest.raises(AssertionError, match="not close"):
        close(exact_mean_gradient(small, wrong, 2), exact, {"rtol": 0, "atol": 1e-3})


def test_baseline_with_the_own_sample_shrinks_the_gradient(small):
    """r - mean = (G-1)/G of the leave-one-out advantage: half the gradient at G = 2, three quarters at G = 4."""
    for group_size in (2, 4):
        share = (group_size - 1) / group_size
        right = exact_mean_gradient(small, rloo, group_size)
        close(exact_mean_gradient(small, own_sample_in_baseline, group_size), share * right)


@pytest.mark.parametrize("group_size", [2, 4])
def test_sampled_rloo_gradients_average_to_the_exact_one(lm, group_size):
    """20,000 sampled groups, 21 components; false-alarm rate 1e-6 in all."""
    exact = oracle.policy_gradient(lm, rewards_of(lm), ref_logps=reference_of(lm).sequence_logps(), beta=BETA)
    assert_mean(sampled_gradients(lm, rloo, group_size, 20_000, seed=0), exact.flatten())


@pytest.mark.parametrize("wrong", WRONG)
def test_the_chance_test_rejects_wrong_estimators(lm, wrong):
    exact = oracle.policy_gradient(lm, rewards_of(lm), ref_logps=reference_of(lm).sequence_logps(), beta=BETA)
    with pytest.raises(AssertionError, match="standard error"):
        assert_mean(sampled_gradients(lm, wrong, 2, 20_000, seed=0), exact.flatten())


@pytest.mark.parametrize(("seed", "scale", "truncated", "off_by"), [(1, 1.0, 0.355, 0.25), (23, 2.0, 0.75, 1.1)])
@pytest.mark.parametrize("group_size", [2, 4])
def test_masking_truncated_completions_biases_the_gradient(seed, scale, truncated, off_by, group_size):
    """What docs/rloo.md says of `mask_truncated`: the terms of the truncated completions are missing from the mean.

    With a divisor of all rows what is left is E[1(finished) (r - E[r]) grad log pi], exactly. `loss_step` divides by
    the rows that count: with 36 % truncated the mean gradient is off by a quarter of its largest component in the first
    model, with 75 % by 1.1 times that component in the second.
    """
    small = oracle.EnumerableLM(vocab_size=3, max_length=2, seed=seed, scale=scale)
    rewards, finished = rewards_of(small), ~small.truncated
    exact = oracle.policy_gradient(small, rewards)
    places, probability = oracle.enumerate_groups(small.sequence_logps(), group_size)
    rows, group_id = places.flatten(), torch.arange(len(places)).repeat_interleave(group_size)
    advantages = rl.compute_loo_advantage(rewards[rows], group_id=group_id)

    def mean_gradient(mask, divisor):
        logp = small.token_logps()[rows]
        losses = rl.rloo_loss(logp, logp.detach(), mask, advantages).reshape(places.shape).sum(-1)
        return torch.autograd.grad(-(probability * losses / divisor).sum(), small.logits)[0]

    close(mean_gradient(small.mask[rows], group_size), exact)
    kept = small.mask[rows] & finished[rows][:, None]
    p = small.probabilities()
    weight = (p * (rewards - (p * rewards).sum()))[finished].detach()
    part = torch.autograd.grad((weight * small.sequence_logps()[finished]).sum(), small.logits)[0]
    close(mean_gradient(kept, group_size), part)
    bias = mean_gradient(kept, kept.any(-1).reshape(places.shape).sum(-1).clamp(min=1)) - exact
    assert float(bias.abs().max() / exact.abs().max()) == pytest.approx(off_by, rel=0.1)
    assert float(p[small.truncated].detach().sum()) == pytest.approx(truncated, rel=0.01)


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_1():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group_id = torch.tensor([7, -1, 4, 4, 7, -1, 4, 7, 4, 7, 7, -1])  # sizes 5, 3, 4, interleaved
    expected = torch.empty(12, dtype=torch.float64)
    for group in (7, -1, 4):
        rows = group_id == group
        size = int(rows.sum())
        expected[rows] = size / (size - 1) * (rewards[rows] - rewards[rows].mean())
    close(rl.compute_loo_advantage(rewards, group_id=group_id), expected)


def test_normalised_advantage_by_hand():
    """r = [1,0] and [3,0] gives A = [1,-1,3,-3]: mean 0, std sqrt(20/3) with n - 1, plus 1e-4."""
    got = rl.compute_loo_advantage(torch.tensor([1.0, 0, 3, 0]).double(), group_id=[0, 0, 1, 1], normalize=True)
    close(got, [a / ((20 / 3) ** 0.5 + 1e-4) for a in (1, -1, 3, -3)])


def test_normalising_scales_every_group_alike(small):
    """One factor for the batch, so the direction stays; division by each group's own std would turn it."""
    rewards, group_id = rewards_of(small, seed=5)[:6], [0, 0, 0, 1, 1, 1]
    plain = rl.compute_loo_advantage(rewards, group_id=group_id)
    ratio = rl.compute_loo_advantage(rewards, group_id=group_id, normalize=True) / plain
    close(ratio, [float(ratio[0])] * 6)


# ---------------------------------------------------------------------------------------------------------------------
# KL


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_mean_of_the_kl_estimate_is_the_kl(lm, estimator, unbiased):
    ref = reference_of(lm)
    kl = rl.compute_kl(lm.token_logps(), ref.token_logps(), mask=lm.mask, estimator=estimator)
    mean = (lm.probabilities().detach() * kl).sum()
    exact = oracle.kl_divergence(lm.sequence_logps(), ref.sequence_logps()).detach()
    assert torch.allclose(mean, exact, **FLOAT64) == unbiased


def test_k1_may_be_negative_and_weighs_the_score_to_the_gradient_of_the_kl(lm):
    """grad KL = E[(log pi - log pi_ref) grad log pi] + E[grad log pi], and the last term is 0."""
    ref = reference_of(lm)
    logps, weight = lm.sequence_logps(), lm.probabilities().detach()
    kl = rl.compute_kl(lm.token_logps(), ref.token_logps(), mask=lm.mask)
    assert float(kl.min()) < 0 < float(kl.max())

    def gradient(value):
        return torch.autograd.grad(value, lm.logits, retain_graph=True)[0]

    exact = gradient(oracle.kl_divergence(logps, ref.sequence_logps()))
    assert float(exact.abs().max()) > 1e-2
    close(gradient((weight * kl * logps).sum()), exact)
    close(gradient((weight * logps).sum()), torch.zeros_like(exact))
    close(gradient((weight * (logps - ref.sequence_logps())).sum()), torch.zeros_like(exact))  # k1 as a loss: no effect


def test_sampled_kl_averages_to_the_kl(lm):
    """20,000 completions, false-alarm rate 1e-6; the KL with its sign flipped is rejected."""
    ref = reference_of(lm)
    rows = lm.sample(20_000, generator=torch.Generator().manual_seed(0))
    kl = rl.compute_kl(lm.token_logps()[rows], ref.token_logps()[rows], mask=lm.mask[rows])
    exact = oracle.kl_divergence(lm.sequence_logps(), ref.sequence_logps()).detach()
    assert_mean(kl[:, None], exact[None])
    with pytest.raises(AssertionError, match="standard error"):
        assert_mean(-kl[:, None], exact[None])


# ---------------------------------------------------------------------------------------------------------------------
# V* and the optimal policy


def mean_estimate(ref, rewards, num_samples, beta1):
    """Exact mean of the V* estimate from N reference samples, over all N-tuples."""
    places, probability = oracle.enumerate_groups(ref.sequence_logps(), num_samples)
    return float((probability * rl.optimal_value(rewards[places], beta1=beta1)).sum())


def test_one_sample_estimates_the_mean_reward(small):
    """beta1 log exp(r/beta1) = r: with N = 1 nothing of V* is left but the expected reward."""
    rewards = rewards_of(small)
    expected = oracle.expected_reward(small.sequence_logps(), rewards).detach()
    close(mean_estimate(small, rewards, 1, beta1=0.5), expected)


@pytest.mark.parametrize("beta1", [0.1, 0.5, 2.0])
def test_v_star_is_underestimated_and_less_so_with_more_samples(small, beta1):
    """Jensen: the log is concave, so E log(mean of w) <= log E w."""
    rewards = rewards_of(small)
    exact = float(oracle.optimal_value(small.sequence_logps(), rewards, beta1=beta1).detach())
    means = [mean_estimate(small, rewards, n, beta1) for n in (1, 2, 3, 4)]
    assert means == sorted(means) and means[-1] < exact


@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_bias_of_v_star_is_that_of_the_delta_method(small, num_samples):
    """Bias = -beta1 Var(w) / (2 N E[w]^2) (1 + O(1/beta1)), with w = exp(r/beta1): the rest shrinks as 1/beta1."""
    rewards, probability = rewards_of(small), small.probabilities().detach()
    rest = []
    for beta1 in (20.0, 200.0):
        weight = (rewards / beta1).exp()
        mean = (probability * weight).sum()
        theory = -beta1 * (probability * (weight - mean) ** 2).sum() / (2 * num_samples * mean**2)
        exact = oracle.optimal_value(small.sequence_logps(), rewards, beta1=beta1).detach()
        rest.append(abs(float((mean_estimate(small, rewards, num_samples, beta1) - exact) / theory) - 1))
    assert rest[0] < 0.02 and rest[1] < 0.15 * rest[0]


def test_optimal_policy_reaches_v_star_and_nothing_else_does(lm):
    ref_logps, rewards = lm.sequence_logps().detach(), rewards_of(lm)
    best = oracle.optimal_policy(ref_logps, rewards, beta=BETA)
    v_star = oracle.optimal_value(ref_logps, rewards, beta1=BETA)
    close(best.exp().sum(), 1.0)
    close(oracle.expected_reward(best, rewards, ref_logps=ref_logps, beta=BETA), v_star)
    slope = oracle.policy_gradient(lm.with_distribution(best), rewards, ref_logps=ref_logps, beta=BETA)
    close(slope, torch.zeros_like(slope))
    noise = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = (best + 0.1 * torch.randn(15, generator=noise, dtype=torch.float64)).log_softmax(-1)
        gap = v_star - oracle.expected_reward(other, rewards, ref_logps=ref_logps, beta=BETA)
        close(gap, BETA * oracle.kl_divergence(other, best))  # the gap is beta KL(pi || pi*): positive


# ---------------------------------------------------------------------------------------------------------------------
# A*-PO


def a2po_losses(lm, ref, rewards, *, v_star, beta2):
    """(C,) loss of each completion."""
    advantages = rl.compute_optimal_advantage(rewards, v_star.expand(len(rewards)))
    return rl.a2po_loss(lm.token_logps(), ref.token_logps(), lm.mask, advantages, beta2=beta2)


@pytest.mark.parametrize("beta2", [1e-3, BETA])
def test_a2po_gradient_is_reinforce_with_a_known_advantage(lm, beta2):
    """Per completion: grad loss = -2 beta2 (R - V* - beta2 log-ratio) grad log pi."""
    ref, rewards = reference_of(lm), rewards_of(lm)
    v_star = oracle.optimal_value(ref.sequence_logps(), rewards, beta1=BETA)
    losses = a2po_losses(lm, ref, rewards, v_star=v_star, beta2=beta2)
    advantages = (rewards - v_star - beta2 * (lm.sequence_logps() - ref.sequence_logps())).detach()
    reinforce = -2 * beta2 * advantages * lm.sequence_logps()
    for row in range(len(losses)):
        got, expected = (torch.autograd.grad(v[row], lm.logits, retain_graph=True)[0] for v in (losses, reinforce))
        close(got, expected)


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_a2po_on_policy_climbs_reward_minus_beta2_kl_whatever_v_star(lm, shift):
    """V* is a baseline that no sample depends on: an error in it costs variance, not direction."""
    ref, rewards = reference_of(lm), rewards_of(lm)
    v_star = oracle.optimal_value(ref.sequence_logps(), rewards, beta1=BETA) + shift
    mean = (lm.probabilities().detach() * a2po_losses(lm, ref, rewards, v_star=v_star, beta2=BETA)).sum()
    exact = oracle.policy_gradient(lm, rewards, ref_logps=ref.sequence_logps(), beta=BETA)
    close(torch.autograd.grad(mean, lm.logits)[0], -2 * BETA * exact)


def test_a2po_loss_is_zero_at_the_optimal_policy_only(lm):
    ref, rewards = reference_of(lm), rewards_of(lm)
    v_star = oracle.optimal_value(ref.sequence_logps(), rewards, beta1=BETA)
    best = lm.with_distribution(oracle.optimal_policy(ref.sequence_logps(), rewards, beta=BETA))
    close(a2po_losses(best, ref, rewards, v_star=v_star, beta2=BETA), [0.0] * 15, {"rtol": 0, "atol": 1e-24})
    assert float(a2po_losses(lm, ref, rewards, v_star=v_star, beta2=BETA).detach().min()) > 1e-6
    assert float(a2po_losses(best, ref, rewards, v_star=v_star, beta2=2 * BETA).mean().detach()) > 1e-3
    close(a2po_losses(best, ref, rewards, v_star=v_star + 0.1, beta2=BETA), [0.01] * 15)


def test_minimising_the_a2po_loss_ends_at_the_optimal_policy(lm):
    """As a regression on all completions alike, from the reference: they need not come from the policy."""
    ref, rewards = lm.reference(), rewards_of(lm)
    v_star = oracle.optimal_value(ref.sequence_logps(), rewards, beta1=BETA)
    best = oracle.optimal_policy(ref.sequence_logps(), rewards, beta=BETA)
    assert float(oracle.kl_divergence(lm.sequence_logps(), best).detach()) > 0.1
    optimizer = torch.optim.LBFGS(
        lm.parameters(), max_iter=500, tolerance_grad=1e-13, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = a2po_losses(lm, ref, rewards, v_star=v_star, beta2=BETA).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    close(lm.sequence_logps(), best, {"rtol": 0, "atol": 1e-6})


# ---------------------------------------------------------------------------------------------------------------------
# Chance: counts of completions


def chi_square_rejects(counts, probabilities, *, false_alarm=FALSE_ALARM):
    """Pearson's statistic against its quantile (Wilson and Hilferty); cells that expect less than 10 are pooled."""
    total = float(counts.sum())
    order = probabilities.argsort(descending=True)
    counts, expected = counts[order].double(), total * probabilities[order].double()
    kept = max(1, int((expected >= 10).sum()))
    if kept < len(expected) and float(expected[kept:].sum()) < 10:
        kept -= 1
    counts = torch.cat([counts[:kept], counts[kept:].sum()[None]])
    expected = torch.cat([expected[:kept], expected[kept:].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    z = NormalDist().inv_cdf(1 - false_alarm)
    limit = freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((counts - expected) ** 2 / expected).sum()) > limit


def test_table_samples_its_own_distribution(lm):
    """20,000 completions, false-alarm rate 1e-6; another model's distribution is rejected."""
    counts = torch.bincount(lm.sample(20_000, generator=torch.Generator().manual_seed(0)), minlength=15)
    assert not chi_square_rejects(counts, lm.probabilities().detach())
    assert chi_square_rejects(counts, reference_of(lm).probabilities())


# ---------------------------------------------------------------------------------------------------------------------
# A real policy: LlamaForCausalLM with 4 tokens and a real tokenizer


def tiny_policy(*, seed=0, eos_ids=()):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=4,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            initializer_range=0.4,
            bos_token_id=None,
            eos_token_id=0,
        )
        model = LlamaForCausalLM(config)
    return rl.Policy(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"), eos_ids=eos_ids)


def tokens_of(rollout):
    return [tuple(tokens) for tokens in completion_tokens(rollout)]


def reward_function(rollout):
    """(B,) float32: share of "b" among the letters, and 0.5 for an end."""
    letters = [text.count("b") / max(1, len(text)) for text in rollout.texts]
    return torch.tensor(letters) + 0.5 * (~rollout.truncated).float()


@pytest.mark.parametrize("eos_ids", [(), (3,)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_probabilities_of_all_completions_sum_to_one(eos_ids, temperature):
    policy = tiny_policy(eos_ids=eos_ids)
    rollout = oracle.enumerate_completions(
        policy, ["ab", {"prompt": "cabba", "answer": 1}], max_completion_length=3, temperature=temperature
    )
    sequences = oracle.enumerate_sequences(4, policy.eos_ids, 3)
    assert tokens_of(rollout) == 2 * sequences
    probability = rollout.sampler_logp.sum(-1).exp().reshape(2, -1)
    close(probability.sum(-1), torch.ones(2), FLOAT32)
    finished = ~rollout.truncated.reshape(2, -1)
    assert bool(((probability * finished).sum(-1) < 0.9995).all())  # the truncated ones are needed for the sum
    assert rollout.columns == {"answer": (None,) * len(sequences) + (1,) * len(sequences)}


def test_probabilities_are_those_of_the_bare_model():
    """The model itself, one row at a time, without padding, packing or rlkit."""
    policy = tiny_policy()
    rollout = oracle.enumerate_completions(policy, ["ab", "cabba"], max_completion_length=3, temperature=0.6)
    for row, tokens in enumerate(tokens_of(rollout)):
        prompt = [1, 2] if row < 40 else [3, 1, 2, 2, 1]
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / 0.6
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
        close(rollout.sampler_logp[row, : len(tokens)], expected, FLOAT32)


@pytest.mark.parametrize("eos_ids", [(), (3,)])
def test_sampled_frequencies_are_the_probabilities(eos_ids):
    """20,000 completions, false-alarm rate 1e-6; the distribution of another temperature is rejected."""
    policy = tiny_policy(eos_ids=eos_ids)
    rollout = rl.sample(policy, ["ab"], num_generations=20_000, max_completion_length=3, temperature=0.8, seed=0)
    every = oracle.enumerate_completions(policy, ["ab"], max_completion_length=3, temperature=0.8)
    place = {tokens: row for row, tokens in enumerate(tokens_of(every))}
    places = torch.tensor([place[tokens] for tokens in tokens_of(rollout)])
    counts = torch.bincount(places, minlength=len(every))
    assert not chi_square_rejects(counts, every.sampler_logp.sum(-1).exp())
    close(rollout.sampler_logp, every.sampler_logp[places], FLOAT32)
    assert torch.equal(rollout.truncated, every.truncated[places])
    other = oracle.enumerate_completions(policy, ["ab"], max_completion_length=3, temperature=1.0)
    assert chi_square_rejects(counts, other.sampler_logp.sum(-1).exp())


def gradient_of_step(policy, rollout, advantages, **settings):
    """The gradient that `loss_step` applied: with SGD at learning rate 1, what the parameters lost."""
    parameters = policy.trainable_parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    update = rl.loss_step(policy, optimizer, rollout, advantages, max_grad_norm=None, **settings)
    assert update.skipped is None
    return torch.cat([(old - new).detach().flatten() for old, new in zip(before, parameters, strict=True)])


def gradient_of_sum(policy, rollout, rewards, *, ref_logps=None, beta=0.0):
    """The exact gradient, by autograd through `score_tokens`; one prompt."""
    logps = policy.score_tokens(rollout).logp.sum(-1)
    value = oracle.expected_reward(logps, rewards, ref_logps=ref_logps, beta=beta)
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, policy.trainable_parameters())])


@pytest.mark.parametrize("micro_batch_size", [None, 7])
def test_loss_step_on_weighted_rollouts_takes_the_exact_gradient(micro_batch_size):
    """REINFORCE over all completions, each with its probability: mean over C rows, so the weight is C pi(y)."""
    policy = tiny_policy()
    rollout = oracle.enumerate_completions(policy, ["ab"], max_completion_length=3)
    rewards = reward_function(rollout)
    exact = gradient_of_sum(policy, rollout, rewards)
    assert float(exact.abs().max()) > 0.01
    weight = len(rollout) * rollout.sampler_logp.sum(-1).exp()
    step = gradient_of_step(policy, rollout, weight * (rewards - 0.4), micro_batch_size=micro_batch_size)
    close(-step, exact, FLOAT32)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_whole_rloo_path_is_unbiased(sign):
    """All 1600 pairs of completions through compute_logps, compute_kl, compute_loo_advantage and loss_step.

    The mean over M groups with equal weight becomes the expectation with advantages times M p(group). A KL with its
    sign flipped is rejected.
    """
    policy, reference = tiny_policy(), tiny_policy(seed=1).reference()
    every = oracle.enumerate_completions(policy, ["ab"], max_completion_length=3)
    rewards, ref_logps = reward_function(every), rl.compute_logps(reference, every)
    exact = gradient_of_sum(policy, every, rewards, ref_logps=ref_logps.sum(-1), beta=BETA)

    places, probability = oracle.enumerate_groups(every.sampler_logp.sum(-1), 2)
    rollout = every.select(places.flatten())
    group_id = torch.arange(len(places)).repeat_interleave(2)
    kl = sign * rl.compute_kl(rollout, rl.compute_logps(reference, rollout))
    advantages = rl.compute_loo_advantage(reward_function(rollout), group_id=group_id, kl=kl, beta=BETA)
    weight = len(places) * probability.repeat_interleave(2)
    step = gradient_of_step(policy, rollout, weight * advantages, micro_batch_size=1000)
    assert torch.allclose(-step, exact, **FLOAT32) == (sign == 1)


def test_the_whole_a2po_path_climbs_reward_minus_beta2_kl():
    """Mean over completions of the a2po gradient is -2 beta2 times that of E[r] - beta2 KL."""
    policy, reference = tiny_policy(), tiny_policy(seed=1).reference()
    rollout = oracle.enumerate_completions(policy, ["ab"], max_completion_length=3)
    rewards, ref_logps = reward_function(rollout), rl.compute_logps(reference, rollout)
    exact = gradient_of_sum(policy, rollout, rewards, ref_logps=ref_logps.sum(-1), beta=BETA)
    weight = len(rollout) * rollout.sampler_logp.sum(-1).exp()
    v_star = oracle.optimal_value(ref_logps.sum(-1), rewards, beta1=BETA)
    advantages = rl.compute_optimal_advantage(rewards, v_star.expand(len(rewards)))

    def weighted(x):
        return weight * rl.AStarPO(beta2=BETA)(x)

    step = gradient_of_step(policy, rollout, advantages, loss=weighted, ref_logps=ref_logps)
    close(step, -2 * BETA * exact, FLOAT32)
