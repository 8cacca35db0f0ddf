"""A training that is stopped, killed and taken up again.

python lifecycle_worker.py OUT first     to the end without a break; half of it; ended by signals
python lifecycle_worker.py OUT killed    kill -9 in the middle of a save
python lifecycle_worker.py OUT second    a new process takes them all up
python lifecycle_worker.py OUT damaged   damaged checkpoints are passed over
python lifecycle_worker.py OUT full      a disk that is full on one process
"""

import hashlib
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from equality_worker import ADAMW
from parts import ROWS, liked, make_policy, whole_optimizer, whole_parameters, write

import rlkit as rl
from rlkit.distributed import collectives
from rlkit.run import checkpoint, manifest

STEPS, HALF = 4, 2
TORN = '{"step": 3, "rewa'  # what a killed process may leave at the end of a log
Hook = Callable[[int], None]


def train(
    path: Path,
    steps: int,
    *,
    resume: str | Path = "none",
    during: Hook = lambda step: None,
    before: Callable[[rl.Run], object] = lambda run: None,
    save_every: int | None = None,
    best: str | None = None,
) -> rl.Run:
    """Train up to `steps` steps and keep the state at the end; `during` runs in the middle of a step."""
    policy = make_policy("llama")
    reference = policy.reference()
    world = rl.setup(seed=1)
    for _ in range(world.rank if resume == "none" else 0):
        random.random()  # the ranks' own random states differ, so that each must get its own back
    policy, optimizer = world.prepare(policy, lambda params: ADAMW(params))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 4)
    prompts = rl.PromptLoader(ROWS, policy, batch_size=4, seed=0)  # 4, 4, 2, 4: a new epoch on the way
    run = rl.Run(path)
    run.track(policy, optimizer, scheduler=scheduler, prompts=prompts, keep=2, best=best)
    resumed_at = run.resume(resume)
    before(run)
    ended = None
    try:
        for step, batch in run.steps(prompts, steps, save_every=save_every):
            rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=8)
            scores = rl.score(rollout, liked)
            during(step)
            ref_logps = rl.compute_logps(reference, rollout)
            advantages = rl.compute_loo_advantage(scores, kl=rl.compute_kl(rollout, ref_logps), beta=0.05)
            update = rl.loss_step(policy, optimizer, rollout, advantages, scheduler=scheduler, micro_batch_size=3)
            drawn = float(torch.rand(())) + np.random.rand()  # noqa: NPY002 - the state that libraries draw from
            peak = -abs(step - 1.0)
            run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps, drawn=drawn, peak=peak)
    except SystemExit as stop:
        ended = stop.code
        if path.name == "usr1":
            raise
    finally:
        found = {
            "resumed_at": resumed_at,
            "ended": ended,
            "step": run.step,
            "stopped": run.stopped,
            "folder": run.path.name,
            "parameters": whole_parameters(policy),
            "optimizer": whole_optimizer(policy, optimizer),
            "scheduler": scheduler.state_dict(),
            "version": policy.version,
            "position": prompts.state_dict(),
            "random_states": random_states(),
        }
        suffix = "-resumed" if resume != "none" else ""
        write(path.parent, path.name + suffix, found)
    return run


def random_states() -> list[str]:
    """Digests of every random state, which stay as they are."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    states = [random.getstate(), [kind, keys.tolist(), *rest], torch.get_rng_state().tolist()]
    return [hashlib.sha256(repr(state).encode()).hexdigest() for state in states]


def signalled(number: int, ranks: range) -> Hook:
    """Send a signal to these ranks in the middle of step 1."""

    def during(step: int) -> None:
        if step == 1 and collectives.rank() in ranks:
            os.kill(os.getpid(), number)

    return during


def kill_at_rename(of: str, kill: Callable[[], None]) -> None:
    """Have `kill` run when the checkpoint `of` is written in full and about to get its name."""
    replace = os.replace

    def replace_or_die(source, target):
        if Path(source).name == f"{of}.partial" and Path(target).name == of:
            kill()
        replace(source, target)

    checkpoint.os.replace = replace_or_die


class SimulatedKill(BaseException):
    """Ends a save as a kill would, with the process left over to go on with other checks."""


def simulate_kill() -> None:
    raise SimulatedKill


def first(folder: Path) -> None:
    """Everything that ends in order."""
    last = collectives.size() - 1
    train(folder / "whole", STEPS)
    train(folder / "half", HALF)
    train(folder / "saved_early", HALF, before=lambda run: run.save())
    train(folder / "kept", 5, save_every=1, best="peak")
    train(folder / "term", STEPS, during=signalled(signal.SIGTERM, range(last, last + 1)))  # it reaches one rank only
    if not collectives.is_many():
        rewrite(folder)
    train(folder / "usr1", STEPS, during=signalled(signal.SIGUSR1, range(last + 1)))  # ends this process


def rewrite(folder: Path) -> None:
    """A checkpoint that exists is written once more, and the process is killed meanwhile."""
    replace = os.replace
    run = train(folder / "rewritten", HALF)
    kill_at_rename(f"step-{HALF:06d}", simulate_kill)
    try:
        run.save()
    except SimulatedKill:
        (folder / "rewritten" / "was_killed").touch()
    checkpoint.os.replace = replace


def killed(folder: Path) -> None:
    """kill -9 while checkpoint 3 is about to get its name; 1 and 2 are there."""
    kill_at_rename("step-000003", lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(folder / "killed", STEPS, save_every=1)


def second(folder: Path) -> None:
    """A new process goes on."""
    if collectives.rank() == 0:
        with open(folder / "killed" / "metrics.jsonl", "a", encoding="utf-8") as log:
            log.write(TORN)
    collectives.barrier()
    for name in ("half", "usr1", "term", "killed", "from_one", "from_two", "rewritten"):
        if (folder / name).exists():
            train(folder / name, STEPS, resume="auto")


def damaged(folder: Path) -> None:
    """A file that one of the processes wrote is damaged; one process finds it, and all go on from the one before."""
    for name in ("flipped", "cut", "forged"):
        if collectives.rank() == 0:
            newest = folder / name / "ckpt" / "step-000005"
            if name == "flipped":
                file = max(newest.glob("*.distcp"))  # of the last rank
                data = bytearray(file.read_bytes())
                data[-9] ^= 0x40
                file.write_bytes(data)
            elif name == "cut":
                file = max(newest.glob("rng-*.pt"))
                file.write_bytes(file.read_bytes()[:500])
            else:
                forge(newest, folder / "executed")
        collectives.barrier()
        train(folder / name, 5, resume="auto")


def forge(checkpoint: Path, file: Path) -> None:
    """An index that runs a command, with the checksums that belong to it."""
    counters = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    (checkpoint / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(file).encode() + b"'\ntR.")
    counters["files"][".metadata"] = manifest._checksum(checkpoint / ".metadata")
    counters.pop("sha256")
    (checkpoint / "run.json").write_text(json.dumps(manifest.sealed(counters)), encoding="utf-8")


def full(folder: Path) -> None:
    """The disk of the last process is full."""
    run = train(folder / "full", HALF)
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if collectives.rank() == collectives.size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, free[1]))
    said = ""
    try:
        run.save()
    except OSError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
    collectives.barrier()
    left = sorted(path.name for path in (folder / "full" / "ckpt").iterdir())
    collectives.barrier()
    again = run.save().name
    write(folder, "full-said", {"said": said, "left": left, "again": again})


if __name__ == "__main__":
    rl.setup(seed=1)
    {"first": first, "killed": killed, "second": second, "damaged": damaged, "full": full}[sys.argv[2]](
        Path(sys.argv[1])
    )
