"""`rl.serve` and `rlkit serve`: start a vLLM server from a notebook or a terminal, and end all of it.

    server = rl.serve(policy)                          # a child of this kernel, on a free port
    policy.use(rl.VLLMServer(policy, url=server.url))

vLLM's command and environment are in `server_settings`; which process ends which is in `launcher`.
"""

import atexit
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.engines.vllm.cleanup import scratch_folder
from rlkit.engines.vllm.colocate_settings import write_skeleton
from rlkit.engines.vllm.guard import PREFIX, SECRET, new_secret, write_secret
from rlkit.engines.vllm.launcher import GRACE_SECONDS, POLL_SECONDS, supervise
from rlkit.engines.vllm.server_settings import (
    ServerSettings,
    check_port,
    is_cpu_build,
    is_healthy,
    serve_command,
    serve_environment,
)
from rlkit.engines.weights import named_weights, whole_copy
from rlkit.loading import OFFLINE_MODELS, load_policy
from rlkit.support.processes import free_port
from rlkit.support.text import fits

if TYPE_CHECKING:
    from rlkit.policy import Policy

LAST_LINES = 15  # of the log, in an error
LINE_LENGTH = 400  # vLLM lists all models that it knows in one


class Server:
    """A vLLM server that this process has started; it ends with `with rl.serve(...) as server:` or with the process.

    Attributes:
        url: its address.
        log: file with vLLM's output.
        process: the supervisor; the server ends with it.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log: Path, scratch: Any) -> None:
        self.process, self.url, self.log, self._scratch = process, url, log, scratch
        atexit.register(self.close)

    def close(self) -> None:
        """End the server and all its processes; does nothing if it has ended."""
        atexit.unregister(self.close)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE_SECONDS + 10)
            except subprocess.TimeoutExpired:
                self.process.kill()  # the processes below it die with it
                self.process.wait()
        self._scratch.cleanup()

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server answers; else end it and raise, with the last lines of its log."""
        until = time.monotonic() + timeout
        try:
            while not is_healthy(self.url):
                if self.process.poll() is not None:
                    raise RuntimeError(f"rl.serve: vLLM ended before it was ready. It last said:\n{self._last_lines()}")
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"rl.serve: {self.url} gave no answer within {timeout:g} s. Give a large model more time with "
                        f"timeout=. vLLM last said:\n{self._last_lines()}"
                    )
                time.sleep(POLL_SECONDS)
        except BaseException:  # also an interrupt, after which nobody could end the server
            self.close()
            raise

    def _last_lines(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines[:-LAST_LINES] if "Error" in line][-3:]
        return "\n".join(line[:LINE_LENGTH] for line in [*errors, *lines[-LAST_LINES:]])

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self.process.poll() is None else f"ended with status {self.process.returncode}"
        return fits(f"Server({self.url}, {state}, log {self.log})")


def serve(
    model: "Policy | str | os.PathLike[str]",
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    dtype: str | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    kv_cache_gib: float | None = None,
    tensor_parallel_size: int = 1,
    max_num_seqs: int | None = None,
    lora_rank: int | None = None,
    token: str | None = None,
    seed: int = 0,
    extra: tuple[str, ...] = (),
    log: str | os.PathLike[str] | None = None,
    timeout: float = 900,
) -> Server:
    """Start a vLLM server for a policy or a model, as a child of this process, and wait until it answers.

    It ends with `close()`, at the end of a `with` block, and when this process ends, also by `kill -9`.

    Args:
        model: a policy (with its current weights), a folder, a hub id, or an offline name ("tiny-add").
        host: address to listen on; the loopback unless other machines must reach it.
        port: 1 to 65535; None takes a free one.
        dtype: "float32", "bfloat16" or "float16"; None takes the policy's, or float32.
        max_model_len: most tokens of prompt and completion; None takes the model's.
        gpu_memory_utilization: share of a GPU's memory, in (0, 1].
        kv_cache_gib: memory of the cache in GiB; None takes 1 on a CPU, and what the share leaves on a GPU.
        tensor_parallel_size: GPUs of the server.
        max_num_seqs: most completions at a time.
        lora_rank: largest rank of an adapter, for a sync of the adapter alone; None serves without adapters.
        token: the secret that every request needs; None takes VLLM_API_KEY, else a random one. Clients of the same
            user on this machine find it by themselves.
        seed: of vLLM itself; completions have their own seeds.
        extra: further arguments of `vllm serve`, each one word.
        log: file for vLLM's output; None takes one in a temporary folder.
        timeout: seconds until it must answer.

    Returns:
        A `Server`: url, log, close().

    Raises:
        ImportError: vLLM is not installed.
        ValueError: a setting out of its range.
        OSError: the port is taken.
        RuntimeError: vLLM ended before it answered.
        TimeoutError: no answer in time.

    Example:
        with rl.serve("tiny-add") as server:
            policy.use(rl.VLLMServer(policy, url=server.url))
    """
    settings = ServerSettings(
        host=host,
        port=port or free_port(),
        dtype=dtype or _dtype_of(model),
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_gib=kv_cache_gib,
        tensor_parallel_size=tensor_parallel_size,
        max_num_seqs=max_num_seqs,
        lora_rank=lora_rank,
        token=token or new_secret(),
        seed=seed,
        extra=tuple(extra),
    )
    is_cpu_build()  # raises without vLLM
    check_port(settings.host, settings.port)
    scratch = scratch_folder(PREFIX)
    folder = Path(scratch.name)
    file = Path(log) if log is not None else folder / "vllm.log"
    try:
        command = supervisor_command(served_model(model, folder), settings, log=file, scratch=folder)
    except BaseException:
        scratch.cleanup()
        raise
    with file.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=serve_environment(settings, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a notebook is for the cell
        )
    server = Server(process, settings.url, file, scratch)
    server.wait_until_ready(timeout)
    return server


def supervisor_command(model: str, settings: ServerSettings, *, log: Path, scratch: Path) -> list[str]:
    """The command of a supervisor (`rlkit serve`) that ends with this process."""
    words = [sys.executable, "-m", "rlkit.cli", "serve", model, "--log", str(log), "--parent", str(os.getpid())]
    words += ["--scratch", str(scratch)]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None and field.name not in ("extra", "token"):  # the secret is in the environment
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return [*words, "--", *settings.extra] if settings.extra else words


def run_server(
    model: str,
    settings: ServerSettings,
    *,
    log: Path | None = None,
    parent: int | None = None,
    scratch: Path | None = None,
) -> int:
    """Run vLLM until Ctrl-C or until it ends (`rlkit serve`); returns the exit status, 2 for what cannot be started.

    `log` and `parent` are those of `supervise`; `scratch` is the parent's folder, deleted if the parent is gone.
    """
    with scratch_folder(PREFIX) as folder:
        try:
            check_port(settings.host, settings.port)
            command = serve_command(served_model(model, Path(folder)), settings)
            secret = write_secret(Path(folder), settings.port, settings.token)
        except (ImportError, OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2

        def announce() -> None:
            print(
                f"rlkit serve: {model} is ready at {settings.url} ({settings.dtype}). In the notebook: "
                f'policy.use(rl.VLLMServer(policy, url="{settings.url}")). On another machine, or as another user, '
                f"with {SECRET} set to what is in {secret}. Ctrl-C ends it.",
                flush=True,
            )

        status = supervise(
            command,
            serve_environment(settings, os.environ),
            is_ready=lambda: is_healthy(settings.url),
            on_ready=announce,
            log=log,
            parent=parent,
        )
    if scratch is not None and os.getppid() != parent:
        shutil.rmtree(scratch, ignore_errors=True)
    return status


def served_model(model: "Policy | str | os.PathLike[str]", scratch: Path) -> str:
    """What vLLM loads: a checkpoint in `scratch` for a policy and for the offline models, else the name as given."""
    if not isinstance(model, (str, os.PathLike)):
        return str(save_served(model, scratch / "model"))
    name = os.fspath(model)
    if name in OFFLINE_MODELS or name.endswith(".gguf"):
        return str(save_served(load_policy(name, device="cpu"), scratch / "model"))
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"rlkit serve: there is no folder {name}. Give a saved model's folder, or a hub id.")
    return name


def save_served(policy: "Policy", folder: Path) -> Path:
    """Write a policy as a checkpoint that vLLM can load, without its adapter, which the first sync transfers."""
    from safetensors.torch import save_file

    adapted = hasattr(policy.model, "peft_config")
    with policy.model.disable_adapter() if adapted else contextlib.nullcontext():
        weights = {name: whole_copy(tensor) for name, tensor in named_weights(policy)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_skeleton(policy, str(folder))
    return folder


def _dtype_of(model: "Policy | str | os.PathLike[str]") -> str:
    if isinstance(model, (str, os.PathLike)):
        return "float32"
    dtype = model.autocast or next(model.model.parameters()).dtype
    return str(dtype).removeprefix("torch.")
