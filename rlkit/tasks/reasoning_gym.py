"""Every task of `reasoning-gym` by name, with its own scorer: `load("reasoning-gym/countdown")`.

reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760) makes questions from a seed and judges answers by code. A row
keeps the number of its question, from which the scorer makes it again: a table would not keep all of its metadata.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.record import Prompt
from rlkit.rewards.answers import answer_part, completion_text
from rlkit.support.text import did_you_mean
from rlkit.tasks import Task

logger = logging.getLogger(__name__)

PREFIX = "reasoning-gym/"


def names() -> list[str]:
    """Names of all tasks of the installed reasoning-gym."""
    _package()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def load(
    name: str,
    *,
    size: int = 500,
    test_size: int = 50,
    conversational: bool = True,
    system: str | None = None,
    seed: int = 0,
    **config: Any,
) -> Task:
    """A task of reasoning-gym.

    Args:
        name: as reasoning-gym calls it, e.g. "countdown"; see `names()`.
        size: rows of train; fewer if the task has fewer different questions.
        test_size: rows of test; no question is in both.
        conversational: chat messages, or one text.
        system: system message, or None.
        seed: of the questions.
        **config: the task's own settings (its config class in reasoning-gym says which).

    Returns:
        A `Task` whose rows have `prompt`, `answer` (one right answer, or None) and `index`; the reward is
        reasoning-gym's `score_answer` of the last `<answer>` block, or of the whole answer.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: no task has this name, a setting does not exist, or there are too few different questions.
    """
    import datasets

    if system is not None and not conversational:
        raise ValueError("reasoning-gym: a system message needs conversational=True.")
    if size < 1 or test_size < 1:
        raise ValueError(f"reasoning-gym: size and test_size must be at least 1, got {size} and {test_size}.")
    scorer = ReasoningGymScore(name, seed=seed, size=size + test_size, config=json.dumps(config, sort_keys=True))
    source = scorer.source()
    rows: dict[str, dict[str, Any]] = {}
    for index in range(size + test_size):
        entry = source[index]
        prompt = _prompt(entry["question"], conversational, system)
        answer = None if entry["answer"] is None else str(entry["answer"])
        rows.setdefault(entry["question"], {"prompt": prompt, "answer": answer, "index": index})
    found = list(rows.values())
    if len(found) <= test_size:
        raise ValueError(
            f"reasoning-gym: {name!r} gave only {len(found)} different questions, which leaves no row to learn from "
            f"beside test_size={test_size}. Ask for fewer, or for harder questions in its settings."
        )
    if len(found) < size + test_size:
        logger.warning("reasoning-gym: %r has only %d different questions of %d.", name, len(found), size + test_size)
    return Task(
        PREFIX + name,
        train=datasets.Dataset.from_list(found[test_size:]),
        test=datasets.Dataset.from_list(found[:test_size]),
        rewards=(scorer,),
    )


@dataclass(frozen=True)
class ReasoningGymScore:
    """The task's own score of an answer, 0 to 1. The settings, config as JSON, are those that made the questions."""

    name: str
    seed: int
    size: int
    config: str = "{}"
    __name__ = "reasoning_gym"

    def source(self) -> Any:
        """The reasoning-gym dataset that makes the questions."""
        return _source(self.name, self.seed, self.size, self.config)

    def __call__(self, completions: Sequence[Prompt], index: Sequence[int], **columns: Any) -> list[float]:
        """One reward per completion."""
        source = self.source()
        rewards, failed = [], []
        for completion, number in zip(completions, index, strict=True):
            answer = answer_part(completion_text(completion)).strip()
            try:
                rewards.append(float(source.score_answer(answer, _entry(self, number))))
            except Exception as error:  # scorers of a hundred authors, on any text
                failed.append(f"{type(error).__name__}: {error} on {answer[:80]!r}")
                rewards.append(0.0)
        if failed:
            logger.warning(
                "reasoning-gym: the scorer of %r failed on %d of %d answers, which get 0. The first: %s",
                self.name,
                len(failed),
                len(rewards),
                failed[0],
            )
        return rewards


@functools.lru_cache(maxsize=16)
def _source(name: str, seed: int, size: int, config: str) -> Any:
    gym = _package()
    known = names()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"reasoning-gym: there is no task {name!r}.{hint} It has {len(known)}: {', '.join(known)}.")
    try:
        return gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym: {name!r} refuses the settings {config}: {error}") from error


@functools.lru_cache(maxsize=4096)
def _entry(scorer: ReasoningGymScore, index: int) -> Any:
    return scorer.source()[index]


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "tasks.load('reasoning-gym/...') needs reasoning-gym: pip install 'rlkit-llm[tasks]'."
        ) from error
    return reasoning_gym


def _prompt(question: str, conversational: bool, system: str | None) -> Any:
    if not conversational:
        return question
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": question}]
