"""Keeper: whose state belongs to a run, and how it is saved and taken up again. The files: checkpoint.py."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlkit.distributed import collectives
from rlkit.run import checkpoint, evaluations
from rlkit.run.folder import cut_lines, gone, numbered_folders
from rlkit.run.manifest import newest, together
from rlkit.run.rollouts import cut_parts
from rlkit.support.process_state import current

if TYPE_CHECKING:
    from rlkit.policy import Policy
    from rlkit.step import LRScheduler


class Keeper:
    """What `Run.track` was given.

    Attributes:
        tracked: policy, optimizer and scheduler; None before `track`.
        prompts: the loader whose position is saved, or None.
        vstar: the table of V* that belongs to the run, or None.
    """

    def __init__(self) -> None:
        self.tracked: checkpoint.Tracked | None = None
        self.prompts: Any = None
        self.vstar: Any = None

    def track(
        self,
        policy: "Policy",
        optimizer: torch.optim.Optimizer,
        scheduler: "LRScheduler | None",
        prompts: Any,
        vstar: Any,
        keep: int,
        best: str | None,
    ) -> None:
        """See `Run.track`."""
        if keep < 1:
            raise ValueError(f"run.track: keep must be at least 1, got {keep}.")
        self.tracked = checkpoint.Tracked(policy, optimizer, scheduler, current.keep or keep, best)
        self.prompts, self.vstar = prompts, vstar

    def need(self, where: str) -> checkpoint.Tracked:
        """What is tracked.

        Raises:
            RuntimeError: nothing is.
        """
        if self.tracked is None:
            raise RuntimeError(f"{where}: nothing is tracked; call run.track(policy, optimizer) first.")
        return self.tracked

    def save(self, folder: Path, counters: Mapping[str, Any], last: Mapping[str, Any]) -> Path:
        """Write a checkpoint into a run's folder; every process calls it.

        Args:
            folder: of the run.
            counters: plain data of the run; `step` names the checkpoint.
            last: the metrics logged last; the best checkpoint is chosen by one of them.
        """
        tracked = self.need("run.save")
        if collectives.from_main(collectives.rank() == 0 and not folder.is_dir()):  # every process says so, none waits
            raise gone(folder)
        table, fresh = folder / "vstar.pt", self.vstar is not None and collectives.rank() == 0
        together(lambda: self.vstar.save(table) if fresh and not table.exists() else None)
        own = {
            "prompts": self.prompts.state_dict() if self.prompts is not None else None,
            "vstar": self.vstar.digest if self.vstar is not None else None,
        }
        score = last.get(tracked.best) if tracked.best else None
        return checkpoint.save(folder / "ckpt", tracked, dict(counters) | own, score)

    def find(self, wanted: Path, source: str | os.PathLike[str]) -> Path | None:
        """The checkpoint that `Run.resume` means, whole or not, the same on every process; None to start a new run."""
        if source == "none":
            return None
        return collectives.from_main(newest_of(wanted) if source == "auto" else Path(source))

    def load(self, found: Path, *, named: bool, mine: bool) -> dict[str, Any]:
        """Put a checkpoint into what is tracked; every process calls it.

        Args:
            found: the checkpoint.
            named: it is the one to load; else the newest whole one beside it.
            mine: it lies in the run's own folder, which is locked by now.

        Returns:
            The counters that were saved with it.
        """
        tracked = self.need("run.resume")
        found, counters = checkpoint.choose(found, named=named, mine=mine)
        checkpoint.check_vstar(found, counters, self.vstar)
        checkpoint.load(found, tracked, counters)
        if self.prompts is not None and counters.get("prompts") is not None:
            self.prompts.load_state_dict(counters["prompts"])
        return counters


def newest_of(wanted: Path) -> Path | None:
    """The newest checkpoint of a run's folder, or of the last of those with a number that has one; whole or not.

    A run that died before its first checkpoint left a folder in which there is none.
    """
    known = (newest(folder / "ckpt") for folder in numbered_folders(wanted))
    return next((path for path in known if path is not None), None)


def cut_back(folder: Path, steps: int) -> None:
    """Cut the log of a run back to its first `steps` steps: those after a checkpoint are done again."""
    if collectives.rank() == 0:
        for name in ("metrics.jsonl", "timings.jsonl"):
            cut_lines(folder / name, steps)
        evaluations.cut(folder, steps)
        cut_parts(folder, steps)
        (folder / "STOPPED").unlink(missing_ok=True)
    collectives.barrier()
