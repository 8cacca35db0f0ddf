"""Throughput of the engines relative to each other, in one process, in turns. Less than 5 minutes on two idle cores.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/engines.py             # what is installed
    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/engines.py --server    # a vLLM server too

Two loads: completions of equal length, and of unequal lengths that the model decides. In each round every engine draws
the same prompts, in a rotating order; the result is tokens per second as a ratio to the transformers engine's in the
same round, so that other work on the machine affects all. Times are of `generate` alone, without transfers of weights
and without the pass that recomputes log-probabilities. Results: docs/performance.md.
"""

import argparse
import contextlib
import importlib.util
import os
import statistics
import time
import warnings

import torch

import rlkit as rl
from rlkit.prompts import make_batch
from rlkit.types import SamplingParams

SHORT = ["Answer with one word. Is the sky blue?", "Say only the word: yes.", "2 + 2 = ? Only the number."]
LONG = "Tell me a long story about a sailor and a whale."
WARM_UP = 4  # prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id or an offline model (smollm2)")
    parser.add_argument("--rows", type=int, default=16, help="completions of a load (16)")
    parser.add_argument("--tokens", type=int, default=32, help="length of each completion of the equal load (32)")
    parser.add_argument("--longest", type=int, default=64, help="longest completion of the skewed load (64)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120, help="start no new round after this many (120)")
    parser.add_argument("--server", action="store_true", help="also a vLLM server")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    rl.setup(seed=0)
    policy = rl.load_policy(options.model, dtype=torch.float32)
    loads = {
        f"equal, {options.rows} x {options.tokens}": equal_load(policy, options),
        f"skewed, {options.rows} up to {options.longest}": skewed_load(policy, options),
    }
    with contextlib.ExitStack() as stack:
        engines = make_engines(policy, options, stack)
        print(f"{options.model}, float32, {torch.get_num_threads()} threads, {', '.join(engines)}", flush=True)
        for engine in engines.values():  # starts, compiles, and takes the weights
            rl.sample(engine, [LONG] * WARM_UP, num_generations=1, max_completion_length=4, seed=0)
        speeds = {load: {name: [] for name in engines} for load in loads}
        rounds_started = time.perf_counter()
        for round_number in range(options.rounds):
            if time.perf_counter() - rounds_started > options.seconds:
                break
            for load, (batch, params) in loads.items():
                names = list(engines)
                for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
                    speed, lengths = measure(engines[name], batch, params, round_number)
                    speeds[load][name].append(speed)
                    print(
                        f"  round {round_number}, load average {os.getloadavg()[0]:.1f}, {load}, {name}: "
                        f"{speed:.0f} tokens/s, lengths {lengths}",
                        flush=True,
                    )
    report(speeds)
    print(f"{time.perf_counter() - started:.0f} s")


def make_engines(policy, options, stack):
    """Those that can be made here, the transformers engine first."""
    engines = {"transformers": rl.TransformersEngine(policy), "continuous batching": rl.ContinuousBatching(policy)}
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: without it")
        return engines
    length = 64 + max(options.tokens, options.longest)
    engines["vLLM colocate"] = rl.VLLMColocate(
        policy, max_model_length=length, max_num_seqs=options.rows, probe_every=0
    )
    stack.callback(engines["vLLM colocate"].close)
    if options.server:
        server = stack.enter_context(rl.serve(policy, max_model_len=length, max_num_seqs=options.rows))
        engines["vLLM server"] = rl.VLLMServer(policy, url=server.url, probe_every=0)
        stack.callback(engines["vLLM server"].close)
    return engines


def equal_load(policy, options):
    params = SamplingParams(max_completion_length=options.tokens, min_completion_length=options.tokens)
    return chat_batch(policy, [LONG] * options.rows), params


def skewed_load(policy, options):
    """One prompt in eight asks for a story, the others for a word."""
    texts = [LONG if place % 8 == 7 else SHORT[place % len(SHORT)] for place in range(options.rows)]
    return chat_batch(policy, texts), SamplingParams(max_completion_length=options.longest, temperature=0.3)


def chat_batch(policy, texts):
    if policy.tokenizer.chat_template is None:
        return make_batch(policy, texts)
    return make_batch(policy, [{"prompt": [{"role": "user", "content": text}]} for text in texts])


def measure(engine, batch, params, seed):
    """Tokens per second, and the quartiles of the lengths."""
    begun = time.perf_counter()
    groups = engine.generate(batch.token_ids, batch.group_id.tolist(), num_generations=1, params=params, seed=seed)
    seconds = time.perf_counter() - begun
    lengths = sorted(len(completion.token_ids) for group in groups for completion in group)
    return sum(lengths) / seconds, "/".join(f"{lengths[round(q * (len(lengths) - 1))]}" for q in (0, 0.5, 0.75, 1))


def report(speeds):
    """Ratios to the transformers engine, round by round: median (least to most)."""
    print("\n| load | engine | tokens/s as a ratio to the transformers engine: median (range, rounds) |\n|---|---|---|")
    for load, found in speeds.items():
        base = found["transformers"]
        for name, values in found.items():
            if name != "transformers":
                ratios = [value / other for value, other in zip(values, base, strict=True)]
                middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
                print(f"| {load} | {name} | {middle:.2f} ({least:.2f} to {most:.2f}, {len(ratios)}) |")


if __name__ == "__main__":
    main()
