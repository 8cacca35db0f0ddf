"""Ways to bring a policy's weights to vLLM servers: a file that they read, the adapter alone, or GPU to GPU by NCCL.

Every way does the same around the load: pause, load, reset the prefix cache, name the weights, resume. Every process
of a run calls `send`, because sharded weights are whole only while all of them read; rank 0 does the rest.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.engine import EngineError
from rlkit.engines.vllm.cleanup import mine
from rlkit.engines.vllm.connection import Remote
from rlkit.engines.vllm.handshake import FRESH, Described
from rlkit.engines.vllm.process_guard import environment
from rlkit.engines.vllm.served_model import whole_copy
from rlkit.engines.weights import Manifest, check_manifest, finite, named_weights, save_adapter

if TYPE_CHECKING:
    from rlkit.policy import Policy

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlkit-weights-"  # of the names of files and folders there
ADAPTER = "rlkit-adapter"  # its name on the server
RESUME_SECONDS = 5.0  # patience with a server that has just failed
MIXED = "rlkit-mixed"  # name of weights of which a failed load has changed some
LEAST_BYTES_PER_SECOND = 50e6  # a load slower than this counts as hanging


@runtime_checkable
class Handover(Protocol):
    """A way to bring weights."""

    def send(self, tensors: Iterable[tuple[str, Tensor]], tag: str) -> None:
        """Bring them to every server, under this name.

        Raises:
            ValueError: names or shapes are not the servers', or numbers are not finite; nothing was changed.
            EngineError: they did not get there.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


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

        # Copies: a tied head shares its memory, which the format does not allow, and tensors are only lent.
        weights = {name: whole_copy(tensor) for name, tensor in checked}
        given: Manifest = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
        for server in self.servers:
            if server.shapes is not None:
                check_manifest(given, {n: (tuple(s), None) for n, s in server.shapes.items()}, "VLLMServer.sync")
        size = sum(t.numel() * t.element_size() for t in weights.values())
        with self._file() as file:
            try:
                save_file(weights, file)
            except SafetensorError as error:  # a full disk too; in a container /dev/shm often holds 64 MiB
                raise EngineError(
                    f"VLLMServer: could not write {size / 2**30:.2f} GiB of weights to {self.folder}, which has "
                    f"{shutil.disk_usage(self.folder).free / 2**30:.2f} GiB free ({error}). Give it more room (docker "
                    "run --shm-size=...), or another way: sync='disk' with folder=."
                ) from error
            for server in self.servers:
                with paused(server.remote):
                    _load(server.remote, file, size)
                    finish(server.remote, tag)

    def close(self) -> None:
        """Nothing is held between two syncs."""

    @contextlib.contextmanager
    def _file(self) -> Iterator[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=mine(PREFIX), suffix=".safetensors", dir=self.folder)
        os.close(handle)
        os.chmod(name, 0o644)  # the server may run as another user
        try:
            yield name
        finally:
            Path(name).unlink(missing_ok=True)


def narrowest(servers: Sequence[Described]) -> torch.dtype:
    """The dtype of these servers whose numbers end first."""
    found: list[torch.dtype] = [getattr(torch, server.dtype) for server in servers]
    return min(found, key=lambda dtype: torch.finfo(dtype).max)


def check_base(remote: Remote) -> None:
    """Refuse an adapter alone for a server whose base weights are not those of its start any more.

    Raises:
        EngineError: full or merged weights have come since then, from this client or another.
    """
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
        if any(answer["mixed"] for answer in bad):  # so that other clients see it too
            remote.call("POST", "/update_weight_version", body={"new_version": MIXED})
        raise EngineError(f"VLLMServer: {remote.where} did not take the weights: {bad[0]['error']}")


class AdapterHandover:
    """The LoRA adapter alone: small, and the only way for quantised base weights (known_faults B57).

    The server's base weights must be those that it was started with: an adapter on top of another policy's full or
    merged weights draws fluent text of no policy at all.
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
        """Write the adapter and have every server put it in the place of the one before; `tensors` are not read."""
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
                with paused(server.remote):
                    server.remote.call(
                        "POST",
                        "/v1/load_lora_adapter",
                        body={"lora_name": ADAPTER, "lora_path": str(written), "load_inplace": True},
                    )
                    finish(server.remote, tag)
        finally:
            self.close()
            self.folder = Path(folder)  # vLLM may read it again when it has put an adapter aside

    def close(self) -> None:
        """Delete the adapter's files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


class NCCLHandover:
    """GPU to GPU, through TRL's client. Not run by any test: there was no GPU (docs/vllm_server.md)."""

    def __init__(self, policy: "Policy", servers: Sequence[Described], manifest: Manifest, port: int) -> None:
        self.policy, self.servers, self.port = policy, servers, port
        self.announced = [
            (name, str(dtype).removeprefix("torch."), list(shape)) for name, (shape, dtype) in manifest.items()
        ]
        self.clients: list[Any] = []

    def send(self, tensors: Iterable[tuple[str, Tensor]], tag: str) -> None:
        """Stream the tensors to every server; the group is joined at first, and again after anything went wrong."""
        with contextlib.closing(named_weights(self.policy)) as weights:  # before anything goes: the stream is not kept
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
                with paused(server.remote):
                    server.remote.call(
                        "POST", "/collective_rpc", body={"method": "rlkit_base_replaced", "args": [True]}
                    )
                    client.update_named_params(self.announced, iter(kept))
                    finish(server.remote, tag)
        except Exception as error:  # TRL raises plain Exception for what a server answers
            self.close()
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"VLLMServer: the weights did not go over by NCCL: {error}") from error

    def close(self) -> None:
        """Leave the groups."""
        for client in self.clients:
            client.close_communicator()
        self.clients = []


def _joined(remote: Remote, port: int) -> Any:
    for path in ("/finish_weight_update", "/shutdown_weight_transfer_engine"):  # what a killed client has left open
        with contextlib.suppress(EngineError):
            remote.call("POST", path)
    client = trl_client(remote, port)
    client.init_communicator(device=torch.device("cuda", torch.cuda.current_device()))
    return client


def trl_client(remote: Remote, port: int) -> Any:
    """TRL's client, without what it does behind one's back: proxies for the loopback, and a POST sent again."""
    from requests.adapters import HTTPAdapter
    from trl.generation.vllm_client import VLLMClient

    class Client(VLLMClient):  # type: ignore[misc, unused-ignore]
        def check_server(self, *arguments: Any, **settings: Any) -> None:  # its first request comes in the constructor
            self.session.trust_env = False
            self.session.headers.update(remote.refresh())
            for scheme in ("http://", "https://"):
                self.session.mount(scheme, HTTPAdapter(max_retries=0))
            super().check_server(*arguments, **settings)

    with environment({}, force={"NO_PROXY": "*", "no_proxy": "*"}):  # it asks for /health without its session
        return Client(base_url=remote.url, group_port=port, connection_timeout=remote.deadline)


@contextlib.contextmanager
def paused(remote: Remote) -> Iterator[None]:
    """No completion is drawn inside. The server goes on afterwards, whatever happened."""
    try:
        remote.call("POST", "/pause", params={"mode": "wait"})
        yield
    except BaseException:  # also an interrupt, and a pause that may still come
        with contextlib.suppress(EngineError):  # the first error says more
            remote.call("POST", "/resume", deadline=min(RESUME_SECONDS, remote.deadline))
        raise
    remote.call("POST", "/resume")


def finish(remote: Remote, tag: str) -> None:
    """What must follow a load: nothing cached from older weights, and the new name.

    Raises:
        EngineError: the cache cannot be reset, because someone else's requests are alive.
    """
    if not remote.call("POST", "/reset_prefix_cache")["success"]:
        raise EngineError(
            f"VLLMServer: {remote.where} did not reset its prefix cache, which holds values of older weights, because "
            "requests of another client are alive there. Give each trainer its own server."
        )
    if remote.unclean:
        remote.call("POST", "/collective_rpc", body={"method": "rlkit_clear_blocks"})
        remote.unclean = False
    remote.call("POST", "/update_weight_version", body={"new_version": tag})
