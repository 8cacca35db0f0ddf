"""torch.distributed.checkpoint, without executing anything that a file holds.

torch unpickles the index `.metadata` and each value that is not a tensor (learning rates, the state of a scheduler), so
a malicious folder could run any code. Here the index may name only the classes that an index consists of, and values
are read with `torch.load(weights_only=True)`. A value that could not be loaded that way is refused when it is saved.

Left out: storage in safetensors, which holds tensors only.
"""

import io
import pickle
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from rlkit.support.files import regular

INDEX = ".metadata"
_NAMES = """Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata
TensorProperties _MEM_FORMAT_ENCODING"""
_CLASSES: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _NAMES.split() if hasattr(metadata, name)},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
}
_NUMPY: list[Any] = [np.float64(0).__reduce__()[0], np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefd"}]
"""What a numpy number consists of; torch's documentation calls it safe."""


def save(state: dict[str, Any], folder: Path, *, alone: bool) -> None:
    """Write a state; every process calls it unless it is `alone`. An error on one process is raised on all.

    Raises:
        TypeError: a value that could not be loaded again without executing code.
    """
    try:
        dcp.save(state, checkpoint_id=str(folder), no_dist=alone, planner=_SavePlanner())
    except CheckpointException as error:
        raise _cause(error) from None


def load(state: dict[str, Any], folder: Path, *, alone: bool) -> None:
    """Load what `save` wrote into a state; every process calls it unless it is `alone`."""
    try:
        dcp.load(state, storage_reader=_Reader(folder), no_dist=alone, planner=_LoadPlanner())
    except CheckpointException as error:
        raise _cause(error) from None


def check_index(folder: Path) -> None:
    """Raise ValueError if the index is damaged, or names other classes than its own, or a file that is not whole."""
    _Reader(folder).read_metadata()


def _cause(error: CheckpointException) -> BaseException:
    """Return the first process's error; torch's own exception is not a subclass of Exception."""
    return next((cause for cause, _ in error.failures.values()), error)


class _Index(pickle.Unpickler):
    """Reads an index, which may hold only the listed globals."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module in ("pathlib", "pathlib._local"):  # where it was saved; never read
            return PureWindowsPath if "Windows" in name else PurePosixPath
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint holds")


class _Reader(dcp.FileSystemReader):
    """Reads an index as plain data, and shards only from the checkpoint's own folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        rank = kwargs.get("rank")
        name = INDEX if rank is None else f"__{rank}{INDEX}"
        try:
            with open(Path(self.path) / name, "rb", opener=regular) as file:
                found = _Index(file).load()
            ends: dict[str, int] = {}
            for info in found.storage_data.values():
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(
                f"{name} cannot be read, nothing in it was executed: {error or type(error).__name__}"
            ) from None
        for shard, end in ends.items():
            if Path(shard).name != shard:
                raise ValueError(f"{name} names a file outside the checkpoint: {shard!r}")
            try:
                with open(Path(self.path) / shard, "rb", opener=regular) as file:
                    size = file.seek(0, io.SEEK_END)
            except OSError as error:
                raise ValueError(f"{shard} cannot be read: {error.strerror}") from None
            if size < end:
                raise ValueError(f"{shard} has {size} bytes, {name} says at least {end}")
        found.storage_meta = getattr(found, "storage_meta", None) or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _LoadPlanner(DefaultLoadPlanner):
    """Reads values without executing anything; an error for what nothing takes up, or only as another type."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        assert self.metadata is not None
        held = self.metadata.state_dict_metadata
        unread = [key for key in held if key not in self.state_dict]
        if unread:
            raise ValueError(
                f"the checkpoint holds {len(unread)} entries for which there is no place here: {unread[0]}, ..."
            )
        for key, here in self.state_dict.items():
            properties = getattr(held[key], "properties", None)
            if properties is not None and isinstance(here, torch.Tensor) and here.dtype != properties.dtype:
                raise ValueError(f"{key} was saved as {properties.dtype}, and is {here.dtype} here")
        return plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        super().load_bytes(read_item, _plain(value))


class _SavePlanner(DefaultSavePlanner):
    """Refuses values that `_LoadPlanner` would refuse."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        if isinstance(found, io.BytesIO):
            try:
                _plain(io.BytesIO(found.getvalue()))
            except Exception as error:
                raise TypeError(
                    f"run.save: {write_item.index.fqn} is not plain data (numbers, text, lists, dicts, tensors), so it "
                    f"could not be loaded again. torch says: {str(error)[:300]}"
                ) from None
        return found


def _plain(value: io.BytesIO) -> io.BytesIO:
    """Load what torch saved without executing anything, and return it saved again."""
    with torch.serialization.safe_globals(_NUMPY):
        found = torch.load(value, weights_only=True)
    plain = io.BytesIO()
    torch.save(found, plain)
    plain.seek(0)
    return plain
