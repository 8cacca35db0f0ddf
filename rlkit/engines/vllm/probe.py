"""Proof by probe: after a transfer of weights the engine must give the trainer's log-probabilities.

An engine whose weights are not the policy's still writes fluent text with finite numbers; only a comparison shows it.
The engine draws a few tokens after two fixed prompts, one of them longer than a block of the prefix cache, from a fixed
small set of tokens S, so that only a few rows of the head matter:

    logp = log softmax over S of (hidden @ head[S] / temperature)

If the two disagree, each known fault is tested: the same answer as before the update (the weights never arrived); the
trainer's numbers at temperature 1; an answer that becomes right without the prefix cache; numbers that fit the
trainer's hidden states with the head of an earlier transfer.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlkit.causal_lm import causal_lm_of, decoder_of
from rlkit.engine import Completion, EngineError
from rlkit.engines.vllm.completions import draw
from rlkit.engines.vllm.handshake import Described
from rlkit.engines.vllm.sampling_requests import request_seed

if TYPE_CHECKING:
    from rlkit.policy import Policy

TEMPERATURE, TOKENS, COMPLETIONS = 0.7, 6, 4
PROMPT_LENGTHS = (7, 300)
TOKEN_CHOICES = 64
MAX_GAP = {torch.float32: 5e-4, torch.float64: 5e-4}
"""Largest difference of any token in nats; in float32 vLLM and transformers differ by 1e-4."""
MEAN_GAP_16_BIT = 0.15
"""In 16 bits single tokens differ by 0.4 nats, the mean by 0.04, so only the mean is tested."""
MOVED = {torch.float32: 1e-4, torch.float64: 1e-4}
MOVED_16_BIT = 0.05
"""If the trainer moved by more than this and the engine by nothing, the weights did not arrive."""


class ProbeError(EngineError):
    """The engine's log-probabilities are not the policy's."""


@runtime_checkable
class Probed(Protocol):
    """What the probe needs of an engine."""

    name: str
    policy: "Policy"

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and completion together, or None."""

    def draw_probe(
        self, prompts: Sequence[Sequence[int]], requests: list[dict[str, Any]], *, cached: bool
    ) -> list[list[Completion]]:
        """Completions of requests in vLLM's form; without `cached`, nothing is read from the prefix cache."""

    def distrust(self, why: str) -> None:
        """Refuse to generate until the next transfer of weights."""


@dataclass(frozen=True)
class _Answer:
    """The engine's tokens, with (N,) log-probabilities of the engine and of the trainer in the same order."""

    version: int
    tokens: list[list[list[int]]]
    engine: Tensor
    trainer: Tensor


class Probe:
    """Compares an engine's log-probabilities with the trainer's.

    Args:
        policy: the trainer's policy.
        engine: the engine under test.
        every: compare after the first transfer and every `every`-th one.
        dtype: of the engine's weights.

    Attributes:
        gap_mean, gap_max: mean and largest difference of the last comparison, in nats; None before the first.
    """

    def __init__(self, policy: "Policy", engine: Probed, *, every: int, dtype: torch.dtype) -> None:
        if every < 1:
            raise ValueError(f"probe_every must be at least 1, or 0 for no probe, got {every}.")
        self._policy, self._engine, self._every, self._dtype = policy, engine, every, dtype
        self._count, self._passed = 0, False
        self._before: _Answer | None = None
        self._heads: list[Tensor] = []  # rows of the head at the first and at the last comparison
        self.gap_mean: float | None = None
        self.gap_max: float | None = None
        ordinary = sorted(set(policy.tokenizer.get_vocab().values()) - set(policy.tokenizer.all_special_ids))
        ordinary = [i for i in ordinary if i < policy.vocab_size and i not in policy.eos_ids]
        self._choices = ordinary[:: max(1, len(ordinary) // TOKEN_CHOICES)][:TOKEN_CHOICES]
        room = (engine.max_context or policy.max_context or 10**6) - TOKENS
        lengths = sorted({max(1, min(length, room)) for length in PROMPT_LENGTHS})
        self._prompts = [[ordinary[(7 * i + 3 * i * i) % len(ordinary)] for i in range(length)] for length in lengths]

    def after_sync(self) -> None:
        """Compare if this transfer is an `every`-th one. Every process calls it.

        After a `ProbeError`, which names the fault, the engine refuses to generate until a new transfer.
        """
        self._count += 1
        if self._passed and (self._count - 1) % self._every:
            return
        try:
            self.compare()
        except EngineError as error:  # also one that could not draw at all
            self._passed = False
            self._engine.distrust(str(error))
            raise

    def compare(self) -> None:
        """Compare now; `ProbeError` if the log-probabilities differ."""
        answer = self._ask(cached=True)
        gap = (answer.engine - answer.trainer).abs()
        self.gap_mean, self.gap_max = float(gap.mean()), float(gap.max())
        same_as_before = self._is_answer_of_before(answer)
        if same_as_before or not self._close(gap):
            fault = self._fault(answer)
            raise ProbeError(
                f"{self._engine.name}: on a probe its log-probabilities are {self.gap_mean:.2g} nats from the "
                f"trainer's (at most {self.gap_max:.2g}) after the transfer of version {answer.version}: "
                f"{fault}"
            )
        rows = self._head_rows()
        self._heads = [self._heads[0], rows] if self._heads else [rows]
        self._before, self._passed = answer, True

    def _fault(self, answer: _Answer) -> str:
        before = self._before
        # Close, not equal: a server batches differently from one draw to the next, which changes the rounding.
        if before is not None and before.tokens == answer.tokens and self._close((answer.engine - before.engine).abs()):
            return (
                f"stale weights, it answers as it did with version {before.version}. The transfer was lost, or an "
                "adapter is ignored. Close the engine and make a new one."
            )
        if self._close((self._score(answer.tokens, raw=True) - answer.engine).abs()):
            return (
                "wrong temperature, its numbers are those of the raw logits. Start it with "
                "logprobs_mode='processed_logprobs'."
            )
        fresh = self._ask(cached=False)
        if self._close((fresh.engine - fresh.trainer).abs()):
            return (
                "stale prefix cache, without the cache the numbers are right. The cache must be reset after each "
                "transfer and before the next request."
            )
        for rows in self._heads:
            if self._close((self._score(answer.tokens, head=rows) - answer.engine).abs()):
                return (
                    "stale head, its numbers fit the trainer's hidden states with the head of an earlier version. A "
                    "tied head must be in the stream of weights under its own name (rlkit.engines.weights)."
                )
        if before is None:
            return (
                "wrong model, the weights that it draws with were never the policy's. Start the engine from the "
                "policy's own model; if it is, vLLM loads this architecture otherwise than transformers does."
            )
        return (
            "some weights did not arrive: they are neither the policy's nor those of the last comparison. A layer was "
            "left out of the transfer, or it stopped half-way. Close the engine and make a new one."
        )

    def _ask(self, *, cached: bool) -> _Answer:
        requests = [self._request(place) for place in range(len(self._prompts))]
        groups = self._engine.draw_probe(self._prompts, requests, cached=cached)
        tokens = [[completion.token_ids for completion in group] for group in groups]
        engine = torch.tensor([value for group in groups for completion in group for value in completion.logp])
        return _Answer(self._policy.version, tokens, engine.double(), self._score(tokens))

    def _request(self, place: int) -> dict[str, Any]:
        return {
            "n": COMPLETIONS,
            "seed": request_seed(0, place),
            "max_tokens": TOKENS,
            "min_tokens": 0,
            "temperature": TEMPERATURE,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "allowed_token_ids": self._choices,
            "logprobs": 0,
        }

    def _score(self, tokens: list[list[list[int]]], *, raw: bool = False, head: Tensor | None = None) -> Tensor:
        """(N,) the trainer's log-probabilities over the choices, float64 on the CPU.

        `raw`: over the whole vocabulary at temperature 1. `head`: rows that replace those of the trainer's head.
        """
        policy = self._policy
        choices = torch.tensor(self._choices, device=policy.device)
        places = {token: place for place, token in enumerate(self._choices)}
        parts = []
        with policy.without_gradient(), policy.inference_settings():
            for prompt, group in zip(self._prompts, tokens, strict=True):
                ids = torch.tensor([prompt + completion for completion in group], device=policy.device)
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
                start = len(prompt) - 1
                if head is None:
                    logits = causal_lm_of(policy.model)(**inputs).logits[:, start:-1]
                    logits = logits if raw else logits.index_select(-1, choices)
                else:
                    hidden = decoder_of(policy.model)(**inputs).last_hidden_state[:, start:-1]
                    logits = hidden.float() @ head.to(hidden.device).float().T
                picked = torch.tensor(
                    [[token if raw else places[token] for token in row] for row in group], device=policy.device
                )
                logp = (logits.double() / (1.0 if raw else TEMPERATURE)).log_softmax(-1)
                parts.append(logp.gather(-1, picked[..., None]).flatten())
        return torch.cat(parts).cpu()

    def _head_rows(self) -> Tensor:
        """(S,D) a copy of the rows of the head that score the choices."""
        with self._policy.without_gradient():
            weight = causal_lm_of(self._policy.model).get_output_embeddings().weight
            return weight.detach()[self._choices].clone().cpu()

    def _close(self, gap: Tensor) -> bool:
        if self._dtype in MAX_GAP:
            return bool(gap.max() <= MAX_GAP[self._dtype])
        return bool(gap.mean() <= MEAN_GAP_16_BIT)

    def _is_answer_of_before(self, answer: _Answer) -> bool:
        """True if the trainer's weights changed since the last comparison and the engine's did not."""
        before = self._before
        if before is None or before.version == answer.version or before.tokens != answer.tokens:
            return False
        moved = float((answer.trainer - before.trainer).abs().max())
        return moved > MOVED.get(self._dtype, MOVED_16_BIT) and torch.equal(answer.engine, before.engine)


@dataclass
class ProbedServer:
    """One of a client's servers as a `Probed` engine; `distrust` is the client's."""

    name: str
    policy: "Policy"
    server: Described
    model: str | None
    distrust: Callable[[str], None]

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and completion together."""
        return self.server.max_model_len

    def draw_probe(
        self, prompts: Sequence[Sequence[int]], requests: list[dict[str, Any]], *, cached: bool
    ) -> list[list[Completion]]:
        """Completions of requests in vLLM's form; without `cached`, under a cache salt that was never used."""
        if not cached:
            requests = [request | {"cache_salt": secrets.token_hex(8)} for request in requests]
        servers, version = [self.server], self.policy.version
        return draw(self.policy, servers, [0] * len(prompts), prompts, requests, version=version, model=self.model)


class ServerProbe:
    """One `Probe` for each server of a client."""

    def __init__(self, servers: Sequence[ProbedServer], *, every: int) -> None:
        self.probes = [Probe(one.policy, one, every=every, dtype=getattr(torch, one.server.dtype)) for one in servers]

    @property
    def gap_max(self) -> float | None:
        """Largest difference of any token on any server, in nats; None before the first comparison."""
        return max((probe.gap_max for probe in self.probes if probe.gap_max is not None), default=None)

    def after_sync(self) -> None:
        """`Probe.after_sync` of every server."""
        for probe in self.probes:
            probe.after_sync()
