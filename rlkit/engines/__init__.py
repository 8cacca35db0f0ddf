"""Engines beside the default one: continuous batching, vLLM in the process and as a server, and what they share."""

from rlkit.engines.colocate import VLLMColocate
from rlkit.engines.continuous import ContinuousBatching
from rlkit.engines.memory import VLLMMemory, vllm_memory
from rlkit.engines.probe import ProbeError
from rlkit.engines.server import VLLMServer
from rlkit.engines.serving import Server, serve

__all__ = [
    "ContinuousBatching",
    "ProbeError",
    "Server",
    "VLLMColocate",
    "VLLMMemory",
    "VLLMServer",
    "serve",
    "vllm_memory",
]
