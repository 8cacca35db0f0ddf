"""Check on a machine with GPUs what could only be shown on CPUs so far (docs/scaling.md, docs/engines.md).

    python scripts/check_gpu.py                    every GPU of this machine
    python scripts/check_gpu.py --nproc 2          on 2 processes
    python scripts/check_gpu.py --only engines     only vLLM and continuous batching; or: --only training
    python scripts/check_gpu.py --cpu --nproc 2    the same checks with gloo, to try the script itself

At most 5 minutes: what does not fit is skipped, and a check that hangs is ended. No GPU was there to run it on.

Each check prints PASS, FAIL or SKIP with a reason; the last line counts them, and the exit status is 1 if one failed.
The model is tiny-add, which ships with rlkit; nothing is downloaded. Training is compared with one process on the same
device: the same samples, and weights within a tolerance that is printed.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from check_gpu_engines import CHECKS as ENGINES

SECONDS = 300
ENGINE_SECONDS = 140  # of one check of an engine; vLLM takes most of a minute to start with CUDA graphs
LEAST_SECONDS = 20  # with less left nothing is begun
# SGD passes float32's rounding on as it is; AdamW with its default eps would turn it into steps of a learning rate.
TOLERANCE = 1e-4  # of weights after 3 updates: GPUs add in another order, and other sizes get other kernels
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="use CPUs and gloo")
    parser.add_argument("--nproc", type=int, help="processes; default: one for each GPU, 2 with --cpu")
    parser.add_argument("--only", choices=["training", "engines"], help="one half of the checks")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker))
        return 0
    return Checks(options.cpu, options.nproc).run(options.only)


class Checks:
    """Launches the work on one and on several processes and compares what they left."""

    def __init__(self, cpu: bool, nproc: int | None) -> None:
        self.cpu = cpu
        self.nproc = nproc or (2 if cpu else max(1, torch.cuda.device_count()))
        self.started = time.perf_counter()
        self.counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
        self.folder = Path(tempfile.mkdtemp(prefix="rlkit-check-"))

    def run(self, only: str | None) -> int:
        name = "CPU" if self.cpu else "no GPU"
        if not self.cpu and torch.cuda.is_available():
            name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
        print(f"check_gpu: {name}, {self.nproc} processes, torch {torch.__version__}, logs in {self.folder}")
        if not self.cpu and not torch.cuda.is_available():
            self.say("FAIL", "GPU", "torch sees none; use --cpu to try the script itself")
            return self.end()
        if only != "training":
            for name in ENGINES:
                self.engine(name)
        if only != "engines":
            self.training()
        return self.end()

    def training(self) -> None:
        single = self.launch("single", 1)
        if single is not None:
            self.one_process(single)
        for strategy in ("ddp", "fsdp2", "zero3"):
            if self.nproc == 1 or (not self.cpu and self.nproc > torch.cuda.device_count()):
                self.say("SKIP", strategy, "needs two processes and a GPU for each (--nproc)")
            elif strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
                self.say("SKIP", strategy, "DeepSpeed is not installed")
            elif single is not None and (found := self.launch(strategy, self.nproc)) is not None:
                self.several(strategy, single[0], found)
        self.say(
            "SKIP", "4-bit weights", "not checked here: rlkit passes the options on to transformers and bitsandbytes"
        )

    def engine(self, name: str) -> None:
        """One check of scripts/check_gpu_engines.py, in a session of its own that ends with it."""
        left = SECONDS - (time.perf_counter() - self.started)
        if left < LEAST_SECONDS:
            self.say("SKIP", name, f"the {SECONDS} s are over; try --only engines")
            return
        log = self.folder / f"{name}.txt"
        command = [sys.executable, str(Path(__file__).with_name("check_gpu_engines.py")), name]
        env = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if self.cpu:
            command, env = [*command, "--cpu"], env | {"CUDA_VISIBLE_DEVICES": ""}
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | str = process.wait(timeout=min(ENGINE_SECONDS, left))
            except subprocess.TimeoutExpired:
                status = "no end: it hangs or is too slow"
            with contextlib.suppress(ProcessLookupError):  # a vLLM server that it started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            verdict, _, rest = line.partition("  ")
            if verdict in self.counts and ": " in rest:
                self.say(verdict, *rest.split(": ", 1))
        if status != 0:
            self.say("FAIL", name, f"status {status}; see {log}")
            print("    " + "\n    ".join(lines[-12:]))

    def one_process(self, single: list[dict]) -> None:
        found = single[0]
        kind = "gloo" if self.cpu else "nccl"
        self.check(f"{kind} group of 1", found["group"] == 1.0, "an all-reduce ran")
        self.check(
            "bf16 autocast", found["bf16_ok"], f"log-probabilities within {found['bf16_gap']:.3f} nats of float32"
        )
        self.check("resume", found["resumed"], "2 steps, resumed, 2 more = 4 steps, bit for bit")
        self.memory("single", single)

    def several(self, strategy: str, single: dict, found: list[dict]) -> None:
        # Step by step and group by group; a group is whole on a rank.
        rows = sorted((row for rank in found for row in rank["rows"]), key=lambda row: row[:2])
        self.check(
            f"{strategy}: samples",
            rows == sorted(single["rows"], key=lambda row: row[:2]),
            "the completions of one process",
        )
        gap = max(
            float((rank["weights"][key] - single["weights"][key]).abs().max())
            for rank in found
            for key in single["weights"]
        )
        self.check(
            f"{strategy}: weights",
            gap <= TOLERANCE,
            f"after {STEPS} updates {gap:.1e} from one process, at most {TOLERANCE:.0e}",
        )
        norms = [abs(a - b) / b for rank in found for a, b in zip(rank["norms"], single["norms"], strict=True)]
        self.check(
            f"{strategy}: gradient norm", max(norms) < 1e-3, f"relative difference {max(norms):.1e}, at most 1e-3"
        )
        self.check(
            f"{strategy}: bf16 autocast",
            all(rank["bf16_ok"] for rank in found),
            f"within {max(rank['bf16_gap'] for rank in found):.3f} nats of float32",
        )
        self.check(
            f"{strategy}: resume", all(rank["resumed"] for rank in found), f"on {len(found)} processes, bit for bit"
        )
        self.memory(strategy, found)

    def memory(self, name: str, found: list[dict]) -> None:
        peaks = [rank["memory"] for rank in found]
        if peaks[0] is None:
            self.say("SKIP", f"{name}: memory", "not measured on a CPU")
        else:
            self.say(
                "PASS", f"{name}: memory", "peak of each GPU: " + ", ".join(f"{peak / 2**20:.0f} MiB" for peak in peaks)
            )

    def launch(self, strategy: str, nproc: int) -> list[dict] | None:
        left = SECONDS - (time.perf_counter() - self.started)
        if left < LEAST_SECONDS:
            self.say("SKIP", strategy, f"the {SECONDS} s are over")
            return None
        folder = self.folder / strategy
        folder.mkdir()
        command = [sys.executable]
        if nproc > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command += [__file__, "--worker", str(folder)]
        env = os.environ | {"RLKIT_STRATEGY": "auto" if nproc == 1 else strategy, "PYTHONUNBUFFERED": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if self.cpu else {}
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
        # cuBLAS is bit for bit the same on each run only with a workspace of fixed size
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        begun = time.perf_counter()
        with open(folder / "log.txt", "w", encoding="utf-8") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
            try:
                status: int | str = process.wait(timeout=min(120, left))
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its processes
                try:
                    process.wait(timeout=40)
                except subprocess.TimeoutExpired:
                    process.kill()
                status = "no end: it hangs or is too slow"
        seconds = time.perf_counter() - begun
        files = sorted(folder.glob("rank*.pt"))
        if status != 0 or len(files) != nproc:
            self.say("FAIL", strategy, f"{nproc} processes, {seconds:.0f} s, status {status}; see {folder / 'log.txt'}")
            print("    " + "\n    ".join((folder / "log.txt").read_text(encoding="utf-8").splitlines()[-12:]))
            return None
        self.say("PASS", f"{strategy}: runs", f"{nproc} processes, {seconds:.0f} s")
        return [torch.load(file, weights_only=False) for file in files]

    def check(self, name: str, good: bool, reason: str) -> None:
        self.say("PASS" if good else "FAIL", name, reason)

    def say(self, verdict: str, name: str, reason: str) -> None:
        self.counts[verdict] += 1
        print(f"{verdict}  {name}: {reason}", flush=True)

    def end(self) -> int:
        passed, failed, skipped = self.counts.values()
        seconds = time.perf_counter() - self.started
        print(f"check_gpu: {passed} passed, {failed} failed, {skipped} skipped, {seconds:.0f} s")
        return 1 if failed else 0


def work(folder: Path) -> None:
    """On each process: train, resume, score in bfloat16, and leave what came out in a file."""
    import rlkit as rl
    from rlkit.distributed import collectives
    from rlkit.distributed.sharding import gathered

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)

    def fresh(name, precision="fp32"):
        world = rl.setup(seed=1)
        policy = rl.load_policy("tiny-add")
        policy, optimizer = world.prepare(
            policy, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), precision=precision
        )
        prompts = rl.PromptLoader(rl.tasks.load("addition").train, policy, batch_size=5, seed=0)  # odd: unequal shares
        run = rl.Run(folder / name)
        run.track(policy, optimizer, prompts=prompts)
        return run, policy, optimizer, prompts

    def train(run, policy, optimizer, prompts, steps):
        rows, norms = [], []
        for step, batch in run.steps(prompts, steps):
            rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
            scores = rl.score(rollout, digits)
            update = rl.loss_step(policy, optimizer, rollout, rl.compute_loo_advantage(scores), micro_batch_size=3)
            run.log(step, rollout, scores, update=update)
            lengths = rollout.lengths.tolist()
            ids = rollout.completion_ids.tolist()
            groups = rollout.group_id.tolist()
            rows += [(step, g, row[:n]) for g, row, n in zip(groups, ids, lengths, strict=True)]
            norms.append(update.metrics["grad_norm"])
        return rows, norms, rollout

    def whole(policy):
        with gathered(policy.local_scorer) if policy.local_scorer.zero3 else contextlib.nullcontext():
            values = policy.model.state_dict()
            values = {key: v.full_tensor() if hasattr(v, "full_tensor") else v for key, v in values.items()}
            return {key: value.detach().cpu().clone() for key, value in values.items()}

    first = fresh("run")
    rows, norms, rollout = train(*first, STEPS)
    found = {"rows": rows, "norms": norms, "weights": whole(first[1])}
    found["memory"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None

    policy = first[1]
    full = rl.compute_logps(policy, rollout)
    policy.autocast = torch.bfloat16
    half = rl.compute_logps(policy, rollout)
    gap = (full - half).abs().max() if len(rollout) else torch.tensor(1e-6)
    third = fresh("bf16", "bf16")
    before = whole(third[1])
    train(*third, 1)
    after = whole(third[1])
    moved = all(bool(value.isfinite().all()) for value in after.values())
    moved = moved and any(not torch.equal(before[key], after[key]) for key in after)
    found |= {"bf16_gap": float(gap), "bf16_ok": moved and 0 < float(gap) < 0.5}

    straight = fresh("straight")
    train(*straight, 4)
    train(*fresh("cut"), 2)
    again = fresh("cut")
    done = again[0].resume("auto")
    train(*again, 4)
    one, other = whole(straight[1]), whole(again[1])
    found["resumed"] = done == 2 and all(torch.equal(one[key], other[key]) for key in one)

    if collectives.size() == 1:
        import torch.distributed as dist

        file = folder / "store"
        device = policy.device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{file}", rank=0, world_size=1
        )
        value = torch.ones(1, device=device)
        dist.all_reduce(value)
        found["group"] = float(value)
        dist.destroy_process_group()
    torch.save(found, folder / f"rank{collectives.rank()}.pt")


def digits(completions, **kwargs):
    """A reward that differs within a group, so that there is something to learn."""
    return [sum(character in "02468" for character in text) / (1 + len(text)) for text in completions]


if __name__ == "__main__":
    sys.exit(main())
