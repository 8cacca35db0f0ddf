"""Engines beside the default one: vLLM in the process, and what every engine with weights of its own shares."""

from rlkit.engines.colocate import VLLMColocate
from rlkit.engines.memory import VLLMMemory, vllm_memory
from rlkit.engines.probe import ProbeError

__all__ = ["ProbeError", "VLLMColocate", "VLLMMemory", "vllm_memory"]
