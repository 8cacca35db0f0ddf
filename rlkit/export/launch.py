"""`launch`: several processes from inside a notebook, as a torchrun in a subprocess.

Never a fork of the kernel: it may have touched a GPU, and forked children of such a process die. The environment of the
child holds nothing of another launcher's, and no notebook back end for plots.
"""

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.export import export_text
from rlkit.support.text import say

FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
FOREIGN_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "SLURM_", "OMPI_", "PMI_")


def launch(
    source: str | os.PathLike[str],
    *,
    nproc: int = 2,
    arguments: Sequence[str] = (),
    strategy: str = "auto",
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> int:
    """Run a script or notebook on several processes of this machine, and print what its main process prints.

    Args:
        source: a `.py` script, or an `.ipynb` notebook, which is exported first (see `rl.export`).
        nproc: number of processes; on GPUs one for each.
        arguments: command-line arguments of the script: `["--max-steps", "3"]`.
        strategy: what `world.prepare(strategy="auto")` takes: "ddp", "fsdp2", "zero3", "auto".
        env: further environment variables.
        check: raise if the run fails.

    Returns:
        The exit status of torchrun.

    Raises:
        FileNotFoundError: no such file.
        ValueError: nproc below 1, or another kind of file.
        ExportError: a notebook that cannot be a script; every reason is in the message.
        RuntimeError: the run failed and `check` is set; its last lines are in the message.
    """
    path = Path(source)
    if nproc < 1:
        raise ValueError(f"launch: nproc must be at least 1, got {nproc}.")
    if not path.is_file():
        raise FileNotFoundError(f"launch: there is no file {path}.")
    if path.suffix not in (".py", ".ipynb"):
        raise ValueError(f"launch: expected a .py script or an .ipynb notebook, got {path.name}.")
    with tempfile.TemporaryDirectory(prefix="rlkit-launch-") as folder:
        script = path.resolve()
        if path.suffix == ".ipynb":
            script = Path(folder) / f"{path.stem}.py"
            script.write_text(export_text(path, name=script.name).text, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        return _stream([*command, str(script), *arguments], clean_environment(nproc, strategy, env), check)


def clean_environment(nproc: int, strategy: str, env: Mapping[str, str] | None) -> dict[str, str]:
    """This process's environment without what a launcher or a kernel has left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_PREFIXES)}
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    own = {"OMP_NUM_THREADS": threads, "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1", "RLKIT_STRATEGY": strategy}
    return {name: value for name, value in kept.items() if name not in FOREIGN} | own | dict(env or {})


def _stream(command: list[str], env: dict[str, str], check: bool) -> int:
    last: deque[str] = deque(maxlen=40)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = subprocess.Popen(command, env=env, text=True, errors="backslashreplace", **pipes)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            say(line, end="", flush=True)
            last.append(line)
        status = process.wait()
    except BaseException:  # an interrupt: the processes end between two steps and save
        process.terminate()
        process.wait()
        raise
    if status and check:
        raise RuntimeError(f"launch: the run ended with status {status}. Its last lines:\n{''.join(last)}")
    return status
