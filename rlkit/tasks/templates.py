"""`prepare`: from a published dataset to rows with a `prompt`, by a template.

Three shapes are known by their columns: GSM8K (question, and an answer that ends in `#### 42`), DeepMath (question,
final_answer), TL;DR (a post or prompt, and a summary). Others need a template. `datasets` loads from a hub:
`prepare(datasets.load_dataset("openai/gsm8k", "main", split="train"))`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.prompts.rows import any_rows

if TYPE_CHECKING:
    import datasets

Answer = str | Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Shape:
    """How rows of a known form, known by its columns, become prompts."""

    columns: frozenset[str]
    template: str
    answer: Answer


def gsm8k_answer(row: Mapping[str, Any]) -> str:
    r"""The number after `####`, without separators.

    Example:
        >>> gsm8k_answer({"answer": "She has 600 * 2 = 1,200.\n#### 1,200"})
        '1200'
    """
    text = row["answer"]
    _, marked, number = str(text).rpartition("####")
    if not marked:
        raise ValueError(f"the answer has no '####': {str(text)[-60:]!r}")
    return number.strip().replace(",", "")


SHAPES = {
    "deepmath": Shape(
        frozenset({"question", "final_answer"}),
        "{question}\n\nReason step by step, and put the final answer in \\boxed{{}}.",
        "final_answer",
    ),
    "gsm8k": Shape(
        frozenset({"question", "answer"}),
        "{question}\n\nThink step by step, and end with the answer as a number after ####.",
        gsm8k_answer,
    ),
    "tldr-posts": Shape(
        frozenset({"subreddit", "title", "post", "summary"}),
        "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:",
        "summary",
    ),
    "tldr": Shape(frozenset({"prompt", "completion"}), "{prompt}", "completion"),
}


def prepare(
    dataset: Any,
    template: str | None = None,
    *,
    answer: Answer | None = None,
    system: str | None = None,
    conversational: bool = True,
) -> datasets.Dataset:
    """Rows with a `prompt` and, where there is one, an `answer`; the other columns stay.

    Args:
        dataset: rows in any form that `PromptLoader` takes, but no stream; they need no `prompt` yet.
        template: of the prompt, with columns in braces: "{question} Answer with a number." A literal brace is written
            twice. None takes the template of the known shape.
        answer: column of the right answer, or a function of the row. None takes that of the known shape; with your own
            template, the column `answer` stays as it is.
        system: system message.
        conversational: chat messages, or one text.

    Returns:
        A `datasets.Dataset`. A source column `prompt` or `answer` that is replaced is kept as `source_prompt` or
        `source_answer`.

    Raises:
        ValueError: a template that names no column, columns of no known shape, or an answer that cannot be made; the
            error names the row.

    Example:
        >>> rows = prepare([{"question": "1+1?", "answer": "1+1=2 #### 2"}], "{question}", answer=gsm8k_answer)
        >>> rows[0]["prompt"], rows[0]["answer"]
        ([{'role': 'user', 'content': '1+1?'}], '2')
    """
    import datasets

    rows = any_rows(dataset, "prepare")
    columns = set(rows[0]) if isinstance(rows[0], Mapping) else set()
    if template is None:
        shape = _shape_of(columns)
        template, answer = shape.template, shape.answer if answer is None else answer
    fields = _fields(template)
    missing = [name for name in fields if name not in columns]
    if missing:
        raise ValueError(f"prepare: the template names {missing}, the columns are {sorted(columns)}.")
    if isinstance(answer, str) and answer not in columns:
        raise ValueError(f"prepare: there is no column {answer!r}; the columns are {sorted(columns)}.")
    if system is not None and not conversational:
        raise ValueError("prepare: a system message needs conversational=True.")
    made = [_row(rows[place], place, template, fields, answer, system, conversational) for place in range(len(rows))]
    _check_kinds(made)
    return datasets.Dataset.from_list(made)


def _row(
    row: Mapping[str, Any],
    place: int,
    template: str,
    fields: list[str],
    answer: Answer | None,
    system: str | None,
    conversational: bool,
) -> dict[str, Any]:
    bad = [name for name in fields if not isinstance(row.get(name), (str, int, float))]
    if bad:
        raise ValueError(f"prepare: row {place} has no text in {bad}: {row.get(bad[0])!r}.")
    text = template.format(**{name: row[name] for name in fields})
    messages = [] if system is None else [{"role": "system", "content": system}]
    made: dict[str, Any] = {"prompt": [*messages, {"role": "user", "content": text}] if conversational else text}
    if answer is not None:
        try:
            made["answer"] = row[answer] if isinstance(answer, str) else answer(row)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"prepare: row {place}: {error}") from error
    kept = {(f"source_{name}" if name in made else name): value for name, value in row.items()}
    return made | kept


def _check_kinds(rows: list[dict[str, Any]]) -> None:
    """Refuse a column that mixes text and other types; the error of `datasets` does not name it."""
    first: dict[str, tuple[int, Any]] = {}
    for place, row in enumerate(rows):
        for name, value in row.items():
            if value is None:
                continue
            before, known = first.setdefault(name, (place, value))
            if isinstance(value, str) != isinstance(known, str):
                raise ValueError(
                    f"prepare: column {name!r} holds {type(known).__name__} in row {before} and {type(value).__name__} "
                    f"in row {place}. Make all of them text before, or with answer=lambda row: str(...)."
                )


def _shape_of(columns: set[str]) -> Shape:
    for shape in SHAPES.values():
        if shape.columns <= columns:
            return shape
    known = ", ".join(f"{name} ({' + '.join(sorted(shape.columns))})" for name, shape in SHAPES.items())
    raise ValueError(
        f"prepare: the columns {sorted(columns)} are of no known shape: {known}. Give a template, such as "
        "'{question} Answer with a number.'"
    )


def _fields(template: str) -> list[str]:
    """Columns that a template names; plain names only."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"prepare: the template {template!r} is not well formed: {error}. Write {{{{ for a brace."
        ) from error
    odd = [name for name in fields if not name.isidentifier()]
    if odd or not fields:
        what = f"names {odd}" if odd else "names no column"
        raise ValueError(f"prepare: the template {template!r} {what}; expected columns in braces: '{{question}}'.")
    return list(dict.fromkeys(fields))
