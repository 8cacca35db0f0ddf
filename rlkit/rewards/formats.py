"""The format of reasoning: `<think>...</think>` and then an answer.

As TRL's `think_format_reward`, with three differences. The opening tag may stand in the prompt: many chat templates put
it there, so completions do not have it. Reasoning and answer must not be empty. There is only one closing tag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlkit.record import Prompt, text_of
from rlkit.rewards.answers import completion_text


@dataclass(frozen=True)
class ThinkFormat:
    """1 where a completion is reasoning in think tags followed by an answer, else 0.

    Attributes:
        opening: "optional" accepts completions without the opening tag, which a chat template may have put where no
            reward function sees it. "required" asks for it, in the completion or at the end of its prompt.

    Example:
        >>> ThinkFormat()(["<think>2+2</think>4", "2+2</think> 4", "<think>2+2 4", "<think></think>"])
        [1.0, 1.0, 0.0, 0.0]
    """

    opening: Literal["optional", "required"] = "optional"
    __name__ = "think_format"

    def __post_init__(self) -> None:
        if self.opening not in ("optional", "required"):
            raise ValueError(f"ThinkFormat: opening must be 'optional' or 'required', got {self.opening!r}.")

    def __call__(
        self, completions: Sequence[Prompt], prompts: Sequence[Prompt] | None = None, **columns: Any
    ) -> list[float]:
        """One reward per completion."""
        shown = [""] * len(completions) if prompts is None else [text_of(prompt).rstrip() for prompt in prompts]
        return [
            float(self._has_format(completion_text(completion), prompt.endswith("<think>")))
            for completion, prompt in zip(completions, shown, strict=True)
        ]

    def _has_format(self, text: str, prefilled: bool) -> bool:
        begins = text.lstrip().startswith("<think>")
        if not begins and not prefilled and self.opening == "required":
            return False
        text = text.lstrip().removeprefix("<think>")
        reasoning, closed, answer = text.partition("</think>")
        if not closed or "<think>" in text or "</think>" in answer:
            return False
        return bool(reasoning.strip()) and bool(answer.strip())


think_format = ThinkFormat()
