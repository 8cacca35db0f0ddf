"""A tiny tied model that vLLM can serve, a server's processes, and calls past rlkit's client."""

import contextlib
import json
import os
import signal
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch
from builders import completion_tokens
from datasets import Dataset
from waiting import LONG

import rlkit as rl
from rlkit.engines.vllm.cleanup import mine
from rlkit.engines.vllm.guard import secret_for
from rlkit.engines.vllm.weight_transfer import PREFIX

CONTEXT = 480  # more than three blocks of vLLM's prefix cache on a CPU, which are 128 tokens long
PROMPTS = ["1+2=", "12+34=", "a", "99999+1=", "abc abc abc", "7"]
LONG_PROMPT = "0123456789" * 30


def ones_in(rollout):
    """Reward of each row: the share of "1" in its text, and its length against a dull signal."""
    return torch.tensor([text.count("1") + 0.01 * len(text) for text in rollout.completions])


def train(policy, steps, *, prompts=PROMPTS, learning_rate=3e-3, length=12):
    """RLOO steps; returns (tokens, rewards, largest gap between sampler and trainer) of each."""
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=learning_rate)
    trace = []
    for step in range(steps):
        rollout = rl.sample(
            policy, prompts, num_generations=4, max_completion_length=length, temperature=0.8, seed=100 + step
        )
        gap = sampler_gap(policy, rollout)
        rewards = ones_in(rollout)
        advantages = rl.compute_loo_advantage(rewards, group_id=rollout.group_id)
        rl.loss_step(policy, optimizer, rollout, advantages)
        trace.append((completion_tokens(rollout), rewards.tolist(), gap))
    return trace


def two_steps(world, url, folder):
    """What this process draws in two steps with a server, its prompts shared with the other processes."""
    policy = rl.load_policy(folder, device="cpu")
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.SGD(params, lr=0.1))
    policy.use(rl.VLLMServer(policy, url=url))
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    loader = rl.PromptLoader(dataset, policy, batch_size=len(dataset), seed=0)
    found = []
    for _ in range(2):
        rollout = rl.sample(policy, loader.next_batch(), num_generations=2, max_completion_length=8, seed=7)
        gap = sampler_gap(policy, rollout)
        advantages = rl.compute_loo_advantage(ones_in(rollout), group_id=rollout.group_id)
        rl.loss_step(policy, optimizer, rollout, advantages)
        found.append({"tokens": completion_tokens(rollout), "gap": gap})
    return found


def sampler_gap(policy, rollout):
    """Largest difference between the engine's log-probabilities and the trainer's."""
    with torch.no_grad():
        logp = policy.score_tokens(rollout).logp
    return float((logp - rollout.sampler_logp).abs()[rollout.completion_mask].max())


def raw(url, method, path, body=None):
    """A call as any other client with the secret would make it."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret_for(urlsplit(url).port)}"}
    request = urllib.request.Request(url + path, data=data, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LONG) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def running_requests(url):
    """Requests that vLLM works on or has in its queue."""
    lines = raw(url, "GET", "/metrics").splitlines()
    wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))


def family(pid):
    """A process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def named(pid, text):
    """The processes below one whose command line or name holds a text."""
    found = []
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if text in " ".join([process.name(), *process.cmdline()]):
                found.append(process)
    return found


def api_server(pid):
    """vLLM's API server below a supervisor."""
    [found] = [p for p in psutil.Process(pid).children() if "rlkit.engines.vllm.launcher" in p.cmdline()]
    return found


def engine_core(pid):
    """vLLM's engine core below a supervisor: the child of the API server that holds the model."""
    return max(api_server(pid).children(), key=lambda p: p.memory_info().rss)


@contextlib.contextmanager
def stopped(process, *, at_most=None):
    """The process stands still inside, or for some seconds; it goes on in any case."""
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(at_most or LONG, lambda: os.kill(process.pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


def shared_files():
    """What this process has in shared memory."""
    return sorted(Path("/dev/shm").glob(f"{mine(PREFIX)}*"))
