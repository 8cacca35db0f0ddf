"""Written by `rlkit export` 0.1.0.dev0 from 01_rloo.ipynb: change the notebook, not this file.

    python 01_rloo.py --help
    torchrun --nproc_per_node 8 01_rloo.py --strategy fsdp2 --out runs/a --resume auto
    rlkit export 01_rloo.ipynb --slurm job.sbatch --nodes 4 --gpus-per-node 8

sha256 of the code: bc5804abe507e1f3fa6619a1c58dedaa102fccd6d7316705266d4ab6027788ce
"""

# # RLOO: REINFORCE with a leave-one-out baseline
#
# **Purpose.** Train a small model that adds two-digit numbers right about two times in five until it is right most of the time, with
# nothing but the reward "the sum is right". The loop is yours: every line of it is in this notebook.
#
# **Cost.** About a minute on two CPU cores, no network, no GPU.
#
# **Expected result.** Accuracy on 500 held-out sums rises from at most 0.45 to at least 0.75.

# ## The idea
#
# A policy $\pi_\theta$ writes a completion $y$ for a prompt $x$ and gets a reward $R(x, y)$. The gradient of the expected reward is
#
# $$\nabla_\theta\, \mathbb{E}[R] = \mathbb{E}\big[(R - b)\, \nabla_\theta \log \pi_\theta(y \mid x)\big]$$
#
# for any baseline $b$ that does not depend on $y$. RLOO ([Ahmadian et al. 2024](https://arxiv.org/abs/2402.14740)) draws $G$ completions per
# prompt and takes as baseline of each the mean reward of the *other* $G-1$: no value network, no bias.
#
# $$A_i = r_i - \frac{1}{G-1} \sum_{j \ne i} r_j, \qquad r_i = R_i - \beta \log \frac{\pi_\theta(y_i)}{\pi_{ref}(y_i)}$$

# %% cell 3
import rlkit as rl
import torch

# %% cell 5 [parameters]
model_name = "tiny-add"  # a folder, a hub id, or an offline model: tiny-add, smollm2
task_name = "addition"
batch_size = 32  # prompts per step
num_generations = 8  # completions per prompt
max_completion_length = 6  # tokens
learning_rate = 3e-4
beta = 0.02  # weight of the KL in the reward
epsilon = 0.2  # clip range of the importance ratio
max_steps = 120
seed = 0

from rlkit import script as rlkit_script

if __name__ in ("__main__", "__mp_main__"):  # the command line decides, in worker processes too
    globals().update(
        rlkit_script.flags(
            __doc__,
            ("model_name", "str", model_name, "a folder, a hub id, or an offline model: tiny-add, smollm2"),
            ("task_name", "str", task_name, ""),
            ("batch_size", "int", batch_size, "prompts per step"),
            ("num_generations", "int", num_generations, "completions per prompt"),
            ("max_completion_length", "int", max_completion_length, "tokens"),
            ("learning_rate", "float", learning_rate, ""),
            ("beta", "float", beta, "weight of the KL in the reward"),
            ("epsilon", "float", epsilon, "clip range of the importance ratio"),
            ("max_steps", "int", max_steps, ""),
            ("seed", "int", seed, ""),
        )
    )


if __name__ == "__main__":
    rlkit_script.start(__file__, notebook="01_rloo.ipynb", sha256="bc5804abe507e1f3fa6619a1c58dedaa102fccd6d7316705266d4ab6027788ce")

    # %% cell 3
    # One correct completion among four: it is better than the others by 1, each of the others is worse by a third.
    rl.compute_loo_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_id=[0, 0, 0, 0])

    # ## Parameters

    # ## Policy, reference, task

    # %% cell 7
    world = rl.setup(seed=seed)
    policy = rl.load_policy(model_name)
    reference = policy.reference()  # a frozen copy
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=learning_rate))
    task = rl.tasks.load(task_name)
    prompts = rl.PromptLoader(task.train, policy, batch_size=batch_size, seed=seed)
    policy

    # %% cell 8
    task

    # %% cell 9
    test_rows = task.test.select(range(500))
    before = rl.evaluate(policy, test_rows, task.rewards, max_completion_length=max_completion_length)
    before

    # ## The loop
    #
    # Five steps: **sample** completions, **score** them, measure the KL from the reference, turn rewards into **advantages**, take a **loss step**.
    # `run.dashboard()` shows the run while it goes: charts, the completions of every step, each group's arithmetic, each token's share. It
    # reads the run's folder, so it also works from another notebook (`rl.Dashboard("runs/rloo-first")`) or a shell (`rlkit view runs/rloo-first`).
    #
    # Interrupt the loop at any time: the current step ends, a checkpoint is on disk, and running the loop's cell again goes on from
    # there. (The cell before it makes a *new* run.)

    # %% cell 11
    run = rl.Run("runs/rloo-first")
    run.dashboard(every=20)
    run.track(policy, optimizer, prompts=prompts)  # their state is saved with the run

    # %% cell 12 [loop]
    for step, batch in run.steps(prompts, max_steps):
        rollout = rl.sample(policy, batch, num_generations=num_generations, max_completion_length=max_completion_length)
        scores = rl.score(rollout, task.rewards)
        ref_logps = rl.compute_logps(reference, rollout)  # (B,T), no gradient
        kl = rl.compute_kl(rollout, ref_logps)  # (B,)
        advantages = rl.compute_loo_advantage(scores, kl=kl, beta=beta)  # (B,)
        update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO(epsilon=epsilon))
        run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)

    # Every record of the last step is still here and has a readable display. A group whose completions all got the same reward has advantage 0
    # everywhere: it teaches nothing (`frac_reward_zero_std` counts them).

    # %% cell 14
    rollout

    # ## The result

    # %% cell 16
    run.plot("reward", "frac_reward_zero_std")

    # %% cell 17
    run.plot("kl", "entropy")

    # %% cell 18
    after = rl.evaluate(policy, test_rows, task.rewards, max_completion_length=max_completion_length)
    change = after.compare(before)  # prompt by prompt, with a 95 % interval
    print(change)

    # %% cell 19
    table = before.to_pandas()[["prompt", "answer", "completion", "reward"]].rename(
        columns={"completion": "before", "reward": "reward before"}
    )
    table["after"], table["reward after"] = after.to_pandas()["completion"], after.to_pandas()["reward"]
    table.head(12)

    # %% cell 20
    if run.step >= 120 and model_name == "tiny-add":  # a shorter run promises nothing
        assert before.reward <= 0.45, before
        assert after.reward >= 0.75, after

    # ## Where to go from here
    #
    # - Lesson zero, [00_exact_gradient](../tutorials/00_exact_gradient.ipynb), proves on a model small enough to enumerate that this gradient is unbiased.
    # - [02_a2po](02_a2po.ipynb) trains the same model with A*-PO; the two loops differ in a few lines.
    # - To use your own model and data: `rl.load_policy("folder or hub id")`, a dataset with a `prompt` column, and a function
    #   `def reward(completions, answer, **kwargs) -> list[float]`.
    # - To take several updates per rollout, repeat `loss_step` with `old_logps=update.logp` of the first one: then clipping has work to do.
