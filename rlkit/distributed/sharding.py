"""Sharded weights: broadcast them, find the sharded modules, gather them for passes without gradient."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


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
    """Inside, sharded weights are whole on every process, and forward passes exchange nothing. May be nested.

    Needs the memory of the whole model meanwhile (docs/scaling.md). Changes are lost under FSDP2, and under ZeRO-3
    without `write`.
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
