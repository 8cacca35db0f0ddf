"""Declared numbers: kinds and bounds, learning rates with and without a schedule, changes that outlive a restart."""

import math

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import rlkit as rl
from rlkit.run.commands import send
from rlkit.run.lock import unlock

RELATIVE = 1e-12  # float64


@pytest.fixture
def run(tmp_path):
    return rl.Run(tmp_path / "run")


def sgd(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_numbers_are_attributes_and_keep_their_kind(run):
    knobs = run.knobs(beta=1.0, count=4, wide=np.float32(0.5), long=np.int64(3))
    assert (knobs.beta, knobs.count, knobs.wide, knobs.long) == (1.0, 4, 0.5, 3)
    knobs.beta, knobs.count = 2, 5.0
    assert [type(number) for number in (knobs.beta, knobs.count, knobs.wide, knobs.long)] == [float, int, float, int]
    assert (knobs.beta, knobs.count) == (2.0, 5)
    assert repr(knobs) == "Knobs(beta=2.0, count=5, wide=0.5, long=3)"
    assert dir(knobs) == ["beta", "count", "long", "wide"]
    with pytest.raises(AttributeError, match="there is no number 'gamma'; declared: beta, count, wide, long"):
        _ = knobs.gamma
    with pytest.raises(ValueError, match=r"there is no number 'gamma'; declared: beta, count"):
        knobs.gamma = 1.0


BAD = {
    "nan": ({"beta": math.nan}, {}, ValueError, "beta must be finite, got nan"),
    "text": ({"beta": "0.1"}, {}, TypeError, "beta must be a number, got '0.1'"),
    "bool": ({"flag": True}, {}, TypeError, "flag must be a number, got True"),
    "none": ({"beta": None}, {}, TypeError, "beta must be a number, got None"),
    "out of bounds": ({"beta": 2.0}, {"beta": (0, 1)}, ValueError, "beta must be between 0 and 1, got 2.0"),
    "stray bounds": ({"beta": 2.0}, {"gamma": (0, 1)}, ValueError, "bounds for gamma, but no such number"),
    "turned bounds": ({"beta": 2.0}, {"beta": (3, 1)}, ValueError, r"bounds of beta must be \(lowest, highest\)"),
    "nan bounds": ({"beta": 2.0}, {"beta": (math.nan, 1)}, ValueError, r"bounds of beta must be \(lowest, highest\)"),
    "underscore": ({"_beta": 2.0}, {}, ValueError, "without a leading underscore, got '_beta'"),
}


@pytest.mark.parametrize(("declared", "bounds", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_declarations_are_named_and_leave_nothing(run, declared, bounds, kind, message):
    run.knobs(first=1.0)
    with pytest.raises(kind, match=message):
        run.knobs(bounds=bounds, **declared)
    assert run.log(0) == {"step": 0, "knobs/first": 1.0}


def test_a_change_is_checked_as_the_declaration_is(run):
    knobs = run.knobs(beta=0.5, count=2, bounds={"beta": (0, 1)})
    for name, bad in (("beta", 2.0), ("beta", math.nan), ("count", 2.5), ("count", math.inf)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            setattr(knobs, name, bad)
    with pytest.raises(TypeError, match="beta must be a number"):
        knobs.beta = "much"
    assert (knobs.beta, knobs.count) == (0.5, 2)


def test_declaring_again_sets_the_number_again(run):
    """The cell is run again: what it says holds."""
    first = run.knobs(beta=0.1)
    first.beta = 0.7
    again = run.knobs(beta=0.1, gamma=1.0)
    assert first.beta == again.beta == 0.1 and again.gamma == 1.0


def test_declared_numbers_are_logged_with_every_step(run):
    knobs = run.knobs(beta=0.5)
    assert run.log(0, loss=1.0) == {"step": 0, "loss": 1.0, "knobs/beta": 0.5}
    knobs.beta = 0.25
    assert run.log(1, loss=1.0)["knobs/beta"] == 0.25
    assert rl.metrics.describe("knobs/beta").name == "knobs/*"


# --- learning rates ---


def test_a_learning_rate_is_that_of_the_optimizer(run):
    """Groups keep their proportions: 0.1 and 0.02 become 0.3 and 0.06."""
    optimizer = sgd(0.1, 0.02)
    knobs = run.knobs(learning_rate=optimizer)
    assert knobs.learning_rate == 0.1
    knobs.learning_rate = 0.3
    assert rates(optimizer) == [0.3, pytest.approx(0.06, rel=RELATIVE)]
    optimizer.param_groups[0]["lr"] = 0.7  # by hand, in the loop: it is one number, not two
    assert knobs.learning_rate == 0.7
    with pytest.raises(ValueError, match=r"learning_rate must be between 0\.0 and None, got -1"):
        knobs.learning_rate = -1


def test_a_learning_rate_of_zero_can_be_left(run):
    optimizer = sgd(0.1, 0.02)
    knobs = run.knobs(learning_rate=optimizer)
    knobs.learning_rate = 0
    assert rates(optimizer) == [0, 0]
    knobs.learning_rate = 0.5
    assert rates(optimizer) == [0.5, 0.5]


def test_a_rate_that_is_a_tensor_stays_that_tensor(run):
    """As torch asks for with compiled and captured optimizers."""
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate, capturable=False, foreach=False)
    knobs = run.knobs(learning_rate=optimizer)
    knobs.learning_rate = 0.5
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.5


SCHEDULES = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 6),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_with_a_schedule_all_of_it_is_scaled(run, make):
    """Three times the rate from step 2 on: from there every rate is three times that of the schedule left alone."""
    plain, changed = sgd(0.1, 0.02), sgd(0.1, 0.02)
    schedules = [make(plain), make(changed)]
    knobs = run.knobs(learning_rate=schedules[1])
    for step in range(8):
        if step == 2:
            knobs.learning_rate = 3 * knobs.learning_rate
        factor = 3 if step >= 2 else 1
        assert rates(changed) == pytest.approx([factor * rate for rate in rates(plain)], rel=1e-9)
        for optimizer, schedule in zip((plain, changed), schedules, strict=True):
            optimizer.step()
            schedule.step()


def test_an_optimizer_that_has_a_schedule_is_refused(run):
    optimizer = sgd(0.1)
    lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(ValueError, match=r"this optimizer has a scheduler.* give the scheduler instead"):
        run.knobs(learning_rate=optimizer)


def test_a_learning_rate_changed_from_outside_reaches_the_optimizer(run):
    optimizer = sgd(0.1)
    run.knobs(learning_rate=optimizer)
    seen = []
    for step, _ in run.steps(range(9), 3, progress=False):
        seen.append(rates(optimizer)[0])
        if step == 0:
            send(run.path, "set", name="learning_rate", value=0.5)
    assert seen == [0.1, 0.5, 0.5]


# --- save and resume ---


def restarted(run, policy, optimizer, *, first):
    """The run as another process would open it; `first`: resume before or after the declaration."""
    unlock(run.path)
    again = rl.Run(run.path)
    again.track(policy, optimizer)
    if first == "resume":
        assert again.resume() == 2
    return again


@pytest.mark.parametrize("first", ["resume", "knobs"])
def test_a_change_outlives_a_restart_unless_another_value_is_declared(run, policy, first, capsys):
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    run.track(policy, optimizer)
    run.knobs(beta=0.1, gamma=1.0, learning_rate=optimizer)
    for step, _ in run.steps(range(9), 2, progress=False):
        if step == 0:
            send(run.path, "set", name="beta", value=0.7)
            send(run.path, "set", name="gamma", value=2.0)
            send(run.path, "set", name="learning_rate", value=0.5)
    optimizer.param_groups[0]["lr"] = 0.1
    again = restarted(run, policy, optimizer, first=first)
    knobs = again.knobs(beta=0.1, gamma=3.0, learning_rate=optimizer)  # gamma by --gamma 3.0
    if first == "knobs":
        assert again.resume() == 2
    assert (knobs.beta, knobs.gamma, knobs.learning_rate) == (0.7, 3.0, 0.5)
    assert rates(optimizer) == [0.5]
    assert "gamma is 3.0, as given now; the checkpoint had 2.0" in capsys.readouterr().out
    assert again.knobs(beta=0.1).beta == 0.1  # declared once more in the same process: as the cell says


def test_a_checkpoint_without_numbers_is_resumed(run, policy):
    """One of an earlier version, or of a loop that declared none."""
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    run.track(policy, optimizer)
    list(run.steps(range(9), 2, progress=False))
    again = restarted(run, policy, optimizer, first="resume")
    assert again.knobs(beta=0.1).beta == 0.1


# --- changes after the last checkpoint ---


def train(run, policy, optimizer, steps, *, send_at=(), beta=0.1, every=2):
    """A loop that saves every few steps; `send_at`: {step: {name: value}} that come in the middle of them."""
    run.track(policy, optimizer)
    knobs = run.knobs(beta=beta, learning_rate=optimizer)
    run.resume()
    for step, _ in run.steps(range(99), steps, save_every=every, progress=False):
        run.log(step, drawn=float(torch.rand(()) * knobs.beta), rate=optimizer.param_groups[0]["lr"])
        for name, value in dict(send_at).get(step, {}).items():
            send(run.path, "set", name=name, value=value)
        yield step


def killed(run, loop, after):
    """The loop goes to the end of a step and not further, as after `kill -9`: nothing is saved on the way out."""
    for step in loop:
        if step == after:
            break
    saved = {file.relative_to(run.path): file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    loop.close()
    for file in list(run.path.rglob("*")):
        if file.is_file() and file.relative_to(run.path) not in saved:
            file.unlink()
    for file, content in saved.items():
        (run.path / file).write_bytes(content)
    unlock(run.path)


CHANGES = {2: {"beta": 0.5}, 4: {"beta": 0.7, "learning_rate": 0.01}}


def start(path, policy):
    rl.setup(seed=0)
    policy = rl.load_policy("tiny-add")
    return rl.Run(path), policy, torch.optim.SGD(policy.trainable_parameters(), lr=0.1)


def test_steps_that_are_done_again_see_the_changes_that_they_saw(tmp_path, policy, capsys):
    """Killed in step 5, gone back to step 4: the change of step 3 is in the checkpoint, those of step 5 are not."""
    whole = start(tmp_path / "whole", policy)
    list(train(*whole, 8, send_at=CHANGES))
    wanted = (whole[0].path / "metrics.jsonl").read_bytes()

    one = start(tmp_path / "killed", policy)
    killed(one[0], train(*one, 8, send_at=CHANGES), after=5)
    assert (one[0].path / "ckpt" / "latest").read_text() == "step-000004\n"
    two = start(tmp_path / "killed", policy)
    killed(two[0], train(*two, 8), after=5)  # once more: the notes are still there
    capsys.readouterr()
    last = start(tmp_path / "killed", policy)
    assert list(train(*last, 8)) == [4, 5, 6, 7]
    assert (last[0].path / "metrics.jsonl").read_bytes() == wanted
    said = capsys.readouterr().out
    assert said.count("beta 0.5 -> 0.7 again, from step 5 on") == said.count("learning_rate 0.1 -> 0.01 again") == 1
    assert (
        "knobs/beta" in last[0].metrics and last[0].metrics["knobs/beta"].tolist() == [0.1] * 3 + [0.5] * 2 + [0.7] * 3
    )
    lines = (last[0].path / "changes.jsonl").read_text().splitlines()
    assert len(lines) == 3  # noted when they came, not when they were repeated


def test_a_new_change_and_a_new_declaration_are_newer_than_the_notes(tmp_path, policy, capsys):
    """It goes back to step 3; the change of step 4 is not that of the loop's declaration, that of step 5 is older."""
    one = start(tmp_path / "run", policy)
    killed(one[0], train(*one, 9, send_at={3: {"beta": 0.7}, 4: {"learning_rate": 0.01}}, every=3), after=5)
    two = start(tmp_path / "run", policy)
    killed(two[0], train(*two, 9, send_at={3: {"learning_rate": 0.5}}, beta=0.2, every=3), after=5)
    assert "beta is not set to 0.7 again: declared now as 0.2, then as 0.1" in capsys.readouterr().out
    last = start(tmp_path / "run", policy)
    list(train(*last, 8, beta=0.2, every=3))
    found = last[0].metrics
    assert found["knobs/beta"].tolist() == [0.1] * 3 + [0.2] * 5
    assert found["knobs/learning_rate"].tolist() == [0.1] * 4 + [0.5] * 4  # not 0.01 from step 5 on


def test_notes_of_nonsense_and_of_numbers_that_are_gone_are_skipped(tmp_path, policy, capsys):
    one = start(tmp_path / "run", policy)
    killed(one[0], train(*one, 8), after=3)
    (one[0].path / "changes.jsonl").write_bytes(
        b'{"step": 2, "name": "gone", "value": 1.0, "declared": 1.0}\n{"step": "x", "name": "beta", "value": 1}\n'
        b'{"step": 2, "name": "beta", "value": NaN, "declared": 0.1}\n[]\n{"step": 3, "name": "beta", "val'
    )
    again = start(tmp_path / "run", policy)
    assert list(train(*again, 4)) == [2, 3]
    said = capsys.readouterr().out
    assert "gone is not set to 1.0 again" in said and "beta is not set to nan again" in said
    assert again[0].metrics["knobs/beta"].tolist() == [0.1] * 4
