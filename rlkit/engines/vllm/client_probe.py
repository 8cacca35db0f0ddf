"""The probe (`rlkit.engines.vllm.probe`) for several servers: each must give the trainer's log-probabilities."""

import secrets
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from rlkit.engine import Completion
from rlkit.engines.vllm.completions import draw
from rlkit.engines.vllm.handshake import Described
from rlkit.engines.vllm.probe import Probe
from rlkit.policy import Policy


@runtime_checkable
class Client(Protocol):
    """What the probe needs of a `VLLMServer`."""

    name: str
    model: str | None
    policy: Policy
    servers: list[Described]

    def distrust(self, why: str) -> None:
        """Refuse to generate until the weights have been brought again."""
        ...


class ServerProbe:
    """Compares every server of an engine with the trainer.

    Args:
        engine: whose servers they are.
        every: after the first transfer and every so many.
    """

    def __init__(self, engine: Client, *, every: int) -> None:
        dtype = getattr(torch, engine.servers[0].dtype)
        self.probes = [
            Probe(engine.policy, OneServer(engine, server), every=every, dtype=dtype) for server in engine.servers
        ]

    @property
    def gap_mean(self) -> float | None:
        """Largest mean distance of a server, in nats; None before the first comparison."""
        return max((probe.gap_mean for probe in self.probes if probe.gap_mean is not None), default=None)

    @property
    def gap_max(self) -> float | None:
        """Largest distance of any token, in nats; None before the first comparison."""
        return max((probe.gap_max for probe in self.probes if probe.gap_max is not None), default=None)

    def after_sync(self) -> None:
        """Compare, if it is time to. Every process calls it.

        Raises:
            ProbeError: names the server and the fault.
        """
        for probe in self.probes:
            probe.after_sync()


class OneServer:
    """One server of an engine, as the probe sees an engine."""

    def __init__(self, engine: Client, server: Described) -> None:
        self.engine, self.server = engine, server
        self.name = f"{engine.name} ({server.remote.where})"
        self.policy = engine.policy
        self.max_context = server.max_model_len

    def draw_probe(
        self, prompts: Sequence[Sequence[int]], requests: list[dict[str, Any]], *, cached: bool
    ) -> list[list[Completion]]:
        """Completions of requests as vLLM takes them; without `cached`, under a name that no cache knows."""
        if not cached:
            requests = [request | {"cache_salt": secrets.token_hex(8)} for request in requests]
        return draw(
            self.policy,
            [self.server],
            [0] * len(prompts),
            prompts,
            requests,
            version=self.policy.version,
            model=self.engine.model,
        )

    def distrust(self, why: str) -> None:
        """Refuse to generate until the weights have been brought again."""
        self.engine.distrust(why)
