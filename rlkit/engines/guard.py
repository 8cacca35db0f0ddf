"""The path of the middleware in commands of vLLM servers; it lives in `rlkit.engines.vllm.guard`."""

from rlkit.engines.vllm.guard import Guard

__all__ = ["Guard"]
