"""The path of the worker extension in commands of vLLM servers; it lives in `rlkit.engines.vllm.worker_extension`."""

from rlkit.engines.vllm.worker_extension import WeightLoader

__all__ = ["WeightLoader"]
