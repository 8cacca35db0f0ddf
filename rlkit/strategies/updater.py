"""From the losses of micro-batches to one optimizer step, on one process, under DDP and FSDP2 (ZeRO-3: zero3.py).

DDP and FSDP2 wrap `TokenScorer`, through whose `forward` every log-probability with a gradient goes. Passes without
gradient bypass DDP, and gather FSDP2's shards once for the whole call, so that processes may take different numbers of
passes (completions end at different lengths).
"""

import contextlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from rlkit.distributed.sharding import fsdp_modules

if TYPE_CHECKING:
    from rlkit.policy import Policy


@runtime_checkable
class Updater(Protocol):
    """What `loss_step` needs of a strategy."""

    def zero_grad(self) -> None:
        """Drop the gradient."""

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch; gradients are exchanged in the last one."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss; the processes' gradients are averaged."""

    def clip(self, max_norm: float) -> float:
        """Clip the gradient to `max_norm` and return its total norm before."""

    def step(self) -> None:
        """Take the optimizer step."""

    def weights(self) -> dict[str, torch.Tensor]:
        """This process's part of each parameter that the optimizer trains, by name."""


class TorchUpdater:
    """Updater for single-process, DDP and FSDP2 training."""

    def __init__(self, policy: "Policy", optimizer: torch.optim.Optimizer) -> None:
        self.policy, self.optimizer = policy, optimizer

    def zero_grad(self) -> None:
        """Drop the gradient of every parameter, also of those that the optimizer does not train."""
        for parameter in self.policy.model.parameters():
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Exchange gradients in the backward pass of the last micro-batch only."""
        scorer: Any = self.policy.scorer
        if hasattr(scorer, "no_sync"):  # DDP
            return contextlib.nullcontext() if last else scorer.no_sync()
        if dist.is_available() and dist.is_initialized() and (modules := fsdp_modules(scorer)):
            modules[0].set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss."""
        loss.backward()

    def clip(self, max_norm: float) -> float:
        """Clip the gradient of what the optimizer trains, and return its total norm before."""
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
    """The updater of the policy's strategy."""
    return policy.local_scorer.zero3 or TorchUpdater(policy, optimizer)


def verify_gradients(parameters: list[nn.Parameter], gather: Any) -> None:
    """Raise if the gradients of unsharded weights differ between processes: a pass bypassed the prepared policy."""
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return  # sharded: the parts differ, and a bypassing forward fails by itself
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
