"""Dynamic sampling as plain functions between steps: keep the groups that teach something, and draw until there are
enough of them.

A group whose completions all have the same reward has advantage 0 everywhere (with G completions and success rate p
that happens with probability p^G + (1-p)^G; known_faults B44). DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2)
leaves such groups out and samples further prompts. Here the two halves are two functions, and neither ever throws away
what was accepted (B41) or draws without end.

Several processes: each filters its own groups, so their numbers differ, and may be 0. All draw equally often, and
`loss_step` takes shares of any size (B42). Which groups are kept does not depend on the number of processes.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from rlkit.advantages import group_index
from rlkit.distributed import collectives
from rlkit.engines.rollout_assembly import join
from rlkit.types import PromptBatch, Rollout, Scores, check_pairing

Draw = Callable[[PromptBatch], tuple[Rollout, Scores]]


def informative_rows(scores: Scores, *, tolerance: float = 1e-6) -> Bool[Tensor, " B"]:
    """(B,) True for the rows of groups in which two completions have different rewards.

    Rows without a reward are of no account: a group needs two that have one.

    Args:
        scores: of B completions.
        tolerance: rewards that differ by no more count as equal, >= 0.
    """
    if not tolerance >= 0:
        raise ValueError(f"informative_rows: tolerance must be at least 0, got {tolerance}.")
    group = group_index(scores.group_id)
    if not len(group):
        return torch.zeros(0, dtype=torch.bool)
    known = ~scores.reward.isnan()
    reward = scores.reward.double()
    low = reward.new_full((int(group.max()) + 1,), torch.inf)
    high = low.scatter_reduce(0, group[known], reward[known], "amax", include_self=False)
    low = low.scatter_reduce(0, group[known], reward[known], "amin")
    return ((high - low) > tolerance)[group]  # inf - inf, of a group without rewards, is NaN and not greater


def drop_uninformative_groups(rollout: Rollout, scores: Scores, *, tolerance: float = 1e-6) -> tuple[Rollout, Scores]:
    """The groups from which something can be learned, whole, in their order; ids stay. There may be none.

    Args:
        rollout: B completions.
        scores: theirs, from `score`.
        tolerance: rewards that differ by no more count as equal, >= 0.

    Returns:
        Rollout and scores of the groups in which at least two completions have different rewards. With several
        processes these are of this process's groups.

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
    """What `accumulate` found.

    Attributes:
        rollout, scores: of the accepted groups; with several processes those of this process.
        groups: accepted groups, over all processes.
        drawn: batches drawn.
        exhausted: True if there are fewer groups than asked for: the data ran out, or `max_batches` was reached.
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
    """Draw batches until `groups` groups are accepted; hand back what there is when there are no more.

    Args:
        draw: samples, scores and filters a batch: `drop_uninformative_groups(rollout, scores)`, or a filter of yours
            that keeps whole groups.
        batch: the step's own batch, drawn first.
        more: where further batches come from: the `PromptLoader` of the loop (its position moves on, so a checkpoint
            has it), or any other iterable.
        groups: groups wanted, over all processes. Of more than that the first are kept, in the order they were drawn.
        max_batches: most batches to draw, at least 1.

    Returns:
        An `Accumulated`. `exhausted` says that there are fewer groups than wanted; what was accepted is there all the
        same (B41).

    Raises:
        ValueError: groups or max_batches below 1, or `draw` returns the scores of another rollout.

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
    mine = torch.tensor([group in kept for group in whole.group_id.tolist()], dtype=torch.bool)
    return Accumulated(
        rollout=whole.select(mine),
        scores=all_scores.select(mine),
        groups=len(kept),
        drawn=len(rollouts),
        exhausted=len(kept) < groups,
        data_ended=data_ended,
    )
