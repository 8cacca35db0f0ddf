"""Restricts completions to a regular expression, by the token masks of xgrammar, a dependency of vLLM.

Left out: JSON schemas and grammars; a regular expression describes most formats that a reward function parses.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlkit.policy import Policy


class RegexMask:
    """Excludes the tokens after which a completion could no longer match.

    Args:
        policy: for its tokenizer and end tokens.
        regex: matched by the whole completion without its end token.
        rows: number of completions.

    Raises:
        ImportError: xgrammar is not installed.
        ValueError: xgrammar does not support the expression.

    A call raises `ValueError` if a completion has no possible next token and cannot end.
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
        self._blank: Any = xgrammar.allocate_token_bitmask(1, policy.vocab_size)
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._regex = regex

    def __call__(self, scores: Tensor, so_far: Tensor, rows: Tensor) -> Tensor:
        """(B,V) scores with -inf for excluded tokens; `rows` is the completion of each row."""
        scores = scores.clone()
        last = so_far[:, -1].tolist() if so_far.shape[1] else None
        for place, row in enumerate(rows.tolist()):
            matcher = self._matchers[row]
            if last is not None and not matcher.is_terminated():
                matcher.accept_token(last[place])  # returns False after the end of a finished row
            if matcher.is_terminated():
                continue
            matcher.fill_next_token_bitmask(self._blank)
            if not self._blank.any():
                raise ValueError(
                    f"sample: regex {self._regex!r} leaves completion {row} no token to go on with, and no end. Write "
                    "it with characters that the policy's tokenizer has."
                )
            self._apply(scores[place : place + 1], self._blank.to(scores.device))
        return torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores)
