"""World: the processes that run the loop, one in a notebook, N under torchrun. The loop itself does not change.

    world = rl.setup(seed=0)
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=1e-5))

Built on torch.distributed with DDP and FSDP2; not on accelerate, which on a CPU silently ran unconnected processes, and
DDP instead of FSDP2 (measured, docs/decisions.md). The only global state is torch.distributed's default group.
"""

import atexit
import contextlib
import hashlib
import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

import numpy as np
import torch

from rlkit.distributed import collectives, failure
from rlkit.distributed.rank_output import RankLog
from rlkit.loading import default_device
from rlkit.policy import Policy
from rlkit.strategies.wrap import wrap_ddp, wrap_fsdp2
from rlkit.support.process_state import current
from rlkit.support.text import did_you_mean

if TYPE_CHECKING:
    from torch.nn import Parameter

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Strategy = Literal["auto", "single", "ddp", "fsdp2", "zero3"]
Precision = Literal["fp32", "bf16"]
Backend = Literal["nccl", "gloo"]
STRATEGY_VARIABLE = "RLKIT_STRATEGY"
PRECISION_VARIABLE = "RLKIT_PRECISION"


class World:
    """The processes of a run, as seen by one of them.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        device: of this process.
        seed: of `setup`.
    """

    def __init__(self, seed: int) -> None:
        self.rank, self.size, self.seed = collectives.rank(), collectives.size(), seed
        self.device = default_device()

    @property
    def main(self) -> bool:
        """True on the process that writes files and prints."""
        return self.rank == 0

    @overload
    def prepare(
        self, policy: Policy, optimizer: None = None, *, strategy: Strategy = "auto", precision: Precision | None = None
    ) -> Policy: ...

    @overload
    def prepare(
        self,
        policy: Policy,
        optimizer: "Callable[[list[Parameter]], OptimizerT]",
        *,
        strategy: Strategy = "auto",
        precision: Precision | None = None,
    ) -> tuple[Policy, OptimizerT]: ...

    def prepare(
        self,
        policy: Policy,
        optimizer: "Callable[[list[Parameter]], OptimizerT] | None" = None,
        *,
        strategy: Strategy = "auto",
        precision: Precision | None = None,
    ) -> "Policy | tuple[Policy, OptimizerT]":
        """Wrap a policy for this world, and build its optimizer on the wrapped weights.

        Args:
            policy: the policy to train, or a frozen one (a reference too large for one device) without an optimizer.
            optimizer: a function from the trainable parameters to a torch optimizer:
                `lambda params: torch.optim.AdamW(params, lr=1e-5)`. It is called after the weights have been moved or
                sharded.
            strategy: "auto" takes the environment variable RLKIT_STRATEGY, else "ddp" on several processes and "single"
                on one. "fsdp2" shards weights, gradients and optimizer state; "zero3" does so with DeepSpeed (extra).
                On one process every strategy is "single".
            precision: "bf16" runs every pass under bfloat16 autocast on float32 weights; "fp32" does not; None takes
                the environment variable RLKIT_PRECISION, else leaves the policy's own setting.

        Returns:
            The policy and its optimizer; the policy alone without an optimizer.

        Raises:
            ValueError: unknown strategy or precision, no trainable parameter, "single" on several processes.
            TypeError: an optimizer instead of a function that makes one.
            ImportError: "zero3" without DeepSpeed.
            RuntimeError: the processes were given different policies or settings.
        """
        chosen = self._strategy(strategy)
        asked = precision or os.environ.get(PRECISION_VARIABLE)
        if asked is not None:
            if asked not in get_args(Precision):
                raise ValueError(f"world.prepare: precision must be 'fp32', 'bf16' or None, got {asked!r}.")
            policy.autocast = torch.bfloat16 if asked == "bf16" else None
        if isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "world.prepare: expected a function that makes the optimizer, got an optimizer. "
                "Write: world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=...))."
            )
        if optimizer is not None and not policy.trainable_parameters():
            raise ValueError(
                f"world.prepare: {policy.name!r} has no trainable parameter; a reference is frozen. "
                "Pass the policy of rl.load_policy, or leave the optimizer out."
            )
        if policy.strategy == "shared":  # a reference on the policy's own weights
            return policy
        if policy.strategy != "single":
            raise ValueError(f"world.prepare: {policy.name!r} is prepared already, as {policy.strategy}.")
        self._agree(policy, chosen)
        built: Any
        if chosen == "zero3":
            from rlkit.strategies.zero3 import wrap_zero3  # only here: DeepSpeed is an extra

            built = wrap_zero3(policy, optimizer)
        else:
            if chosen == "ddp" and optimizer is not None:
                wrap_ddp(policy)
            elif chosen == "fsdp2":
                wrap_fsdp2(policy)
            built = None if optimizer is None else optimizer(policy.trainable_parameters())
        policy.strategy = chosen
        if optimizer is None:
            return policy
        if current.vllm_url is not None:  # --vllm-url of an exported script
            from rlkit.engines.vllm.client import VLLMServer

            policy.use(
                VLLMServer(
                    policy,
                    url=current.vllm_url,
                    deadline=current.vllm_deadline,
                    folder=current.vllm_folder,
                    group_port=current.vllm_group_port,
                )
            )
        return policy, built

    def _strategy(self, strategy: str) -> str:
        if strategy == "auto":
            strategy = os.environ.get(STRATEGY_VARIABLE, "auto")
        if strategy not in get_args(Strategy):
            hint = did_you_mean(strategy, get_args(Strategy))
            raise ValueError(f"world.prepare: strategy must be one of {get_args(Strategy)}, got {strategy!r}.{hint}")
        if self.size == 1:
            return "single"
        if strategy == "single":
            raise ValueError(
                f"world.prepare: strategy 'single' on {self.size} processes would train {self.size} copies that drift "
                "apart. Use 'ddp' or 'fsdp2', or start one process."
            )
        return "ddp" if strategy == "auto" else strategy

    def _agree(self, policy: Policy, strategy: str) -> None:
        shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in policy.model.named_parameters()]
        plan = {
            "strategy": strategy,
            "seed": self.seed,
            "autocast": str(policy.autocast),
            "parameters": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        }
        check_agreement(plan, "world.prepare")

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.device}, seed {self.seed})"


def setup(*, seed: int = 0, timeout_minutes: float = 30) -> World:
    """Join the other processes of the run, if there are any, and seed Python, numpy and torch.

    Under torchrun the process group is started: NCCL on GPUs, gloo on CPUs, or `--backend` of a script. A second call
    only seeds again.

    Args:
        seed: of data order, sampling and initialisation; the same on every process. Sampling noise is a function of the
            prompt, so the completions do not depend on the number of processes. `--seed` of a script wins.
        timeout_minutes: timeout of one collective; `--dist-timeout` of a script wins.

    Raises:
        RuntimeError: WORLD_SIZE is set but not the address of the other processes; accelerate's strategy variables are
            set; the processes have different seeds.
        ValueError: a negative seed, a timeout that is not positive, or NCCL without a GPU.
    """
    seed = seed if current.seed is None else current.seed
    if seed < 0:
        raise ValueError(f"rl.setup: seed must be at least 0, got {seed}.")
    if (minutes := current.dist_timeout) is not None and minutes <= 0:
        raise ValueError(f"rl.setup: --dist-timeout must be > 0 minutes, got {minutes}.")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if current.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's own condition for CUDA
        torch.use_deterministic_algorithms(True)
    if size > 1 and not torch.distributed.is_initialized():
        _join(size, current.dist_timeout or timeout_minutes)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - for the users' own code
    torch.manual_seed(seed)
    plan = {"seed": seed, "script": os.path.basename(sys.argv[0]), "parameters": repr(current.parameters)}
    check_agreement(plan, "rl.setup")
    return World(seed)


def check_agreement(plan: dict[str, Any], where: str) -> None:
    """Raise the same error on every process if their plans differ; it names the setting and the ranks."""
    for name in plan:
        values = collectives.gather(plan[name])
        odd = [r for r, value in enumerate(values) if value != values[0]]
        if odd:
            raise RuntimeError(
                f"{where}: the processes disagree on {name}: rank 0 has {values[0]!r}, rank {odd[0]} has "
                f"{values[odd[0]]!r}. Start every process with the same script, settings and model."
            )


def _join(size: int, timeout_minutes: float) -> None:
    import torch.distributed as dist

    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"rl.setup: WORLD_SIZE={size} but {', '.join(missing)} not set, so this process cannot meet the others. "
            "Start the script with torchrun --nproc_per_node N script.py; in a notebook unset WORLD_SIZE."
        )
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        if os.environ.get(name, "false").lower() == "true":
            raise RuntimeError(
                f"rl.setup: {name} is set, but accelerate's strategy variables are not read. Choose the strategy with "
                f"world.prepare(..., strategy=...) or {STRATEGY_VARIABLE}."
            )
    device = default_device()
    if current.backend == "nccl" and device.type != "cuda":
        raise ValueError("rl.setup: --backend nccl needs GPUs, and there is none here. Leave it out, or take gloo.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    backend = current.backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(
        backend, store=dist.PrefixStore("rlkit-group", store), rank=rank, world_size=size, timeout=timeout
    )
    failure.start(store, rank)
    atexit.register(_leave)
    # Standard output of other ranks goes to files beside the log; standard error still reaches the console.
    if rank and os.environ.get("RLKIT_PRINT_ALL_RANKS", "0") != "1":
        sys.stdout = RankLog(rank)


def _leave() -> None:
    if torch.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.distributed.destroy_process_group()
