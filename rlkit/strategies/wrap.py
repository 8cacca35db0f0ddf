"""Wrap a policy for several processes: DDP (whole weights on each) or FSDP2 (shards)."""

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlkit.causal_lm import causal_lm_of
from rlkit.distributed.sharding import broadcast_weights, fsdp_modules

if TYPE_CHECKING:
    from rlkit.policy import Policy


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

    broadcast_weights(policy.model)  # FSDP2 does not
    mesh = init_device_mesh(policy.device.type, (dist.get_world_size(),))
    lm = causal_lm_of(policy.model)
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy.local_scorer, mesh=mesh)
    policy.scorer = policy.local_scorer
    # FSDP's default prefetches by its record of all forward passes, also those without gradient, of which processes may
    # take different numbers; the collectives would then mismatch.
    modules: list[Any] = [policy.scorer, *layers, policy.scorer]
    for before, module in pairwise(modules):
        module.set_modules_to_backward_prefetch([before])
    # The first forward pass decides which module is FSDP's root: it must be the scorer's, before anything samples.
    probe = torch.zeros(1, 2, dtype=torch.int64, device=policy.device)
    row, column = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with torch.no_grad(), policy.inference_settings():
        policy.scorer(
            probe, torch.ones_like(probe).bool(), row.to(probe.device), column.to(probe.device), temperature=1.0
        )
    for module in fsdp_modules(policy.scorer):
        module.reshard()  # the root stays whole after a forward pass, and the optimizer needs its shards
