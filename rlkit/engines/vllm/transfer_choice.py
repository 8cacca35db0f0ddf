"""Which way a policy's weights go to its servers: what was asked for, what can work here, or why nothing can."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlkit.distributed import collectives
from rlkit.engines.vllm.cleanup import remove_left
from rlkit.engines.vllm.connection import Remote
from rlkit.engines.vllm.handshake import Described
from rlkit.engines.vllm.weight_transfer import (
    PREFIX,
    SHARED_MEMORY,
    AdapterHandover,
    FileHandover,
    Handover,
    NCCLHandover,
)
from rlkit.engines.weights import Manifest, check_plain_lora, is_quantised

if TYPE_CHECKING:
    from rlkit.policy import Policy

SyncWay = Literal["auto", "shm", "disk", "nccl"]
Lora = Literal["auto", "merge", "adapter"]


def make_handover(
    policy: "Policy",
    servers: Sequence[Described],
    *,
    way: str,
    folder: str | os.PathLike[str] | None,
    adapter: bool,
    manifest: Manifest,
    group_port: int,
) -> Handover:
    """The way itself; on the main process it also removes what killed clients have left there.

    Raises:
        ValueError: an adapter alone by NCCL.
        EngineError: a server that does not take the adapter.
    """
    place = Path(folder) if folder is not None else SHARED_MEMORY
    if collectives.rank() == 0 and place == SHARED_MEMORY:  # on a shared disk a process may live on another machine
        remove_left(place, PREFIX)
    if adapter:
        if way == "nccl":
            raise ValueError("VLLMServer: an adapter alone goes over as a file. Give folder= on a shared disk.")
        return AdapterHandover(policy, servers, place)
    if way == "nccl":
        return NCCLHandover(policy, servers, manifest, group_port)
    return FileHandover(servers, place)


def choose_way(remotes: Sequence[Remote], sync: str, folder: str | os.PathLike[str] | None) -> str:
    """How weights go over.

    Raises:
        ValueError: an unknown way, or one that cannot work here.
    """
    if sync not in get_args(SyncWay):
        raise ValueError(f"VLLMServer: sync must be one of {', '.join(get_args(SyncWay))}, got {sync!r}.")
    away = [remote.where for remote in remotes if not remote.is_here]
    if sync == "shm" and away:
        raise ValueError(f"VLLMServer: sync='shm' is for servers on this machine, but {away[0]} is not.")
    if sync == "disk" and folder is None:
        raise ValueError("VLLMServer: sync='disk' needs folder=, on a disk that this machine and the server see.")
    if sync != "auto":
        return sync
    if folder is not None:
        return "disk"
    if not away and SHARED_MEMORY.is_dir():
        return "shm"
    if torch.cuda.is_available():
        return "nccl"
    raise ValueError(
        f"VLLMServer: there is no way to bring weights to {(away or [remotes[0].where])[0]}: it is not this machine "
        "(is its name right?), no folder= on a shared disk is given, and there is no GPU for NCCL."
    )


def uses_adapter(policy: "Policy", lora: str) -> bool:
    """True if only the policy's adapter goes over.

    Raises:
        ValueError: an unknown way, or one that this policy cannot have.
    """
    if lora not in get_args(Lora):
        raise ValueError(f"VLLMServer: lora must be one of {', '.join(get_args(Lora))}, got {lora!r}.")
    adapted = hasattr(policy.model, "peft_config")
    if lora == "adapter" and not adapted:
        raise ValueError(f"VLLMServer: lora='adapter', but {policy.name!r} has no adapter.")
    alone = lora == "adapter" or (lora == "auto" and adapted and is_quantised(policy.model))
    if alone:
        check_plain_lora(policy, "VLLMServer")
    return alone
