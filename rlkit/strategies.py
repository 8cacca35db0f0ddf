"""How a policy's weights lie on several processes: whole on each (DDP) or in shards (FSDP2, and ZeRO-3 in zero3.py).

Both stand around `TokenScorer`, through whose `forward` every log-probability with a gradient goes. Sampling and
log-probabilities without gradient need no gradient exchange: DDP is passed by, and FSDP2's shards are gathered once for
the whole call, so that processes may take different numbers of passes (completions end at different lengths).

Measured traps behind the lines below (the shared study on export): FSDP2 does not broadcast the weights of rank 0; its
first forward decides which module is the root; `generate` on a sharded PEFT wrapper fails.
"""

import contextlib
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from rlkit.logps import causal_lm_of

if TYPE_CHECKING:
    from rlkit.policy import Policy


@runtime_checkable
class Updater(Protocol):
    """What `loss_step` asks of a strategy: from the losses of the micro-batches to one optimizer step."""

    def zero_grad(self) -> None:
        """Drop the gradient."""

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch; after the last one gradients are exchanged."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss; the processes' gradients are averaged."""

    def clip(self, max_norm: float) -> float:
        """Total norm of the gradient, which is clipped to `max_norm`."""

    def step(self) -> None:
        """Take the optimizer step."""

    def weights(self) -> dict[str, torch.Tensor]:
        """This process's part of each parameter that the optimizer trains, by name."""


class TorchUpdater:
    """Of one process, DDP and FSDP2: the gradients lie in the parameters that the optimizer has."""

    def __init__(self, policy: "Policy", optimizer: torch.optim.Optimizer) -> None:
        self.policy, self.optimizer = policy, optimizer

    def zero_grad(self) -> None:
        """No gradient is left in any parameter, also not in those that the optimizer does not train."""
        for parameter in self.policy.model.parameters():
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are exchanged in the backward pass of the last micro-batch only."""
        return gradient_sync(self.policy.scorer, last=last)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss."""
        loss.backward()

    def clip(self, max_norm: float) -> float:
        """Total norm of the gradient of what the optimizer trains, before clipping; clips in place."""
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(trained, max_norm)
        # Sharded gradients give a sharded norm, whose local value would depend on the number of processes.
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self) -> None:
        """Take the optimizer step."""
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        """This process's part of each parameter that the optimizer trains, by name."""
        trained = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        found: dict[str, Any] = {n: p.detach() for n, p in self.policy.model.named_parameters() if id(p) in trained}
        return {n: p.to_local() if hasattr(p, "to_local") else p for n, p in found.items()}


def updater_of(policy: "Policy", optimizer: torch.optim.Optimizer) -> Updater:
    """How this policy is updated, as it was prepared."""
    return policy.local_scorer.zero3 or TorchUpdater(policy, optimizer)


def wrap_ddp(policy: "Policy") -> None:
    """Whole weights on every process; gradients are averaged in the backward pass of the last micro-batch."""
    from torch.nn.parallel import DistributedDataParallel

    broadcast_weights(policy.model)
    index = [policy.device.index] if policy.device.type == "cuda" else None
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = (
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    )  # renamed in torch 2.13
    options: dict[str, Any] = {"device_ids": index, buffers: False}
    policy.scorer = DistributedDataParallel(policy.local_scorer, **options)


def wrap_fsdp2(policy: "Policy") -> None:
    """Weights, gradients and optimizer state in shards, one group per decoder layer and one for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    broadcast_weights(policy.model)
    mesh = init_device_mesh(policy.device.type, (dist.get_world_size(),))
    lm = causal_lm_of(policy.model)
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy.local_scorer, mesh=mesh)
    policy.scorer = policy.local_scorer
    # By itself FSDP fetches ahead what came before in its record of all forward passes, those without gradient too, of
    # which processes may take different numbers: the exchanges would no longer fit together.
    modules: list[Any] = [policy.scorer, *layers, policy.scorer]
    for before, module in pairwise(modules):
        module.set_modules_to_backward_prefetch([before])
    # The first forward decides which module is FSDP's root: let it be the scorer, before anything samples.
    probe = torch.zeros(1, 2, dtype=torch.int64, device=policy.device)
    row, column = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with torch.no_grad(), policy.inference_settings():
        policy.scorer(
            probe, torch.ones_like(probe).bool(), row.to(probe.device), column.to(probe.device), temperature=1.0
        )
    for module in fsdp_modules(policy.scorer):
        module.reshard()  # the root stays whole after a forward pass; the optimizer must see its shards


def broadcast_weights(model: nn.Module) -> None:
    """Give every process the parameters and buffers of rank 0."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def fsdp_modules(scorer: nn.Module) -> list[Any]:
    """The sharded modules of a scorer, outermost first; empty if nothing is sharded."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def gathered(scorer: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Inside, sharded weights are whole on every process, and forward passes exchange nothing.

    Needs the memory of the whole model for as long as it lasts (docs/scaling.md). Changes are kept under FSDP2 never,
    under ZeRO-3 with `write`. May be nested: the outermost one ends it.
    """
    zero3: Any = getattr(scorer, "zero3", None)
    if zero3 is not None:
        with zero3.gathered(write=write):
            yield
        return
    outer: bool = getattr(scorer, "is_gathered", False)
    modules = fsdp_modules(scorer) if not outer and dist.is_available() and dist.is_initialized() else []
    for module in modules:
        module.unshard()
    if modules:
        modules[0].set_reshard_after_forward(False)
        vars(scorer)["is_gathered"] = True
    try:
        yield
    finally:
        if modules:
            modules[0].set_reshard_after_forward(True)
            vars(scorer)["is_gathered"] = False
        for module in modules:
            module.reshard()


@contextlib.contextmanager
def gradient_sync(scorer: Any, *, last: bool) -> Iterator[None]:
    """Exchange gradients in the backward pass of the last micro-batch only."""
    if hasattr(scorer, "no_sync"):  # DDP
        with contextlib.nullcontext() if last else scorer.no_sync():
            yield
        return
    modules = fsdp_modules(scorer) if dist.is_available() and dist.is_initialized() else []
    if modules:
        modules[0].set_requires_gradient_sync(last)
    yield


def verify_gradients(parameters: list[nn.Parameter], gather: Any) -> None:
    """Compare a checksum of the gradient over the processes, for whole weights.

    Raises:
        RuntimeError: gradients differ, so some forward pass did not go through the prepared policy.
    """
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return  # sharded: each process holds another part, and a bypassing forward fails by itself
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mine = (len(grads), float(sum(grad.double().abs().sum() for grad in grads)))
    everyone = gather(mine)
    spread = max(total for _, total in everyone) - min(total for _, total in everyone)
    if len({count for count, _ in everyone}) > 1 or spread > 1e-6 * max(1.0, abs(mine[1])):
        raise RuntimeError(
            "loss_step: the gradients differ between the processes: "
            + ", ".join(f"rank {r}: {total:.9g} in {count} tensors" for r, (count, total) in enumerate(everyone))
            + ". A forward pass with gradient did not go through the prepared policy. Use the policy that "
            "world.prepare returned, and never policy.model or .module for a loss."
        )
