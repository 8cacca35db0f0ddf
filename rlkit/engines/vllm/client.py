"""vLLM as a server: completions over HTTP, the policy's weights by shared memory, a shared disk, or NCCL.

    policy.use(rl.VLLMServer(policy, url="http://127.0.0.1:8000"))     # the server: rlkit serve MODEL

A sync is: pause, load, reset the prefix cache, name the weights, resume. The name contains a random word of this engine
and the policy's version. It is read back before and after generation, which detects a server that was restarted or took
weights from another client in between. The next client, a restarted notebook too, syncs again; it needs nothing of the
old one.

Under torchrun every process makes the engine and sends its own prompts; rank 0 alone transfers weights.
Left out: transfers while completions are drawn (off-policy by design), and vLLM's `/v1/chat`, whose templates would
replace the policy's own.
"""

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rlkit.distributed import collectives
from rlkit.engine import Completion, EngineError
from rlkit.engines.vllm.completions import draw
from rlkit.engines.vllm.connection import Remote
from rlkit.engines.vllm.handshake import FRESH, Described, attach, check_fit
from rlkit.engines.vllm.probe import ProbedServer, ServerProbe
from rlkit.engines.vllm.sampling_requests import NotFiniteError, truncates_in_vllm, vllm_request
from rlkit.engines.vllm.weight_transfer import ADAPTER, Lora, SyncWay, choose_way, make_handover, uses_adapter
from rlkit.engines.weights import Manifest, is_quantised, manifest, named_weights
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 4  # of the OpenAI API


class VLLMServer:
    """Samples with one or more running vLLM servers (`rlkit serve`, `rl.serve`).

    Under torchrun every process must make it.

    Args:
        policy: the policy to sample from.
        url: address of the server; several, comma-separated, share the prompts, and all get the weights.
        deadline: seconds within which a server must answer, and the longest time without progress while it generates.
        sync: how weights are transferred. "shm": a file in shared memory, for a server on this machine. "disk": a file
            in `folder`, which both sides see. "nccl": GPU to GPU. "auto": disk if there is a `folder`, else shm on this
            machine, else nccl.
        folder: for "disk".
        lora: "merge" transfers base weights with the adapter merged in, on a copy. "adapter" transfers the adapter
            alone, to a server with `--lora-rank`. "auto" does the latter for quantised base weights only.
        probe_every: compare log-probabilities with the trainer's on a probe after the first transfer of weights and
            every `probe_every`-th one; 0 never does.
        token: the server's secret. None takes that of this user's `rlkit serve` on this machine, else VLLM_API_KEY.
        group_port: for "nccl": port at which trainer and server connect.

    Raises:
        EngineError: no answer in time, or a server that cannot serve this policy: another model, another dtype, too
            old, without the endpoints for weights. The error says which and what to do.
        ValueError: an argument out of range, or arguments that exclude each other.

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
        lora: Lora = "auto",
        probe_every: int = 50,
        token: str | None = None,
        group_port: int = 51216,
    ) -> None:
        if deadline <= 0:
            raise ValueError(f"VLLMServer: deadline must be > 0 seconds, got {deadline}.")
        self.policy = policy
        self.remotes = [Remote(one, deadline=deadline, token=token) for one in url.split(",") if one.strip()]
        if not self.remotes:
            raise ValueError("VLLMServer: url is empty; give the server's address, 'http://127.0.0.1:8000'.")
        main = collectives.rank() == 0  # rank 0 alone transfers weights, so its machine decides
        self.way = collectives.from_main(choose_way(self.remotes, sync, folder) if main else "")
        by_adapter = uses_adapter(policy, lora)
        self.word = collectives.from_main(secrets.token_hex(4))  # in the name of the weights
        shapes: Manifest = {} if is_quantised(policy.model) else manifest(policy)
        self.servers: list[Described] = [attach(remote) for remote in self.remotes]
        for server in self.servers:
            check_fit(server, policy, shapes)
        self.model = ADAPTER if by_adapter else None  # None: the server's own name
        self._version: int | None = None
        self._closed = False
        self.handover = make_handover(
            policy,
            self.servers,
            way=self.way,
            folder=folder,
            adapter=by_adapter,
            manifest=shapes,
            group_port=group_port,
        )
        probed = [
            ProbedServer(f"{self.name} ({server.remote.where})", policy, server, self.model, self.distrust)
            for server in self.servers
        ]
        self.probe = ServerProbe(probed, every=probe_every) if probe_every else None
        self._trouble = "it has not been given the policy's weights yet"

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and completion together."""
        return min(server.max_model_len for server in self.servers)

    @property
    def version(self) -> int | None:
        """Policy version of the last transfer; None before the first and after one that failed.

        `generate` asks the servers whether they still have these weights.
        """
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

        Every process of the run calls it. A server that was restarted since the last sync gets the weights first.

        Raises:
            EngineError: a server has no valid weights or another client's, dies, hangs, or cuts completions off.
            ValueError: settings that a vLLM server does not support.
        """
        if len(params.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(
                f"sample: a vLLM server takes up to {MAX_STOP_STRINGS} stop strings, got {len(params.stop_strings)}. "
                "Use fewer, or an engine in this process."
            )
        requests = [
            vllm_request(self.policy, params, num_generations=num_generations, seed=seed, group_id=group)
            for group in group_ids
        ]
        self._check_usable()
        if self._any_restarted_on_main():
            logger.warning("VLLMServer: a server was started again; it gets the weights of %r again.", self.policy.name)
            self.sync(named_weights(self.policy), self.policy.version)
            if self.probe is not None:
                self.probe.after_sync()
        version = self._version
        assert version is not None
        if not prompts:
            return []
        shares = [(place + collectives.rank()) % len(self.servers) for place in range(len(prompts))]
        try:
            drawn = draw(self.policy, self.servers, shares, prompts, requests, version=version, model=self.model)
        except NotFiniteError as error:
            self.distrust(str(error))
            raise
        if self._any_restarted():
            self.distrust("a server was started again")
            raise EngineError(
                f"VLLMServer: a server of {', '.join(r.where for r in self.remotes)} was started again while it drew "
                "completions, which may come from other weights. None is kept; call sample again."
            )
        return drawn

    def renormalises(self, params: SamplingParams) -> bool:
        """True if vLLM's log-probabilities are of the truncated distribution, not of the policy's own."""
        return truncates_in_vllm(self.policy, params)

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Transfer the policy's weights to every server; all processes of the run call it.

        Raises:
            ValueError: names or shapes differ from the servers', or numbers are not finite; nothing was changed.
            EngineError: the weights did not arrive; until a sync succeeds, `generate` refuses.
        """
        self._check_open()
        before, problem = self._version, None
        if any(collectives.gather(any(remote.unclean for remote in self.remotes))):  # rank 0 cleans for all
            for remote in self.remotes:
                remote.unclean = True
        self.distrust("the last transfer of weights failed")  # an interrupt may come at any moment
        try:
            self.handover.send(tensors, self._tag(version))
        except (EngineError, ValueError, OSError) as error:
            problem = error
        said = collectives.gather(problem)  # all raise together, or the others would wait
        found = next((error for error in said if error is not None), None)
        if found is None:
            self._version = version
            return
        if isinstance(found, ValueError):  # nothing was changed
            self._version = before
        raise found

    def distrust(self, why: str) -> None:
        """Refuse to generate until the next sync."""
        self._version, self._trouble = None, why

    def check(self) -> None:
        """Raise `EngineError` unless every server answers and has this client's weights."""
        self._check_usable()
        if self._any_restarted():
            raise EngineError(
                f"VLLMServer: a server of {', '.join(r.where for r in self.remotes)} has been started again and has "
                "the weights that it was started with. rl.sample transfers the policy's."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("VLLMServer: the engine is closed. Make a new one: VLLMServer(policy, url=...).")

    def _check_usable(self) -> None:
        self._check_open()
        if self._version is None:
            raise EngineError(
                f"VLLMServer: {', '.join(remote.where for remote in self.remotes)} cannot generate: {self._trouble}. "
                "rl.sample transfers the weights; by hand: engine.sync(named_weights(policy), policy.version)."
            )

    def _any_restarted(self) -> bool:
        """True if a server was restarted since the last sync; `EngineError` for another client's weights."""
        fresh = False
        for remote in self.remotes:
            found = remote.call("GET", "/weight_info")["weight_version"]
            if found == FRESH:
                fresh = True
            elif found != self._tag(self._version):
                mine = self._version
                self.distrust("another client has put its weights there")
                raise EngineError(
                    f"VLLMServer: another client has put its weights ({found!r}) on {remote.where} since version {mine}"
                    " of this policy was transferred. Two trainers cannot share a server: give each its own. Calling "
                    "sample again takes this one back."
                )
        return fresh

    def _any_restarted_on_main(self) -> bool:
        """`_any_restarted` of rank 0 on every process, so that all take the same branch."""
        fresh, problem = False, None
        if collectives.rank() == 0:
            try:
                fresh = self._any_restarted()
            except EngineError as error:
                problem = error
        fresh, problem = collectives.from_main((fresh, problem))
        if problem is not None:
            self.distrust(str(problem))
            raise problem
        return fresh

    def close(self) -> None:
        """Detach from the servers, which stay up. Closing twice is harmless."""
        self._closed = True
        self.handover.close()

    def _tag(self, version: int | None) -> str:
        return f"rlkit-{self.word}-{version}"

    def __repr__(self) -> str:
        return f"VLLMServer({','.join(r.url for r in self.remotes)}, sync {self.way}, version {self._version})"
