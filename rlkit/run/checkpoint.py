"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    ckpt/step-000100/   weights, optimizer and scheduler (torch.distributed.checkpoint: any number of processes can load
                        what any other number saved), rng-0.pt ... (random states), run.json (counters, data position)
                        under ZeRO-3 zero3/ instead, in DeepSpeed's format: only for the same number of processes
    ckpt/latest         name of the newest whole checkpoint
    ckpt/best           name of the best one, if a metric was named

A checkpoint is written under another name and renamed when it is whole, then `latest` is replaced: a process killed in
the middle leaves the previous checkpoint in force. Saving and loading are collective: every process calls them.

Left out: frozen parameters (an adapter's base model comes from where it was loaded the first time).
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlkit import collectives
from rlkit.run.folder import write_json

if TYPE_CHECKING:
    from rlkit.policy import Policy
    from rlkit.step import LRScheduler


@dataclass(frozen=True)
class Tracked:
    """The objects whose state belongs to a run, and how many checkpoints to keep.

    Attributes:
        policy: the policy that is trained, prepared.
        optimizer: its optimizer.
        scheduler: its learning-rate scheduler, or None.
        keep: newest checkpoints that stay.
        best: metric by which the best checkpoint stays as well, or None; larger is better.
    """

    policy: "Policy"
    optimizer: torch.optim.Optimizer
    scheduler: "LRScheduler | None" = None
    keep: int = 2
    best: str | None = None


def save(folder: Path, tracked: Tracked, counters: Mapping[str, Any], score: float | None) -> Path:
    """Write a checkpoint; every process calls it.

    Args:
        folder: the `ckpt` folder.
        tracked: what to save.
        counters: plain data for run.json; `step` names the checkpoint.
        score: value of the metric `tracked.best` now, or None if it was not measured.

    Returns:
        The folder of the checkpoint.
    """
    target = folder / f"step-{counters['step']:06d}"
    partial = folder / f"{target.name}.partial"
    if collectives.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    collectives.barrier()
    if zero3 := tracked.policy.local_scorer.zero3:
        zero3.save(partial, _scheduler_state(tracked))
    else:
        with _quiet():
            import torch.distributed.checkpoint as dcp  # a second of import time, so only here

            dcp.save(_state(tracked), checkpoint_id=str(partial), no_dist=not collectives.is_many())
    torch.save(_random_state(), partial / f"rng-{collectives.rank()}.pt")
    collectives.barrier()
    if collectives.rank() == 0:
        extra = {
            "version": tracked.policy.version,
            "strategy": tracked.policy.strategy,
            "processes": collectives.size(),
            "score": score,
            "optimizer_has_state": bool(tracked.optimizer.state),
        }
        write_json(partial / "run.json", dict(counters) | extra)
        if target.exists():  # aside in one go: deleted bit by bit it would be no whole checkpoint, nor the new one yet
            aside = folder / f"{target.name}.old.partial"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(target, aside)
        os.replace(partial, target)
        _point(folder / "latest", target.name)
        if score is not None and score >= _score_of(folder, "best"):
            _point(folder / "best", target.name)
        _prune(folder, tracked.keep)
    collectives.barrier()
    return target


def load(checkpoint: Path, tracked: Tracked) -> dict[str, Any]:
    """Put a checkpoint's state into the tracked objects; every process calls it. Returns the counters.

    Raises:
        FileNotFoundError: there is no whole checkpoint at that path.
        RuntimeError: the checkpoint belongs to another model or optimizer, or is one of ZeRO-3 and the processes are
            others than those that saved it.
    """
    if not (checkpoint / "run.json").exists():
        raise FileNotFoundError(f"run.resume: {checkpoint} is no whole checkpoint (run.json is missing).")
    counters = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    _check_layout(checkpoint, counters, tracked)
    if zero3 := tracked.policy.local_scorer.zero3:
        try:
            state = zero3.load(checkpoint)
        except Exception as error:
            raise RuntimeError(_misfit(checkpoint, "DeepSpeed", error)) from error
    else:
        state = _load_state(checkpoint, tracked)
        if not counters.get("optimizer_has_state", True):
            tracked.optimizer.state.clear()
    if tracked.scheduler is not None:
        tracked.scheduler.load_state_dict(state["scheduler"])  # type: ignore[attr-defined]
    tracked.policy.version = counters["version"]
    own = checkpoint / f"rng-{collectives.rank()}.pt"
    # On another number of processes each takes the state of rank 0: what matters is common to all (world.setup).
    _set_random_state(torch.load(own if own.exists() else checkpoint / "rng-0.pt", weights_only=True))
    collectives.barrier()
    return counters


def _check_layout(checkpoint: Path, counters: Mapping[str, Any], tracked: Tracked) -> None:
    """The formats of torch and DeepSpeed do not mix, and DeepSpeed's is for one number of processes."""
    saved, now = (strategy == "zero3" for strategy in (counters.get("strategy"), tracked.policy.strategy))
    if saved != now or (now and counters["processes"] != collectives.size()):
        raise RuntimeError(
            f"run.resume: {checkpoint} was saved as {counters.get('strategy')!r} on {counters['processes']} processes, "
            f"this run is {tracked.policy.strategy!r} on {collectives.size()}. A checkpoint of zero3 can only be "
            "loaded as zero3 on as many processes, and no other one as zero3; go on as it was saved. To change over, "
            "save the weights with policy.save_pretrained there and start a new run from them."
        )


def _misfit(checkpoint: Path, who: str, error: Exception) -> str:
    return (
        f"run.resume: {checkpoint} does not fit the tracked policy and optimizer: were they made with other settings? "
        f"{who} says: {str(error)[:500]}"
    )


def _load_state(checkpoint: Path, tracked: Tracked) -> dict[str, Any]:
    state = _state(tracked)
    with _quiet():
        try:
            import torch.distributed.checkpoint as dcp

            dcp.load(state, checkpoint_id=str(checkpoint), no_dist=not collectives.is_many())
        except Exception as error:
            raise RuntimeError(_misfit(checkpoint, "torch", error)) from error
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            tracked.policy.model,
            tracked.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
    return state


def check_vstar(checkpoint: Path, table: Any) -> None:
    """Refuse to go on with another table of V* than the run had: its advantages would mean something else.

    Raises:
        RuntimeError: says where the run's own table is.
    """
    file = checkpoint / "run.json"
    saved = json.loads(file.read_text(encoding="utf-8")).get("vstar") if file.exists() else None
    if saved is not None and table is not None and table.digest != saved:
        raise RuntimeError(
            f"run.resume: the tracked V* differs from the one of {checkpoint}. Load the run's own: "
            f"rl.ValueTable.load({str(checkpoint.parent.parent / 'vstar.pt')!r})."
        )


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a `ckpt` folder, or None. Only looks; `mend` it before it is loaded."""
    pointer = folder / "latest"
    return folder / pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None


def mend(found: Path) -> None:
    """Give a checkpoint its name back, by the main process of the run that holds the folder's lock.

    A process that was killed while it wrote a checkpoint of that name again left the new one, the old one, or both.
    """
    for other in (found.with_name(f"{found.name}.partial"), found.with_name(f"{found.name}.old.partial")):
        if not found.exists() and (other / "run.json").exists():
            os.replace(other, found)


def _state(tracked: Tracked) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    untouched = not tracked.optimizer.state
    with _quiet():
        model, optimizer = get_state_dict(
            tracked.policy.model, tracked.optimizer, options=StateDictOptions(ignore_frozen_params=True)
        )
    if untouched:  # torch has stepped it once to give it a state, and Adam's bias correction would count that
        tracked.optimizer.state.clear()
    return {"model": model, "optimizer": optimizer} | _scheduler_state(tracked)


def _scheduler_state(tracked: Tracked) -> dict[str, Any]:
    return {} if tracked.scheduler is None else {"scheduler": tracked.scheduler.state_dict()}  # type: ignore[attr-defined]


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - the users' own code may use it
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _point(pointer: Path, name: str) -> None:
    partial = pointer.with_name(pointer.name + ".partial")
    partial.write_text(name + "\n", encoding="utf-8")
    os.replace(partial, pointer)


def _score_of(folder: Path, pointer: str) -> float:
    file = folder / pointer
    if not file.exists():
        return float("-inf")
    score = json.loads((folder / file.read_text(encoding="utf-8").strip() / "run.json").read_text())["score"]
    return float("-inf") if score is None else float(score)


def _prune(folder: Path, keep: int) -> None:
    whole = sorted(path for path in folder.glob("step-*") if not path.name.endswith(".partial"))
    pointers = {(folder / name).read_text().strip() for name in ("latest", "best") if (folder / name).exists()}
    for path in whole[: max(0, len(whole) - keep)]:
        if path.name not in pointers:
            shutil.rmtree(path)
    for path in folder.glob("step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice that there is no process group: in a notebook that is as it should be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield
