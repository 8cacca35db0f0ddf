"""The rollouts of a run on disk: `rollouts/step-00000012.parquet`, one file per kept step, one row per completion.

A file is written under another name and renamed when it is whole, so a reader sees all of a step or none of it. When
the files outgrow a limit, steps are dropped so that the first, the last and evenly spread ones between them remain.

Left out: one file for many steps, since Parquet has its index at the end and cannot be read while it is written; and
statistics, dictionaries of columns that do not repeat and slow compression, which double the time of a file of 256
short completions (docs/decisions.md).
"""

import os
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.distributed import collectives
from rlkit.run.rollout_rows import Rows, StepRecords, check_columns, rows_of, table_of
from rlkit.support.files import regular, written_whole

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

FOLDER, SUFFIX = "rollouts", ".parquet"
REPEATED = ("prompt", "completion", "prompt_messages", "prompt_token_ids.list.element", "tokens.list.element")
MOST_PARTS = 2000
"""Most steps that are kept, whatever their size: more files make a folder slow."""


def part_of(run: Path, step: int) -> Path:
    """Return the file of a step.

    Example:
        >>> part_of(Path("runs/x"), 12).as_posix()
        'runs/x/rollouts/step-00000012.parquet'
    """
    return run / FOLDER / f"step-{step:08d}{SUFFIX}"


def kept_steps(run: Path) -> list[int]:
    """Return the steps of a run that have a file, in order."""
    try:
        names = os.listdir(run / FOLDER)
    except OSError:
        return []
    texts = [name[5 : -len(SUFFIX)] for name in names if name.startswith("step-") and name.endswith(SUFFIX)]
    return sorted(int(text) for text in texts if text.isascii() and text.isdecimal())


def read_part(file: Path, columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """Read a step's file, or only some columns of it; FileNotFoundError or ValueError if it is missing or damaged."""
    import pyarrow.parquet as pq

    with open(file, "rb", opener=regular) as handle:
        try:
            found = pq.ParquetFile(handle, page_checksum_verification=True)
            check_columns(found.schema_arrow)
            wanted = None if columns is None else [name for name in columns if name in found.schema_arrow.names]
            return found.read(columns=wanted).to_pandas(ignore_metadata=True)  # pandas' own is never written here
        except (OSError, ValueError):
            raise
        except Exception as error:  # of another make, or forged
            raise ValueError(f"{type(error).__name__}: {error}") from error


def write_part(run: Path, step: int, table: "pa.Table") -> Path:
    """Write a step's file atomically."""
    import pyarrow.parquet as pq

    file = part_of(run, step)
    file.parent.mkdir(exist_ok=True)
    repeated = [name for name in REPEATED if name.partition(".")[0] in table.column_names]
    options = {"compression": "snappy", "write_statistics": False, "write_page_checksum": True}
    with written_whole(file) as partial:
        pq.write_table(table, partial, use_dictionary=repeated, **options)
    return file


def cut_parts(run: Path, steps: int) -> None:
    """Keep the files of the first `steps` steps, and remove partial files of a killed process."""
    for step in kept_steps(run):
        if step >= steps:
            part_of(run, step).unlink()
    for partial in (run / FOLDER).glob(f"*{SUFFIX}.partial"):
        partial.unlink()


class RolloutWriter:
    """Writes the rollouts of a run; see `Run`. Errors are warned of once and never stop the training."""

    def __init__(self, every: int | None, limit: int) -> None:
        if every is not None and every < 1:
            raise ValueError(f"Run: rollouts_every must be at least 1, or None to keep no rollouts; got {every}.")
        if limit < 0:
            raise ValueError(f"Run: rollouts_limit is in bytes and cannot be negative, got {limit}.")
        self._every, self._limit = every, limit
        self._thinning: Thinning | None = None
        self._warned = False

    def write(self, run: Path, step: int, given: StepRecords) -> "pa.Table | None":
        """Write the rollout of a step, if it is one to keep, and return the table on the main process. Every process
        calls it.
        """
        if given.rollout is None or self._every is None or step % self._every:
            return None
        mine: Rows | bytes | str
        try:
            mine = rows_of(given.rollout, given)
            if collectives.is_many():
                mine = pickle.dumps(mine)  # here, where an error can be sent to the waiting processes
        except Exception as error:
            mine = f"{type(error).__name__}: {error}"
        parts = collectives.to_main(mine)
        if collectives.rank():
            return None
        try:
            rows = [pickle.loads(part) if isinstance(part, bytes) else part for part in parts]
            fault = next((part for part in rows if isinstance(part, str)), None)
            if fault is None:
                table = table_of(step, [part for part in rows if isinstance(part, Rows)])
                write_part(run, step, table)
                self._thinning = self._thinning or Thinning(run, self._limit)
                self._thinning.added(step)
                return table
        except Exception as error:  # a full disk, a column that no table can hold
            fault = f"{type(error).__name__}: {error}"
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"run.log: the rollout of step {step} was not written, the training goes on. {fault}. Later ones are "
                "tried, without a further warning.",
                stacklevel=4,
            )
        return None


class Thinning:
    """Keeps the rollouts of a run within `limit` bytes; the files that are there count."""

    def __init__(self, run: Path, limit: int) -> None:
        self._run, self._limit = run, limit
        self._sizes = {step: part_of(run, step).stat().st_size for step in kept_steps(run)}

    def added(self, step: int) -> None:
        """Count a new file, and remove old ones until the folder is within its limit. Two steps always stay."""
        self._sizes[step] = part_of(self._run, step).stat().st_size
        while (len(self._sizes) > MOST_PARTS or sum(self._sizes.values()) > self._limit) and len(self._sizes) > 2:
            step = spare(sorted(self._sizes))
            part_of(self._run, step).unlink(missing_ok=True)
            del self._sizes[step]


def spare(steps: Sequence[int]) -> int:
    """Return the step whose removal leaves the smallest gap; never the first or last. The earliest of equals.

    Example:
        >>> spare([0, 4, 8, 9, 12])
        9
    """
    gaps = [after - before for before, after in zip(steps, steps[2:], strict=False)]
    return steps[1 + gaps.index(min(gaps))]
