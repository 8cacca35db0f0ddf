"""Engines: the default one, continuous batching, vLLM in the process and as a server."""

from rlkit.engines.continuous_batching import ContinuousBatching
from rlkit.engines.vllm.client import VLLMServer
from rlkit.engines.vllm.colocate import VLLMColocate
from rlkit.engines.vllm.memory import VLLMMemory, vllm_memory
from rlkit.engines.vllm.probe import ProbeError
from rlkit.engines.vllm.server import Server, serve

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
