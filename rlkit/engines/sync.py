"""Give an engine the policy's weights before it samples."""

import contextlib
from typing import TYPE_CHECKING

from rlkit.distributed import collectives
from rlkit.distributed.sharding import gathered
from rlkit.engine import Engine, EngineError, PolicyModelEngine
from rlkit.engines.weights import named_weights, weights_mark

if TYPE_CHECKING:
    from rlkit.policy import Policy


def sync(engine: Engine) -> None:
    """Give an engine the policy's weights if its own are older. Every process calls it; all fail together.

    Weights are older if `loss_step` has changed the policy since, or something else has (`weights_mark`).

    Raises:
        EngineError: some process's engine could not take them.
    """
    policy = engine.policy
    mark = None if isinstance(engine, PolicyModelEngine) else weights_mark(policy)
    # A missing mark means that the last transfer failed: the engine refused it and still has older weights.
    changed = mark is not None and mark != policy.marks.get(engine)
    if collectives.maxima({"stale": float(engine.version != policy.version or changed)})["stale"]:
        _transfer(engine, policy, mark)


def _transfer(engine: Engine, policy: "Policy", mark: int | None) -> None:
    policy.marks.pop(engine, None)
    problem: Exception | None = None
    # Gathered around the whole transfer: an engine may keep a tensor of the stream until it has read all of them.
    with gathered(policy.local_scorer), contextlib.closing(named_weights(policy)) as weights:
        try:
            engine.sync(weights, policy.version)
        except (EngineError, ValueError, OSError) as error:
            problem = error
    if problem is None and engine.version != policy.version:
        problem = EngineError(
            f"sample: engine {engine.name!r} has weights of version {engine.version} after it was given version "
            f"{policy.version}; its completions would not be the policy's."
        )
    said = collectives.gather(None if problem is None else str(problem))
    probe = getattr(engine, "probe", None)
    if probe is not None and not any(said):  # on every process or on none: gathering sharded weights is an exchange
        try:
            probe.after_sync()
        except EngineError as error:
            problem = error
        said = collectives.gather(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    if mark is not None:
        policy.marks[engine] = mark
    others = [f"rank {place}: {text}" for place, text in enumerate(said) if text is not None]
    if others:
        raise EngineError(f"sample: the weights did not reach the engine of {'; '.join(others)}")
