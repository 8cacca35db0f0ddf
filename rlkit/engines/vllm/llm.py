"""vLLM's `LLM` inside the trainer's process: one at a time, stepped here, closed without damage to the trainer.

Uses vLLM's public calls, except to restore the layers that a failed reload leaves without data.
"""

import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.engine import EngineError
from rlkit.engines.vllm.lifecycle import Part
from rlkit.engines.vllm.preserved_state import (
    DeferredInterrupt,
    default_group_kept,
    environment,
    random_states_kept,
    settings_kept,
)
from rlkit.engines.vllm.sampling_requests import REGEX_HINT
from rlkit.engines.vllm.server_settings import check_lscpu
from rlkit.support.processes import free_port

logger = logging.getLogger(__name__)

_live: "weakref.ref[InProcessLLM] | None" = None  # vLLM's parallel state is global


class InProcessLLM:
    """One `vllm.LLM` in this process; making another closes this one and calls `on_close` with the reason."""

    def __init__(
        self, settings: dict[str, Any], *, device: torch.device, name: str, on_close: Callable[[str], None]
    ) -> None:
        global _live
        before = _live() if _live is not None else None
        if before is not None:
            logger.warning("%s: closing the earlier vLLM engine; a process can have only one.", name)
            before.close("because another engine was made in this process")
        self._name, self._on_close = name, on_close
        self._llm: Any = None
        self.unclean = False  # the cache may hold NaN; the next reset overwrites it
        self._owns_group = not dist.is_initialized()
        variables = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the trainer's thread is bound to one core
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        if self._owns_group or dist.get_world_size() == 1:
            variables["VLLM_HOST_IP"] = "127.0.0.1"  # nodes of a larger run meet at a real address
        force = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if settings.get("distributed_executor_backend") == "external_launcher":
            # This process and its GPU, in torchrun's variables.
            variables |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            force |= {"LOCAL_RANK": str(device.index)} if device.index is not None else {}
        with environment(variables, force=force), self._state_kept():
            try:
                self._llm = _load_vllm(name)(**settings)
            except BaseException:  # too little memory, Ctrl-C: the next engine needs a clean state
                if "vllm.distributed.parallel_state" in sys.modules:
                    from vllm.distributed import cleanup_dist_env_and_memory

                    cleanup_dist_env_and_memory()
                raise
        _live = weakref.ref(self)

    def run(self, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, Any]], adapter: Any) -> list[Any]:
        """VLLM's output of each prompt, in order. Ctrl-C ends it between two steps and leaves no requests."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        torch.get_num_threads()  # initialises a new thread's setting, which vLLM's attention reads
        settings = []
        for request in requests:
            values = dict(request)
            if "structured_outputs" in values:
                values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
            settings.append(SamplingParams(**values))
        engine, done, order = self._llm.llm_engine, {}, []
        with random_states_kept(), DeferredInterrupt() as interrupt:
            try:
                order += self._enqueue(prompts, settings, adapter)
                while engine.has_unfinished_requests():
                    interrupt.deliver()
                    done.update({output.request_id: output for output in engine.step() if output.finished})
            finally:
                if order and engine.has_unfinished_requests():
                    # Else they would be scheduled in the next generation too.
                    engine.abort_request(order, internal=True)
        if len(done) != len(order):
            raise EngineError(f"{self._name}: {len(order)} prompts went in, {len(done)} came out.")
        return sorted(done.values(), key=lambda output: int(output.request_id))

    def _enqueue(self, prompts: Sequence[Sequence[int]], settings: list[Any], adapter: Any) -> list[str]:
        from vllm.exceptions import VLLMError

        try:
            inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            return list(self._llm.enqueue(inputs, settings, lora_request=adapter, use_tqdm=False))
        except (VLLMError, ValueError) as error:
            hint = f" {REGEX_HINT}" if any(one.structured_outputs is not None for one in settings) else ""
            said = " ".join(str(error).split()).rstrip(".")
            raise ValueError(f"{self._name}: vLLM refuses these settings or prompts: {said}.{hint}") from error

    def reload(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights layer by layer, in the kernels' layout. After an `EngineError` some layers have old weights."""
        try:
            with random_states_kept():
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
        except BaseException as error:  # an interrupt too: layers may be without data
            self._llm.apply_model(restore_layers)
            if not isinstance(error, Exception):
                raise
            raise EngineError(
                f"{self._name}: vLLM could not load the weights ({type(error).__name__}: {error}). It refuses to "
                "generate until a whole transfer succeeds."
            ) from error

    def add_adapter(self, request: Any) -> None:
        """Load a LoRA adapter, a `LoRARequest`."""
        from vllm.exceptions import VLLMError

        try:
            self._llm.llm_engine.add_lora(request)
        except (VLLMError, ValueError, RuntimeError, KeyError, OSError) as error:
            raise EngineError(f"{self._name}: vLLM could not load the adapter: {error}") from error
        if request.lora_int_id not in self._llm.llm_engine.list_loras():
            raise EngineError(f"{self._name}: vLLM did not take the adapter in {request.lora_path}.")

    def sleep(self, level: int) -> None:
        """See `lifecycle.Calls`."""
        self._llm.sleep(level)

    def wake(self, part: Part) -> None:
        """See `lifecycle.Calls`."""
        self._llm.wake_up(tags=[part])

    def reset_cache(self) -> bool:
        """See `lifecycle.Calls`."""
        if not self._llm.reset_prefix_cache():
            return False
        if self.unclean:
            self._llm.collective_rpc(clear_blocks)
            self.unclean = False
        return True

    def set_version(self, version: int) -> None:
        """See `lifecycle.Calls`."""
        self._llm.update_weight_version(str(version))

    def close(self, why: str) -> None:
        """Release everything but the trainer's process group; closing twice is harmless."""
        global _live
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        with self._state_kept():
            if llm.llm_engine.is_sleeping():
                # By csrc/cumem_allocator.cpp (not run: no GPU), freeing memory that sleeps leaves a CUDA error behind.
                try:
                    llm.wake_up()
                except RuntimeError as error:
                    said = "%s: could not wake before closing (%s); a new engine may need a new process."
                    logger.warning(said, self._name, error)
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
        if _live is not None and _live() is self:
            _live = None
        self._on_close(why)

    @contextlib.contextmanager
    def _state_kept(self) -> Iterator[None]:
        with random_states_kept(), settings_kept(), default_group_kept(not self._owns_group):
            yield


def _load_vllm(name: str) -> Any:
    try:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            check_lscpu(name)
            # Else the first log-probability compiles a function, which needs a C++ compiler.
            type(current_platform).simple_compile_backend = "eager"
        from vllm import LLM
    except (ImportError, RuntimeError) as error:  # torchvision for another torch raises the latter
        raise ImportError(
            f"{name}: vLLM does not load here ({type(error).__name__}: {error}). If it speaks of torchvision, "
            "torchaudio or torchcodec, they are for another torch: pip uninstall torchvision torchaudio torchcodec."
        ) from error
    return LLM


def clear_blocks(worker: Any) -> None:
    """Overwrite the KV cache, which no request may be using, by zeros.

    A new request's block holds old numbers past its last token. The attention multiplies them by 0, and 0 * NaN is NaN:
    once it has drawn NaN, vLLM 0.32 draws NaN for ever, also with correct weights.
    """
    for layer in worker.model_runner.kv_caches:
        for part in layer if isinstance(layer, (list, tuple)) else [layer]:  # several for a layer with states
            part.zero_()


def restore_layers(model: Any) -> None:
    """After a failed reload: give every layer data again, some of it old."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
