"""Trackers: the numbers of a run, and on request its completions, sent to wandb or trackio.

The main process opens a tracker's run at the first logged step, when the folder and its config.json exist, and closes
it when the loop ends. A run that goes on, in the same process or resumed, continues the same one (`sinks.json` holds
its id). A tracker that fails is warned of once and never stops the training.

Names, settings from the environment (WANDB_MODE, WANDB_DIR, TRACKIO_DIR ...) and the columns of the table of
completions are those of TRL's `report_to` and `log_completions`. Left out: a table of every completion; the first rows
of a step are sent, the run's folder has all of them.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.distributed import collectives
from rlkit.run.folder import write_json
from rlkit.run.line_files import read_json

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TABLE_ROWS = 64
"""Completions of a step that are sent, at most."""
PROJECT = "rlkit"


class Sink:
    """An open run of a tracker; `id` identifies it when the run is resumed. Opened with the folder, the project or None
    for the environment's, the name, the configuration and the id of the run to continue or None.
    """

    id: str
    _module: Any
    _run: Any

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a step. wandb drops a step that is not after its last one."""
        self._run.log(dict(values), step=step)

    def table(self, frame: "pd.DataFrame") -> Any:
        """Return a table in the tracker's form, as one of the values to log."""
        return self._module.Table(dataframe=frame)

    def close(self) -> None:
        """Send what is left and end the tracker's run."""
        self._run.finish()


class _Wandb(Sink):
    """A run of Weights & Biases. One that the user has opened with `wandb.init` is used and stays open."""

    def __init__(self, folder: Path, project: str | None, name: str, config: Mapping[str, Any], known: str | None):
        import wandb

        self._module, self._theirs = wandb, wandb.run is not None
        self._run = wandb.run or wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=name,
            id=known,
            resume="allow" if known else None,
            config=dict(config),
            dir=os.environ.get("WANDB_DIR") or str(folder),
        )
        self.id = self._run.id

    def close(self) -> None:
        if not self._theirs:
            self._run.finish()


class _Trackio(Sink):
    """A run of trackio, in its local folder unless the environment names a space or a server."""

    def __init__(self, folder: Path, project: str | None, name: str, config: Mapping[str, Any], known: str | None):
        import trackio

        self._module = trackio
        self._run = trackio.init(
            project=project or os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=known or name,
            resume="allow" if known else "never",
            config=dict(config),
            embed=False,
        )
        self.id = self._run.name  # trackio finds runs by name

    def close(self) -> None:
        if self._module.context_vars.current_run.get() is self._run:
            self._module.finish()  # forgets the run too, and does not finish it again at exit
        else:
            self._run.finish()


KINDS: dict[str, Callable[..., Sink]] = {"trackio": _Trackio, "wandb": _Wandb}


@dataclass
class Target:
    """A tracker that was asked for; see `Run.report_to`."""

    kind: str
    project: str | None = None
    name: str | None = None
    log_completions: bool = False
    sink: Sink | None = None  # while it is open
    failed: bool = False  # it could not be opened
    warned: bool = False


class Trackers:
    """The trackers of a run."""

    def __init__(self) -> None:
        self._targets: list[Target] = []

    def add(self, target: Target) -> None:
        """Add a tracker; see `Run.report_to`."""
        if target.kind not in KINDS:
            raise ValueError(f"run.report_to: expected one of {sorted(KINDS)}, got {target.kind!r}.")
        if any(other.kind == target.kind for other in self._targets):
            raise ValueError(f"run.report_to: this run reports to {target.kind} already.")
        if importlib.util.find_spec(target.kind) is None:
            raise ImportError(
                f"run.report_to: the package {target.kind!r} is not installed: pip install 'rlkit-llm[track]'."
            )
        self._targets.append(target)

    def log(self, folder: Path, line: Mapping[str, Any], table: "pa.Table | None") -> None:
        """Send a line of metrics.jsonl, and completions of the step's rollout if given. Main process only."""
        if not self._targets or collectives.rank():
            return
        numbers = {name: value for name, value in line.items() if name != "step" and value is not None}
        for target in self._targets:
            try:
                if target.sink is None and not target.failed:
                    target.failed = True  # until it is open
                    target.sink = _open(target, folder)
                    target.failed = False
                if target.sink is not None:
                    own = {}
                    if table is not None and target.log_completions:
                        own["completions"] = target.sink.table(completions_frame(table))
                    target.sink.log(line["step"], numbers | own)
            except Exception as error:  # a tracker must never stop a training
                _warn(target, error)

    def close(self) -> None:
        """Close the trackers' runs; the next logged step continues them."""
        for target in self._targets:
            sink, target.sink = target.sink, None
            try:
                if sink is not None:
                    sink.close()
            except Exception as error:
                _warn(target, error)


def completions_frame(table: "pa.Table") -> "pd.DataFrame":
    """Return TRL's table of completions from a rollout's: step, prompt, completion, a column per reward, advantage."""
    head = table.slice(0, TABLE_ROWS)
    rewards = [name for name in head.column_names if name.startswith("rewards/")]
    frame = head.select(["step", "prompt", "completion", *rewards, "advantage"]).to_pandas()
    return frame.rename(columns={name: name.removeprefix("rewards/") for name in rewards})


def _open(target: Target, folder: Path) -> Sink:
    memory = folder / "sinks.json"
    known = read_json(memory) or {}
    config = read_json(folder / "config.json") or {}
    ours = known.get(target.kind)
    sink = KINDS[target.kind](folder, target.project, target.name or folder.name, config, ours)
    if ours != sink.id:
        write_json(memory, known | {target.kind: sink.id})
    return sink


def _warn(target: Target, error: Exception) -> None:
    if target.warned:
        return
    target.warned = True
    what = "is not used" if target.failed else "missed something; later steps are tried, without a further warning"
    warnings.warn(
        f"run.report_to: {target.kind} failed and {what}; the training goes on. {type(error).__name__}: {error}",
        stacklevel=5,
    )
