"""What `VLLMColocate` refuses before vLLM is loaded, and what it asks of vLLM."""

import pytest
import torch
from builders import vllm_policy

from rlkit.engines.vllm.colocate_settings import checked_length, checked_lora, llm_settings
from rlkit.engines.vllm.preserved_state import settings_kept


@pytest.mark.parametrize("length", [0, 1, -5])
def test_a_length_that_holds_nothing_is_refused(length):
    with pytest.raises(ValueError, match=rf"max_model_length must be at least 2, got {length}"):
        checked_length(vllm_policy(), length)


def test_a_length_is_the_models_unless_said_otherwise():
    assert checked_length(vllm_policy(), None) == 512 and checked_length(vllm_policy(), 64) == 64
    with pytest.raises(ValueError, match="max_model_length=513 is more than the model's context of 512"):
        checked_length(vllm_policy(), 513)


def test_the_adapter_alone_of_a_policy_without_one_is_refused():
    with pytest.raises(ValueError, match=r"lora='adapter', but 'LlamaForCausalLM' has no adapter"):
        checked_lora(vllm_policy(), "adapter", None)
    assert checked_lora(vllm_policy(), "merge", None) is False


def settings_of(policy, folder, **changes):
    options = {
        "model": None,
        "max_model_length": 64,
        "dtype": torch.float32,
        "gpu_memory_utilization": None,
        "kv_cache_memory_bytes": None,
        "max_num_seqs": 8,
        "enable_sleep": True,
        "tensor_parallel_size": 1,
        "adapter_only": False,
        "enforce_eager": None,
    }
    return llm_settings(policy, folder=str(folder), **(options | changes))


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_share_of_a_gpu_that_cannot_be_is_refused(tmp_path, share):
    with pytest.raises(ValueError, match=rf"gpu_memory_utilization must be in \(0, 1\], got {share}. Leave it out"):
        settings_of(vllm_policy(), tmp_path, gpu_memory_utilization=share)


def test_one_process_with_the_first_device_has_vllms_own_launcher(tmp_path):
    settings = settings_of(vllm_policy(), tmp_path)
    assert "distributed_executor_backend" not in settings and "tensor_parallel_size" not in settings
    assert settings["enable_sleep_mode"] is False  # on a CPU


def test_torchs_settings_are_those_of_before():
    """VLLM's worker for GPUs sets the precision of products; its worker for CPUs replaces the function."""
    threads, function = torch.get_num_threads(), torch.set_num_threads
    before = torch.get_float32_matmul_precision()
    with settings_kept():
        torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = None
    assert torch.get_float32_matmul_precision() == before
    assert torch.set_num_threads is function and torch.get_num_threads() == threads
