"""Continuous batching of transformers as an engine: `policy.use(rl.ContinuousBatching(policy))`.

transformers schedules the requests over a paged cache: at every step a finished sequence is replaced by a waiting one.
But it samples from one global random state, its log-probabilities are those of the truncated distribution, and it has
no stop strings. So each completion is a request, and a logits processor leaves only the token that rlkit's
`TokenSampler` chose. That keeps the default engine's seeds per group and completion, all sampling settings, and the
policy's own log-probabilities.

Source: transformers 5.19, `generation/continuous_batching`. Left out: its CUDA graphs and asynchronous batches, because
rlkit chooses tokens on the host; one prefill for all completions of a prompt (`num_return_sequences` forks a request);
tensor parallel models.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.causal_lm import causal_lm_of
from rlkit.engine import Completion, EngineError, PolicyModelEngine
from rlkit.engines.token_sampler import TokenSampler
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

CPU_PAGE = 32
"""Tokens of a page on a CPU, where attention runs over whole pages."""
PREFILL_TOKENS = 8192
"""Default limit of tokens in one forward pass, transformers' own."""
SEQUENCES = 1024
"""Default limit of sequences in a batch, transformers' own."""
POLL_SECONDS = 0.2
JOIN_SECONDS = 60.0


class ContinuousBatching(PolicyModelEngine):
    """Samples with the policy's own model by transformers' continuous batching.

    For GPUs with flash attention and completions of unequal length; without flash attention every pass computes the
    attention of all pairs of sequences and masks it, and it is not faster than the default engine
    (docs/performance.md).

    Args:
        policy: the policy to sample from: an attention model with "eager", "sdpa" or a flash implementation.
        page_size: tokens per page of the cache, at least 4; None takes 32 on a CPU, else 256 (for flash attention).
        num_blocks: pages of the cache (each for all layers); None takes what the step's batch needs on a CPU, else what
            fits.
        max_batch_tokens: most tokens of one forward pass; longer prompts are split over several. None takes 8192, on a
            CPU at most what the step needs.
        max_requests_per_batch: most sequences in a batch; None takes 1024.
        max_memory_percent: share of the free memory, in (0, 1], for the cache; None takes transformers' own.
        allow_block_sharing: prompts with equal first pages share them.
        scheduler_type: "fifo" or "prefill_first".
        auto_switch_to_flash: sample with flash attention if it is installed, though the policy trains without: faster,
            but log-probabilities differ from the trainer's by the rounding of the kernels.

    Raises:
        TypeError: the model cannot do continuous batching.
        ValueError: a setting out of its range.

    Example: `policy.use(rl.ContinuousBatching(policy, max_requests_per_batch=64))`
    """

    name = "continuous-batching"

    def __init__(
        self,
        policy: "Policy",
        *,
        page_size: int | None = None,
        num_blocks: int | None = None,
        max_batch_tokens: int | None = None,
        max_requests_per_batch: int | None = None,
        max_memory_percent: float | None = None,
        allow_block_sharing: bool = True,
        scheduler_type: str = "fifo",
        auto_switch_to_flash: bool = False,
    ) -> None:
        for name, value, least in (
            ("page_size", page_size, 4),
            ("num_blocks", num_blocks, 1),
            ("max_batch_tokens", max_batch_tokens, 1),
            ("max_requests_per_batch", max_requests_per_batch, 1),
        ):
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(
                    f"ContinuousBatching: {name} is a whole number of at least {least} or None, got {value!r}."
                )
        if max_memory_percent is not None and not 0 < max_memory_percent <= 1:
            raise ValueError(f"ContinuousBatching: max_memory_percent is a share in (0, 1], got {max_memory_percent}.")
        if scheduler_type not in ("fifo", "prefill_first"):
            raise ValueError(
                f"ContinuousBatching: scheduler_type is 'fifo' or 'prefill_first', got {scheduler_type!r}."
            )
        _check_model(policy)
        self.policy = policy
        self._on_cpu = policy.device.type == "cpu"
        self._page_size = page_size or (CPU_PAGE if self._on_cpu else 256)
        self._num_blocks = num_blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_requests = max_requests_per_batch or SEQUENCES
        self._fixed: dict[str, Any] = {
            "max_memory_percent": max_memory_percent,
            "allow_block_sharing": allow_block_sharing,
            "scheduler_type": scheduler_type,
            "auto_switch_to_flash": auto_switch_to_flash,
            "use_cuda_graph": False,
            "use_async_batching": False,
            "disable_nccl_graph_mixing": False,  # True would set an environment variable for the whole run
            "seed": 0,  # of a random state that is never used; None would draw one
        }

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

        They equal those of the transformers engine, except where rounding decides a token. Ctrl-C ends it after the
        current forward pass.

        Raises:
            EngineError: transformers' generation loop failed.
            ValueError: the cache (`num_blocks`) is too small for one sequence.
        """
        with self.policy.without_gradient(), self.policy.inference_settings():  # gathers, so without prompts too
            if not prompts:
                return []
            sampler = TokenSampler(self.policy, prompts, group_ids, num_generations, params, seed)
            config = self._config(sampler)
            lm = causal_lm_of(self.policy.model)
            devices = [self.policy.device] if self.policy.device.type == "cuda" else []
            with (
                _autocast_in_threads(lm, self.policy),
                torch.random.fork_rng(devices=devices),  # the manager seeds torch when it starts
                _own_attention(lm),
            ):
                self._run(lm, config, sampler)
            return sampler.completions()

    def _config(self, sampler: TokenSampler) -> Any:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        lengths = [len(prompt) for prompt in sampler.prompts]
        side_by_side = min(len(sampler), self._max_requests)
        pages = math.ceil((max(lengths) + sampler.params.max_completion_length) / self._page_size)
        if self._num_blocks is not None and self._num_blocks < pages:
            raise ValueError(
                f"ContinuousBatching: a prompt with its completion takes up to {pages} pages of {self._page_size} "
                f"tokens, num_blocks={self._num_blocks} holds fewer. Raise num_blocks, or leave it out."
            )
        blocks, tokens = self._num_blocks, self._max_batch_tokens
        if self._on_cpu:  # transformers would take nearly all of the machine's memory
            blocks = blocks or pages * side_by_side
            tokens = tokens or min(PREFILL_TOKENS, max(side_by_side, sampler.num_generations * sum(lengths)))
        return ContinuousBatchingConfig(
            # Under mixed precision flash attention's own cache access does not fit a cache of the weights' dtype.
            max_blocks_per_request=None if self.policy.autocast is None else 0,
            page_size=self._page_size,
            num_blocks=blocks,
            max_batch_tokens=tokens,
            max_requests_per_batch=side_by_side,
            **self._fixed,
        )

    def _run(self, lm: Any, config: Any, sampler: TokenSampler) -> None:
        from transformers import GenerationConfig

        settings = GenerationConfig(
            do_sample=False,  # the processor leaves one token, and the largest score is its
            max_new_tokens=sampler.params.max_completion_length,
            eos_token_id=list(self.policy.eos_ids),
            pad_token_id=self.policy.pad_id,
        )
        manager = lm.init_continuous_batching(generation_config=settings, continuous_batching_config=config)
        try:
            processors = manager.logit_processor
            processors.logits_processor.append(_processor_of(sampler))
            processors.tensors_required, processors.do_processing = 1, True
            if self.policy.autocast is not None:
                manager.warmup()  # without CUDA graphs it only creates the cache
                _cast_around(manager.batch_processor.cache, lm.dtype)
            if self.policy.device.type == "cuda":  # the passes run on another stream than the sampler's tensors
                torch.cuda.synchronize(self.policy.device)
            manager.start()
            for row in range(len(sampler)):
                manager.add_request(
                    list(sampler.prompts[row // sampler.num_generations]),
                    request_id=str(row),
                    eos_token_id=list(self.policy.eos_ids),
                )
            self._wait(manager, sampler)
        finally:
            if manager.is_running():
                manager.stop(block=True, timeout=JOIN_SECONDS, hard_stop=True)
            manager.destroy()

    def _wait(self, manager: Any, sampler: TokenSampler) -> None:
        left = len(sampler)
        while left:
            result = manager.get_result(timeout=POLL_SECONDS)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise EngineError(f"{self.name}: transformers' generation failed: {result.error}")
                chosen = sampler.tokens_of(int(result.request_id))
                if result.generated_tokens[: len(chosen)] != chosen:
                    raise EngineError(
                        f"{self.name}: transformers returned other tokens for completion {result.request_id} than "
                        "rlkit chose. Only transformers 5.19 is tested. Please report it, and leave the engine out."
                    )
                left -= 1
            elif result is None and not manager.is_running():
                raise EngineError(
                    f"{self.name}: transformers' generation ended with {left} completions missing: "
                    f"{manager.background_thread_status.fatal_error}"
                )

    def __repr__(self) -> str:
        return f"ContinuousBatching(page_size={self._page_size}, max_requests_per_batch={self._max_requests})"


def _check_model(policy: "Policy") -> None:
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    lm = causal_lm_of(policy.model)
    reason = ""
    if not hasattr(lm, "init_continuous_batching") or getattr(lm, "_is_stateful", False):
        reason = "it keeps states, not a cache of keys and values"
    else:
        try:
            group_layers_by_attn_type(lm.config.get_text_config())
        except (ValueError, AttributeError) as error:
            reason = str(error)
    if reason:
        raise TypeError(
            f"ContinuousBatching: {type(lm).__name__} cannot be batched continuously by transformers: {reason}. Leave "
            "the engine out: rl.sample needs none."
        )


def _processor_of(sampler: TokenSampler) -> Any:
    """A logits processor of transformers' continuous batching that leaves only what the sampler chooses."""
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

    class OnlyChosen(ContinuousBatchingLogitsProcessor):
        supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - declared so by transformers
        ignored_kwargs: tuple[str, ...] = ()

        def fill_defaults(self, int32_tensor: Tensor) -> None:
            int32_tensor.fill_(0)

        def prepare_tensor_args(self, requests_with_new_token: Any) -> Tensor:
            self.rows = torch.tensor([int(request.state.request_id) for request in requests_with_new_token])
            return self.rows.int()

        def __call__(self, scores: Any, tensor_arg: Tensor) -> Any:
            # The first scores belong to these rows, the others to prompts that are not read to their end.
            return sampler.only_chosen(scores, self.rows.to(scores.device))

    return OnlyChosen()


@contextlib.contextmanager
def _own_attention(lm: Any) -> Iterator[None]:
    """Restore the policy's attention, also if a second Ctrl-C kept the manager from doing so."""
    attention = lm.config._attn_implementation
    try:
        yield
    finally:
        if lm.config._attn_implementation != attention:
            lm.set_attn_implementation(attention)


def _cast_around(cache: Any, dtype: torch.dtype) -> None:
    """Store keys and values of mixed precision in a cache of the weights' dtype (wider, so nothing is lost)."""
    update = cache.update

    def cast(key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        keys, values = update(key_states.to(dtype), value_states.to(dtype), layer_idx, kwargs)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    cache.update = cast


@contextlib.contextmanager
def _autocast_in_threads(lm: Any, policy: "Policy") -> Iterator[None]:
    """Enter autocast in every forward pass: it is a setting of the thread, and transformers runs another one."""
    if policy.autocast is None:
        yield
        return
    context = torch.autocast(policy.device.type, dtype=policy.autocast)

    def enter(module: Any, arguments: Any) -> None:
        context.__enter__()

    def leave(module: Any, arguments: Any, output: Any) -> None:
        context.__exit__(None, None, None)

    hooks = [lm.register_forward_pre_hook(enter), lm.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
