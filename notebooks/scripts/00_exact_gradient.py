"""Written by `rlkit export` 0.1.0.dev0 from 00_exact_gradient.ipynb: change the notebook, not this file.

    python 00_exact_gradient.py --help
    torchrun --nproc_per_node 8 00_exact_gradient.py --strategy fsdp2 --out runs/a --resume auto
    rlkit export 00_exact_gradient.ipynb --slurm job.sbatch --nodes 4 --gpus-per-node 8

sha256 of the code: f9449035f710d8ca0aff0ee08f3541a3fb970806357f37e8f84aac6745688e9e
"""

# # Lesson 0: the exact gradient
#
# **Purpose.** Reinforcement learning of language models estimates everything: the gradient, the KL, the value of a prompt. Here
# nothing needs to be estimated. We take a language model so small that we can write down *all* it can say, derive RLOO and A\*-PO
# from sums, and hold each estimator of rlkit against the number that it estimates.
#
# **Cost.** No GPU, no download, well under a minute on 2 CPU cores.
#
# **Expected result.** Every `assert` passes in silence, most of them to 12 digits. Two figures: what a baseline costs and earns, and
# RLOO and A\*-PO climbing to the same optimum. Three exercises check your answers; their solutions are at the end.
#
# You need: softmax, expectation, and that $\nabla \log f = \nabla f / f$.

# %% cell 2
import pandas as pd
import plotly.graph_objects as go
import torch

import rlkit as rl
from rlkit import oracle


def close(a, b, tolerance=1e-12):
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)

# %% cell 14
def variance(estimates, probability):
    """Total variance of (M,K) estimates that occur with (M,) probabilities."""
    mean = probability @ estimates
    return float(probability @ estimates.square().sum(-1) - mean.square().sum())

# %% cell 52
def check(number, test, answer):
    """Run the checks of an exercise; an exercise that is not done yet is no error."""
    try:
        test(answer)
    except NotImplementedError:
        print(f"exercise {number}: to do")
    else:
        print(f"exercise {number}: right")

# %% cell 54
def leave_one_out(group_rewards):
    """(M,G) rewards of M groups -> (M,G) advantages."""
    raise NotImplementedError

# %% cell 56
def best_baseline(p, rewards, score):
    """(C,) probabilities, (C,) rewards, (C,K) scores -> the best constant b."""
    raise NotImplementedError

# %% cell 58
def reward_of(policy_logps, ref_logps, beta):
    """(C,) log-probabilities of the policy and of the reference -> (C,) rewards."""
    raise NotImplementedError

# %% cell 60
def solution_1(group_rewards):
    others = group_rewards.sum(1, keepdim=True) - group_rewards
    return group_rewards - others / (group_rewards.shape[1] - 1)


def solution_2(p, rewards, score):
    weight = p * score.square().sum(-1)
    return (weight @ rewards) / weight.sum()


def solution_3(policy_logps, ref_logps, beta):
    return beta * (policy_logps - ref_logps)

from rlkit import script as rlkit_script

if __name__ in ("__main__", "__mp_main__"):  # the command line decides, in worker processes too
    globals().update(
        rlkit_script.flags(__doc__)
    )


if __name__ == "__main__":
    rlkit_script.start(__file__, notebook="00_exact_gradient.ipynb", sha256="f9449035f710d8ca0aff0ee08f3541a3fb970806357f37e8f84aac6745688e9e")

    # %% cell 2
    torch.set_num_threads(1)  # tensors this small are fastest on one core

    # ## 1. A language model that fits on a page
    #
    # Three tokens: `.` ends the text, `a` and `b` are letters. A completion has at most three tokens; if no `.` has come by then, it is
    # *truncated*. The model is a table: one row of logits for each prefix that can be continued, and
    #
    # $$\pi(y) = \prod_t \pi(y_t \mid y_{<t}), \qquad \pi(\cdot \mid y_{<t}) = \mathrm{softmax}(\text{logits}[y_{<t}]).$$
    #
    # The task: say one `a` and one `b`, in any order, and stop. The reward is 1 for that and 0 for anything else, as in a task with a
    # verifiable answer.

    # %% cell 4
    lm = oracle.EnumerableLM(vocab_size=3, max_length=3, eos_id=0, seed=2)
    texts = ["".join(".ab"[token] for token in tokens) for tokens in lm.completions]
    rewards = torch.tensor([float(text in ("ab.", "ba.")) for text in texts], dtype=torch.float64)

    logps = lm.sequence_logps()  # (C,) log pi(y), with gradient
    p = lm.probabilities().detach()  # (C,) pi(y)

    assert len(texts) == 15  # 1 + 2 + 4 finished, 8 truncated
    assert lm.logits.shape == (7, 3)  # 7 prefixes: none, 2 of one letter, 4 of two
    assert close(p.sum(), 1.0)  # the truncated ones are part of the sum
    pd.DataFrame({"completion": texts, "probability": p, "reward": rewards, "truncated": lm.truncated}).round(4)

    # ## 2. The objective and its gradient
    #
    # We want a large expected reward, $J = \mathbb{E}_{y\sim\pi}[r(y)] = \sum_y \pi(y)\, r(y)$. With 15 completions that is a sum of 15
    # terms, and its derivative by autograd is the true gradient: no samples, no noise.

    # %% cell 6
    J = float((p * rewards).sum())
    gradient = oracle.policy_gradient(lm, rewards)  # (7,3), one slope per logit

    assert close(J, p[texts.index("ab.")] + p[texts.index("ba.")])
    assert close(gradient.sum(-1), torch.zeros(7))  # adding a constant to a row of logits changes no probability

    # Is it the slope? Move one logit by h and look.
    h, nudged = 1e-6, lm.reference()
    nudged.logits[0, 1] += h
    assert close((nudged.probabilities() @ rewards - J) / h, gradient[0, 1], 1e-6)
    print(f"J = {J:.4f}")

    # With the true gradient, learning is plain gradient ascent. A few hundred steps and the model does nothing else but the task:

    # %% cell 8
    student = oracle.EnumerableLM(vocab_size=3, max_length=3, seed=2)
    optimizer = torch.optim.SGD(student.parameters(), lr=2.0, maximize=True)
    for _ in range(300):
        student.logits.grad = oracle.policy_gradient(student, rewards)
        optimizer.step()

    solved = float(student.probabilities().detach() @ rewards)
    assert J < 0.15 and solved > 0.97
    print(f"expected reward {J:.3f} -> {solved:.3f}")

    # ## 3. REINFORCE: the gradient as an average
    #
    # A real model has more completions than there are atoms, so the sum is out of reach, but an *average over samples* is not. Write
    # the derivative of a probability as the probability times the derivative of its logarithm:
    #
    # $$\nabla J = \sum_y r(y)\, \nabla \pi(y) = \sum_y \pi(y)\, r(y)\, \nabla \log \pi(y) = \mathbb{E}_{y\sim\pi}\big[\, r(y)\, s(y)\,\big],
    # \qquad s(y) = \nabla \log \pi(y).$$
    #
    # $s$ is called the *score*. So: draw a completion, take its score, multiply by its reward. That is REINFORCE (Williams, 1992). Its
    # mean is the true gradient:

    # %% cell 10
    score = torch.stack([torch.autograd.grad(logp, lm.logits, retain_graph=True)[0].flatten() for logp in logps])  # (C,21)
    g = gradient.flatten()

    assert close(p @ (rewards[:, None] * score), g)

    # Set $r = 1$ in this formula. The expected reward is then 1 for every policy, its gradient is 0, and we have found the most useful
    # zero of the field:
    #
    # $$\mathbb{E}_{y\sim\pi}[\,s(y)\,] = 0.$$

    # %% cell 12
    assert close(p @ score, torch.zeros(21))

    # ## 4. Why a baseline
    #
    # Because of that zero we may subtract any constant $b$ from the reward without moving the mean: $\mathbb{E}[(r-b)\,s] =
    # \mathbb{E}[r\,s] - b\,\mathbb{E}[s] = \nabla J$. What moves is the noise. Let us measure it: the variance of a one-sample estimate,
    # added up over the 21 components.

    # %% cell 14
    def reinforce(baseline, reward=rewards):
        return (reward - baseline)[:, None] * score


    for baseline in (0.0, J, 1.0, -10.0):
        assert close(p @ reinforce(baseline), g)  # the mean never moves
        print(f"baseline {baseline:6.2f}: variance {variance(reinforce(baseline), p):8.4f}")

    assert variance(reinforce(J), p) < variance(reinforce(0.0), p) < variance(reinforce(1.0), p)

    # A baseline far from the rewards is a disaster, and "no baseline" is the baseline 0: fine for rewards of 0 and 1 when success is
    # rare, a disaster for the same task with rewards of −1 and 0. The expected reward is a safe choice, but we do not know it.
    #
    # ## 5. Leave-one-out
    #
    # Draw a group of $G$ completions. For completion $i$ the others are independent samples, so their mean reward is an estimate of $J$ in
    # which $y_i$ has no part, and the argument of section 4 holds:
    #
    # $$A_i = r_i - \frac{1}{G-1} \sum_{j \ne i} r_j, \qquad \hat g = \frac1G \sum_i A_i\, s(y_i).$$
    #
    # This is RLOO (Kool et al. 2019, Ahmadian et al. 2024). By hand, with one success in four: $1 - 0 = 1$ for the success, $0 - 1/3$ for
    # each of the others.

    # %% cell 16
    advantages = rl.compute_loo_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_id=[0, 0, 0, 0])
    assert close(advantages, torch.tensor([1, -1 / 3, -1 / 3, -1 / 3]), 1e-7)
    advantages

    # Is it unbiased? With 15 completions there are $15^2 = 225$ groups of two, $15^4 = 50\,625$ of four. We can list them all, each with
    # its probability, and the mean of the estimator is one more sum.

    # %% cell 18
    def rloo_gradients(places, reward=rewards):
        """(M,21) gradient estimates of M groups, given by the places (M,G) of their completions."""
        group_id = torch.arange(len(places)).repeat_interleave(places.shape[1])
        advantages = rl.compute_loo_advantage(reward[places].flatten(), group_id=group_id)
        return (advantages.reshape(*places.shape, 1) * score[places]).mean(1)


    exact = {}  # the variance for each G, for section 6
    for size in (2, 3, 4):
        places, probability = oracle.enumerate_groups(logps, size)
        estimates = rloo_gradients(places)
        assert close(probability @ estimates, g)
        exact[size] = variance(estimates, probability)
        print(f"G = {size}: mean over {len(places):6,} groups equals the true gradient")

    # What if completion $i$ stays in its own baseline, $r_i - \bar r$? Then the baseline depends on $y_i$, and section 4 no longer
    # applies. Since $r_i - \bar r = \frac{G-1}{G} A_i$, the gradient shrinks by that factor: half of it is lost at $G = 2$.

    # %% cell 20
    places, probability = oracle.enumerate_groups(logps, 2)
    centred = rewards[places] - rewards[places].mean(1, keepdim=True)
    assert close(probability @ (centred[..., None] * score[places]).mean(1), g / 2)

    # There is a second way to see it. As $\mathbb{E}[s] = 0$, the policy gradient is a *covariance*, $\nabla J = \mathrm{Cov}(r, s)$. RLOO
    # is its sample covariance with the divisor $G - 1$, the own-sample baseline the one with the divisor $G$: Bessel's correction.
    #
    # $$\frac1G\sum_i A_i s_i = \frac{1}{G-1} \sum_i (r_i - \bar r)(s_i - \bar s)$$

    # %% cell 22
    reward_spread = rewards[places] - rewards[places].mean(1, keepdim=True)
    score_spread = score[places] - score[places].mean(1, keepdim=True)
    assert close((reward_spread[..., None] * score_spread).sum(1) / (2 - 1), rloo_gradients(places))

    # In training nobody forms scores. A loss is written whose gradient is $-\hat g$, and autograd does the rest. rlkit's `rloo_loss` on the
    # log-probabilities of the tokens, over all pairs at once:

    # %% cell 24
    rows = places.flatten()  # B = 225 * 2 completions, prompt-major
    group_id = torch.arange(len(places)).repeat_interleave(2)
    logp, mask = lm.token_logps()[rows], lm.mask[rows]  # (B,T)
    advantages = rl.compute_loo_advantage(rewards[rows], group_id=group_id)
    loss = rl.rloo_loss(logp, logp.detach(), mask, advantages)  # (B,)

    mean_loss = (probability * loss.reshape(-1, 2).mean(1)).sum()
    assert close(torch.autograd.grad(mean_loss, lm.logits)[0], -gradient)

    # ## 6. What a group costs and what it earns
    #
    # The variance of a sample covariance has a closed form (Hoeffding, 1948). With $V_J$ the one-sample variance at the baseline $J$ and
    # $V_2$ the variance of RLOO at $G = 2$,
    #
    # $$\mathrm{Var}[\hat g] = \frac{(G-2)\, V_J + 2\, V_2}{G\,(G-1)} \;\longrightarrow\; \frac{V_J}{G}.$$
    #
    # RLOO pays for not knowing $J$, and the price falls as $1/(G-1)$. Check the formula against all groups, then draw it.

    # %% cell 26
    V_J = variance(reinforce(J), p)


    def rloo_variance(G):
        return ((G - 2) * V_J + 2 * exact[2]) / (G * (G - 1))


    for size, value in exact.items():
        assert close(rloo_variance(size), value)

    sizes = list(range(2, 65))
    curves = {
        "no baseline, rewards −1 and 0": [variance(reinforce(1.0), p) / G for G in sizes],
        "no baseline, rewards 0 and 1": [variance(reinforce(0.0), p) / G for G in sizes],
        "leave-one-out, either": [rloo_variance(G) for G in sizes],
        "baseline J, if we knew it": [V_J / G for G in sizes],
    }
    figure = go.Figure([go.Scatter(x=sizes, y=values, name=name, mode="lines") for name, values in curves.items()])
    figure.add_scatter(x=list(exact), y=list(exact.values()), name="leave-one-out, all groups listed", mode="markers")
    figure.update_layout(
        title="Variance of the gradient estimate from one group",
        template="plotly_white",
        height=420,
        xaxis={"title": "completions per prompt, G", "type": "log"},
        yaxis={"title": "total variance", "type": "log"},
    )
    figure

    # %% cell 27
    # The rewards' zero point does not matter to leave-one-out ...
    places, probability = oracle.enumerate_groups(logps, 2)
    assert close(rloo_gradients(places, rewards - 1), rloo_gradients(places))

    # ... and from G = 5 on it beats "no baseline" even where that is at its best: rare success, rewards 0 and 1.
    break_even = next(G for G in sizes if rloo_variance(G) < variance(reinforce(0.0), p) / G)
    assert break_even == 5

    # One more reason for large groups: if all completions of a group have the same reward, every advantage is 0 and the group teaches
    # nothing. With success probability $J$ that happens with probability $J^G + (1-J)^G$.

    # %% cell 29
    for size in (2, 4):
        places, probability = oracle.enumerate_groups(logps, size)
        no_signal = (rewards[places] == rewards[places][:, :1]).all(1)
        assert close(probability[no_signal].sum(), J**size + (1 - J) ** size)
        print(f"G = {size}: {probability[no_signal].sum():.0%} of the groups teach nothing")

    # ## 7. Staying near the reference
    #
    # Reward alone makes the model forget everything else. So we subtract a price for leaving the reference $\pi_{ref}$:
    #
    # $$J_\beta = \mathbb{E}_\pi[r] - \beta\, \mathrm{KL}(\pi\|\pi_{ref}), \qquad
    # \mathrm{KL}(\pi\|\pi_{ref}) = \mathbb{E}_{y\sim\pi}\Big[\underbrace{\log \pi(y) - \log \pi_{ref}(y)}_{k_1(y)}\Big].$$
    #
    # $k_1$ of a sampled completion is an unbiased estimate of the KL. It can be negative, although the KL cannot: that is no fault.

    # %% cell 31
    reference = oracle.EnumerableLM(vocab_size=3, max_length=3, seed=0).reference()
    ref_logps, beta = reference.sequence_logps(), 0.3

    k1 = rl.compute_kl(lm.token_logps(), reference.token_logps(), mask=lm.mask)  # (C,) for every completion
    kl = oracle.kl_divergence(logps, ref_logps)

    assert close(p @ k1, kl.detach()) and float(kl.detach()) > 0 > float(k1.min())

    # Now its gradient, and a famous trap. By the product rule, with $\nabla k_1 = s$,
    #
    # $$\nabla \mathrm{KL} = \sum_y \nabla\pi(y)\, k_1(y) + \sum_y \pi(y)\, \nabla k_1(y) = \mathbb{E}[k_1 s] + \underbrace{\mathbb{E}[s]}_{0}.$$
    #
    # The whole gradient is in the *first* term, where $k_1$ acts as a (negative) reward. Add $k_1$ to a loss and let autograd
    # differentiate it, and you get the second term: zero on average, pure noise, no pull towards the reference.

    # %% cell 33
    kl_gradient = torch.autograd.grad(kl, lm.logits, retain_graph=True)[0].flatten()

    assert float(kl_gradient.norm()) > 0.1
    assert close(p @ (k1[:, None] * score), kl_gradient)  # k1 in the reward: right
    autograd_of_k1 = torch.autograd.grad((p * (logps - ref_logps)).sum(), lm.logits, retain_graph=True)[0]
    assert close(autograd_of_k1, torch.zeros(7, 3))  # k1 in the loss: nothing

    # So RLOO puts the KL into the reward, $r - \beta k_1$, *before* the baseline is taken. That is the whole algorithm, and its mean is the
    # gradient of $J_\beta$:

    # %% cell 35
    places, probability = oracle.enumerate_groups(logps, 2)
    rows = places.flatten()
    logp, ref_logp, mask = lm.token_logps()[rows], reference.token_logps()[rows], lm.mask[rows]
    group_id = torch.arange(len(places)).repeat_interleave(2)

    kl_per_row = rl.compute_kl(logp, ref_logp, mask=mask)
    advantages = rl.compute_loo_advantage(rewards[rows], group_id=group_id, kl=kl_per_row, beta=beta)
    loss = rl.rloo_loss(logp, logp.detach(), mask, advantages)

    mean_loss = (probability * loss.reshape(-1, 2).mean(1)).sum()
    true_gradient = oracle.policy_gradient(lm, rewards, ref_logps=ref_logps, beta=beta)
    assert close(torch.autograd.grad(mean_loss, lm.logits)[0], -true_gradient)

    # ## 8. The optimum, in closed form
    #
    # Where does this climb end? From here on the reference is the model we started with. For any policy,
    #
    # $$\mathbb{E}_\pi[r] - \beta\,\mathrm{KL}(\pi\|\pi_{ref}) = V^* - \beta\,\mathrm{KL}(\pi\|\pi^*), \qquad
    # \pi^*(y) = \pi_{ref}(y)\, e^{(r(y) - V^*)/\beta}, \qquad V^* = \beta \log \mathbb{E}_{\pi_{ref}}\big[e^{r/\beta}\big]$$
    #
    # (put $\log\pi^*$ into the right-hand side and $\log \pi_{ref}$ comes back). A KL is at least 0, so $V^*$ is the most that can be
    # reached, and only $\pi^*$ reaches it: the reference, tilted towards reward.

    # %% cell 37
    reference = lm.reference()
    ref_logps = reference.sequence_logps()
    v_star = oracle.optimal_value(ref_logps, rewards, beta1=beta)
    best_logps = oracle.optimal_policy(ref_logps, rewards, beta=beta)

    assert close(best_logps.exp().sum(), 1.0)
    assert close(oracle.expected_reward(best_logps, rewards, ref_logps=ref_logps, beta=beta), v_star)
    best = lm.with_distribution(best_logps)
    assert close(oracle.policy_gradient(best, rewards, ref_logps=ref_logps, beta=beta), torch.zeros(7, 3))

    print(f"expected reward: reference {J:.3f}, optimal policy {best_logps.exp() @ rewards:.3f}; V* = {v_star:.3f}")

    # Look at one completion instead of the mean. At the optimum $r(y) - \beta \log\frac{\pi^*(y)}{\pi_{ref}(y)} = V^*$ for *every* $y$:
    # what is gained in reward is paid in KL, to the last digit. So RLOO's advantages are all 0 there, in every group: the noise ends where
    # the gradient ends.

    # %% cell 39
    assert close(rewards - beta * (best_logps - ref_logps), v_star.expand(15))

    # $V^*$ needs the reference only, so it can be estimated before training, from $N$ samples of the reference:
    # $\hat V = \beta \log \frac1N \sum_i e^{r_i/\beta}$. The logarithm is concave, so the estimate is too low on average (Jensen); with
    # $N = 1$ it is just the mean reward. All $N$-tuples, listed:

    # %% cell 41
    means = []
    for N in (1, 2, 3, 4):
        places, probability = oracle.enumerate_groups(ref_logps, N)
        means.append(float(probability @ rl.optimal_value(rewards[places], beta1=beta)))
        print(f"N = {N}: mean estimate {means[-1]:.4f}   (V* = {v_star:.4f})")

    assert close(means[0], J) and means == sorted(means) and means[-1] < v_star

    # And if none of the $N$ samples solves the prompt, the estimate is exactly 0, whatever $V^*$ is. That happens with probability
    # $(1-J)^N$: A\*-PO cannot know of solutions that the reference does not show. rlkit leaves such prompts out.

    # %% cell 43
    unsolved = (rewards[places] == 0).all(1)  # of the groups of N = 4
    assert close(rl.optimal_value(rewards[places[unsolved]], beta1=beta), torch.zeros(int(unsolved.sum())))
    assert close(probability[unsolved].sum(), (1 - J) ** 4)

    # ## 9. A\*-PO: the optimum as a regression
    #
    # The equation that holds at the optimum for every completion can be made a loss (Brantley et al. 2025):
    #
    # $$\ell(y) = \Big(\beta \log\frac{\pi(y)}{\pi_{ref}(y)} - \big(r(y) - V^*\big)\Big)^2.$$
    #
    # No group, no other completion of the same prompt: $V^*$ does the work of the baseline. The loss is 0 at $\pi^*$ and only there.

    # %% cell 45
    optimal_advantages = rl.compute_optimal_advantage(rewards, v_star.expand(15))  # (C,) r - V*


    def a2po(model):
        return rl.a2po_loss(model.token_logps(), reference.token_logps(), lm.mask, optimal_advantages, beta2=beta)


    assert close(a2po(best), torch.zeros(15), 1e-24)
    assert float(a2po(lm).detach().min()) > 0.01

    # It looks unlike a policy gradient, and it is one. Differentiate:
    #
    # $$\nabla \ell = -2\beta\,\Big(r - V^* - \beta\log\frac{\pi}{\pi_{ref}}\Big)\, s.$$
    #
    # That is REINFORCE with the reward $r - \beta k_1$ of section 7, the baseline $V^*$, and a step $2\beta$ times as long. On-policy its
    # mean is $-2\beta\,\nabla J_\beta$: A\*-PO and RLOO climb the same hill.

    # %% cell 47
    away = oracle.EnumerableLM(vocab_size=3, max_length=3, seed=5)  # some policy that has left the reference
    mean_loss = (away.probabilities().detach() * a2po(away)).sum()
    uphill = oracle.policy_gradient(away, rewards, ref_logps=ref_logps, beta=beta)
    assert close(torch.autograd.grad(mean_loss, away.logits)[0], -2 * beta * uphill)

    # ## 10. Both, from samples
    #
    # Now as in real life: no sums, 32 sampled completions per step. RLOO draws 8 groups of 4; A\*-PO draws 32 single completions and uses
    # a $V^*$ estimated once from $N = 8$ samples of the reference, or the exact one. The sums only watch.

    # %% cell 49
    def train(step_loss, steps=150, seed=0):
        """Returns the trained model and J_beta before each step."""
        model, generator = oracle.EnumerableLM(vocab_size=3, max_length=3, seed=2), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        history = []
        for _ in range(steps):
            rows = model.sample(32, generator=generator)
            loss = step_loss(model.token_logps()[rows], reference.token_logps()[rows], lm.mask[rows], rewards[rows])
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
            objective = oracle.expected_reward(model.sequence_logps(), rewards, ref_logps=ref_logps, beta=beta)
            history.append(float(objective.detach()))
        return model, history


    def rloo_step(logp, ref_logp, mask, reward):
        kl = rl.compute_kl(logp, ref_logp, mask=mask)
        advantages = rl.compute_loo_advantage(reward, group_id=torch.arange(32) // 4, kl=kl, beta=beta)
        return rl.rloo_loss(logp, logp.detach(), mask, advantages)


    def a2po_step(v_star):
        def step(logp, ref_logp, mask, reward):
            advantages = rl.compute_optimal_advantage(reward, torch.full_like(reward, float(v_star)))
            return rl.a2po_loss(logp, ref_logp, mask, advantages, beta2=beta)

        return step


    value_samples = reference.sample(8, generator=torch.Generator().manual_seed(3))
    v_estimate = rl.optimal_value(rewards[value_samples], beta1=beta)
    runs = {
        "RLOO, 8 groups of 4": train(rloo_step),
        "A*-PO, exact V*": train(a2po_step(v_star)),
        f"A*-PO, V* = {v_estimate:.2f} from 8 samples": train(a2po_step(v_estimate)),
    }
    figure = go.Figure([go.Scatter(y=history, name=name, mode="lines") for name, (_, history) in runs.items()])
    figure.add_hline(y=float(v_star), line_dash="dot", annotation_text="V*")
    figure.update_layout(
        title="Reward minus β KL",
        template="plotly_white",
        height=420,
        xaxis={"title": "step"},
        yaxis={"title": "J<sub>β</sub>, exact"},
    )
    figure

    # %% cell 50
    for name, (model, history) in runs.items():
        distance = float(oracle.kl_divergence(model.sequence_logps(), best_logps).detach())
        print(f"{name:35}  J_beta {history[-1]:.4f} of {v_star:.4f}   KL to the optimal policy {distance:.4f}")
        assert history[-1] <= v_star and v_star - history[-1] < 0.01
        assert close(v_star - history[-1], beta * distance)  # the equation of section 8

    # Both end at the same policy. What differs is what they pay: RLOO needs several completions of each prompt in every step; A\*-PO needs
    # one, and pays in advance for $V^*$.
    #
    # ## Exercises
    #
    # Replace `raise NotImplementedError` and run the cell. The checks say "right", or fail with a hint.

    # %% cell 52
    def test_leave_one_out(answer):
        places, probability = oracle.enumerate_groups(logps, 3)
        got = answer(rewards[places])
        assert got.shape == places.shape, f"expected one advantage per completion, shape {tuple(places.shape)}"
        mean = probability @ (got[..., None] * score[places]).mean(1)
        assert not close(mean, g * 2 / 3), "biased by (G-1)/G: is completion i part of its own baseline?"
        assert close(mean, g), "the mean over all groups is not the true gradient"
        assert not close(got, rewards[places]), "unbiased, but without a baseline"
        expected = rl.compute_loo_advantage(torch.tensor([3.0, 1.0, 2.0]), group_id=[0, 0, 0])
        assert close(answer(torch.tensor([[3.0, 1.0, 2.0]])), expected[None], 1e-6), (
            "for rewards 3, 1, 2: expected 1.5, -1.5, 0"
        )


    def test_best_baseline(answer):
        b = float(answer(p, rewards, score))
        assert not close(b, J), "J is a safe choice, not the best one: completions with a large score should count more"
        lowest = variance(reinforce(b), p)
        for other in (b - 0.01, b + 0.01, 0.0, J):
            assert lowest < variance(reinforce(other), p), f"the baseline {other:.3f} has less variance than {b:.3f}"
        assert close(answer(p, rewards + 5, score), b + 5), "adding 5 to every reward must add 5 to the baseline"


    def test_reward_of(answer):
        policy_logps = oracle.EnumerableLM(vocab_size=3, max_length=3, seed=7).sequence_logps().detach()
        for strength in (0.1, 2.0):
            got = answer(policy_logps, ref_logps, strength)
            assert got.shape == (15,), "expected one reward per completion"
            optimal = oracle.optimal_policy(ref_logps, got, beta=strength)
            assert close(optimal, policy_logps), f"for beta = {strength} the optimal policy of your reward is another one"
            assert close(oracle.optimal_value(ref_logps, got, beta1=strength), 0.0), (
                "right up to a constant: V* should be 0"
            )

    # **Exercise 1.** Write the leave-one-out advantage for a whole tensor of groups, without a loop over completions.

    # %% cell 54
    check(1, test_leave_one_out, leave_one_out)

    # **Exercise 2.** $J$ is not the constant baseline with the least variance. Set the derivative of
    # $\mathbb{E}\big[(r-b)^2\,\|s\|^2\big]$ with respect to $b$ to zero and find the one that is.

    # %% cell 56
    check(2, test_best_baseline, best_baseline)

    # **Exercise 3.** Turn section 8 around: for *which* reward is a given policy the optimal one? Choose the one with $V^* = 0$. (It is
    # called the implicit reward; DPO and A\*-PO both live from it.)

    # %% cell 58
    check(3, test_reward_of, reward_of)

    # ## Solutions
    #
    # <details>
    # <summary>Why they are what they are (click to open)</summary>
    #
    # 1. The sum of the others is the sum of all minus one's own, so no loop is needed.
    # 2. $\frac{d}{db}\mathbb{E}[(r-b)^2\|s\|^2] = -2\,\mathbb{E}[(r-b)\|s\|^2] = 0$ gives $b = \mathbb{E}[r\|s\|^2] / \mathbb{E}[\|s\|^2]$: the
    #    mean reward, with completions weighted by the square of their score. (The squared mean $\|\nabla J\|^2$ in the variance does not depend on $b$.)
    # 3. $\pi = \pi_{ref}\, e^{(r - V^*)/\beta}$ with $V^* = 0$ gives $r = \beta \log(\pi/\pi_{ref})$.
    #
    # The code is in the next cell. It goes through the same checks, and three wrong answers go through them too: they must fail.
    # </details>

    # %% cell 60
    check(1, test_leave_one_out, solution_1)
    check(2, test_best_baseline, solution_2)
    check(3, test_reward_of, solution_3)

    wrong = [
        (test_leave_one_out, lambda group_rewards: group_rewards - group_rewards.mean(1, keepdim=True)),
        (test_best_baseline, lambda p, rewards, score: p @ rewards),
        (test_reward_of, lambda policy_logps, ref_logps, beta: policy_logps - ref_logps),
    ]
    for test, answer in wrong:
        try:
            test(answer)
        except AssertionError as hint:
            print(f"{test.__name__} rejects a wrong answer: {hint}")
        else:
            raise RuntimeError(f"{test.__name__} accepted a wrong answer")
