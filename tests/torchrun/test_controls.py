"""Two processes, one run: commands and signals reach both between the same two steps, and one of them prints."""

import threading
import time

import pytest
from builders import assert_identical
from controls_worker import MANY
from waiting import until

from rlkit.cli import main
from rlkit.run.commands import send
from rlkit.run.line_files import read_json, read_lines
from rlkit.run.manifest import newest

pytestmark = pytest.mark.torchrun


class Outsider(threading.Thread):
    """Someone with a shell, who sees only the run's folder."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.error, self.paused_at = folder, None, None

    def state(self):
        return read_json(self.folder / "state.json") or {}

    def run(self):
        try:
            self.act()
        except BaseException as error:
            self.error = error

    def act(self):
        until(lambda: self.state().get("step", 0) > 2, "some steps")
        assert main(["ctl", str(self.folder), "set", "beta", "0.5"]) == 0
        until(lambda: self.state()["numbers"]["beta"] == 0.5, "the change of beta")
        assert main(["ctl", str(self.folder), "pause"]) == 0
        until(lambda: self.state()["status"] == "paused", "the pause")
        self.paused_at = self.state()["step"]
        send(self.folder, "set", name="learning_rate", value=0.25)
        saved = send(self.folder, "save")
        until(lambda: self.state()["taken"] >= saved, "the change and the save")
        time.sleep(2)  # many polls: every one is an exchange between the processes
        assert newest(self.folder / "ckpt").name == f"step-{self.paused_at:06d}"
        assert self.state()["step"] == self.paused_at and self.state()["numbers"]["learning_rate"] == 0.25
        send(self.folder, "resume")
        until(lambda: self.state()["step"] > self.paused_at + 2, "going on")
        send(self.folder, "stop")


@pytest.fixture(scope="module")
def launched(launcher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("controls")
    outsider = Outsider(folder / "run")
    outsider.start()
    launch = launcher("controls_worker.py", ranks=2, strategy="ddp", folder=folder)
    outsider.join()
    if outsider.error is not None:
        raise AssertionError(launch.stderr[-3000:]) from outsider.error
    assert launch.code == 0, launch.stderr[-3000:]
    return launch, outsider


def test_every_rank_obeys_between_the_same_two_steps(launched):
    launch, outsider = launched
    one, two = launch.check("controlled")
    assert one["seen"] == two["seen"]
    assert one["stopped"] == two["stopped"] == "stopped" and one["step"] == two["step"] < MANY
    assert_identical(one["parameters"], two["parameters"])
    betas = [beta for _, beta, _ in one["seen"]]
    assert set(betas) == {0.05, 0.5} and betas == sorted(betas)
    rates = [rate for _, _, rate in one["seen"]]
    assert rates.index(0.25) == outsider.paused_at and len(set(rates)) == 2
    lines = read_lines(launch.folder / "run" / "metrics.jsonl")
    assert [line["knobs/beta"] for line in lines] == betas and [line["step"] for line in lines] == list(
        range(one["step"])
    )
    assert newest(launch.folder / "run" / "ckpt").name == f"step-{one['step']:06d}"


def test_a_preemption_before_the_first_step_saves_and_asks_to_go_on_later(launched):
    """SIGTERM to one rank, while it loads: no step is done, everything is saved, STOPPED says that it is to go on."""
    launch, _ = launched
    for rank in launch.check("early"):
        assert (rank["ended"], rank["step"], rank["stopped"], rank["seen"]) == (0, 0, "preempted", [])
    assert (launch.folder / "early" / "STOPPED").read_text() == "0\n"
    assert newest(launch.folder / "early" / "ckpt").name == "step-000000"
    assert "got SIGTERM, stopping before the first step" in launch.stderr
    assert f"stopped before the first step of {MANY}" in launch.stdout


def test_one_process_prints_and_the_other_one_into_a_file(launched):
    launch, outsider = launched
    steps = launch.check("controlled")[0]["step"]
    assert launch.stdout.count("said by rank 0") == 2 and "said by rank 1" not in launch.stdout
    for step in range(steps):
        assert launch.stdout.count(f"step {step} |") == 1
    assert launch.stdout.count("rlkit: beta 0.05 -> 0.5 (by rlkit ctl), from step") == 1
    assert launch.stdout.count(f"rlkit: paused before step {outsider.paused_at}") == 1
    texts = {name: (launch.folder / name / "rank1.log").read_text() for name in ("early", "run")}
    assert texts["early"].count("said by rank 1") == 2  # the second time before the second run has its folder
    assert "beta 0.05 -> 0.5" in texts["run"]
    assert not list(launch.folder.glob("*/rank0.log"))
