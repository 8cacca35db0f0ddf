"""The evaluations of a run: whole in `evaluations/NAME-STEP.pt`, their numbers as lines of `evaluations.jsonl`.

They are not in `metrics.jsonl`, whose lines are steps: an evaluation may come before the first and after the last step,
and several at one step. One of the same name at the same step replaces the earlier one, so a cell that is run again,
and a resumed run, leave no duplicates.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.metrics import for_json
from rlkit.run.folder import append_line, keep_lines, need_folder
from rlkit.run.line_files import is_step

if TYPE_CHECKING:
    from rlkit.evaluation.compare import Evaluation

FILE = "evaluations.jsonl"
FOLDER = "evaluations"
_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)


def check(name: Any, evaluation: Any) -> None:
    """Raise an error for a name that cannot be the name of a file, and for anything but an evaluation."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(
            "run.log_evaluation: expected a name of letters, digits, '_', '-' and '.', such as 'before' or 'test-set', "
            f"got {name!r}."
        )
    if not hasattr(evaluation, "per_prompt"):
        raise TypeError(
            f"run.log_evaluation: expected what rl.evaluate returned, got {type(evaluation).__name__}; numbers go into "
            "run.log(step, ..., name=number)."
        )


def file_of(run: Path, step: int, name: str) -> Path:
    """Return where an evaluation is saved.

    Example:
        >>> file_of(Path("runs/x"), 12, "test").as_posix()
        'runs/x/evaluations/test-000012.pt'
    """
    return run / FOLDER / f"{name}-{step:06d}.pt"


def write(run: Path, step: int, name: str, evaluation: "Evaluation") -> None:
    """Save an evaluation in a run's folder and append its numbers; the main process calls it."""
    need_folder(run)
    path = file_of(run, step, name)
    path.parent.mkdir(exist_ok=True)
    evaluation.save(path)
    if (run / FILE).exists():
        keep_lines(run / FILE, lambda line: (line.get("name"), line.get("step")) != (name, step))
    line = {"name": name, "step": step, "file": path.relative_to(run).as_posix(), **for_json(evaluation.metrics)}
    append_line(run / FILE, line)


def cut(run: Path, steps: int) -> None:
    """Drop the lines of evaluations made after the first `steps` steps, which are done again."""
    if (run / FILE).exists():
        keep_lines(run / FILE, lambda line: is_step(line.get("step")) and line["step"] <= steps)
