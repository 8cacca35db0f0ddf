"""The batch file: quoted, clean to shellcheck, and run whole with stand-ins for srun, scontrol, vllm and torchrun."""

import argparse
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import LONG

from rlkit.export.launch import FOREIGN
from rlkit.export.slurm import SlurmSettings, slurm_job
from rlkit.export.slurm.job import TEMPLATE
from rlkit.export.slurm.options import add_arguments, from_arguments, launch_command

pytestmark = pytest.mark.integration

SHIMS = Path(__file__).parent / "shims"
HANG_SECONDS = LONG  # a job that takes longer hangs
GRACE = LONG // 2  # seconds that a trainer gets to save: not what these tests are about
SERVERS = {"vllm_nodes": 1, "model": "org/model"}
HOSTILE = [
    "$(touch PWNED)",
    "`touch PWNED`",
    "'; touch PWNED; '",
    '"; touch PWNED; "',
    "a\ntouch PWNED\nb",
    "TASK\ntouch PWNED\n",
    "& touch PWNED &",
    "${PWNED:=$(touch PWNED)}",
    "\\",
    "\\'; touch PWNED #",
    "* ? [a] {a,b} ~ !! #",
    "",
    " ",
    "ä β 🙂",
    "# --- servers",
]
WORST = "o'ut\n'; touch PWNED; '\n$(touch PWNED)`touch PWNED`\"; touch PWNED; \"\\"
# The trainer: rlkit's behaviour at a signal, without rlkit. Rank 0's node writes, the others only end.
TRAINER = r"""
out=run
for ((i = 1; i < $#; i++)); do
  if [[ ${!i} == --out ]]; then j=$((i + 1)); out=${!j}; fi
done
mkdir -p "$out"
how=${SHIM_TRAINER:-finish} stop=''
trap 'stop=yes' USR1 TERM
save() {
  if [[ $SLURM_PROCID != 0 ]]; then return; fi
  mkdir -p "$out/ckpt"
  echo step-000001 >"$out/ckpt/latest"
  echo 1 >"$out/STOPPED"
}
touch "$SHIM_LOG/training" "$SHIM_LOG/training-$SLURM_PROCID"
case $how in
  finish) sleep 0.1 ;;
  fail) sleep 1000 & exit 7 ;;
  finish-anyway) until [[ $stop ]]; do sleep 0.02; done ;;
  save) until [[ $stop ]]; do sleep 0.02; done; save ;;
  save-itself) save; exit 1 ;;
  save-second) out+=-second; mkdir -p "$out"; save; exit 1 ;;
  hang) while :; do sleep 0.02; done ;;
  go) until [[ -e $SHIM_LOG/go ]]; do sleep 0.02; done ;;
esac
exit 0
"""


@dataclass
class Job:
    """A job that runs here; what the stand-ins saw lies in `log`."""

    folder: Path
    process: subprocess.Popen
    number: int
    tag: str

    @property
    def log(self) -> Path:
        return self.folder / "shim log"

    @property
    def out(self) -> Path:
        return self.folder / "runs" / f"train-{self.number}" / "run"

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not all((self.log / name).exists() for name in names):
            assert self.process.poll() is None and time.monotonic() < deadline, f"no {names}:\n{self.end()[1]}"
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Exit code and what the job said."""
        try:
            output, _ = self.process.communicate(timeout=HANG_SECONDS)
        except subprocess.TimeoutExpired:
            for process in self.left():
                os.kill(process, signal.SIGKILL)
            pytest.fail(f"the job hangs:\n{self.process.communicate()[0]}")
        return self.process.returncode, output

    def left(self) -> list[int]:
        """Processes of the job that live: those with its mark in their environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self.tag.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def read(self, name: str) -> dict:
        return json.loads((self.log / name).read_text())

    @property
    def steps(self) -> list[dict]:
        file = self.log / "srun.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def requeues(self) -> list[str]:
        file = self.log / "scontrol"
        return file.read_text().splitlines() if file.exists() else []


def free_job_number() -> int:
    """A number of a job whose server's port, 10000 + number % 10000, is free."""
    while True:
        number = random.randrange(100_000, 999_999)
        try:
            for host in ("127.0.0.1", "127.0.0.2"):
                socket.create_server((host, 10000 + number % 10000)).close()
        except OSError:
            continue
        return number


@pytest.fixture
def start(tmp_path):
    """Starts jobs; whatever is left of one at the end of the test fails it."""
    jobs: list[Job] = []

    def run(settings=None, *, script="train.py", code=TRAINER, number=None, before=None, **variables) -> Job:
        settings = settings or SlurmSettings(**SERVERS)
        serving = [f"127.0.0.{n + 1}" for n in range(settings.vllm_nodes)]
        nodes = [f"node{n}" for n in range(settings.nodes)] + serving
        (tmp_path / "shim log").mkdir(exist_ok=True)
        (tmp_path / script).write_text(code)
        (tmp_path / "job.sbatch").write_text(slurm_job(script, settings))
        job = Job(tmp_path, None, number or free_job_number(), f"slurm-test-{uuid.uuid4()}")
        if before:
            before(job)
        kept = {name: os.environ[name] for name in ("LANG", "HOME") if name in os.environ}
        env = kept | {
            "PATH": f"{SHIMS}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(job.number),
            "SLURM_JOB_NODELIST": "nodes[1-9]",
            "SHIM_LOG": str(job.log),
            "SHIM_NODES": " ".join(nodes),
            "SHIM_TAG": job.tag,
            "RLKIT_JOB_POLL": "0.02",
            "RLKIT_JOB_GRACE": str(GRACE),
            "http_proxy": "http://127.0.0.1:9",  # clusters set it; it must not be asked for the servers' health
        }
        job.process = subprocess.Popen(
            ["bash", "job.sbatch"],
            cwd=tmp_path,
            env=env | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        jobs.append(job)
        return job

    yield run
    deadline = time.monotonic() + LONG
    for job in jobs:
        while (left := job.left()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in left:
            os.kill(process, signal.SIGKILL)
        assert not left, "the job left processes behind"


# ---- the file


def test_same_settings_give_the_same_file_and_the_header_asks_for_what_was_said():
    settings = SlurmSettings(
        nodes=4, gpus_per_node=8, time="4:00:00", partition="gpu", account="lab", **SERVERS, sbatch=("--qos=high",)
    )
    text = slurm_job("rloo.py", settings)
    assert text == slurm_job("rloo.py", settings)
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert lines == [
        "--job-name=rloo",
        "--nodes=5",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--mem=0",
        "--time=4:00:00",
        "--partition=gpu",
        "--account=lab",
        "--signal=B:USR1@300",
        "--output=%x-%j.out",
        "--open-mode=append",
        "--exclusive",
        "--requeue",
        "--qos=high",
    ]
    assert text.index("set -euo pipefail") > text.rindex("#SBATCH")
    assert text.startswith("#!/bin/bash\n# Written by `rlkit export`")  # by which a file of rlkit's is known again


def test_cpus_instead_of_whole_nodes_reach_sbatch_and_srun():
    text = slurm_job("rloo.py", SlurmSettings(cpus_per_node=16, mem="64G"))
    assert "#SBATCH --cpus-per-task=16\n#SBATCH --mem=64G\n" in text
    assert "SRUN_ARGS=(--cpus-per-task=16 --cpu-bind=none)" in text
    assert "--exclusive" not in text


def test_sbatch_gets_back_every_value():
    """shlex reads double quotes as sbatch does: backslash escapes in them, # does not begin a comment."""
    for value in [*(v for v in HOSTILE if v.isprintable() and v), "it's", 'say "no"', "back\\slash", "a # b"]:
        text = slurm_job("x.py", SlurmSettings(job_name=value, account=value, sbatch=(f"--comment={value}",)))
        words = [shlex.split(line) for line in text.splitlines() if line.startswith("#SBATCH ")]
        assert all(len(line) == 2 for line in words)
        read = dict(word.partition("=")[::2] for _, word in words)
        assert read["--job-name"] == read["--account"] == read["--comment"] == value


@pytest.mark.parametrize("field", ["time", "partition", "account", "job_name", "mem", "sbatch"])
@pytest.mark.parametrize("value", ["a\ntouch PWNED", "a\rb", "a\x00b", "a\u2028b", "a\tb", ""])
def test_a_line_end_in_a_directive_is_refused(field, value):
    given = (f"--comment={value}" if value else "",) if field == "sbatch" else value
    with pytest.raises(ValueError, match=field):
        SlurmSettings(**{field: given})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"notice": 30}, "notice must be 60 to"),
        ({"vllm_nodes": 1}, "Set model too"),
        ({"model": "m"}, "no node serves"),
        ({**SERVERS, "vllm_tp": 8, "gpus_per_node": 4}, "has 4 GPUs"),
        ({**SERVERS, "port": 80}, "port must be"),
        ({"sbatch": ("qos=high",)}, "options like --qos=high"),
        ({"sbatch": ("--nodes=3",)}, "the job sets --nodes itself"),
        ({"sbatch": ("--signal=USR2",)}, "the job sets --signal itself"),
        ({"run_folder": "-rf"}, "run_folder must not"),
        ({"script_args": ("a\0b",)}, "NUL"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SlurmSettings(**settings)


def test_a_script_whose_name_is_no_job_name_needs_one():
    with pytest.raises(ValueError, match="job_name"):
        slurm_job("a\nb.py", SlurmSettings())
    assert slurm_job("a\nb.py", SlurmSettings(job_name="ab"))


def many_files(folder: Path) -> list[Path]:
    everything = {
        "setup": HOSTILE[0],
        "run_folder": HOSTILE[4],
        "script_args": tuple(HOSTILE),
        "srun_args": tuple(HOSTILE),
        "sbatch": ("--qos=a b", "--comment=it's"),
        "time": "1-0",
    }
    servers = {"vllm_nodes": 2, "model": HOSTILE[4], "vllm_args": tuple(HOSTILE), "port": 8000}
    files = []
    for number, (more, serve, cpus) in enumerate(
        itertools.product([{}, everything], [{}, SERVERS, servers], [None, 8])
    ):
        file = folder / f"job{number}.sbatch"
        file.write_text(slurm_job("train.py", SlurmSettings(nodes=1 + number, cpus_per_node=cpus, **more, **serve)))
        files.append(file)
        for name, task in re.findall(r"^(\w+_task)=\$\(\n.*?'TASK'\n(.*?)^TASK$", file.read_text(), re.S | re.M):
            part = folder / f"job{number}-{name}.bash"  # what runs inside `bash -c`, which the checkers do not see
            part.write_text(f"#!/bin/bash\n{task}")
            files.append(part)
    assert len(files) == 12 + 12 + 8
    return files


def test_bash_reads_every_file(tmp_path):
    for file in many_files(tmp_path):
        done = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), f"{file.name}: {done.stderr}"


def test_each_task_drops_what_a_launcher_has_set():
    assert TEMPLATE.read_text().count(f"unset {' '.join(FOREIGN)} ") == 2


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(tmp_path):
    unlike = {file.read_bytes(): file for file in many_files(tmp_path)}
    done = subprocess.run(["shellcheck", TEMPLATE, *unlike.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the file, run


def test_a_job_trains_beside_its_servers_and_leaves_nothing(start):
    settings = SlurmSettings(
        nodes=2, gpus_per_node=4, vllm_nodes=2, vllm_tp=2, model="org/model", vllm_args=("--dtype", "bfloat16")
    )
    job = start(settings, RANK="3", LOCAL_RANK="1", TORCHELASTIC_RUN_ID="other")
    code, said = job.end()
    assert code == 0, said
    assert job.requeues == []
    server, trainer = job.steps
    port = 10000 + job.number % 10000

    assert server["options"]["--nodelist"] == "127.0.0.1,127.0.0.2"
    assert server["options"]["--ntasks"] == server["options"]["--nodes"] == "2"
    assert trainer["options"]["--nodelist"] == "node0,node1"
    assert trainer["options"]["--ntasks"] == trainer["options"]["--nodes"] == "2"
    assert trainer["options"]["--kill-on-bad-exit"] == "1"
    assert "--output" not in trainer["options"]

    for rank in ("0", "1"):
        vllm, torchrun = job.read(f"vllm-{rank}.json"), job.read(f"torchrun-{rank}.json")
        assert vllm["arguments"][:6] == ["serve", "org/model", "--host", "0.0.0.0", "--port", str(port)]
        assert "--tensor-parallel-size 2" in " ".join(vllm["arguments"])
        assert json.loads(vllm["arguments"][vllm["arguments"].index("--weight-transfer-config") + 1]) == {
            "backend": "nccl"
        }
        assert vllm["arguments"][-2:] == ["--dtype", "bfloat16"]
        assert vllm["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
        assert "VLLM_SERVER_DEV_MODE" not in torchrun["environment"]
        secret = vllm["environment"]["VLLM_API_KEY"]
        assert re.fullmatch("[0-9a-f]{64}", secret) and torchrun["environment"]["VLLM_API_KEY"] == secret
        assert secret not in " ".join([*vllm["arguments"], *torchrun["script"]]) and secret not in said
        assert vllm["environment"]["RLKIT_SERVE_HOSTS"] == "127.0.0.1,127.0.0.2"
        assert vllm["arguments"][vllm["arguments"].index("--middleware") + 1] == "rlkit.engines.vllm.guard.Guard"
        for environment in (vllm["environment"], torchrun["environment"]):
            assert environment["SLURM_PROCID"] == rank
            assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & environment.keys()
        assert torchrun["flags"] == {
            "--signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            "--shutdown-timeout": "280",
            "--nnodes": "2",
            "--nproc-per-node": "4",
            "--max-restarts": "0",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"node0:{20000 + job.number % 10000}",
            "--rdzv-id": str(job.number),
        }
        urls = f"http://127.0.0.1:{port},http://127.0.0.2:{port}"
        out = f"runs/train-{job.number}/run"
        assert torchrun["script"] == ["train.py", "--out", out, "--resume", "auto", "--vllm-url", urls]
    assert "loading the weights" in (job.folder / f"vllm-{job.number}-1.out").read_text()


def test_a_job_without_servers(start):
    job = start(SlurmSettings(script_args=("--lr", "3e-6")))
    assert job.end()[0] == 0
    (trainer,) = job.steps
    assert trainer["options"]["--nodelist"] == "node0"
    assert job.read("torchrun-0.json")["script"][-2:] == ["--lr", "3e-6"]
    assert "--vllm-url" not in job.read("torchrun-0.json")["script"]


def test_a_server_that_never_comes_up(start):
    job = start(SHIM_SERVER="never", RLKIT_JOB_SERVER_LIMIT="1")
    code, said = job.end()
    assert code == 1
    assert f"no answer from http://127.0.0.1:{10000 + job.number % 10000}/health after 1 s" in said
    assert not (job.log / "torchrun-0.json").exists(), "the trainer must not start"


def test_a_server_that_dies_while_it_starts_ends_the_job_at_once(start):
    job = start(SHIM_SERVER="dies-starting", RLKIT_JOB_SERVER_LIMIT=str(10 * HANG_SECONDS))
    code, said = job.end()
    assert code == 1
    assert "the vLLM servers ended before they answered" in said
    assert "out of memory while loading" in said
    assert len(job.steps) == 1


def test_a_port_that_answers_for_someone_else_is_noticed(start, tmp_path):
    number = free_job_number()
    stranger = subprocess.Popen(
        [SHIMS / "vllm", "--port", str(10000 + number % 10000)],
        env=os.environ | {"SHIM_LOG": str(tmp_path), "SLURM_PROCID": "0"},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", 10000 + number % 10000)) == 0:
                    break
            time.sleep(0.01)
        job = start(number=number)
        code, said = job.end()
    finally:
        stranger.kill()
        stranger.wait()
    assert code == 1
    assert "of 127.0.0.1 answers already, for someone else" in said
    assert job.steps == []


@pytest.mark.parametrize("trainer", ["save", "finish-anyway", "hang"])
def test_a_server_that_dies_in_mid_run(start, trainer):
    grace = "1" if trainer == "hang" else str(GRACE)
    job = start(SHIM_SERVER="dies-later", SHIM_TRAINER=trainer, RLKIT_JOB_GRACE=grace)
    code, said = job.end()
    assert "the vLLM servers ended while the trainer runs" in said
    assert "CUDA error: the server is gone" in said
    assert code == (137 if trainer == "hang" else 1)
    assert (job.out / "STOPPED").exists() == (trainer == "save")
    assert job.requeues == [], "the next server would die too"


def test_one_server_of_two_that_dies_counts(start):
    job = start(SlurmSettings(vllm_nodes=2, model="m"), SHIM_TRAINER="finish-anyway")
    job.wait_for("training")
    os.kill(job.read("vllm-1.json")["pid"], signal.SIGKILL)
    code, said = job.end()
    assert code == 1
    assert "the vLLM servers ended while the trainer runs" in said


@pytest.mark.parametrize("torchrun", ["new", "old"])
def test_a_preemption_by_usr1_saves_and_requeues_once(start, torchrun):
    job = start(SlurmSettings(nodes=2, **SERVERS), SHIM_TRAINER="save", SHIM_TORCHRUN=torchrun)
    job.wait_for("training-0", "training-1")
    job.process.send_signal(signal.SIGUSR1)
    code, said = job.end()
    assert code == 0, said
    assert (job.out / "STOPPED").exists()
    assert job.requeues == [f"requeue {job.number}, 0 steps run"]
    assert "stopped early, all saved, requeued" in said


def test_a_requeue_that_slurm_refuses_is_said_and_is_no_success(start):
    job = start(SHIM_TRAINER="save", SHIM_REQUEUE_CODE="1")
    job.wait_for("training")
    job.process.send_signal(signal.SIGUSR1)
    code, said = job.end()
    assert code == 1
    assert f"did not requeue the job; start it again with --run-folder runs/train-{job.number}" in said


def test_term_saves_and_leaves_the_requeue_to_slurm(start):
    """Otherwise scancel would never end a job."""
    job = start(SHIM_TRAINER="save")
    job.wait_for("training")
    job.process.send_signal(signal.SIGTERM)
    code, said = job.end()
    assert code == 0
    assert (job.out / "STOPPED").exists()
    assert job.requeues == []
    assert f"scontrol requeue {job.number}" in said


def test_a_preemption_that_reaches_only_the_steps_spares_the_server(start):
    """SLURM then sends SIGTERM to the tasks, not to the batch shell; the trainer needs the server for its last step."""
    job = start(SHIM_TRAINER="go")
    job.wait_for("training")
    os.kill(job.read("vllm-0.json")["parent"], signal.SIGTERM)
    time.sleep(0.3)  # were the server to end, the job would see it now
    (job.log / "go").touch()
    code, said = job.end()
    assert code == 0, said
    assert "servers ended" not in said


@pytest.mark.parametrize("trainer", ["save-itself", "save-second"])
def test_stopped_in_any_run_of_the_script_requeues_without_a_signal_to_the_job(start, trainer):
    """torchrun ends with 1 after a signal, its workers having saved."""
    job = start(SHIM_TRAINER=trainer)
    assert job.end()[0] == 1
    assert job.requeues == [f"requeue {job.number}, 0 steps run"]


def test_a_run_that_finishes_in_spite_of_the_signal_is_not_requeued(start):
    job = start(SHIM_TRAINER="finish-anyway")
    job.wait_for("training")
    job.process.send_signal(signal.SIGUSR1)
    assert job.end()[0] == 0
    assert job.requeues == []


def test_a_signal_while_the_servers_start(start):
    job = start(SHIM_SERVER="never")
    job.wait_for("vllm-0.json")
    job.process.send_signal(signal.SIGUSR1)
    code, said = job.end()
    assert code == 1
    assert "stopped by SIGUSR1 before the vLLM servers answered" in said
    assert job.requeues == []


def test_a_trainer_that_fails_ends_the_job_with_its_code_and_everything_else(start):
    job = start(SlurmSettings(nodes=2, **SERVERS), SHIM_TRAINER="fail")
    code, _ = job.end()
    assert code in (7, 137)  # 137: the other node, which srun then killed
    single = start(SHIM_TRAINER="fail")
    assert single.end()[0] == 7
    assert job.requeues == []


def test_a_restart_goes_on_in_the_same_folder(start):
    def half_done(job):
        (job.out / "ckpt").mkdir(parents=True)
        for name in ("ckpt/latest", "STOPPED", "lock", "metrics.jsonl"):
            (job.out / name).write_text("step-000001")

    job = start(before=half_done, SLURM_RESTART_COUNT="1")
    code, said = job.end()
    assert code == 0, said
    assert job.requeues == [], "STOPPED of the first start is not of the second"
    assert {file.name for file in job.out.iterdir()} == {"ckpt", "metrics.jsonl"}


def test_a_folder_without_a_checkpoint_is_kept_aside_at_a_restart_and_refused_at_a_start(start):
    def not_begun(job):
        job.out.mkdir(parents=True)
        (job.out / "metrics.jsonl").touch()

    job = start(before=not_begun, SLURM_RESTART_COUNT="2")
    assert job.end()[0] == 0
    assert (job.out.parent / "run.before-restart-2" / "metrics.jsonl").exists()
    assert not (job.out / "metrics.jsonl").exists()
    job = start(before=not_begun)
    code, said = job.end()
    assert code == 1
    assert "holds something, but no checkpoint" in said


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "start this file with sbatch"),
        ({"SHIM_NODES": "one"}, r"expected 1 \+ 1 nodes, got 1: one"),
        ({"RLKIT_JOB_GRACE": "a[$(touch PWNED)]"}, "whole seconds"),
    ],
)
def test_a_job_that_cannot_run_says_why(start, variables, message):
    job = start(**variables)
    code, said = job.end()
    assert code == 1
    assert re.search(message, said)
    assert job.steps == []


def test_no_value_runs_anything_and_all_arrive_as_they_are(start):
    generator = random.Random(0)
    noise = ["".join(generator.choices("'\"\\$`(){}[]<>|&;!#*?~ \n\ta-=", k=9)) for _ in range(100)]
    job = start(
        SlurmSettings(
            job_name="$(touch PWNED) `touch PWNED`' \" #",
            partition="$(touch PWNED)",
            setup="set up" + WORST,
            run_folder="out" + WORST,
            script_args=(*HOSTILE, *noise),
            srun_args=tuple(f"--comment={value}" for value in HOSTILE),
            sbatch=("--qos=`touch PWNED`", "--wckey=$(touch PWNED)"),
            vllm_nodes=1,
            model=WORST,
            vllm_args=(*HOSTILE, *noise),
        ),
        script=WORST,
        before=lambda job: (job.folder / ("set up" + WORST)).write_text('echo "set up$NOT_SET"; export SET_UP=yes'),
    )
    code, said = job.end()
    assert code == 0, said
    script = job.read("torchrun-0.json")["script"]
    assert script[:3] == [WORST, "--out", f"out{WORST}/run"]
    assert script[-len(HOSTILE + noise) :] == HOSTILE + noise
    assert job.read("vllm-0.json")["arguments"][1] == WORST
    assert job.read("vllm-0.json")["arguments"][-len(HOSTILE + noise) :] == HOSTILE + noise
    assert job.read("torchrun-0.json")["environment"]["SET_UP"] == "yes"
    assert "PWNED" not in {file.name for file in job.folder.rglob("*")}


# ---- the command line


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words))


def test_the_command_line_of_the_issue():
    words = "--slurm job.sbatch --nodes 4 --gpus-per-node 8 --vllm-nodes 1 --vllm-tp 8 --vllm-model m".split()
    assert parsed(*words) == SlurmSettings(nodes=4, gpus_per_node=8, vllm_nodes=1, vllm_tp=8, model="m")
    assert parsed() is None


def test_words_are_split_as_a_shell_would_and_nothing_else():
    settings = parsed("--slurm", "j", "--script-args=--lr 3e-6 --name 'a b' $(touch PWNED)", "--sbatch=--qos=high")
    assert settings.script_args == ("--lr", "3e-6", "--name", "a b", "$(touch", "PWNED)")
    assert settings.sbatch == ("--qos=high",)
    with pytest.raises(ValueError, match=r"--script-args .*No closing quotation"):
        parsed("--slurm", "j", "--script-args='a")


def test_every_field_of_the_settings_has_its_option():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    asked = {action.dest for action in parser._actions}
    assert {f"slurm_{name}" for name in SlurmSettings.__dataclass_fields__} < asked


def test_options_of_a_job_without_a_job_are_an_error():
    with pytest.raises(ValueError, match=r"--nodes, --vllm-nodes describe a SLURM job. Add --slurm FILE"):
        parsed("--nodes", "2", "--vllm-nodes", "1")
    assert parsed("--launch", "torchrun", "--gpus-per-node", "2") is None


def test_launch_commands_are_quoted():
    assert launch_command("a.py", "local") == "python a.py"
    assert launch_command("a.py", "torchrun") == "torchrun --standalone --nproc-per-node=gpu a.py"
    command = launch_command("my $(run).py", "torchrun", processes=2, arguments=HOSTILE)
    assert shlex.split(command)[3:] == ["my $(run).py", *HOSTILE]
    with pytest.raises(ValueError, match="expected one of"):
        launch_command("a.py", "mpirun")


# ---- the file, run with the real torchrun and the real rlkit

REAL_SCRIPT = """
import argparse, os, pathlib, time
import torch
import rlkit as rl

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--resume")
parser.add_argument("--max-steps", type=int)
args = parser.parse_args()
world = rl.setup(seed=0)
policy, optimizer = world.prepare(rl.load_policy("tiny-add"), lambda params: torch.optim.SGD(params, lr=1e-3))
task = rl.tasks.load("addition")
run = rl.Run(args.out)
prompts = rl.PromptLoader(task.train, policy, batch_size=2, seed=0)
run.track(policy, optimizer, prompts=prompts)
run.resume(args.resume)
for step, batch in run.steps(prompts, args.max_steps, progress=False):
    rollout = rl.sample(policy, batch, num_generations=2, max_completion_length=4)
    scores = rl.score(rollout, task.rewards)
    rl.loss_step(policy, optimizer, rollout, rl.compute_loo_advantage(scores))
    run.log(step, rollout, scores)
    pathlib.Path(os.environ["SHIM_LOG"], "training").touch()
    if step == 1 and "SLURM_RESTART_COUNT" not in os.environ and world.size == 2:
        while run._state.flag.reason is None:  # a long step, in which the notice comes
            time.sleep(0.1)
"""


@pytest.mark.torchrun
def test_a_preempted_run_goes_on_where_it_stopped(start, tmp_path):
    """Two real processes: USR1 goes through srun and torchrun, the run saves, and the requeued job ends it."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol"):
        (tmp_path / "bin" / name).symlink_to(SHIMS / name)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    variables = {
        "PATH": path,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "SHIM_NODES": "localhost",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    settings = SlurmSettings(gpus_per_node=2, script_args=("--max-steps", "4"))

    first = start(settings, code=REAL_SCRIPT, **variables)
    first.wait_for("training")
    time.sleep(0.5)
    first.process.send_signal(signal.SIGUSR1)
    code, said = first.end()
    assert (first.out / "STOPPED").exists(), said
    assert first.requeues == [f"requeue {first.number}, 0 steps run"], said
    assert code == 1, "torchrun's own code after a signal, whatever its workers' was"
    assert not first.left(), "USR1 leaves workers behind unless torchrun passes it on"

    again = start(settings, code=REAL_SCRIPT, number=first.number, SLURM_RESTART_COUNT="1", **variables)
    code, said = again.end()
    assert code == 0, said
    assert not (first.out / "STOPPED").exists()
    steps = [json.loads(line)["step"] for line in (first.out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3], "that a resumed run gives the same numbers is tested beside run.resume"
