"""`vllm_memory`: an estimate of vLLM's memory on each device.

    weights   = parameters * bytes of the engine's dtype / tensor_parallel_size
    KV cache  = sequences * ceil(length / block) * block * 2 * layers * key-value heads * head size * bytes / tp

Each device has at least one KV head. `gpu_memory_utilization` is a share of the *whole* device, of which vLLM uses its
own weights, cache and working memory. Left out: latent attention (DeepSeek), sliding windows and recurrent states,
which need less.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlkit.causal_lm import causal_lm_of

if TYPE_CHECKING:
    from rlkit.policy import Policy

GIB = 2**30
BLOCK = 128
"""Tokens of a cache block on a CPU; 16 on a GPU, where the estimate is a little high."""
WORKSPACE = {"cpu": 0, "cuda": 2 * GIB}
"""Activations of a batch and CUDA graphs; an allowance, not measured here (no GPU)."""


@dataclass(frozen=True)
class VLLMMemory:
    """Bytes that vLLM needs on each device.

    Attributes:
        weights: of the model's copy.
        kv_cache: for all sequences at their full length at once.
        kv_cache_minimum: for one sequence of full length, below which vLLM does not start.
        workspace: activations and CUDA graphs, an allowance.
        device_total: bytes of the device, or None on a CPU.
    """

    weights: int
    kv_cache: int
    kv_cache_minimum: int
    workspace: int
    device_total: int | None

    @property
    def total(self) -> int:
        """Weights, cache and working memory."""
        return self.weights + self.kv_cache + self.workspace

    @property
    def gpu_memory_utilization(self) -> float | None:
        """The share of the device to ask for, in steps of 0.01, at most 0.9; None on a CPU."""
        if self.device_total is None:
            return None
        return min(0.9, math.ceil(100 * self.total / self.device_total) / 100)

    def __repr__(self) -> str:
        share = "" if self.device_total is None else f", gpu_memory_utilization={self.gpu_memory_utilization}"
        return (
            f"VLLMMemory(weights {self.weights / GIB:.2f} GiB, KV cache {self.kv_cache / GIB:.2f} GiB (at least "
            f"{self.kv_cache_minimum / GIB:.2f}), workspace {self.workspace / GIB:.2f} GiB{share})"
        )


def vllm_memory(
    policy: "Policy | Any",
    *,
    max_model_length: int,
    num_sequences: int,
    dtype: torch.dtype | None = None,
    tensor_parallel_size: int = 1,
    device_total: int | None = None,
) -> VLLMMemory:
    """Estimate the memory of a vLLM engine for a policy or a transformers model.

    Args:
        policy: a policy or a transformers model.
        max_model_length: most tokens of prompt and completion together.
        num_sequences: completions side by side; more than these wait in vLLM's queue.
        dtype: of the engine; None takes the policy's autocast or the weights' own.
        tensor_parallel_size: devices that share one engine.
        device_total: bytes of one device; None asks the device of the model.

    Raises:
        ValueError: sizes below 1.

    Example: `rl.vllm_memory(policy, max_model_length=1024, num_sequences=256).gpu_memory_utilization`
    """
    for name, value in (
        ("max_model_length", max_model_length),
        ("num_sequences", num_sequences),
        ("tensor_parallel_size", tensor_parallel_size),
    ):
        if value < 1:
            raise ValueError(f"vllm_memory: {name} must be at least 1, got {value}.")
    model = getattr(policy, "model", policy) if hasattr(policy, "score_tokens") else policy
    lm = causal_lm_of(model)
    own = next(lm.parameters())
    dtype = dtype or getattr(policy, "autocast", None) or own.dtype
    size = torch.empty(0, dtype=dtype).element_size()
    if device_total is None and own.device.type == "cuda":
        device_total = torch.cuda.get_device_properties(own.device).total_memory
    count = sum(getattr(p, "ds_numel", p.numel()) for n, p in lm.named_parameters() if ".lora_" not in n)
    token = kv_bytes_per_token(lm.config, dtype, tensor_parallel_size)
    blocks = BLOCK * math.ceil(max_model_length / BLOCK)
    return VLLMMemory(
        weights=math.ceil(count * size / tensor_parallel_size),
        kv_cache=num_sequences * blocks * token,
        kv_cache_minimum=blocks * token,
        workspace=WORKSPACE.get(own.device.type, WORKSPACE["cuda"]) if device_total is None else WORKSPACE["cuda"],
        device_total=device_total,
    )


def kv_bytes_per_token(config: Any, dtype: torch.dtype, tensor_parallel_size: int = 1) -> int:
    """Bytes of one token's keys and values on one device."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    size = torch.empty(0, dtype=dtype).element_size()
    return 2 * text.num_hidden_layers * max(1, kv_heads // tensor_parallel_size) * head_size * size
