"""Collectives between the processes of a run; with one process each is the identity.

Numbers are reduced in float64, to be as exact as a sum over rows. Objects are gathered in the order of the ranks, which
is the order of the rows, since each rank holds a contiguous share.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def is_many() -> bool:
    """True if this run has several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def size() -> int:
    """Number of processes."""
    return dist.get_world_size() if is_many() else 1


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if is_many() else 0


def sums(values: Mapping[str, float]) -> dict[str, float]:
    """Each value summed over the processes, which must give the same names."""
    return _reduced(values, dist.ReduceOp.SUM) if is_many() else dict(values)


def maxima(values: Mapping[str, float]) -> dict[str, float]:
    """The maximum of each value over the processes, which must give the same names."""
    return _reduced(values, dist.ReduceOp.MAX) if is_many() else dict(values)


def _reduced(values: Mapping[str, float], op: Any) -> dict[str, float]:
    tensor = torch.tensor([float(value) for value in values.values()], dtype=torch.float64, device=_device())
    dist.all_reduce(tensor, op=op)
    return dict(zip(values, tensor.tolist(), strict=True))


def gather(value: T) -> list[T]:
    """The value of every process, in the order of the ranks, on every process. Tensors inside should be on the CPU."""
    if not is_many():
        return [value]
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, value)
    return found


def to_main(value: T) -> list[T]:
    """The value of every process, in the order of the ranks, on the main process; an empty list on the others."""
    if not is_many():
        return [value]
    found: list[Any] = [None] * size() if rank() == 0 else []
    dist.gather_object(value, found if rank() == 0 else None, dst=0)
    return found


def gather_rows(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with one entry per row, joined over the processes into the rows of the whole step."""
    if not is_many():
        return dict(rows)
    parts = gather({name: value.detach().cpu() for name, value in rows.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in rows}


def from_main(value: T) -> T:
    """The main process's value, on every process."""
    if not is_many():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Wait for every process."""
    if is_many():
        dist.barrier()


def share(count: int) -> slice:
    """This rank's contiguous share of `count` items; shares differ by at most one, the first ranks get more.

    Example:
        >>> share(5)
        slice(0, 5, None)
    """
    n, r = size(), rank()
    each, rest = divmod(count, n)
    start = r * each + min(r, rest)
    return slice(start, start + each + (r < rest))


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
