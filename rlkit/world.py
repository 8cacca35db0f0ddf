"""World: the processes that run the loop. For now there is one; the notebook's calls are those that many will use.

`rl.setup` seeds everything once. Sampling noise does not come from the global random state, see `sampling.draw`.
"""

import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from rlkit.policy import Policy, default_device

if TYPE_CHECKING:
    from torch.nn import Parameter

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class World:
    """One process.

    Attributes:
        rank: 0.
        size: 1.
        device: where this process computes.
        seed: as given to `setup`.
    """

    def __init__(self, seed: int) -> None:
        self.rank, self.size, self.seed = 0, 1, seed
        self.device = default_device()

    @property
    def main(self) -> bool:
        """True on the process that writes files and prints."""
        return self.rank == 0

    def prepare(
        self, policy: Policy, optimizer: "Callable[[list[Parameter]], OptimizerT]"
    ) -> tuple[Policy, OptimizerT]:
        """Make a policy ready for training and build its optimizer.

        Args:
            policy: the policy to train.
            optimizer: a function from the trainable parameters to a torch optimizer, so that it is built after the
                parameters have their final place: `lambda params: torch.optim.AdamW(params, lr=1e-5)`.

        Raises:
            ValueError: the policy has no trainable parameter.
            TypeError: an optimizer instead of a function that makes one.
        """
        if isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "world.prepare: expected a function that makes the optimizer, got an optimizer. "
                "Write: world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=...))."
            )
        parameters = policy.trainable_parameters()
        if not parameters:
            raise ValueError(
                f"world.prepare: {policy.name!r} has no trainable parameter; a reference is frozen. "
                "Pass the policy of rl.load_policy."
            )
        return policy, optimizer(parameters)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.device}, seed {self.seed})"


def setup(*, seed: int = 0) -> World:
    """Start the run: seed Python, numpy and torch, and say which processes take part.

    Args:
        seed: of data order, sampling and initialisation.

    Raises:
        RuntimeError: started under torchrun with several processes.
        ValueError: a negative seed.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise RuntimeError(
            f"rl.setup: WORLD_SIZE={size}, but this version of rlkit runs in one process. Start it with plain python, "
            "or with torchrun --nproc_per_node 1."
        )
    if seed < 0:
        raise ValueError(f"rl.setup: seed must be at least 0, got {seed}.")
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - for the users' own code
    torch.manual_seed(seed)
    return World(seed)
