"""Checkpointer: what a run saves, and which checkpoint it goes on from. One checkpoint's files: checkpoint.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.distributed import collectives
from rlkit.run import checkpoint, evaluations
from rlkit.run.folder import cut_lines, gone
from rlkit.run.manifest import candidates, mend, read_counters, together, verify
from rlkit.run.rollouts import cut_parts
from rlkit.support.text import say


class Checkpointer:
    """Saves and restores what `Run.track` was given."""

    def __init__(self) -> None:
        self.tracked: checkpoint.Tracked | None = None
        self.prompts: Any = None  # the loader whose position is saved
        self.position: Any = None  # where the checkpoint left it
        self.vstar: Any = None  # the table of V* that belongs to the run

    def require(self, where: str) -> checkpoint.Tracked:
        """Return what is tracked; RuntimeError if nothing is."""
        if self.tracked is None:
            raise RuntimeError(f"{where}: nothing is tracked; call run.track(policy, optimizer) first.")
        return self.tracked

    def save(self, folder: Path, counters: Mapping[str, Any], last: Mapping[str, Any]) -> Path:
        """Write a checkpoint into a run's folder; every process calls it.

        `counters` is plain data, whose `step` names the checkpoint; `last` are the metrics that were logged last.
        """
        tracked = self.require("run.save")
        if collectives.from_main(collectives.rank() == 0 and not folder.is_dir()):  # raised on every process
            raise gone(folder)
        table, fresh = folder / "vstar.pt", self.vstar is not None and collectives.rank() == 0
        together(lambda: self.vstar.save(table) if fresh and not table.exists() else None)
        own = {
            "prompts": self.prompts.state_dict() if self.prompts is not None else None,
            "vstar": self.vstar.digest if self.vstar is not None else None,
        }
        score = last.get(tracked.best) if tracked.best else None
        return checkpoint.save(folder / "ckpt", tracked, dict(counters) | own, score)

    def load(self, found: Path, *, named: bool, mine: bool) -> dict[str, Any]:
        """Restore a checkpoint and return the counters that were saved with it; arguments as in `choose`."""
        tracked = self.require("run.resume")
        found, counters = choose(found, named=named, mine=mine)
        checkpoint.check_vstar(found, counters, self.vstar)
        checkpoint.load(found, tracked, counters)
        self.position = counters.get("prompts")
        self._put_back()
        return counters

    def follow(self, prompts: Any) -> None:
        """Save and restore the position of the loop's loader, unless another one is tracked."""
        if self.tracked is not None and self.prompts is None and hasattr(prompts, "state_dict"):
            self.prompts = prompts
            self._put_back()

    def _put_back(self) -> None:
        if self.prompts is not None and self.position is not None:
            self.prompts.load_state_dict(self.position)


def choose(found: Path, *, named: bool, mine: bool) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint to go on from, and its run.json; every process calls it.

    Args:
        found: the one that the user named, or any in the `ckpt` folder of which the newest whole one is wanted.
        named: the user named it, so no other one will do.
        mine: it lies in the run's own folder, which is locked by now.

    Raises:
        FileNotFoundError, RuntimeError: it is not whole, or none is; the error names the file.
    """
    fault: Exception | None = None
    places = (found.parent, found, found / "ckpt") if named else (found.parent,)  # users name the run's folder too
    known = collectives.from_main([path for place in places for path in candidates(place)])
    for candidate in (found, *(path for path in known if path != found)) if named else known:
        try:
            counters = _verified(candidate, mine)
        except (FileNotFoundError, RuntimeError) as error:
            fault = fault or error
            continue
        if fault is None:
            return candidate, counters
        if named:
            hint = f"The newest whole checkpoint there: run.resume({str(candidate)!r})."
            raise type(fault)(f"{fault} {hint}") from None
        if collectives.rank() == 0:
            say(f"rlkit: {str(fault).removeprefix('run.resume: ')} Going on from {candidate.name} instead.")
        return candidate, counters
    assert fault is not None  # at least `found` was tried
    raise type(fault)(
        f"{fault} No other checkpoint beside it is whole. Restore the file from a copy, or start over: in another "
        'folder, or with run.resume("none").'
    ) from None


def _verified(candidate: Path, mine: bool) -> dict[str, Any]:
    if mine:
        together(lambda: mend(candidate) if collectives.rank() == 0 else None)
    counters = together(lambda: read_counters(candidate))[collectives.rank()]
    verify(candidate, counters)
    if counters.get("strategy") != "zero3":
        together(lambda: checkpoint.check_index(candidate))
    return counters


def cut_back(folder: Path, steps: int) -> None:
    """Cut the log of a run back to its first `steps` steps: those after a checkpoint are done again."""
    if collectives.rank() == 0:
        for name in ("metrics.jsonl", "timings.jsonl"):
            cut_lines(folder / name, steps)
        evaluations.cut(folder, steps)
        cut_parts(folder, steps)
        (folder / "STOPPED").unlink(missing_ok=True)
    collectives.barrier()
