"""Launching a worker: as plain `python`, or as two processes under torchrun. Never two launches at a time.

A launch costs some ten seconds of imports, so a worker packs many checks and writes one file per check and rank.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = 2
# Far above any launch here, and far below the half hour of a collective's timeout.
HANG_SECONDS = int(os.environ.get("RLKIT_HANG_SECONDS", "1200"))


@dataclass(frozen=True)
class Launch:
    """What a launch left: exit code, streams, seconds, and the files of its checks."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    folder: Path

    def check(self, name: str) -> list[dict]:
        """What each rank wrote for a check."""
        found = sorted(self.folder.glob(f"{name}-rank*.pt"))
        assert found, f"the worker wrote nothing for {name!r} (exit code {self.code}):\n{self.stderr[-3000:]}"
        return [torch.load(file, weights_only=False) for file in found]

    def json(self, name: str) -> list[dict]:
        """What each rank wrote for a check that is plain data."""
        found = sorted(self.folder.glob(f"{name}-rank*.json"))
        assert found, f"the worker wrote nothing for {name!r} (exit code {self.code}):\n{self.stderr[-3000:]}"
        return [json.loads(file.read_text(encoding="utf-8")) for file in found]


class Launcher:
    """Launches workers; the same launch twice is done once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[tuple, Launch] = {}

    def __call__(
        self,
        worker: str,
        *arguments: str,
        ranks: int,
        strategy: str = "auto",
        package: Path = ROOT,
        folder: Path | None = None,
        **variables: str,
    ) -> Launch:
        """Run a worker script of this folder. Its first argument is the folder to write to.

        Args:
            worker: file name.
            arguments: further arguments.
            ranks: 1 is plain `python`, more is torchrun.
            strategy: RLKIT_STRATEGY.
            package: folder that holds the rlkit to test.
            folder: where the worker writes; a fresh one by default.
            variables: further environment variables.
        """
        key = (worker, arguments, ranks, strategy, package, folder, tuple(sorted(variables.items())))
        if key not in self._done:
            self._done[key] = self._launch(worker, arguments, ranks, strategy, package, folder, variables)
        return self._done[key]

    def _launch(self, worker, arguments, ranks, strategy, package, folder, variables) -> Launch:
        folder = folder or Path(tempfile.mkdtemp(prefix=f"{strategy}-{ranks}-", dir=self.folder))
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [str(HERE / worker), str(folder), *arguments]
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(package) | {"RLKIT_STRATEGY": strategy} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=HANG_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # the workers have sessions of their own: torchrun ends them, the stubborn after 30 s
            try:
                stdout, stderr = process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                stdout, stderr = "", ""
            stderr += f"\n{worker} was ended after {HANG_SECONDS} s: it hangs"
        return Launch(process.returncode, stdout, stderr, time.perf_counter() - started, folder)


def environment(package: Path = ROOT) -> dict[str, str]:
    """This process's environment without what another launcher, or a notebook's kernel, may have left in it."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ours and "ACCELERATE" not in name}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(package), str(ROOT / "tests"), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
