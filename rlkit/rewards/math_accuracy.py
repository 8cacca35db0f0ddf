"""`accuracy`: is the answer mathematically equal to the right one? math-verify decides, as in TRL's `accuracy_reward`.

Unlike there, the value is the same in every thread (math-verify's timeout needs the main thread), no expression can
hang a run, only the text after the reasoning counts, and a right answer that cannot be read gives None, not 1
(`check_gold` counts them before the run).
"""

import importlib.util
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.prompts.rows import as_rows
from rlkit.record import Prompt
from rlkit.reward_calls.child import Child, Died, TimedOut
from rlkit.rewards.answers import GOLD, answer_part, boxes, completion_text, gold_column

logger = logging.getLogger(__name__)

QUICK = 32  # the first round has 1 / QUICK of the timeout
CALL_BUDGET = 3.0  # timeouts that the slow completions of a call take together
LATE = {"error": "took too long", "late": True}


WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 120.0  # to import sympy on a busy machine
GRACE_SECONDS = 10.0  # beyond the limit of a question, until a worker without an answer is killed


class MathProcess:
    """The process in which math-verify runs, started when first needed. Any thread may ask; one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.child: Child | None = None

    def ask(
        self, gold: str, answer: str | None, seconds: float, *, processor_seconds: float | None = None
    ) -> dict[str, Any]:
        """The verdict of math-verify: "gold", "answer" and "correct", or an "error", which is "late" or not.

        Without an answer only the gold is parsed. `processor_seconds` is a further bound, which a busy machine does not
        shorten.
        """
        bounds = {"seconds": seconds, "processor_seconds": seconds if processor_seconds is None else processor_seconds}
        question = json.dumps({"gold": gold, "answer": answer} | bounds).encode()
        with self._lock:
            child = self._started()
            try:
                return json.loads(child.ask(question, seconds + GRACE_SECONDS))
            except (TimedOut, Died):
                return {"error": "its process ended", "late": True}

    def close(self) -> None:
        """End the process, if there is one; the next question starts another one."""
        with self._lock:
            if self.child is not None:
                self.child.close()
                self.child = None

    def _started(self) -> Child:
        if self.child is not None and self.child.alive:
            return self.child
        if self.child is not None:
            self.child.close()
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("rlkit.rewards.accuracy needs math-verify: pip install 'rlkit-llm[math]'.")
        self.child = Child([sys.executable, "-I", str(WORKER)], stderr=subprocess.DEVNULL)
        try:
            self.child.ask(b"", START_SECONDS)  # it writes a line when it is ready
        except (TimedOut, Died) as error:
            raise RuntimeError("rlkit.rewards.accuracy: the process for math-verify did not start.") from error
        return self.child


math_process = MathProcess()


@dataclass(frozen=True)
class Accuracy:
    r"""1 where the answer equals the right one, 0 where it does not or cannot be read, None where the right one cannot.

    The answer must be in a box, or LaTeX after words such as "the answer is" (TRL's rule); the right one may be plain.
    Of several boxes the last complete one counts, alone: TRL reads two near each other as one answer.

    Attributes:
        column: of the right answer; None takes `answer`, else `solution`.
        timeout: seconds for one completion, > 0. The slow ones of a call, however many, have three timeouts together
            (of processor time): each is first given a thirty-second of the timeout, which is many times what an
            ordinary one needs; those that need more then share what is left. When that is used up, the remaining
            completions get `on_timeout` too.
        on_timeout: what a completion gets that takes longer, or breaks math-verify; None abstains. Use 0.0 where a
            policy might learn to write such things.

    Example:
        >>> Accuracy()([r"\boxed{\frac{1}{2}}", r"\boxed{3}", r"\boxed{3}"], answer=["0.5", "4", "no number"])
        [1.0, 0.0, None]
    """

    column: str | None = None
    timeout: float = 5.0
    on_timeout: float | None = None
    __name__ = "accuracy"

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"Accuracy: timeout must be above 0 seconds, got {self.timeout}.")

    def __call__(
        self,
        completions: Sequence[Prompt],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """One reward per completion; what was read is logged as the columns gold_parsed and answer_parsed."""
        golds = gold_column(columns, self.column, "Accuracy")
        texts = [_answer(completion_text(completion)) for completion in completions]
        found = self._judge_all(list(zip(golds, texts, strict=True)))
        failed = [place for place, one in enumerate(found) if "error" in one]
        if failed:
            logger.warning(
                "accuracy: math-verify failed on %d of %d completions, which get %s. The first: %s: %r",
                len(failed),
                len(found),
                self.on_timeout,
                found[failed[0]]["error"],
                texts[failed[0]][-80:],
            )
        if log_extra is not None:
            log_extra("gold_parsed", ["" if "error" in one else _shown(one["gold"]) for one in found])
            log_extra("answer_parsed", ["[failed]" if "error" in one else _shown(one["answer"]) for one in found])
        return [self._reward(one) for one in found]

    def _reward(self, found: Mapping[str, Any]) -> float | None:
        if "error" in found:
            return self.on_timeout
        return None if found["correct"] is None else float(found["correct"])

    def _judge_all(self, pairs: Sequence[tuple[Any, str]]) -> list[dict[str, Any]]:
        """The verdict of math-verify on each (gold, text); a quick round for all, a second one for the slow."""
        found: list[dict[str, Any]] = [LATE] * len(pairs)
        left = CALL_BUDGET * self.timeout
        slow = list(range(len(pairs)))
        for second in (False, True):
            share = min(self.timeout, left / max(1, len(slow))) if second else self.timeout / QUICK
            places, slow = slow, []
            for place in places:
                if left <= 0:
                    break
                found[place] = self._judge(*pairs[place], share)
                if found[place].get("late"):
                    left -= share
                    slow.append(place)
        return found

    def _judge(self, gold: Any, text: str, share: float) -> dict[str, Any]:
        if gold is None:
            return {"gold": None, "answer": None, "correct": None}
        answer = math_process.ask(_clean(gold), _clean(text), self.timeout, processor_seconds=share)
        return LATE if answer.get("late") else answer


def _answer(text: str) -> str:
    """The last complete box alone: math-verify reads two that are near each other as one answer."""
    part = answer_part(text)
    boxed, cut = boxes(part)
    return rf"\boxed{{{boxed}}}" if boxed is not None else "" if cut else part


def _shown(readings: list[str] | None) -> str:
    return str(readings) if readings else "[unparseable]"


def check_gold(dataset: Any, *, column: str | None = None, timeout: float = 5.0) -> list[int]:
    """The rows whose right answer `accuracy` cannot read: all their completions would have no reward.

    Call it before a run; a warning names how many and which.

    Args:
        dataset: rows in any form that `PromptLoader` takes, but no stream.
        column: of the right answer; None takes `answer`, else `solution`.
        timeout: seconds for one row.

    Returns:
        Places of the rows.

    Example:
        >>> check_gold([{"prompt": "1/2?", "answer": "0.5"}, {"prompt": "why?", "answer": "no number"}])
        [1]
    """
    rows = as_rows(dataset, "check_gold")
    known = [name for name in GOLD if name in rows[0]]
    if column is None and not known:
        raise ValueError(f"check_gold: expected a column {' or '.join(GOLD)}; the rows have {sorted(rows[0])}.")
    column = column or known[0]
    bad = []
    for place in range(len(rows)):
        gold = rows[place].get(column)
        found = None if gold is None else math_process.ask(_clean(gold), None, timeout)
        if found is None or not found.get("gold"):
            bad.append(place)
    if bad:
        logger.warning(
            "check_gold: %d of %d rows have a right answer in %r that cannot be read; they get no reward. The first: "
            "row %d, %r",
            len(bad),
            len(rows),
            column,
            bad[0],
            str(rows[bad[0]].get(column))[:80],
        )
    return bad


def _clean(text: Any) -> str:
    """Text as it can be sent to another process: a lone surrogate becomes a question mark."""
    return str(text).encode("utf-8", "replace").decode("utf-8")


accuracy = Accuracy()
