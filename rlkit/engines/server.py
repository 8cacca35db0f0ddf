"""vLLM as a server: completions over HTTP, the policy's weights by shared memory, a shared disk, or NCCL.

    policy.use(rl.VLLMServer(policy, url="http://127.0.0.1:8000"))     # the server: rlkit serve MODEL

A sync is: pause, load, reset the prefix cache, name the weights, resume. The name holds a random word of this engine
and the policy's version. It is read back before and after completions are drawn, so a server that was started again,
or that took weights from another client in between, is noticed. Whoever comes next, a restarted notebook too, simply
syncs again; nothing of the old client is needed.

Under torchrun every process makes the engine and sends its own prompts; rank 0 alone moves weights, the others wait.
Left out: weights that go over while completions are still drawn (off-policy by design), and vLLM's `/v1/chat`, whose
templates would replace the policy's own.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from rlkit import collectives
from rlkit.engines.attach import Described, attach, check_fit
from rlkit.engines.completions import draw
from rlkit.engines.remote import Remote
from rlkit.engines.requests import truncates_in_vllm, vllm_request
from rlkit.engines.weights import Manifest, check_manifest, manifest
from rlkit.rollout import SamplingParams
from rlkit.sampling.engine import Completion, EngineError

if TYPE_CHECKING:
    from rlkit.policy import Policy

SyncWay = Literal["auto", "shm", "disk", "nccl"]
SHARED_MEMORY = Path("/dev/shm")
FRESH = "default"  # vLLM's own name for the weights of a server that has just been started
LEAST_BYTES_PER_SECOND = 50e6  # a load slower than this counts as hanging


class VLLMServer:
    """Samples with one or more running vLLM servers (`rlkit serve`, `rl.serve`).

    Under torchrun every process must make it.

    Args:
        policy: whose completions are drawn.
        url: address of the server; several with commas between share the prompts, and all get the weights.
        deadline: seconds in which a server must answer, and the longest time without any progress while it draws.
        sync: how weights go over. "shm": a file in shared memory, for a server on this machine. "disk": a file in
            `folder`, which both sides see. "nccl": GPU to GPU. "auto": shm on this machine, else disk if there is a
            `folder`, else nccl.
        folder: for "disk".
        token: of the server, if it asks for one.
        group_port: for "nccl": port at which trainer and server meet.

    Raises:
        EngineError: no server there in time, or one that cannot serve this policy: another model, other numbers, too
            old, without the endpoints for weights. The error says which and what to do.
        ValueError: arguments that cannot be meant.

    Example:
        policy.use(rl.VLLMServer(policy, url="http://127.0.0.1:8000"))
    """

    name = "vllm-server"

    def __init__(
        self,
        policy: "Policy",
        *,
        url: str = "http://127.0.0.1:8000",
        deadline: float = 60.0,
        sync: SyncWay = "auto",
        folder: str | os.PathLike[str] | None = None,
        token: str | None = None,
        group_port: int = 51216,
    ) -> None:
        if deadline <= 0:
            raise ValueError(f"VLLMServer: deadline must be > 0 seconds, got {deadline}.")
        self.policy = policy
        token = token or os.environ.get("VLLM_API_KEY")
        self.remotes = [Remote(one, deadline=deadline, token=token) for one in url.split(",") if one.strip()]
        if not self.remotes:
            raise ValueError("VLLMServer: url is empty; give the server's address, 'http://127.0.0.1:8000'.")
        self.way = choose_way(self.remotes, sync, folder)
        self.folder = Path(folder) if folder is not None else SHARED_MEMORY
        self.group_port = group_port
        self.word = collectives.from_main(secrets.token_hex(4))  # in the name of the weights: whose they are
        self.manifest: Manifest = manifest(policy)
        self.servers: list[Described] = [attach(remote) for remote in self.remotes]
        for server in self.servers:
            check_fit(server, policy, self.manifest)
        self._version: int | None = None
        self._closed = False
        self._nccl: Any = None
        if collectives.rank() == 0 and self.way in ("shm", "disk"):
            remove_left_files(self.folder)

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and completion together."""
        return min(server.max_model_len for server in self.servers)

    @property
    def version(self) -> int | None:
        """Policy version of the weights that every server has; asked of the servers each time.

        None before the first sync, after a failed one, and when a server has been started again.

        Raises:
            EngineError: a server does not answer, or another client has put its own weights there; asked again, the
                engine then takes the server back by a sync.
        """
        if self._version is None or self._closed:
            return None
        for remote in self.remotes:
            found = remote.call("GET", "/weight_info")["weight_version"]
            if found == self._tag(self._version):
                continue
            mine, self._version = self._version, None
            if found == FRESH:  # started again in between: sample syncs
                return None
            raise EngineError(
                f"VLLMServer: another client has put its weights ({found!r}) on {remote.where} since version {mine} of "
                "this policy was synced. Two trainers cannot share a server: give each its own. Calling sample again "
                "takes this one back."
            )
        return self._version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        *,
        num_generations: int,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Completion]]:
        """For each prompt, `num_generations` completions. The same seed and group id give the same completions.

        Raises:
            EngineError: a server has no valid weights, dies, hangs, or cuts completions off.
            ValueError: settings that vLLM does not have.
        """
        requests = [
            vllm_request(self.policy, params, num_generations=num_generations, seed=seed, group_id=group)
            for group in group_ids
        ]
        self.check()
        version = self._version
        assert version is not None
        if not prompts:
            return []
        shares = [(place + collectives.rank()) % len(self.servers) for place in range(len(prompts))]
        drawn = draw(self.policy, self.servers, shares, prompts, requests, version=version)
        if self.version != version:
            raise EngineError(
                f"VLLMServer: a server of {', '.join(r.where for r in self.remotes)} was started again while it drew "
                "completions, which may come from other weights. None is kept; call sample again."
            )
        return drawn

    def renormalises(self, params: SamplingParams) -> bool:
        """True if vLLM's log-probabilities are of the truncated distribution, not of the policy's own."""
        return truncates_in_vllm(self.policy, params)

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Put the policy's weights on every server; all processes of the run call it and wait.

        Raises:
            ValueError: names or shapes are not the servers' own; they are as they were before.
            EngineError: the weights did not get there; until a sync succeeds, `generate` refuses.
        """
        if self._closed:
            raise EngineError("VLLMServer: the engine is closed. Make a new one: VLLMServer(policy, url=...).")
        if self.way == "nccl":
            problem = self._sync_nccl(tensors, version)
        else:
            problem = self._sync_file(tensors, version)
        problem = collectives.from_main(problem)
        if isinstance(problem, EngineError):
            self._version = None
        if problem is not None:
            raise problem
        self._version = version

    def check(self) -> None:
        """Nothing if every server can draw from the policy's weights.

        Raises:
            EngineError: closed, dead, without valid weights, or with another client's.
        """
        if self._closed:
            raise EngineError("VLLMServer: the engine is closed. Make a new one: VLLMServer(policy, url=...).")
        if self.version is None:
            raise EngineError(
                f"VLLMServer: {', '.join(remote.where for remote in self.remotes)} has no weights of this policy. "
                "rl.sample hands them over; by hand: engine.sync(named_weights(policy), policy.version)."
            )

    def close(self) -> None:
        """Let go of the servers; they stay up. Closing twice is harmless."""
        self._closed = True
        if self._nccl is not None:
            for client in self._nccl:
                client.close_communicator()
            self._nccl = None

    def _tag(self, version: int) -> str:
        return f"rlkit-{self.word}-{version}"

    def _sync_file(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Exception | None:
        """Sync through a file that the servers read; the error is returned, for every process."""
        if collectives.rank() != 0:
            for _ in tensors:  # sharded weights are whole only while all processes read them
                pass
            return None
        from safetensors.torch import save_file

        # Copies: a tied head shares its memory, which the format does not allow, and tensors are only lent.
        weights = {name: torch.clone(t.detach().to("cpu"), memory_format=torch.contiguous_format) for name, t in tensors}
        try:
            given: Manifest = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
            for server in self.servers:
                if server.shapes is not None:
                    check_manifest(given, {n: (tuple(s), None) for n, s in server.shapes.items()}, "VLLMServer.sync")
            with self._file() as file:
                save_file(weights, file)
                size = sum(t.numel() * t.element_size() for t in weights.values())
                for server in self.servers:
                    with paused(server.remote):
                        self._load(server.remote, file, size)
                        self._finish(server.remote, version)
        except (EngineError, ValueError, OSError) as error:
            return error
        return None

    def _load(self, remote: Remote, file: str, size: int) -> None:
        deadline = remote.deadline + size / LEAST_BYTES_PER_SECOND
        answers = remote.call(
            "POST", "/collective_rpc", body={"method": "rlkit_load", "args": [file]}, deadline=deadline
        )["results"]
        bad = [answer for answer in answers if not answer["ok"]]
        if bad:
            if any(answer["mixed"] for answer in bad):  # so that other clients see it too
                remote.call("POST", "/update_weight_version", body={"new_version": "rlkit-mixed"})
            raise EngineError(f"VLLMServer: {remote.where} did not take the weights: {bad[0]['error']}")

    def _finish(self, remote: Remote, version: int) -> None:
        """What must follow a load: nothing cached from older weights, and the new name."""
        if not remote.call("POST", "/reset_prefix_cache")["success"]:
            raise EngineError(
                f"VLLMServer: {remote.where} did not reset its prefix cache, which holds values of older weights, "
                "because requests of another client are alive there. Give each trainer its own server."
            )
        remote.call("POST", "/update_weight_version", body={"new_version": self._tag(version)})

    @contextlib.contextmanager
    def _file(self) -> Iterator[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"rlkit-{os.getpid()}-", suffix=".safetensors", dir=self.folder)
        os.close(handle)
        os.chmod(name, 0o644)  # the server may run as another user
        try:
            yield name
        finally:
            Path(name).unlink(missing_ok=True)

    def _sync_nccl(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Exception | None:
        """GPU to GPU through TRL's client. Not run by any test: there was no GPU (docs/engines.md)."""
        if collectives.rank() != 0:
            for _ in tensors:
                pass
            return None
        names = [(name, str(dtype).removeprefix("torch."), list(shape)) for name, (shape, dtype) in self.manifest.items()]
        try:
            if self._version is None:  # the first time, and after anything went wrong
                self.close_group()
                self._nccl = [join_group(server.remote, self.group_port + i) for i, server in enumerate(self.servers)]
            whole = list(tensors) if len(self.servers) > 1 else tensors
            for server, client in zip(self.servers, self._nccl, strict=True):
                with paused(server.remote):
                    client.update_named_params(names, iter(whole))
                    self._finish(server.remote, version)
        except (EngineError, ValueError, OSError, RuntimeError) as error:
            return error if isinstance(error, EngineError) else EngineError(f"VLLMServer: NCCL sync failed: {error}")
        return None

    def close_group(self) -> None:
        """Leave the NCCL group, also one that a killed client has left open on the server."""
        for client in self._nccl or []:
            client.close_communicator()
        self._nccl = None
        for server in self.servers:
            with contextlib.suppress(EngineError):  # there is none yet
                server.remote.call("POST", "/shutdown_weight_transfer_engine")

    def __repr__(self) -> str:
        return f"VLLMServer({','.join(r.url for r in self.remotes)}, sync {self.way}, version {self._version})"


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
        f"VLLMServer: there is no way to bring weights to {(away or [remotes[0].where])[0]}: it is not this machine, no "
        "folder= on a shared disk is given, and there is no GPU for NCCL."
    )


@contextlib.contextmanager
def paused(remote: Remote) -> Iterator[None]:
    """No completion is drawn inside. The server goes on afterwards, whatever happened."""
    remote.call("POST", "/pause", params={"mode": "wait"})
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError):  # the first error says more
            remote.call("POST", "/resume")
        raise
    remote.call("POST", "/resume")


def join_group(remote: Remote, port: int) -> Any:
    """TRL's client for a server, joined to it by NCCL."""
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=remote.url, group_port=port, connection_timeout=remote.deadline)
    client.init_communicator(device=torch.device("cuda", torch.cuda.current_device()))
    return client


def remove_left_files(folder: Path) -> None:
    """Delete weights that processes of this machine have left there by being killed in a sync."""
    if folder != SHARED_MEMORY:
        return  # on a shared disk the process may live on another machine
    for file in folder.glob("rlkit-*-*.safetensors"):
        number = file.name.split("-")[1]
        if number.isdecimal() and not Path("/proc", number).exists():
            with contextlib.suppress(OSError):
                file.unlink()
