"""Write and load one checkpoint: all that a run needs to go on as if it had never stopped.

    ckpt/step-000100/   weights, optimizer and scheduler (torch.distributed.checkpoint, for any number of processes),
                        rng-0.pt ... (random states), run.json (counters, position in the data, checksums)
                        under ZeRO-3 zero3/ instead, in DeepSpeed's format, for the same number of processes
    ckpt/latest         name of the newest whole checkpoint
    ckpt/best           name of the best one, if a metric was named

A checkpoint is written under another name and renamed when it is whole, then `latest` is replaced: a process killed in
between leaves the previous checkpoint valid. Every process calls save and load. The other modules: manifest.py (which
checkpoints are whole), storage.py (nothing in a file is executed), checkpointer.py (which one a run goes on from).

Left out: frozen parameters (an adapter's base model is loaded from where it came from).
"""

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

from rlkit.distributed import collectives
from rlkit.run.folder import write_json
from rlkit.run.line_files import read_json
from rlkit.run.manifest import FILE, checksums, damaged, pointed, sealed, together
from rlkit.support.files import regular, written_whole

if TYPE_CHECKING:
    from rlkit.policy import Policy
    from rlkit.step import LRScheduler


@dataclass(frozen=True)
class Tracked:
    """The objects whose state belongs to a run, and which checkpoints stay; see `Run.track`."""

    policy: "Policy"
    optimizer: torch.optim.Optimizer
    scheduler: "LRScheduler | None" = None
    keep: int = 2
    best: str | None = None


def save(folder: Path, tracked: Tracked, counters: Mapping[str, Any], score: float | None) -> Path:
    """Write a checkpoint into the `ckpt` folder and return its own; every process calls it; errors as in `Run.save`.

    `counters` is plain data for run.json, whose `step` names the checkpoint; `score` is the value of `tracked.best`.
    """
    target = folder / f"step-{counters['step']:06d}"
    partial = folder / f"{target.name}.partial"
    main = collectives.rank() == 0

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish(files: Mapping[str, Any]) -> None:
        extra = {
            "version": tracked.policy.version,
            "strategy": tracked.policy.strategy,
            "processes": collectives.size(),
            "score": score,
            "optimizer_has_state": bool(tracked.optimizer.state),
            "files": files,
        }
        write_json(partial / FILE, sealed(dict(counters) | extra))
        if target.exists():  # moved in one operation: a half-deleted one would not be whole
            aside = folder / f"{target.name}.old.partial"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(target, aside)
        os.replace(partial, target)
        _point(folder / "latest", target.name)
        if score is not None and score >= _score_of(folder, "best"):
            _point(folder / "best", target.name)
        _prune(folder, tracked.keep, target.name)

    try:
        together(lambda: begin() if main else None)
        together(lambda: _write(partial, tracked))
        files = checksums(partial)
        together(lambda: finish(files) if main else None)
    except Exception as error:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | RuntimeError):  # torch raises the latter on a full disk
            raise OSError(_unwritten(target, tracked, error)) from None
        raise
    return target


def _write(partial: Path, tracked: Tracked) -> None:
    if zero3 := tracked.policy.local_scorer.zero3:
        zero3.save(partial, _scheduler_state(tracked))
    else:
        state = _state(tracked)
        with _quiet():
            from rlkit.run import storage  # a second of import time, so only here

            storage.save(state, partial, alone=not collectives.is_many())
    torch.save(random_state(), partial / f"rng-{collectives.rank()}.pt")


def _unwritten(target: Path, tracked: Tracked, error: Exception) -> str:
    """Return the error message for a checkpoint that could not be written."""
    parameters = [parameter for parameter in tracked.policy.model.parameters() if parameter.requires_grad]
    states = [value for state in tracked.optimizer.state.values() for value in state.values()]
    tensors = [value for value in (*parameters, *states) if isinstance(value, torch.Tensor)]
    needed = sum(getattr(value, "ds_numel", value.numel()) * value.element_size() for value in tensors)
    place = next((path for path in target.parents if path.exists()), Path("/"))
    said = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return (
        f"run.save: the checkpoint {target} could not be written: {said}. It needs about {needed / 2**20:.1f} MiB, and "
        f"{shutil.disk_usage(place).free / 2**20:.1f} MiB are free on that disk (a quota may allow less). What was "
        "written of it is removed, and earlier checkpoints are untouched. Make room and run the loop again: policy and "
        "optimizer are in memory, and it goes on after the last finished step."
    )


def load(checkpoint: Path, tracked: Tracked, counters: Mapping[str, Any]) -> None:
    """Load a whole checkpoint into the tracked objects; every process calls it. `counters` is its run.json.

    Raises:
        RuntimeError: the checkpoint belongs to another model or optimizer, or a file of it is damaged.
    """
    _check_layout(checkpoint, counters, tracked)
    if zero3 := tracked.policy.local_scorer.zero3:
        try:
            state = zero3.load(checkpoint)
        except Exception as error:
            raise _misfit(checkpoint, "DeepSpeed", error) from error
    else:
        state = _load_state(checkpoint, tracked)
        if not counters["optimizer_has_state"]:
            tracked.optimizer.state.clear()
    if tracked.scheduler is not None:
        if "scheduler" not in state:
            raise damaged(checkpoint, "it holds no state of a scheduler")
        tracked.scheduler.load_state_dict(state["scheduler"])  # type: ignore[attr-defined]
    tracked.policy.version = counters["version"]
    # With another number of processes each takes the state of rank 0: all share a seed (world.setup).
    own = checkpoint / f"rng-{collectives.rank()}.pt"
    together(lambda: _load_random_state(own if own.exists() else checkpoint / "rng-0.pt"))


def _load_random_state(file: Path) -> None:
    try:
        with open(file, "rb", opener=regular) as handle:
            set_random_state(torch.load(handle, weights_only=True))
    except Exception as error:  # a forged file may raise anything
        what = f"{file.name} holds no random states ({type(error).__name__}: {error})"
        raise damaged(file.parent, what[:300]) from None


def random_state() -> dict[str, Any]:
    """Return the random states of this process as plain data: Python's, numpy's, torch's, those of its GPUs."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - the users' own code may use it
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random states; those of GPUs only on the same number of GPUs."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def check_index(checkpoint: Path) -> None:
    """Raise RuntimeError if the index of a checkpoint of torch cannot be read without executing anything."""
    with _quiet():
        from rlkit.run import storage
    try:
        storage.check_index(checkpoint)
    except ValueError as error:
        raise damaged(checkpoint, str(error)[:400]) from None


def _check_layout(checkpoint: Path, counters: Mapping[str, Any], tracked: Tracked) -> None:
    """Check that the checkpoint has the format of this run, and under DeepSpeed its number of processes."""
    saved, now = (strategy == "zero3" for strategy in (counters.get("strategy"), tracked.policy.strategy))
    if saved != now or (now and counters["processes"] != collectives.size()):
        raise RuntimeError(
            f"run.resume: {checkpoint} was saved as {counters.get('strategy')!r} on {counters['processes']} processes, "
            f"this run is {tracked.policy.strategy!r} on {collectives.size()}. A checkpoint of zero3 can only be "
            "loaded as zero3 on as many processes, and no other one as zero3; go on as it was saved. To change over, "
            "save the weights with policy.save_pretrained there and start a new run from them."
        )


def _misfit(checkpoint: Path, who: str, error: Exception) -> RuntimeError:
    said = " ".join(str(error).split())[:500] or type(error).__name__
    return RuntimeError(
        f"run.resume: {checkpoint} does not fit the tracked policy and optimizer: were they made with other settings "
        f"(another model, adapter, optimizer or scheduler)? {who} says: {said}"
    )


def _load_state(checkpoint: Path, tracked: Tracked) -> dict[str, Any]:
    state = _state(tracked)
    with _quiet():
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        from rlkit.run import storage

        try:
            storage.load(state, checkpoint, alone=not collectives.is_many())
        except Exception as error:
            raise _misfit(checkpoint, "torch", error) from None
        set_state_dict(
            tracked.policy.model,
            tracked.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
    return state


def check_vstar(checkpoint: Path, counters: Mapping[str, Any], table: Any) -> None:
    """Raise RuntimeError if the tracked table of V* is not the run's, which would change the advantages."""
    saved = counters.get("vstar")
    if saved is not None and table is not None and table.digest != saved:
        raise RuntimeError(
            f"run.resume: the tracked V* differs from the one of {checkpoint}. Load the run's own: "
            f"rl.ValueTable.load({str(checkpoint.parent.parent / 'vstar.pt')!r})."
        )


def _state(tracked: Tracked) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    untouched = not tracked.optimizer.state
    # torch makes up a state for a fresh optimizer, to load into, only if no parameter has a gradient.
    gradients = [(parameter, parameter.grad) for parameter in tracked.policy.model.parameters()] if untouched else []
    for parameter, _ in gradients:
        parameter.grad = None
    with _quiet():
        model, optimizer = get_state_dict(
            tracked.policy.model, tracked.optimizer, options=StateDictOptions(ignore_frozen_params=True)
        )
    if untouched:  # torch has stepped it to make up the state, and Adam's bias correction would count that step
        tracked.optimizer.state.clear()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return {"model": model, "optimizer": optimizer} | _scheduler_state(tracked)


def _scheduler_state(tracked: Tracked) -> dict[str, Any]:
    return {} if tracked.scheduler is None else {"scheduler": tracked.scheduler.state_dict()}  # type: ignore[attr-defined]


def _point(pointer: Path, name: str) -> None:
    with written_whole(pointer) as partial:
        partial.write_text(name + "\n", encoding="utf-8")


def _score_of(folder: Path, pointer: str) -> float:
    name = pointed(folder, pointer)
    score = (read_json(folder / name / FILE) or {}).get("score") if name else None
    return float(score) if isinstance(score, (int, float)) else float("-inf")


def _prune(folder: Path, keep: int, last: str) -> None:
    """Delete old checkpoints. Those after `last` are left from before a resume: not counted, written again later."""
    whole = sorted(path for path in folder.glob("step-*") if path.suffix != ".partial" and path.name <= last)
    pointers = {pointed(folder, name) for name in ("latest", "best")}
    for path in whole[: max(0, len(whole) - keep)]:
        if path.name not in pointers:
            shutil.rmtree(path)
    for path in folder.glob("step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        yield
