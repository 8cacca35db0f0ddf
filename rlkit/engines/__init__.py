"""Engines: the default one, continuous batching, vLLM in the process and as a server.

`transformers_engine` and `continuous_batching` run the policy's own model; `token_sampler` chooses their tokens.
`weights` streams the policy's weights to engines with a copy, all of which are in `vllm/`. `rollout_assembly` builds a
`Rollout` from any engine's completions, with the readable tokens of `token_text`. `worker` is a path that commands of
vLLM servers name.
"""

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
