"""Damaged, forged and foreign checkpoints, and disks that are full while one is saved."""

import contextlib
import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from builders import assert_identical, make_rollout, make_scores, snapshot, tiny_policy

import rlkit as rl
from rlkit.run import manifest, storage
from rlkit.run.checkpoint import random_state
from rlkit.run.lock import unlock

SHARD, INDEX, RANDOM = "__0_0.distcp", ".metadata", "rng-0.pt"
NEWEST, BEFORE = "step-000002", "step-000001"


def lora_policy(rank):
    torch.manual_seed(0)
    policy = tiny_policy(layers=1)
    config = peft.LoraConfig(r=rank, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return rl.load_policy(policy.model, tokenizer=policy.tokenizer, device="cpu", peft_config=config)


def tracked(path, policy=None, optimizer=torch.optim.AdamW, **options):
    """A run with something to save; the objects that have a state are its attributes for the test."""
    policy = lora_policy(4) if policy is None else policy
    optimizer = optimizer(policy.trainable_parameters(), lr=0.1, **options)
    run = rl.Run(path)
    run.track(policy, optimizer)
    return run, policy, optimizer


def train(run, policy, optimizer, steps):
    """Updates without sampling; a checkpoint after each."""
    for step, _ in run.steps(range(9), steps, save_every=1, progress=False):
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in policy.trainable_parameters()).backward()
        optimizer.step()
        policy.version += 1
        run.log(step, a=float(step))
    unlock(run.path)
    return snapshot(policy.model, optimizer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with two checkpoints, and the state at each."""
    path = tmp_path_factory.mktemp("whole") / "run"
    parts = tracked(path)
    return path, {steps: train(*parts, steps) for steps in (1, 2)}


@pytest.fixture
def ckpt(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    return tmp_path / "run" / "ckpt"


def flip(file, at=0.6, count=64):
    data = bytearray(file.read_bytes())
    place = int(len(data) * at)
    data[place : place + count] = bytes(byte ^ 0x40 for byte in data[place : place + count])
    file.write_bytes(data)


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


def instead(file, make):
    file.unlink()
    make(file)


def edit(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def reseal(checkpoint):
    """Whoever changes a file can change its checksum."""
    counters = json.loads((checkpoint / "run.json").read_text())
    counters.pop("sha256")
    counters["files"] = manifest.checksums(checkpoint)
    counters["files"].pop("run.json")
    (checkpoint / "run.json").write_text(json.dumps(manifest.sealed(counters)))


def forge(checkpoint, **values):
    """Changes run.json and its checksum; `...` takes a value out."""
    counters = json.loads((checkpoint / "run.json").read_text()) | values
    kept = {name: value for name, value in counters.items() if value is not ... and name != "sha256"}
    (checkpoint / "run.json").write_text(json.dumps(manifest.sealed(kept)))


def again(checkpoint, damage):
    damage(checkpoint)
    reseal(checkpoint)


# What is done to the newest of two checkpoints, and what is said of it: the run goes on from the one before.
PASSED_OVER = {
    "shard cut": (lambda c: cut(c / SHARD, 1000), rf"{SHARD} has 1000 bytes, \d+ were saved"),
    "shard empty": (lambda c: cut(c / SHARD, 0), f"{SHARD} has 0 bytes"),
    "shard longer": (lambda c: (c / SHARD).write_bytes((c / SHARD).read_bytes() + b"x"), f"{SHARD} has "),
    "64 bytes flipped": (lambda c: flip(c / SHARD), f"the contents of {SHARD} differ from their checksum"),
    "a bit flipped": (lambda c: flip(c / SHARD, 0.99, 1), f"the contents of {SHARD} differ from their checksum"),
    "shard of the one before": (
        lambda c: shutil.copy(c.with_name(BEFORE) / SHARD, c / SHARD),
        f"the contents of {SHARD} differ from their checksum",
    ),
    "shard missing": (lambda c: (c / SHARD).unlink(), rf"not a whole checkpoint \({SHARD} is missing\)"),
    "shard a FIFO": (lambda c: instead(c / SHARD, os.mkfifo), f"{SHARD} has 0 bytes"),
    "shard a folder": (lambda c: instead(c / SHARD, os.mkdir), f"{SHARD} (has|cannot be read)"),
    "index cut": (lambda c: cut(c / INDEX, 100), rf"\{INDEX} has 100 bytes"),
    "index missing": (lambda c: (c / INDEX).unlink(), rf"\{INDEX} is missing"),
    "index flipped": (lambda c: flip(c / INDEX, 0.5, 1), rf"contents of \{INDEX} differ"),
    "random states cut": (lambda c: cut(c / RANDOM, 500), f"{RANDOM} has 500 bytes"),
    "random states empty": (lambda c: cut(c / RANDOM, 0), f"{RANDOM} has 0 bytes"),
    "random states missing": (lambda c: (c / RANDOM).unlink(), f"{RANDOM} is missing"),
    "random states flipped": (lambda c: flip(c / RANDOM), f"contents of {RANDOM} differ"),
    "run.json empty": (lambda c: cut(c / "run.json", 0), "run.json cannot be read as JSON"),
    "run.json cut": (lambda c: cut(c / "run.json", 60), "run.json cannot be read as JSON"),
    "run.json missing": (lambda c: (c / "run.json").unlink(), r"not a whole checkpoint \(run.json is missing\)"),
    "run.json no text": (lambda c: (c / "run.json").write_bytes(b"\xff\xfe\x00"), "run.json cannot be read as JSON"),
    "run.json a list": (lambda c: (c / "run.json").write_text("[1]"), "run.json cannot be read as JSON"),
    "run.json a FIFO": (lambda c: instead(c / "run.json", os.mkfifo), "run.json cannot be read as JSON"),
    "run.json a number changed": (lambda c: edit(c / "run.json", tokens=1), "contents of run.json differ"),
    "run.json without its checksum": (lambda c: edit(c / "run.json", sha256=None), "contents of run.json differ"),
    "run.json without a step": (
        lambda c: again(c, lambda c: edit(c / "run.json", step="2")),
        "run.json has step='2'",
    ),
    "forged, no logged step": (lambda c: forge(c, logged_step=...), "run.json has logged_step=Ellipsis"),
    "forged, no word of the optimizer": (
        lambda c: forge(c, optimizer_has_state=...),
        "run.json has optimizer_has_state=Ellipsis",
    ),
    "forged, no pairs of size and checksum": (
        lambda c: forge(c, files={SHARD: 5}),
        f"no size and checksum of '{SHARD}'",
    ),
    "forged, a name that is too long": (lambda c: forge(c, files={"a" * 5000: [1, ""]}), "aaa is missing"),
    "forged, a name that is none": (lambda c: forge(c, files={"a\0\ud800": [1, ""]}), "is missing"),
    "the folder missing": (shutil.rmtree, r"not a whole checkpoint \(run.json is missing\)"),
    "the folder a file": (lambda c: (shutil.rmtree(c), c.write_text("")), r"run.json is missing"),
    "forged, shard cut": (
        lambda c: again(c, lambda c: cut(c / SHARD, 1000)),
        f"{SHARD} has 1000 bytes, .metadata says at",
    ),
    "forged, shard missing": (
        lambda c: again(c, lambda c: (c / SHARD).unlink()),
        f"{SHARD} cannot be read: No such file",
    ),
    "forged, shard a FIFO": (lambda c: again(c, lambda c: instead(c / SHARD, os.mkfifo)), "not a regular file"),
    "forged, index empty": (
        lambda c: again(c, lambda c: cut(c / INDEX, 0)),
        r"\.metadata cannot be read.*Ran out of input",
    ),
    "forged, index missing": (
        lambda c: again(c, lambda c: (c / INDEX).unlink()),
        r"\.metadata cannot be read.*No such file",
    ),
}


@pytest.mark.parametrize("damage", PASSED_OVER)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(whole, ckpt, capsys, damage):
    spoil, said = PASSED_OVER[damage]
    spoil(ckpt / NEWEST)
    run, policy, optimizer = tracked(ckpt.parent)
    assert run.resume() == 1 and run.path == ckpt.parent
    unlock(run.path)
    printed = capsys.readouterr().out
    assert f"{NEWEST} is " in printed and f"Going on from {BEFORE} instead." in printed
    assert re.search(said, printed), printed
    assert_identical(snapshot(policy.model, optimizer), whole[1][1])
    assert_identical(train(run, policy, optimizer, 2), whole[1][2])  # and writes the damaged one again
    assert manifest.newest(ckpt) == ckpt / NEWEST and run.metrics["step"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.unlink(),
        lambda file: cut(file, 0),
        lambda file: file.write_bytes(b"\xff\x00"),
        lambda file: file.write_text("../../../elsewhere/step-000001\n"),
        lambda file: instead(file, os.mkfifo),
        lambda file: instead(file, os.mkdir),
    ],
)
def test_without_a_pointer_the_newest_is_taken(whole, ckpt, spoil):
    spoil(ckpt / "latest")
    run, policy, optimizer = tracked(ckpt.parent)
    assert run.resume() == 2 and run.path == ckpt.parent
    unlock(run.path)
    assert_identical(snapshot(policy.model, optimizer), whole[1][2])


def test_a_pointer_to_nothing_is_said(ckpt, capsys):
    (ckpt / "latest").write_text("step-000009\n")
    run, *_ = tracked(ckpt.parent)
    assert run.resume() == 2
    unlock(run.path)
    assert "step-000009 is not a whole checkpoint" in capsys.readouterr().out


def test_a_checkpoint_of_a_past_that_was_left_is_the_last_to_be_taken(ckpt, tmp_path):
    """The run went back from step 2 to step 1, and died; 2 is of another future."""
    (ckpt / "latest").write_text(BEFORE + "\n")
    run, *_ = tracked(ckpt.parent)
    assert run.resume() == 1
    unlock(run.path)
    cut(ckpt / BEFORE / SHARD, 10)
    assert tracked(ckpt.parent)[0].resume() == 2
    assert [path.name for path in manifest.candidates(ckpt)] == [BEFORE, NEWEST]


@pytest.mark.parametrize("place", ["", "ckpt", "ckpt/latest", "ckpt/step-000009"])
def test_a_path_that_is_no_checkpoint_names_the_newest_there(ckpt, place):
    run, *_ = tracked(ckpt.parent)
    with pytest.raises(FileNotFoundError, match=rf"is not a whole checkpoint.*run\.resume\('.*{NEWEST}'\)"):
        run.resume(ckpt.parent / place)


@pytest.mark.parametrize("named", [False, True])
def test_what_cannot_go_on_says_which_file_and_what_to_do(ckpt, named):
    cut(ckpt / NEWEST / SHARD, 1000)
    source = ckpt / NEWEST if named else "auto"
    advice = rf"run\.resume\('.*{BEFORE}'\)" if named else "No other checkpoint beside it is whole"
    if not named:
        (ckpt / BEFORE / "run.json").unlink()
    run, policy, optimizer = tracked(ckpt.parent)
    before = snapshot(policy.model, optimizer)
    with pytest.raises(RuntimeError, match=rf"run\.resume: .*{NEWEST} is damaged: {SHARD} has 1000 bytes.*{advice}"):
        run.resume(source)
    assert_identical(snapshot(policy.model, optimizer), before)
    unlock(ckpt.parent)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("damage", [lambda file: cut(file, 500), lambda file: file.write_bytes(pickle.dumps(print))])
def test_forged_random_states_are_named(ckpt, damage):
    damage(ckpt / NEWEST / RANDOM)
    reseal(ckpt / NEWEST)
    run, *_ = tracked(ckpt.parent)
    with pytest.raises(RuntimeError, match=rf"{NEWEST} is damaged: {RANDOM} holds no random states"):
        run.resume()
    unlock(ckpt.parent)


def test_no_flipped_bit_of_run_json_changes_anything(ckpt, tmp_path):
    """Each bit of each byte: an error, or the same contents (a letter of an escape may be spelled in two ways)."""
    file = ckpt / NEWEST / "run.json"
    data, expected = file.read_bytes(), manifest.read_counters(ckpt / NEWEST)
    for place in range(0, 8 * len(data), 3):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        with contextlib.suppress(RuntimeError):
            assert manifest.read_counters(ckpt / NEWEST) == expected, place


@pytest.mark.parametrize("name", [SHARD, INDEX, RANDOM])
def test_no_flipped_bit_of_a_file_is_overlooked(ckpt, name):
    """A hundred of them, evenly spread."""
    file, counters = ckpt / NEWEST / name, manifest.read_counters(ckpt / NEWEST)
    data = file.read_bytes()
    for place in range(0, 8 * len(data), 8 * len(data) // 100):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(RuntimeError, match=f"the contents of {re.escape(name)} differ from their checksum"):
            manifest.verify(ckpt / NEWEST, counters)


# --- other files of a run ---


@pytest.mark.parametrize("place", [0.02, 0.3, 0.6, 0.97])
def test_flipped_bits_of_a_record_are_found(tmp_path, place):
    """torch.load does not look at the checksums in the file."""
    table = rl.ValueTable(torch.arange(300), torch.rand(300, 8), ("a prompt",) * 300)
    table.save(tmp_path / "vstar.pt")
    assert rl.ValueTable.load(tmp_path / "vstar.pt").digest == table.digest
    flip(tmp_path / "vstar.pt", place)
    with pytest.raises(ValueError, match=r"ValueTable\.load: .*vstar\.pt was not written by `save`, or is"):
        rl.ValueTable.load(tmp_path / "vstar.pt")


@pytest.mark.parametrize("size", [0, 10, 1000])
def test_a_record_that_was_cut_is_named(tmp_path, size):
    rl.ValueTable(torch.arange(300), torch.rand(300, 8), ("a prompt",) * 300).save(tmp_path / "vstar.pt")
    cut(tmp_path / "vstar.pt", size)
    with pytest.raises(ValueError, match=r"ValueTable\.load: .*vstar\.pt was not written by `save`"):
        rl.ValueTable.load(tmp_path / "vstar.pt")


def test_flipped_bits_of_a_rollout_are_found(tmp_path):
    run = rl.Run(tmp_path / "run")
    run.log(0, make_rollout(), make_scores([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]))
    (file,) = (run.path / "rollouts").iterdir()
    assert len(run.rollouts(0)) == 4
    data = file.read_bytes()
    file.write_bytes(data.replace(np.float32([1, 0, 1, 0]).tobytes(), np.float32([1, 0, 1, 7]).tobytes()))
    assert file.read_bytes() != data and len(run.rollouts(0)) == 0
    assert any(file.name in note and "CRC" in note for note in run.reader.notes)
    unlock(run.path)


# --- of something else ---

SAVED = {
    "adapter": lambda: lora_policy(4),
    "one layer": lambda: tiny_policy(layers=1),
    "two": lambda: tiny_policy(layers=2),
}


@pytest.mark.parametrize(
    ("saved", "policy", "options", "said"),
    [
        ("adapter", lambda: lora_policy(8), {}, "[Ss]ize"),
        ("adapter", lambda: tiny_policy(layers=1), {}, "Missing key"),
        ("one layer", lambda: tiny_policy(layers=2), {}, "Missing key"),
        ("two", lambda: tiny_policy(layers=1), {}, "no place here: model.model.layers.1"),
        ("one layer", lambda: tiny_policy(layers=1), {"amsgrad": True}, "Missing key.*max_exp_avg_sq"),
        ("one layer", lambda: tiny_policy(layers=1), {"optimizer": torch.optim.SGD}, "Missing key|no place here"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, saved, policy, options, said):
    run, *_ = parts = tracked(tmp_path / "run", SAVED[saved]())
    train(*parts, 1)
    run, policy, _ = tracked(tmp_path / "run", policy(), **options)
    before = copy.deepcopy(policy.model.state_dict())
    with pytest.raises(
        RuntimeError, match=r"run\.resume: .*step-000001 does not fit the tracked policy and opt"
    ) as found:
        run.resume()
    assert re.search(said, str(found.value)), found.value
    assert "Traceback" not in str(found.value) and len(str(found.value)) < 1000
    assert_identical(policy.model.state_dict(), before)


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        ({"scheduler": True}, {}, r"no place here: (scheduler\.|.*initial_lr)"),
        ({}, {"scheduler": True}, "Missing key.*initial_lr"),
        ({"groups": 2}, {}, r"no place here: optimizer\.param_groups\.1\."),
        ({}, {"groups": 2}, r"Missing key.*param_groups\.1\."),
        ({}, {"dtype": torch.bfloat16}, "was saved as torch.float32, and is torch.bfloat16 here"),
        ({"dtype": torch.bfloat16}, {}, "was saved as torch.bfloat16, and is torch.float32 here"),
    ],
)
def test_nothing_of_a_checkpoint_is_left_out_or_rounded(tmp_path, saved, now, said):
    """A run went on without its scheduler, with the learning rate of another group, or in another precision."""

    def start(scheduler=False, groups=1, dtype=torch.float32):
        policy = tiny_policy(layers=1)
        policy.model.to(dtype)
        parameters = list(policy.trainable_parameters())
        parts = [parameters[number::groups] for number in range(groups)]
        optimizer = torch.optim.AdamW([{"params": part, "lr": 0.1 / (1 + n)} for n, part in enumerate(parts)])
        run = rl.Run(tmp_path / "run")
        run.track(policy, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduler else None)
        return run, policy, optimizer

    train(*start(**saved), 1)
    run, *_ = start(**now)
    with pytest.raises(RuntimeError, match=rf"step-000001 does not fit the tracked .*{said}"):
        run.resume()
    unlock(run.path)
    run, *_ = start(**saved)
    assert run.resume() == 1
    unlock(run.path)
    unlock(run.path)


# --- forged ---


class Attack:
    """What is executed when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def forge_index(checkpoint, attack):
    (checkpoint / INDEX).write_bytes(pickle.dumps(attack))


def forge_index_inside(checkpoint, attack):
    found = storage._Reader(checkpoint).read_metadata()
    found.planner_data = attack
    (checkpoint / INDEX).write_bytes(pickle.dumps(found))


def forge_random_states(checkpoint, attack):
    torch.save(random_state() | {"python": attack}, checkpoint / RANDOM)


def forge_value(checkpoint, attack):
    """A learning rate, which is no tensor, in a shard of torch's own."""
    run, _, optimizer = tracked(checkpoint.parent / "forged")
    optimizer.param_groups[0]["lr"] = attack
    state = rl.run.checkpoint._state(run._state.checkpointer.tracked)
    dcp.save(state, checkpoint_id=str(checkpoint), no_dist=True)


@pytest.mark.parametrize("forge", [forge_index, forge_index_inside, forge_random_states, forge_value])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_in_a_checkpoint_is_executed(ckpt, tmp_path, forge):
    shutil.rmtree(ckpt / BEFORE)
    forge(ckpt / NEWEST, Attack(tmp_path / "executed"))
    (tmp_path / "executed").unlink(missing_ok=True)
    reseal(ckpt / NEWEST)
    run, *_ = tracked(ckpt.parent)
    with pytest.raises(RuntimeError, match=rf"run\.resume: .*{NEWEST} (is damaged|does not fit)"):
        run.resume()
    assert not (tmp_path / "executed").exists()
    unlock(ckpt.parent)


def test_the_attack_would_succeed(tmp_path):
    pickle.loads(pickle.dumps(Attack(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("shard", ["../secret", "/etc/hostname", "sub/file"])
def test_an_index_names_only_files_of_its_checkpoint(ckpt, shard):
    found = storage._Reader(ckpt / NEWEST).read_metadata()
    for info in found.storage_data.values():
        info.relative_path = shard
    (ckpt / NEWEST / INDEX).write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"\.metadata names a file outside the checkpoint"):
        storage.check_index(ckpt / NEWEST)


class Odd:
    """No plain data."""


def test_what_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path):
    run, _, optimizer = tracked(tmp_path / "run")
    optimizer.param_groups[0]["odd"] = Odd()
    with pytest.raises(TypeError, match=r"run\.save: optimizer\.param_groups.*odd is not plain data"):
        run.save()
    assert not list((run.path / "ckpt").glob("*"))


def test_numbers_of_numpy_come_back(tmp_path):
    run, _, optimizer = tracked(tmp_path / "run")
    optimizer.param_groups[0].update(lr=np.float64(0.25), kinds=[np.int64(3), np.float32(0.5), np.bool_(True)])
    run.save()
    unlock(run.path)
    run, _, optimizer = tracked(tmp_path / "run")
    optimizer.param_groups[0]["kinds"] = [0, 0, 0]
    run.resume()
    unlock(run.path)
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["kinds"] == [3, 0.5, True]


# --- a full disk ---


@pytest.fixture
def small_disk():
    """A file system of its own, of 2 MiB."""
    folder = tempfile.mkdtemp()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        os.rmdir(folder)
        pytest.skip(f"cannot mount a file system here: {mount.stderr.strip()}")
    yield Path(folder)
    subprocess.run(["umount", "-l", folder], check=True)
    os.rmdir(folder)


def fill(folder, leave=0):
    """Write until the disk is full; `leave` bytes are free then."""
    free = shutil.disk_usage(folder).free - leave
    (folder / "filler").write_bytes(b"\0" * free)
    return folder / "filler"


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("leave", [0, 4096, 20_000, 60_000, 100_000])
def test_a_full_disk_ends_a_save_with_one_error_and_leaves_nothing(small_disk, leave):
    """Whichever part of the checkpoint is the first that does not fit."""
    run, policy, _ = parts = tracked(small_disk / "run", tiny_policy(layers=1))
    train(*parts, 1)
    before = files_of(run.path / "ckpt")
    filler = fill(small_disk, leave)
    run.step = 2
    with pytest.raises(OSError, match=r"run\.save: the checkpoint .*step-000002 could not be written") as found:
        run.save()
    said = str(found.value)
    assert (
        re.search(r"needs about 0\.\d MiB, and 0\.\d MiB are free", said)
        and "earlier checkpoints are untouched" in said
    )
    assert found.value.__cause__ is None and found.value.__suppress_context__  # one traceback, not three
    assert files_of(run.path / "ckpt") == before
    filler.unlink()
    assert run.save().name == "step-000002"
    run, *_ = tracked(small_disk / "run", policy)  # with gradients
    assert run.resume() == 2
    unlock(run.path)


def test_a_loop_goes_on_after_the_checkpoint_that_did_not_fit(small_disk, whole):
    run, *_ = parts = tracked(small_disk / "run")
    train(*parts, 1)
    filler = fill(small_disk, 6000)  # for the log, not for a checkpoint
    with pytest.raises(OSError, match=r"step-000002 could not be written"):
        train(*parts, 2)
    assert run.step == 2 and run.metrics["step"].tolist() == [0, 1]
    filler.unlink()
    assert_identical(train(*parts, 2), whole[1][2])
    assert (run.path / "ckpt" / "latest").read_text() == "step-000002\n" and run.stopped == "done"


def test_a_run_that_starts_on_a_full_disk_leaves_nothing(small_disk):
    filler = fill(small_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*run/lock"):
        rl.Run(small_disk / "run").log(0, a=1.0)
    assert files_of(small_disk) == ["filler"]
    filler.unlink()
    run = rl.Run(small_disk / "run")
    assert run.path.name == "run"
    unlock(run.path)


def test_what_else_does_not_fit_names_its_file_and_leaves_nothing(small_disk):
    run = rl.Run(small_disk / "run")
    run.log(0, a=1.0)
    state, lines = run.path / "state.json", (run.path / "metrics.jsonl").read_bytes()
    table = rl.ValueTable(torch.arange(300), torch.rand(300, 8), ("a prompt",) * 300)
    fill(small_disk)
    before = files_of(small_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*vstar\.pt"):
        table.save(small_disk / "vstar.pt")
    with pytest.raises(OSError, match=r"No space left on device: .*state\.json"):
        from rlkit.run.folder import write_json

        write_json(state, {"a": "x" * 9000})
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        run.log(1, **{f"a long name {number}": 1.0 for number in range(300)})
    with pytest.raises(OSError, match=r"No space left on device: .*report\.html"):
        from rlkit.view.report import write_report

        write_report([run.path], small_disk / "report.html")
    with pytest.warns(UserWarning, match=r"rollout of step 1 was not written"):
        run.log(1, make_rollout(), make_scores([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]))
    assert [name for name in files_of(small_disk) if name not in before] == []
    assert (run.path / "metrics.jsonl").read_bytes().startswith(lines)


def test_gradients_of_an_earlier_loop_keep_no_optimizer_state_away(whole, ckpt):
    """torch gives a fresh optimizer a state to load into only where no parameter has a gradient; nothing was said."""
    run, policy, optimizer = tracked(ckpt.parent)
    sum(parameter.sum() for parameter in policy.trainable_parameters()).backward()
    assert run.resume() == 2
    unlock(run.path)
    assert_identical(snapshot(policy.model, optimizer), whole[1][2])


def test_a_checkpoint_between_a_gradient_and_the_first_step_can_be_loaded(tmp_path):
    run, policy, optimizer = tracked(tmp_path / "run")
    sum(parameter.sum() for parameter in policy.trainable_parameters()).backward()
    kept = [parameter.grad.clone() for parameter in policy.trainable_parameters()]
    run.save()
    assert_identical([parameter.grad for parameter in policy.trainable_parameters()], kept)
    unlock(run.path)
    run, _, optimizer = tracked(tmp_path / "run")
    run.resume()
    assert not optimizer.state
    unlock(run.path)
