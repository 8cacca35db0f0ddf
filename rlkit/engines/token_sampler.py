"""From logits to tokens under the sampling settings, for every engine that runs in this process.

Noise is fixed by (seed, group id, completion, position) and turned into a token by the inverse of the cumulative
distribution, so a completion does not depend on the other rows of its batch, their order, or the rank. A global random
state would make it depend on all three.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlkit.engine import Completion, FinishReason
from rlkit.engines.rollout_assembly import pad_tokens
from rlkit.token_scorer import MAX_CHUNK_ELEMENTS
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy

BELOW_ONE = 1.0 - 1e-12
REASONS: tuple[FinishReason, ...] = ("length", "eos", "stop")


def uniform_noise(seed: int, group_ids: Sequence[int], num_generations: int, length: int) -> Tensor:
    """(P*G, length) float64 in [0, 1), a function of seed, group id, completion index and position only.

    A longer `length` or a larger `num_generations` extends what a smaller one gives for the same group.
    """
    rows = [
        np.random.Generator(
            np.random.Philox(np.random.SeedSequence([*seed_words(seed), *seed_words(group), g]))
        ).random(length)
        for group in group_ids
        for g in range(num_generations)
    ]
    return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, length))).clamp(max=BELOW_ONE)


def seed_words(value: int) -> tuple[int, int]:
    """A signed 64-bit number as two 32-bit words; numpy's own split would let different sequences collide."""
    return value % 2**32, value % 2**64 >> 32


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Pick one token per row by inverse transform sampling.

    Args:
        scores: (B,V) unnormalised log-probabilities; -inf rules a token out.
        uniform: (B,) float64 in [0, 1).

    Returns:
        (B,) token ids, each with positive probability.

    Example:
        >>> draw(torch.tensor([[0.1, 0.2, 0.7]]).log().expand(3, 3), torch.tensor([0.05, 0.25, 0.9]).double()).tolist()
        [0, 1, 2]
    """
    tokens = [torch.zeros(0, dtype=torch.int64, device=scores.device)]
    size = max(1, MAX_CHUNK_ELEMENTS // scores.shape[-1])
    for part, u in zip(scores.split(size), uniform.split(size), strict=True):
        cdf = part.double().softmax(-1).cumsum(-1)
        # right=True: u equal to a boundary belongs to the next token, so a token of probability 0 is never picked.
        tokens.append(torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).squeeze(-1))
    # A row of NaN is searched past its end; the clamp keeps its NaN log-probability, which `sample` refuses by name.
    return torch.cat(tokens).clamp(max=scores.shape[-1] - 1)


def build_processors(params: SamplingParams) -> Any:
    """The logits processors of transformers for the settings that are not neutral, in its order; no temperature."""
    from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    processors = LogitsProcessorList()
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


class TokenSampler:
    """The growing completions of one `generate`: chooses each token, records it with its log-probability, ends rows.

    Row r of the R = P*G rows is completion r % G of prompt r // G. A call may hold any rows, each at its own length.

    Attributes:
        ended: (R,) True for rows that an end id or a stop string has ended.
    """

    def __init__(
        self,
        policy: "Policy",
        prompts: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        num_generations: int,
        params: SamplingParams,
        seed: int,
    ) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        device, length = policy.device, params.max_completion_length
        self.policy, self.prompts, self.num_generations, self.params = policy, prompts, num_generations, params
        self._noise = uniform_noise(seed, group_ids, num_generations, length).to(device)
        self._eos = torch.tensor(policy.eos_ids, device=device)
        self._unused = torch.tensor(policy.unused_ids, dtype=torch.int64, device=device)
        self._processors = build_processors(params)
        self._penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        self._stop = _stop_criterion(policy, params)
        # Padded with the prompt's first token, which the penalty has seen anyway: a pad id would be penalised too.
        ids, mask = pad_tokens(prompts, policy.pad_id, side="left")
        first = torch.tensor([prompt[0] for prompt in prompts])[:, None]
        seen = torch.cat([ids.where(mask, first), first.expand(-1, length)], dim=1).to(device)
        self._seen = seen.repeat_interleave(num_generations, 0)  # prompt and completion
        self._tokens = self._seen[:, ids.shape[1] :]
        self._logp = torch.zeros(self._tokens.shape, device=device)
        self._lengths = torch.zeros(len(self), dtype=torch.int64, device=device)
        self._reasons = torch.zeros(len(self), dtype=torch.int64, device=device)  # places in REASONS
        self._regex = None if params.regex is None else _RegexMask(policy, params.regex, len(self))

    def __len__(self) -> int:
        return len(self._noise)

    @property
    def ended(self) -> Tensor:  # noqa: D102 - described in the class
        return self._reasons > 0

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        """(N,) next tokens of `rows` from their (N,V) logits; an end id for rows that have ended."""
        step, ended, temperature = self._lengths[rows], self.ended[rows], self.params.temperature
        scores = logits = logits.float()
        if self.params.repetition_penalty != 1:
            scores = self._penalty(self._seen[rows], scores)
        if self.params.min_completion_length:
            early = step < self.params.min_completion_length
            scores = torch.where(early[:, None], scores.index_fill(1, self._eos, -torch.inf), scores)
        if len(self._unused):
            scores = scores.index_fill(1, self._unused, -torch.inf)
        if self._regex is not None:
            scores = self._regex(scores, rows, self._tokens[rows, step - 1], ~ended)
        scores = self._processors(self._tokens[rows], scores / temperature)
        token = draw(scores, self._noise[rows, step]).where(~ended, self._eos[0])
        self._tokens[rows, step] = token
        self._logp[rows, step] = (logits / temperature).log_softmax(-1).gather(-1, token[:, None])[:, 0]
        self._lengths[rows] += ~ended
        at_eos = torch.isin(token, self._eos)
        self._reasons[rows] = torch.where(
            ended, self._reasons[rows], torch.where(at_eos, 1, 2 * self._at_stop_string(rows, ended | at_eos))
        )
        return token

    def only_chosen(self, scores: Tensor, rows: Tensor) -> Tensor:
        """As a logits processor of transformers: scores that leave the chosen tokens only, for the first rows."""
        token = self._eos[:1].repeat(len(scores))
        token[: len(rows)] = self(scores[: len(rows)], rows)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    def tokens_of(self, row: int) -> list[int]:
        """The completion so far."""
        return self._tokens[row, : self._lengths[row]].tolist()

    def completions(self) -> list[list[Completion]]:
        """G completions for each of the P prompts."""
        columns = (self._tokens, self._logp, self._lengths, self._reasons)
        done = [
            Completion(tokens[:length], logp[:length], REASONS[reason], self.policy.version)
            for tokens, logp, length, reason in zip(*(column.tolist() for column in columns), strict=True)
        ]
        return [done[start : start + self.num_generations] for start in range(0, len(done), self.num_generations)]

    def _at_stop_string(self, rows: Tensor, ended: Tensor) -> Tensor:
        """(N,) 1 where the completion ends with a stop string; the criterion takes rows of one length."""
        found = torch.zeros_like(rows)
        if self._stop is not None:
            lengths = self._lengths[rows].masked_fill(ended, 0)
            for length in lengths[~ended].unique().tolist():
                places = (lengths == length).nonzero()[:, 0]
                found[places] = self._stop(self._tokens[rows[places], :length], None).to(found)
        return found


def _stop_criterion(policy: "Policy", params: SamplingParams) -> Any:
    """The criterion of transformers for the stop strings, or a slower one for tokenizers that it does not take."""
    from transformers import StopStringCriteria

    def found_in_text(tokens: Tensor, scores: None) -> Tensor:
        texts = policy.tokenizer.batch_decode(tokens)
        return torch.tensor([any(stop in text for stop in params.stop_strings) for text in texts])

    if not params.stop_strings:
        return None
    try:
        return StopStringCriteria(policy.tokenizer, list(params.stop_strings))
    except ValueError:  # it needs a tokenizer that can encode a certain word
        return found_in_text


class _RegexMask:
    """Excludes the tokens after which a completion could no longer match, by the token masks of xgrammar.

    Left out: JSON schemas and grammars; a regular expression describes most formats that a reward function parses.
    """

    def __init__(self, policy: "Policy", regex: str, rows: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ImportError(
                "sample: regex needs xgrammar, which is not installed: pip install 'rlkit-llm[regex]'. Or draw with "
                "vLLM, which installs it."
            ) from error
        info = xgrammar.TokenizerInfo.from_huggingface(
            policy.tokenizer, vocab_size=policy.vocab_size, stop_token_ids=list(policy.eos_ids)
        )
        try:
            grammar = xgrammar.GrammarCompiler(info).compile_regex(regex)
        except RuntimeError as error:
            raise ValueError(f"sample: regex {regex!r} is not one that xgrammar knows: {error}") from error
        self._matchers = [xgrammar.GrammarMatcher(grammar) for _ in range(rows)]
        self._started = [False] * rows
        self._allowed: Any = xgrammar.allocate_token_bitmask(1, policy.vocab_size)
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._regex = regex

    def __call__(self, scores: Tensor, rows: Tensor, last: Tensor, going: Tensor) -> Tensor:
        """(N,V) scores with -inf for excluded tokens; `last` is each row's last token, `going` False where it ended."""
        scores = scores.clone()
        for place, (row, token, goes_on) in enumerate(zip(rows.tolist(), last.tolist(), going.tolist(), strict=True)):
            if not goes_on:
                continue
            if self._started[row]:
                self._matchers[row].accept_token(token)
            self._started[row] = True
            self._matchers[row].fill_next_token_bitmask(self._allowed)
            if not self._allowed.any():
                raise ValueError(
                    f"sample: regex {self._regex!r} leaves completion {row} no token to go on with, and no end. Write "
                    "it with characters that the policy's tokenizer has."
                )
            self._apply(scores[place : place + 1], self._allowed.to(scores.device))
        return scores
