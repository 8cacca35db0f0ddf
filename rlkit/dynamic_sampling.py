"""Dynamic sampling as plain functions between steps: drop groups without a signal, and draw until enough are left.

A group whose completions all have the same reward has advantage 0 everywhere; with G completions and success rate p
that happens with probability p^G + (1-p)^G. DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2) leaves such groups out
and samples further prompts. Here these are two functions, and neither discards accepted groups or draws without end.

Several processes: each filters its own groups, so their numbers differ, and may be 0. All draw equally often. Which
groups are kept does not depend on the number of processes.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from rlkit.distributed import collectives
from rlkit.engines.rollout_assembly import join
from rlkit.metrics import reward_spread
from rlkit.step_checks import check_pairing
from rlkit.types import PromptBatch, Rollout, Scores

Draw = Callable[[PromptBatch], tuple[Rollout, Scores]]


def informative_rows(scores: Scores, *, tolerance: float = 1e-6) -> Bool[Tensor, " B"]:
    """(B,) True for the rows of groups in which two completions have different rewards."""
    if not tolerance >= 0:
        raise ValueError(f"informative_rows: tolerance must be at least 0, got {tolerance}.")
    spread, group = reward_spread(scores.reward, scores.group_id)
    return (spread > tolerance)[group]


def drop_uninformative_groups(rollout: Rollout, scores: Scores, *, tolerance: float = 1e-6) -> tuple[Rollout, Scores]:
    """Keep the groups in which at least two completions have different rewards, in their order; there may be none.

    Args:
        rollout: B completions.
        scores: theirs, from `score`.
        tolerance: rewards that differ by no more count as equal, >= 0.

    Returns:
        Rollout and scores of those groups; with several processes of this process's groups. Group ids stay.

    Raises:
        ValueError: rollout and scores do not belong together.

    Source: DAPO (arXiv 2503.14476), eq. 11, for rewards of any kind.

    Example:
        rollout, scores = rl.drop_uninformative_groups(rollout, scores)
        advantages = rl.compute_loo_advantage(scores)
    """
    check_pairing("drop_uninformative_groups", rollout, scores)
    rows = informative_rows(scores, tolerance=tolerance)
    return rollout.select(rows), scores.select(rows)


@dataclass(frozen=True)
class Accumulated:
    """Result of `accumulate`.

    Attributes:
        rollout, scores: of the accepted groups; with several processes those of this process.
        groups: accepted groups, over all processes.
        drawn: batches drawn.
        exhausted: True if there are fewer groups than wanted: the data ran out, or `max_batches` was reached.
        data_ended: True if the data ran out.
    """

    rollout: Rollout
    scores: Scores
    groups: int
    drawn: int
    exhausted: bool
    data_ended: bool

    def __repr__(self) -> str:
        end = ", the data ended" if self.data_ended else ", not enough" if self.exhausted else ""
        return f"<Accumulated: {self.groups} groups from {self.drawn} batches{end}>"


def accumulate(
    draw: Draw, batch: PromptBatch, more: Iterable[Any] = (), *, groups: int, max_batches: int = 8
) -> Accumulated:
    """Draw batches until `groups` groups are accepted, the data ends, or `max_batches` were drawn.

    Args:
        draw: samples, scores and filters a batch: `drop_uninformative_groups(rollout, scores)`, or a filter of yours
            that keeps whole groups.
        batch: the step's own batch, drawn first.
        more: where further batches come from: the `PromptLoader` of the loop (its position moves on, so a checkpoint
            has it), or any other iterable.
        groups: groups wanted, over all processes. Of more than that the first are kept, in the order they were drawn.
        max_batches: most batches to draw, at least 1.

    Returns:
        An `Accumulated`; it holds the accepted groups also if there are fewer than wanted.

    Raises:
        ValueError: groups or max_batches below 1, `draw` returns the scores of another rollout, or two batches share a
            group id.

    Example:
        def draw(batch):
            rollout = rl.sample(policy, batch, num_generations=8)
            return rl.drop_uninformative_groups(rollout, rl.score(rollout, task.rewards))

        found = rl.accumulate(draw, batch, prompts, groups=len(batch))
    """
    if groups < 1 or max_batches < 1:
        raise ValueError(f"accumulate: groups and max_batches must be at least 1, got {groups} and {max_batches}.")
    rollouts: list[Rollout] = []
    scores: list[Scores] = []
    accepted: list[int] = []  # group ids of all processes, in the order that they were drawn
    data_ended = False
    stream = itertools.chain([batch], more)
    for _ in range(max_batches):
        following = next(stream, None)
        ended = collectives.sums({"ended": float(following is None)})["ended"]  # on any process: all stop together
        if ended or following is None:
            data_ended = True
            break
        drawn = draw(following)
        if not isinstance(drawn, tuple) or len(drawn) != 2:
            raise TypeError(
                "accumulate: draw must return the pair (rollout, scores), as drop_uninformative_groups does, got "
                f"{type(drawn).__name__}. Does it end in `return`?"
            )
        rollout, score = drawn
        check_pairing("accumulate", rollout, score)
        rollouts.append(rollout)
        scores.append(score)
        for ids in collectives.gather(list(dict.fromkeys(rollout.group_id.tolist()))):
            accepted += ids
        if len(accepted) >= groups:
            break
    kept = set(accepted[:groups])
    whole, all_scores = join(rollouts, pad_id=0), Scores.join([score.cpu() for score in scores])
    prompts_of_groups = set(zip(whole.group_id.tolist(), whole.row_id.tolist(), strict=True))
    if len(prompts_of_groups) > len(whole.group_id.unique()):
        raise ValueError(
            "accumulate: two batches give one group id to different prompts, whose completions would be one group. "
            "Take batches from a PromptLoader, or number them: rl.make_batch(..., first_group_id=...)."
        )
    mine = torch.tensor([group in kept for group in whole.group_id.tolist()], dtype=torch.bool)
    return Accumulated(
        rollout=whole.select(mine),
        scores=all_scores.select(mine),
        groups=len(kept),
        drawn=len(rollouts),
        exhausted=len(kept) < groups,
        data_ended=data_ended,
    )
