"""Transfers a policy's weights to vLLM servers: as a file that they read, the adapter alone, or GPU to GPU by NCCL.

All do the same around the load: pause, load, reset the prefix cache, name the weights, resume. Every process of a run
calls `send(tensors, tag)`, because sharded weights are whole only while all of them read; rank 0 does the rest. It
raises `ValueError` if names or shapes differ or numbers are not finite (nothing was changed), and `EngineError` if the
weights did not arrive.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.engine import EngineError
from rlkit.engines.vllm.cleanup import mine, remove_left
from rlkit.engines.vllm.connection import Remote
from rlkit.engines.vllm.handshake import FRESH, Described
from rlkit.engines.vllm.preserved_state import environment
from rlkit.engines.weights import (
    Manifest,
    check_manifest,
    check_plain_lora,
    finite,
    is_quantised,
    named_weights,
    save_adapter,
    whole_copy,
)

if TYPE_CHECKING:
    from rlkit.policy import Policy

SyncWay = Literal["auto", "shm", "disk", "nccl"]
Lora = Literal["auto", "merge", "adapter"]
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlkit-weights-"  # of the names of files and folders there
ADAPTER = "rlkit-adapter"  # its name on the server
MIXED = "rlkit-mixed"  # name of weights of which a failed load has changed some
LEAST_BYTES_PER_SECOND = 50e6  # a load slower than this counts as hanging


def choose_way(remotes: Sequence[Remote], sync: str, folder: str | os.PathLike[str] | None) -> str:
    """Resolve `sync` to "shm", "disk" or "nccl"; `ValueError` for one that cannot work here."""
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
        f"VLLMServer: there is no way to transfer weights to {(away or [remotes[0].where])[0]}: it is not this machine "
        "(is its name right?), no folder= on a shared disk is given, and there is no GPU for NCCL."
    )


def uses_adapter(policy: "Policy", lora: str) -> bool:
    """True if the adapter alone is transferred; `ValueError` if `lora` does not fit the policy."""
    if lora not in get_args(Lora):
        raise ValueError(f"VLLMServer: lora must be one of {', '.join(get_args(Lora))}, got {lora!r}.")
    adapted = hasattr(policy.model, "peft_config")
    if lora == "adapter" and not adapted:
        raise ValueError(f"VLLMServer: lora='adapter', but {policy.name!r} has no adapter.")
    alone = lora == "adapter" or (lora == "auto" and adapted and is_quantised(policy.model))
    if alone:
        check_plain_lora(policy, "VLLMServer")
    return alone


class FileHandover:
    """Whole weights through a safetensors file in shared memory or on a disk that both sides see."""

    def __init__(self, servers: Sequence[Described], folder: Path) -> None:
        self.servers, self.folder = servers, folder

    def send(self, tensors: Iterable[tuple[str, Tensor]], tag: str) -> None:
        """Write the file, have every server load it, delete it."""
        checked = finite(tensors, "VLLMServer", narrowest(self.servers))
        if collectives.rank() != 0:
            for _ in checked:
                pass
            return
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        # Copies: the stream lends its tensors, and the format does not allow the shared memory of a tied head.
        weights = {name: whole_copy(tensor) for name, tensor in checked}
        given: Manifest = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
        for server in self.servers:
            if server.shapes is not None:
                check_manifest(given, {n: (tuple(s), None) for n, s in server.shapes.items()}, "VLLMServer.sync")
        size = sum(t.numel() * t.element_size() for t in weights.values())
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=mine(PREFIX), suffix=".safetensors", dir=self.folder) as file:
            os.chmod(file.name, 0o644)  # the server may belong to another user
            try:
                save_file(weights, file.name)
            except SafetensorError as error:  # a full disk too: /dev/shm of a container often holds 64 MiB
                raise EngineError(
                    f"VLLMServer: could not write {size / 2**30:.2f} GiB of weights to {self.folder}, which has "
                    f"{shutil.disk_usage(self.folder).free / 2**30:.2f} GiB free ({error}). Give it more room (docker "
                    "run --shm-size=...), or another way: sync='disk' with folder=."
                ) from error
            for server in self.servers:
                with server.remote.paused():
                    _load(server.remote, file.name, size)
                    finish(server.remote, tag)

    def close(self) -> None:
        """Do nothing: no file is kept between two transfers."""


def narrowest(servers: Sequence[Described]) -> torch.dtype:
    """The servers' dtype with the smallest largest number."""
    found: list[torch.dtype] = [getattr(torch, server.dtype) for server in servers]
    return min(found, key=lambda dtype: torch.finfo(dtype).max)


def check_base(remote: Remote) -> None:
    """Raise `EngineError` if any client replaced the server's base weights, to which an adapter alone would apply."""
    answer = remote.call("POST", "/collective_rpc", body={"method": "rlkit_base_replaced"})
    name = remote.call("GET", "/weight_info")["weight_version"]
    if any(one["replaced"] for one in answer["results"]) or (name != FRESH and not name.startswith("rlkit-")):
        raise EngineError(
            f"VLLMServer: the server at {remote.where} has taken full or merged weights since it was started "
            f"({name!r}), so an adapter alone would lie on top of those. Start the server again, or use lora='merge'."
        )


def _load(remote: Remote, file: str, size: int) -> None:
    answers = remote.call(
        "POST",
        "/collective_rpc",
        body={"method": "rlkit_load", "args": [file]},
        deadline=remote.deadline + size / LEAST_BYTES_PER_SECOND,
    )["results"]
    bad = [answer for answer in answers if not answer["ok"]]
    if bad:
        if any(answer["mixed"] for answer in bad):  # for other clients
            remote.call("POST", "/update_weight_version", body={"new_version": MIXED})
        raise EngineError(f"VLLMServer: {remote.where} did not take the weights: {bad[0]['error']}")


class AdapterHandover:
    """The LoRA adapter alone: small, and the only way for quantised base weights, which cannot be merged exactly.

    The server's base weights must be those that it was started with: on top of other full or merged weights the adapter
    gives fluent text that belongs to no policy.
    """

    def __init__(self, policy: "Policy", servers: Sequence[Described], folder: Path) -> None:
        self.policy, self.servers, self.parent = policy, servers, folder
        self.folder: Path | None = None
        config = policy.model.peft_config[policy.model.active_adapter]
        for server in servers:
            if server.lora_rank is None or server.lora_rank < config.r:
                allowed = "no adapters" if server.lora_rank is None else f"adapters up to rank {server.lora_rank}"
                raise EngineError(
                    f"VLLMServer: the server at {server.remote.where} takes {allowed}, the policy's has rank "
                    f"{config.r}. Start it with: rlkit serve MODEL --lora-rank {config.r}."
                )
            check_base(server.remote)

    def send(self, tensors: Iterable[tuple[str, Tensor]], tag: str) -> None:
        """Write the adapter and have every server load it in place of the last one; `tensors` are not read."""
        main = collectives.rank() == 0
        folder = collectives.from_main(tempfile.mkdtemp(prefix=mine(PREFIX), dir=self.parent) if main else None)
        assert folder is not None
        try:
            written = save_adapter(self.policy, folder, narrowest(self.servers))
            if main:
                self._put(folder, written, tag)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _put(self, folder: str, written: Path, tag: str) -> None:
        os.chmod(folder, 0o755)
        for server in self.servers:  # another client may have come in between
            check_base(server.remote)
        try:
            for server in self.servers:
                with server.remote.paused():
                    server.remote.call(
                        "POST",
                        "/v1/load_lora_adapter",
                        body={"lora_name": ADAPTER, "lora_path": str(written), "load_inplace": True},
                    )
                    finish(server.remote, tag)
        finally:
            self.close()
            self.folder = Path(folder)  # vLLM reads it again after it has evicted the adapter

    def close(self) -> None:
        """Delete the adapter's files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


class NCCLHandover:
    """GPU to GPU, through TRL's client. Not run by any test (docs/engines.md, "What was not run")."""

    def __init__(self, policy: "Policy", servers: Sequence[Described], manifest: Manifest, port: int) -> None:
        self.policy, self.servers, self.port = policy, servers, port
        self.announced = [
            (name, str(dtype).removeprefix("torch."), list(shape)) for name, (shape, dtype) in manifest.items()
        ]
        self.clients: list[Any] = []

    def send(self, tensors: Iterable[tuple[str, Tensor]], tag: str) -> None:
        """Stream the tensors to every server; joins the NCCL group first, and again after any failure."""
        with contextlib.closing(named_weights(self.policy)) as weights:  # first: the stream can be read once
            for _ in finite(weights, "VLLMServer", narrowest(self.servers)):
                pass
        if collectives.rank() != 0:
            for _ in tensors:
                pass
            return
        try:
            if not self.clients:
                self.clients = [_joined(server.remote, self.port + i) for i, server in enumerate(self.servers)]
            kept = list(tensors) if len(self.servers) > 1 else tensors
            for server, client in zip(self.servers, self.clients, strict=True):
                with server.remote.paused():
                    server.remote.call(
                        "POST", "/collective_rpc", body={"method": "rlkit_base_replaced", "args": [True]}
                    )
                    client.update_named_params(self.announced, iter(kept))
                    finish(server.remote, tag)
        except Exception as error:  # TRL raises plain Exception for what a server answers
            self.close()
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"VLLMServer: the transfer by NCCL failed: {error}") from error

    def close(self) -> None:
        """Leave the groups."""
        for client in self.clients:
            client.close_communicator()
        self.clients = []


def make_handover(
    policy: "Policy",
    servers: Sequence[Described],
    *,
    way: str,
    folder: str | os.PathLike[str] | None,
    adapter: bool,
    manifest: Manifest,
    group_port: int,
) -> FileHandover | AdapterHandover | NCCLHandover:
    """The transfer for a resolved way; rank 0 also removes the files of killed clients."""
    place = Path(folder) if folder is not None else SHARED_MEMORY
    if collectives.rank() == 0 and place == SHARED_MEMORY:  # on a shared disk a process may live on another machine
        remove_left(place, PREFIX)
    if adapter:
        if way == "nccl":
            raise ValueError("VLLMServer: an adapter alone is transferred as a file. Give folder= on a shared disk.")
        return AdapterHandover(policy, servers, place)
    if way == "nccl":
        return NCCLHandover(policy, servers, manifest, group_port)
    return FileHandover(servers, place)


def _joined(remote: Remote, port: int) -> Any:
    for path in (
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
    ):  # left open by a killed client
        with contextlib.suppress(EngineError):
            remote.call("POST", path)
    client = trl_client(remote, port)
    client.init_communicator(device=torch.device("cuda", torch.cuda.current_device()))
    return client


def trl_client(remote: Remote, port: int) -> Any:
    """TRL's client without proxies and without repeated requests, and with the server's secret."""
    from requests.adapters import HTTPAdapter
    from trl.generation.vllm_client import VLLMClient

    class Client(VLLMClient):  # type: ignore[misc, unused-ignore]
        def check_server(self, *arguments: Any, **settings: Any) -> None:  # called by the constructor
            self.session.trust_env = False
            self.session.headers.update(remote.refresh())
            for scheme in ("http://", "https://"):
                self.session.mount(scheme, HTTPAdapter(max_retries=0))
            super().check_server(*arguments, **settings)

    with environment({}, force={"NO_PROXY": "*", "no_proxy": "*"}):  # /health is requested outside the session
        return Client(base_url=remote.url, group_port=port, connection_timeout=remote.deadline)


def finish(remote: Remote, tag: str) -> None:
    """After a load: reset the prefix cache (`EngineError` if another client's requests use it) and name the weights."""
    if not remote.call("POST", "/reset_prefix_cache")["success"]:
        raise EngineError(
            f"VLLMServer: {remote.where} did not reset its prefix cache, which holds values of older weights, because "
            "requests of another client are alive there. Give each trainer its own server."
        )
    if remote.unclean:
        remote.call("POST", "/collective_rpc", body={"method": "rlkit_clear_blocks"})
        remote.unclean = False
    remote.call("POST", "/update_weight_version", body={"new_version": tag})
