"""Written by `rlkit export` 0.1.0.dev0 from 03_rewards.ipynb: change the notebook, not this file.

    python 03_rewards.py --help
    torchrun --nproc_per_node 8 03_rewards.py --strategy fsdp2 --out runs/a --resume auto
    rlkit export 03_rewards.ipynb --slurm job.sbatch --nodes 4 --gpus-per-node 8

sha256 of the code: 8f8cd255e0f89561919433e5abb38af77cd8d0fa8d269db7eab34c9fe2e0e50d
"""

# # Rewards: write, test and debug one before any training
#
# **Purpose.** A policy finds what is paid for, not what was meant. So a reward is tried first on completions that lie on disk, and on short
# cuts that nobody has taken yet. At the end, the two ways to choose what to train on between steps: a curriculum, and dynamic sampling.
#
# **Cost.** About a minute on two CPU cores, no network, no GPU.
#
# **Expected result.** The first reward of this notebook pays for a short cut and the probes show it; the mended one does not. Ten steps with
# dynamic sampling train on no group that teaches nothing.

# %% cell 2
import pandas as pd
import rlkit as rl
import torch

# ## Parameters

# %% cell 4 [parameters]
model_name = "tiny-add"  # a folder, a hub id, or an offline model: tiny-add, smollm2
task_name = "addition"
num_prompts = 64  # rows to try rewards on
num_generations = 8  # completions per prompt
max_completion_length = 6  # tokens
learning_rate = 3e-4
batch_size = 16  # prompts per step, and groups wanted by dynamic sampling
max_steps = 10
seed = 0

from rlkit import script as rlkit_script

if __name__ in ("__main__", "__mp_main__"):  # the command line decides, in worker processes too
    globals().update(
        rlkit_script.flags(
            __doc__,
            ("model_name", "str", model_name, "a folder, a hub id, or an offline model: tiny-add, smollm2"),
            ("task_name", "str", task_name, ""),
            ("num_prompts", "int", num_prompts, "rows to try rewards on"),
            ("num_generations", "int", num_generations, "completions per prompt"),
            ("max_completion_length", "int", max_completion_length, "tokens"),
            ("learning_rate", "float", learning_rate, ""),
            ("batch_size", "int", batch_size, "prompts per step, and groups wanted by dynamic sampling"),
            ("max_steps", "int", max_steps, ""),
            ("seed", "int", seed, ""),
        )
    )

# %% cell 9
def contains(completions, answer, **columns):
    return [float(right in rl.rewards.completion_text(text)) for text, right in zip(completions, answer, strict=True)]


def one_number(completions, **columns):
    return [float(rl.rewards.completion_text(text).strip().isdigit()) for text in completions]

# %% cell 19
def right(completions, answer, **columns):
    return [
        float(rl.rewards.completion_text(text).strip() == right)
        for text, right in zip(completions, answer, strict=True)
    ]


if __name__ == "__main__":
    rlkit_script.start(__file__, notebook="03_rewards.ipynb", sha256="8f8cd255e0f89561919433e5abb38af77cd8d0fa8d269db7eab34c9fe2e0e50d")

    # ## Completions to work on
    #
    # Sampled once and saved. From here on no model is needed to try a reward: `rl.score` takes the rollout from the file.

    # %% cell 6
    world = rl.setup(seed=seed)
    policy = rl.load_policy(model_name)
    task = rl.tasks.load(task_name)
    rows = task.train.select(range(num_prompts))

    run = rl.Run("runs/rewards")
    sampled = rl.sample(
        policy,
        rl.make_batch(policy, list(rows)),
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        seed=seed,
    )
    file = run.path / "completions.pt"
    if world.main:
        sampled.save(file)

    # %% cell 7
    rollout = rl.Rollout.load(file) if world.main else sampled
    rollout

    # ## A first reward
    #
    # A reward function gets the completions and every column of the dataset, one value per completion, and returns one number per completion, or
    # None where it has no opinion. This one pays where the right answer stands anywhere in the completion.

    # %% cell 9
    scores = rl.score(
        rollout, [contains, one_number, rl.rewards.exact_match], weights=[1.0, 0.1, 0.0]
    )  # weight 0: measured
    scores

    # ### Distribution
    #
    # Is there anything to learn from? A reward that is 0 or 1 everywhere teaches nothing, and neither does a group whose completions all got the
    # same reward: its advantages are 0. With $G$ completions and success rate $p$ that happens with probability $p^G + (1-p)^G$.

    # %% cell 11
    table = scores.to_pandas()
    table.filter(like="reward").describe().loc[["mean", "std", "min", "max"]]

    # %% cell 12
    kept, kept_scores = rl.drop_uninformative_groups(rollout, scores)
    print(f"{len(kept) // num_generations} of {num_prompts} groups have completions with different rewards")

    # ### Agreement between parts
    #
    # The rows where two rewards disagree are the ones to read.

    # %% cell 14
    pd.crosstab(table["rewards/contains"], table["rewards/exact_match"])

    # %% cell 15
    both = pd.concat([rollout.to_pandas()[["prompt", "answer", "completion"]], table.filter(like="rewards/")], axis=1)
    both[both["rewards/contains"] != both["rewards/exact_match"]].head()

    # ### Short cuts
    #
    # On these completions the first reward looks fine: this policy has never tried to cheat. `rl.rewards.probe` tries: nothing at all, the prompt
    # again, the answer twenty times, tags without anything in them, and what you add. Nothing is sampled.

    # %% cell 17
    probes = rl.rewards.probe(
        policy,
        list(rows)[:8],
        [contains, one_number, rl.rewards.exact_match],
        extra={"every number": lambda row: " ".join(map(str, range(200)))},
    )
    probes

    # A completion that counts to 200 earns `contains`, and so does the answer twenty times. `one_number` pays for any number, right or not: with a
    # large weight the policy would learn to be brief, not right. The mended reward asks for the answer and nothing else.

    # %% cell 19
    mended = rl.rewards.probe(
        policy, list(rows)[:8], right, extra={"every number": lambda row: " ".join(map(str, range(200)))}
    )
    mended

    # %% cell 20
    assert probes.loc["every number", "contains"] == 1 and probes.loc["repeated answer", "contains"] == 1
    assert mended["right"].tolist() == [1, 0, 0, 0, 0, 0, 0]

    # ## How hard is it?
    #
    # `rl.evaluate` needs no group; with several completions per prompt it also estimates pass@k without bias. The interval is a bootstrap over
    # prompts.

    # %% cell 22
    before = rl.evaluate(
        policy, rows, right, num_generations=num_generations, max_completion_length=max_completion_length, seed=seed
    )
    run.log_evaluation("before", before)
    before

    # %% cell 23
    before.per_prompt()[["prompt", "answer", "reward", "passed", "pass@4", "mean_length"]].head()

    # ## A curriculum
    #
    # Plain functions between steps: leave out what is always or never solved, then go from easy to hard. The rows keep their ids.

    # %% cell 25
    by_prompt = before.per_prompt()
    teaches = by_prompt[(by_prompt["reward"] > 0) & (by_prompt["reward"] < 1)]
    easy_first = rows.select(teaches.sort_values("reward", ascending=False).index)
    curriculum = rl.PromptLoader(easy_first, policy, batch_size=8, shuffle=False)
    print(f"{len(easy_first)} of {len(rows)} rows, from {teaches['reward'].max():.2f} to {teaches['reward'].min():.2f}")
    first = curriculum.next_batch()
    first

    # ## Dynamic sampling
    #
    # Leave out the groups that teach nothing and draw further prompts until there are enough (DAPO, [Yu et al. 2025](https://arxiv.org/abs/2503.14476)).
    # `rl.accumulate` returns what it has when the prompts end or `max_batches` is reached, and says so.

    # %% cell 27
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=learning_rate))
    prompts = rl.PromptLoader(task.train, policy, batch_size=batch_size, seed=seed)
    run.track(policy, optimizer, prompts=prompts)


    def draw(batch):
        rollout = rl.sample(policy, batch, num_generations=num_generations, max_completion_length=max_completion_length)
        return rl.drop_uninformative_groups(rollout, rl.score(rollout, right))

    # %% cell 28 [loop]
    for step, batch in run.steps(prompts, max_steps):
        found = rl.accumulate(draw, batch, prompts, groups=batch_size, max_batches=4)
        advantages = rl.compute_loo_advantage(found.scores)
        update = rl.loss_step(policy, optimizer, found.rollout, advantages)
        run.log(step, found.rollout, found.scores, advantages, update, batches_drawn=found.drawn, groups_kept=found.groups)

    # %% cell 29
    run.metrics[["step", "reward", "frac_reward_zero_std", "batches_drawn", "groups_kept"]]

    # The reward that is logged is that of the kept groups: near the middle by construction, it says nothing about progress. An evaluation does,
    # prompt by prompt, with the same random numbers.

    # %% cell 31
    after = rl.evaluate(
        policy, rows, right, num_generations=num_generations, max_completion_length=max_completion_length, seed=seed
    )
    run.log_evaluation("after", after)  # whole in the run's folder; its numbers in rl.Run.open(run.path).evaluations
    comparison = after.compare(before)
    comparison

    # %% cell 32
    comparison.summary()

    # %% cell 33
    if run.step >= 10 and model_name == "tiny-add":  # a shorter run promises nothing
        assert run.metrics["frac_reward_zero_std"].max() == 0
        assert comparison.difference > 0, comparison

    # ## Where to go from here
    #
    # - Ready-made rewards: `rl.rewards.accuracy` (math-verify in a process of its own), `numeric_match`, `boxed_match`, `think_format`, `SoftOverlong`,
    #   `python_tests` and more: [docs/tasks.md](../docs/tasks.md).
    # - Every task of reasoning-gym by name: `rl.tasks.load("reasoning-gym/countdown")`. Your own data: `rl.tasks.prepare`.
    # - [01_rloo](01_rloo.ipynb) and [02_a2po](02_a2po.ipynb) train to the end.
