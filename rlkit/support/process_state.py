"""State that any part of rlkit may read, of the process or of one of its threads.

- `current`: the flags of an exported script, so that its cells need not pass them. `rlkit.script` fills it; `Run`,
  `setup` and `PromptLoader` read it. In a notebook nothing is set.
- `loop`: per thread, the length of the loop that runs in it, for rewards with a schedule (`trainer_state.max_steps`).
- `clock`: per thread, the seconds of each phase of a step (timing.py).

Resources (child processes, event loops, open dashboards) are private to the module that makes them.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Settings:
    """Run flags of a script.

    Attributes:
        out: folder of the run, instead of the notebook's.
        resume: "auto", a checkpoint, or None: start from step 0.
        seed: of `rl.setup` and `PromptLoader`, instead of the notebook's.
        max_steps: instead of the loop's.
        save_every: instead of the loop's.
        keep: checkpoints that stay.
        vllm_url: servers that the trained policy samples from (`world.prepare`).
        vllm_folder: shared folder for the weights that go to them.
        vllm_group_port: port for weights by NCCL.
        vllm_deadline: seconds in which the servers must answer.
        dist_timeout: minutes that a process waits for the others, instead of `setup`'s.
        backend: of torch.distributed, instead of the device's.
        deterministic: only deterministic algorithms of torch.
        parameters: resolved values of the notebook's parameters, for config.json.
        script: where the script comes from and how it was started, for config.json.
        folder: of the run that was opened last; error files go there.
        runs: folders asked for so far.
    """

    out: Path | None = None
    resume: str | None = None
    seed: int | None = None
    max_steps: int | None = None
    save_every: int | None = None
    keep: int | None = None
    vllm_url: str | None = None
    vllm_folder: str | None = None
    vllm_group_port: int = 51216
    vllm_deadline: float = 60.0
    dist_timeout: float | None = None
    backend: str | None = None
    deterministic: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    script: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    runs: int = 0

    def folder_for(self, wanted: Path) -> Path:
        """The folder of a new run: `--out` for the first, and beside it for others."""
        if self.out is None:
            return wanted
        self.runs += 1
        return self.out if self.runs == 1 else self.out.with_name(f"{self.out.name}-{wanted.name}")


current = Settings()


class _Loop(threading.local):
    max_steps: int | None = None


class _Clock(threading.local):
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.busy = False


loop = _Loop()
clock = _Clock()
