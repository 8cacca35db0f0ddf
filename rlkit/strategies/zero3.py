"""ZeRO-3 through DeepSpeed, an extra: weights, gradients and optimizer state in shards, as `strategy="zero3"`.

    pip install "rlkit-llm[deepspeed]"
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=1e-5), strategy="zero3")

"fsdp2" does the same with torch alone and is the first choice (docs/scaling.md). Left out: offloading, fp16, parameters
that are sharded while they load, checkpoints for another number of processes.

DeepSpeed's hooks gather a module's weights when it runs. Therefore:

- Passes without gradient run with the hooks off, on weights gathered once: completions end at different lengths on
  different processes, and a hook would wait for the others without end.
- The head runs once per chunk of tokens, and the number of chunks differs between processes. So it has no hooks, and
  its weights belong to the scorer, whose hook runs once a pass (`register_external_parameter`).
- Gradients are only averaged over the processes and summed over micro-batches: the loss of `loss_step` is already a
  share of the mean over the whole update.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlkit.causal_lm import causal_lm_of
from rlkit.distributed import collectives
from rlkit.distributed.sharding import broadcast_weights
from rlkit.token_scorer import TokenScorer

if TYPE_CHECKING:
    from rlkit.policy import Policy

PERSISTENCE_THRESHOLD = 100_000
"""Parameters with fewer elements (biases, norms) stay whole on every process."""

BUCKET = 50_000_000
"""Most elements whose gradients are exchanged at once (200 MB in float32)."""

TAG = "zero3"
"""Name of DeepSpeed's folder inside a checkpoint."""


def wrap_zero3(
    policy: "Policy", optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
) -> torch.optim.Optimizer | None:
    """Shard a policy in place, and build its optimizer, if it is not frozen, on DeepSpeed's shards."""
    deepspeed = _import_deepspeed(policy.device)
    odd = sorted({str(p.dtype) for p in policy.model.parameters()} - {"torch.float32"})
    if odd:
        raise ValueError(
            f"world.prepare: zero3 takes float32 weights, {policy.name!r} has {', '.join(odd)}. Load it with "
            "dtype=torch.float32 and use precision='bf16'; for quantised or mixed weights use 'ddp' or 'fsdp2'."
        )
    broadcast_weights(policy.model)
    scorer = policy.local_scorer
    with torch.no_grad(), policy.inference_settings():  # with dropout off
        scorer.look_for_head()  # it runs the model, so it must come before the weights are shards
    base = None if optimizer is None else optimizer(policy.trainable_parameters())
    engine, *_ = deepspeed.initialize(model=_Root(scorer), optimizer=base, config=_config(policy.model))
    scorer.zero3 = ZeRO3(engine, scorer)
    policy.scorer = _EngineScorer(engine)
    return scorer.zero3.optimizer


def _import_deepspeed(device: torch.device) -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(
            "world.prepare: strategy 'zero3' needs DeepSpeed, which is not installed. Install it with: "
            "pip install 'rlkit-llm[deepspeed]'; on a machine without GPU: pip install wheel setuptools ninja && "
            "DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed. Or use 'fsdp2', which needs nothing."
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # torch 2.13 renamed them, DeepSpeed calls them
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{name}` is deprecated", category=FutureWarning)
    if device.type == "cpu":
        # DeepSpeed's own all-reduce for CPUs is compiled on first use: over a minute, and a killed compiler leaves a
        # lock on which every later run hangs. Without it gloo is used.
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _config(model: nn.Module) -> dict[str, Any]:
    size = max(1, min(BUCKET, sum(parameter.numel() for parameter in model.parameters())))
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only counts with it
        "gradient_accumulation_steps": 1,  # the loss is not divided; ZeRO3.micro_batch says where an update ends
        "gradient_clipping": 0.0,  # set at each step
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
            "reduce_bucket_size": size,
            "stage3_prefetch_bucket_size": size,
        },
    }


class ZeRO3:
    """A sharded policy's `Updater`; it also gathers the weights, and saves and loads checkpoints.

    Attributes:
        optimizer: the user's optimizer of the shards; None for a frozen policy.
    """

    def __init__(self, engine: Any, scorer: TokenScorer) -> None:
        import deepspeed

        self._engine, self._gather = engine, deepspeed.zero.GatheredParameters
        self.optimizer: torch.optim.Optimizer | None = getattr(engine.optimizer, "optimizer", None)
        # Without an optimizer, engine.optimizer is the parameter offload itself.
        self._shards = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        handles = [*self._shards.forward_hooks, *self._shards.backward_hooks, self._shards.fwd_pre_hook]
        head = causal_lm_of(scorer.model).get_output_embeddings()
        for parameter in head.parameters():
            deepspeed.zero.register_external_parameter(scorer, parameter)
        self._hooks = _Hooks(handles, never=head.modules())
        self._parameters = list(scorer.parameters())
        self._names = [name.removeprefix("model.") for name, _ in scorer.named_parameters()]
        self._inside = 0

    @contextlib.contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[None]:
        """Inside, every process has the whole weights and forward passes exchange nothing. May be nested.

        With `write`, the main process's changes of frozen weights are kept; the optimizer has its own copy of trained
        weights.
        """
        if self._inside:
            yield
            return
        self._shards.partition_all_parameters()  # also those that an error in a pass left gathered
        with self._hooks.off(), self._gather(self._parameters, modifier_rank=0 if write else None):
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1

    def zero_grad(self) -> None:
        """Drop the gradient."""
        self._engine.optimizer.zero_grad()

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Exchange gradients in every micro-batch: no process has room for all of them."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss, averaged over the processes."""
        self._engine.backward(loss)

    def clip(self, max_norm: float) -> float:
        """Total norm of the gradient, by which DeepSpeed clips when it steps, with torch's formula."""
        from deepspeed.utils import safe_get_local_grad

        self._engine.optimizer.clip_grad = max_norm if max_norm < float("inf") else 0.0
        parts = [safe_get_local_grad(parameter) for parameter in self._parameters if parameter.requires_grad]
        squares = sum(float(part.double().square().sum()) for part in parts if part is not None)
        return float(collectives.sums({"squares": squares})["squares"] ** 0.5)

    def step(self) -> None:
        """Take the optimizer step on this process's shards."""
        self._engine.step()

    def weights(self) -> dict[str, Tensor]:
        """This process's shard of each trained parameter, by name."""
        from deepspeed.utils import safe_get_local_fp32_param

        named = zip(self._names, self._parameters, strict=True)
        parts = {name: safe_get_local_fp32_param(p) for name, p in named if p.requires_grad}
        return {name: part.detach() for name, part in parts.items() if part is not None}

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write weights, optimizer state and `extra`, one file per process; every process calls it."""
        self._engine.save_checkpoint(
            str(folder), tag=TAG, client_state={"rlkit": extra}, save_latest=False, exclude_frozen_parameters=True
        )

    def load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint of the same number of processes; returns `extra`."""
        path, found = self._engine.load_checkpoint(
            str(folder), tag=TAG, load_module_strict=False, load_lr_scheduler_states=False
        )
        if path is None:
            raise FileNotFoundError(f"{folder / TAG} holds no checkpoint of DeepSpeed")
        return found["rlkit"]


class _Hooks:
    """DeepSpeed's module hooks, which `off` disables; those of the modules in `never` are removed."""

    def __init__(self, handles: Iterable[Any], *, never: Iterable[nn.Module]) -> None:
        without = {id(hooks) for module in never for hooks in (module._forward_hooks, module._forward_pre_hooks)}
        self._places = []
        for handle in sorted(handles, key=lambda handle: handle.id):  # in the order of registration
            if id(handle.hooks_dict_ref()) in without:
                handle.remove()
            else:
                self._places.append((handle.hooks_dict_ref(), handle.id, handle.hooks_dict_ref()[handle.id]))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        for hooks, number, _ in self._places:
            del hooks[number]
        try:
            yield
        finally:
            for hooks, number, hook in self._places:
                hooks[number] = hook


class _Root(nn.Module):
    """What DeepSpeed wraps: the scorer, under the caller's autocast, which DeepSpeed's engine would end."""

    def __init__(self, scorer: TokenScorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.autocast: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.autocast is None:
            return self.scorer(*args, **kwargs)
        # The cache would keep a second copy of every weight until the end of the pass.
        with torch.autocast(args[0].device.type, dtype=self.autocast, cache_enabled=False):
            return self.scorer(*args, **kwargs)


class _EngineScorer(nn.Module):
    """DeepSpeed's engine as a scorer."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind = args[0].device.type
        self.engine.module.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            return self.engine(*args, **kwargs)
