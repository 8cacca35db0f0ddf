"""rlkit's choice of tokens inside transformers' continuous batching, as one of its logits processors.

The processor gets the logits of the sequences that receive a token in this pass. It chooses with the noise of (seed,
group, completion, position), records the policy's log-probability, and leaves only the chosen token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.engine import Completion, EngineError, FinishReason
from rlkit.engines.token_sampler import Chooser, uniform_noise
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.policy import Policy


class Choice:
    """The growing completions of one `generate`.

    Attributes:
        prompts: one for each completion.
        ending_ids: the ids at which transformers ends a sequence.
        stopped: completions that a stop string has ended, unknown to transformers.
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
        self.prompts = [list(prompt) for prompt in prompts for _ in range(num_generations)]
        self.params = params
        self.ending_ids = list(policy.eos_ids)
        self._chooser = Chooser(policy, params, self.prompts)
        self._noise = uniform_noise(seed, group_ids, num_generations, params.max_completion_length).to(policy.device)
        self._eos = torch.tensor(policy.eos_ids, device=policy.device)
        self._tokens: list[list[int]] = [[] for _ in self.prompts]
        self._logp: list[list[float]] = [[] for _ in self.prompts]
        self.stopped: set[int] = set()

    def choose(self, logits: Tensor, rows: list[int]) -> Tensor:
        """(N,) next tokens of the completions `rows` from their (N,V) logits."""
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for step, places in self._by_step(rows).items():
            where = torch.tensor(places, device=logits.device)
            belongs = torch.tensor([rows[place] for place in places], device=logits.device)
            so_far = torch.tensor([self._tokens[row][:step] for row in belongs.tolist()], device=logits.device).long()
            steps = torch.tensor([len(self._tokens[row]) for row in belongs.tolist()], device=logits.device)
            token, logp = self._chooser(logits[where], so_far, belongs, self._noise[belongs, steps], step, self._eos)
            chosen[where] = token
            self._note(belongs.tolist(), token.tolist(), logp.tolist())
        return chosen

    def _by_step(self, rows: list[int]) -> dict[int, list[int]]:
        """Places of `rows` by the number of tokens so far if the choice depends on it; else all under 0."""
        result: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            result.setdefault(len(self._tokens[row]) if self._chooser.looks_back else 0, []).append(place)
        return result

    def _note(self, rows: list[int], tokens: list[int], logp: list[float]) -> None:
        for row, token, value in zip(rows, tokens, logp, strict=True):
            self._tokens[row].append(token)
            self._logp[row].append(value)

    def end_at_stop_strings(self, rows: list[int]) -> None:
        """Add those of `rows` to `stopped` whose completion ends with a stop string."""
        for row in rows if self._chooser.stop is not None else ():
            if bool(self._chooser.hits_stop_string(torch.tensor([self._tokens[row]]))[0]):
                self.stopped.add(row)

    def check(self, row: int, tokens: list[int]) -> None:
        """Raise `EngineError` unless transformers used the chosen tokens."""
        if tokens[: len(self._tokens[row])] != self._tokens[row]:
            raise EngineError(
                f"continuous-batching: transformers returned other tokens for completion {row} than rlkit chose. Only "
                "transformers 5.19 is tested. Please report it, and leave the engine out."
            )

    def completions(self) -> list[Completion]:
        """All of them, in the order of `prompts`."""
        return [
            Completion(tokens, logp, self._reason(row))
            for row, (tokens, logp) in enumerate(zip(self._tokens, self._logp, strict=True))
        ]

    def _reason(self, row: int) -> FinishReason:
        if row in self.stopped:
            return "stop"
        return "eos" if self._tokens[row][-1] in self.ending_ids else "length"


def choosing_processor(choice: Choice) -> Any:
    """A logits processor of transformers' continuous batching that leaves only what `choice` chose."""
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

    class ChoosingProcessor(ContinuousBatchingLogitsProcessor):
        supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - declared so by transformers
        ignored_kwargs: tuple[str, ...] = ()

        def __init__(self) -> None:
            self.rows: list[int] = []

        def fill_defaults(self, int32_tensor: Tensor) -> None:
            int32_tensor.fill_(0)

        def prepare_tensor_args(self, requests_with_new_token: Any) -> Tensor:
            self.rows = [int(request.state.request_id) for request in requests_with_new_token]
            return torch.tensor(self.rows, dtype=torch.int32)

        def __call__(self, scores: Any, tensor_arg: Tensor) -> Any:
            rows = self.rows  # of the first scores; the rest belong to unfinished prefills
            if len(rows) > len(scores):
                raise EngineError(f"continuous-batching: {len(scores)} rows of logits for {len(rows)} sequences.")
            going = [place for place, row in enumerate(rows) if row not in choice.stopped]
            token = torch.full((len(scores),), choice.ending_ids[0], device=scores.device)
            if going:
                token[going] = choice.choose(scores[going], [rows[place] for place in going])
            choice.end_at_stop_strings([rows[place] for place in going])
            return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    return ChoosingProcessor()
