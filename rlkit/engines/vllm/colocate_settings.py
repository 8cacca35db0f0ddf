"""The keywords of `vllm.LLM` for a policy, and the checks before it is started."""

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from rlkit.causal_lm import causal_lm_of
from rlkit.engines.vllm.cleanup import remove_left_by_vllm
from rlkit.engines.vllm.memory import vllm_memory
from rlkit.engines.vllm.server_settings import offered_rank
from rlkit.engines.weights import check_plain_lora, is_quantised

if TYPE_CHECKING:
    from rlkit.policy import Policy

LoRAMode = Literal["merge", "adapter"]
DEFAULT_SEQUENCES = 128
MAX_DEFAULT_CACHE = 2**32
"""Default limit in bytes of the KV cache on a CPU."""


def llm_settings(
    policy: "Policy",
    *,
    folder: str,
    model: str | None,
    max_model_length: int,
    dtype: torch.dtype,
    gpu_memory_utilization: float | None,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    enable_sleep: bool,
    tensor_parallel_size: int,
    adapter_only: bool,
    enforce_eager: bool | None,
) -> dict[str, Any]:
    """Keywords of `vllm.LLM`; see `VLLMColocate` for the arguments. `folder` receives the policy's configuration."""
    on_cpu = policy.device.type == "cpu"
    memory = vllm_memory(
        policy,
        max_model_length=max_model_length,
        num_sequences=max_num_seqs,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
    )
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"VLLMColocate: gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}. Leave it out for "
            "the estimate of rl.vllm_memory."
        )
    if on_cpu and kv_cache_memory_bytes is None:
        # An explicit size also skips a warm-up of seconds.
        kv_cache_memory_bytes = max(memory.kv_cache_minimum, min(memory.kv_cache, MAX_DEFAULT_CACHE))
    if on_cpu and kv_cache_memory_bytes is not None and kv_cache_memory_bytes < memory.kv_cache_minimum:
        raise ValueError(
            f"VLLMColocate: kv_cache_memory_bytes={kv_cache_memory_bytes} is too small for one sequence of "
            f"{max_model_length} tokens, which needs {memory.kv_cache_minimum}. See rl.vllm_memory(...)."
        )
    settings: dict[str, Any] = {
        "model": model or write_skeleton(policy, folder),
        "load_format": "auto" if model else "dummy",
        "dtype": str(dtype).removeprefix("torch."),  # "auto" turns float32 into bfloat16
        "max_model_len": max_model_length,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": on_cpu if enforce_eager is None else enforce_eager,
        "logprobs_mode": "processed_logprobs",  # at the temperature; the default ignores it
        "max_logprobs": -1,
        "generation_config": "vllm",  # none of the checkpoint's sampling defaults
        "enable_prefix_caching": True,
        "enable_sleep_mode": enable_sleep and not on_cpu,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "seed": 0,
        "disable_log_stats": True,
    }
    if share := gpu_memory_utilization or memory.gpu_memory_utilization:
        settings["gpu_memory_utilization"] = share
    if tensor_parallel_size > 1:
        settings["tensor_parallel_size"] = tensor_parallel_size
    if (dist.is_initialized() and dist.get_world_size() > 1) or policy.device.index:
        # vLLM's default executor would use the first GPU in every process.
        settings["distributed_executor_backend"] = "external_launcher"
    if adapter_only:
        rank = policy.model.peft_config[policy.model.active_adapter].r
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": offered_rank(rank)}
    return settings


def write_skeleton(policy: "Policy", folder: str) -> str:
    """Write the policy's configuration and tokenizer, without weights, for vLLM.

    A model created by its class has no architecture in its configuration; it is added, else vLLM would guess one.
    """
    lm = causal_lm_of(policy.model)
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__]
    config.save_pretrained(folder)
    if getattr(lm, "generation_config", None) is not None:
        lm.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def short_refusal(policy: "Policy") -> Iterator[None]:
    """Shorten vLLM's `ValueError` for an unknown architecture, which lists every model that it supports."""
    try:
        yield
    except ValueError as error:
        if "not supported" not in str(error) or "rchitecture" not in str(error):
            raise
        import vllm

        raise ValueError(
            f"VLLMColocate: vLLM {vllm.__version__} cannot run {type(causal_lm_of(policy.model)).__name__} "
            f"({policy.name!r}). Leave the engine out: rl.sample needs none."
        ) from None


def checked_length(policy: "Policy", max_model_length: int | None) -> int:
    """The engine's context length; `ValueError` if it is unknown, or longer than the model's."""
    length = policy.max_context if max_model_length is None else max_model_length
    if length is None or length < 2:
        raise ValueError(
            f"VLLMColocate: max_model_length must be at least 2, got {length}: most tokens of a prompt and its "
            "completion together. None takes the model's context, if it names one."
        )
    if policy.max_context is not None and length > policy.max_context:
        raise ValueError(
            f"VLLMColocate: max_model_length={length} is more than the model's context of {policy.max_context}."
        )
    return length


def checked_lora(policy: "Policy", lora: str, model: str | None) -> bool:
    """True if the adapter alone is transferred; `ValueError` if `lora` does not fit the policy."""
    if lora not in ("merge", "adapter"):
        raise ValueError(f"VLLMColocate: lora must be 'merge' or 'adapter', got {lora!r}.")
    quantised = is_quantised(policy.model)
    if not hasattr(policy.model, "peft_config"):
        if quantised:
            raise ValueError("VLLMColocate: quantised weights without an adapter can neither be trained nor synced.")
        if lora == "adapter":
            raise ValueError(f"VLLMColocate: lora='adapter', but {policy.name!r} has no adapter.")
        return False
    if quantised and (lora == "merge" or model is None):
        raise ValueError(
            "VLLMColocate: the policy's weights are quantised, so only the adapter can be transferred: pass "
            "lora='adapter' and model=, the checkpoint that the policy was loaded from."
        )
    if lora == "adapter":
        check_plain_lora(policy, "VLLMColocate")
    return lora == "adapter"


def check_world(tensor_parallel_size: int) -> None:
    """Raise unless the run's processes form a group whose size is a multiple of `tensor_parallel_size`."""
    if tensor_parallel_size < 1:
        raise ValueError(f"VLLMColocate: tensor_parallel_size must be at least 1, got {tensor_parallel_size}.")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"VLLMColocate: WORLD_SIZE={size}, but the processes have not met. Call rl.setup() first: vLLM would make "
            "a group of one process each, in which no gradient is exchanged."
        )
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size % tensor_parallel_size:
        raise ValueError(
            f"VLLMColocate: {size} process(es) cannot be split into groups of tensor_parallel_size="
            f"{tensor_parallel_size}."
        )


def tensor_parallel_group(size: int) -> Any:
    """The group of neighbouring processes that share this one's engine; None if it has its own."""
    if size == 1:
        return None
    groups = [list(range(start, start + size)) for start in range(0, dist.get_world_size(), size)]
    remove_left_by_vllm(Path("/dev/shm"), groups[dist.get_rank() // size])
    dist.barrier()  # no engine starts before all have cleaned up
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group
