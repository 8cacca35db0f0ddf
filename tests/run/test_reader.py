"""RunReader: a folder of another process, while it is written, damaged, long, or hardly there."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_rollout, make_scores

import rlkit as rl
from rlkit.run.reader import RunReader
from rlkit.run.rollouts import part_of

ROOT = Path(__file__).parents[2]
CUTS = 200
REPEATS = 15
LONG, SHORT = 100_000, 1_000
MUCH_LONGER = 10.0  # of refreshes; parsing the whole file again would be a factor of LONG / SHORT = 100


@pytest.fixture
def run(tmp_path):
    return rl.Run(tmp_path / "run")


def log(run, step, **numbers):
    run.log(step, make_rollout(seed=step), make_scores([1, 0, 0.5, None], [0, 0, 1, 1]), torch.ones(4), **numbers)


def lines_of(data):
    """The whole lines of a JSON-lines file, parsed without rlkit."""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def without_null(frame):
    """A frame as plain rows, None for NaN."""
    return [
        {name: None if math.isnan(value) else value for name, value in row.items()} for row in frame.to_dict("records")
    ]


# --- what is there ---


def test_a_folder_is_read_as_it_was_written(run):
    for step, _ in run.steps(range(3), 3, progress=False):
        log(run, step, a=step / 2)
    found = rl.Run.open(run.path)
    assert isinstance(found, RunReader) and found.path == run.path and found.name == "run" and found.notes == []
    assert found.config["parameters"] == {} and found.state["stopped"] == "done"
    assert without_null(found.metrics) == lines_of((run.path / "metrics.jsonl").read_bytes())
    assert found.metrics["step"].dtype == np.int64
    assert found.names[-1] == "a" and "step" not in found.names
    steps, values = found.series("a")
    assert steps.tolist() == [0, 1, 2] and values.tolist() == [0, 0.5, 1]
    assert found.timings["step"].tolist() == [0, 1, 2] and (found.timings["step_time"] > 0).all()
    assert found.rollout_steps == [0, 1, 2]
    assert found.rollouts()["step"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert "3 steps logged, the last is 2" in repr(found)


def test_the_run_itself_reads_the_same(run):
    log(run, 0)
    log(run, 1)
    assert run.rollouts(1)["completion"].tolist() == ["0", "1", "2", "3"]
    assert run.reader.rollout_steps == [0, 1] and run.reader is run.reader


def test_metrics_that_come_and_go_are_gaps(run):
    """A metric that comes at step 50, one that stops, values that are null; nothing raises."""
    run.log(0, a=1, b=float("nan"))
    reader = rl.Run.open(run.path)
    assert reader.names == ["a", "b"]
    run.log(50, b=2, late=3)
    assert reader.refresh() and reader.names == ["a", "b", "late"]
    assert without_null(reader.metrics) == [
        {"step": 0, "a": 1, "b": None, "late": None},
        {"step": 50, "a": None, "b": 2, "late": 3},
    ]
    np.testing.assert_array_equal(reader.series("b")[1], [math.nan, 2])


def test_phases_of_a_step_are_columns(tmp_path):
    (tmp_path / "timings.jsonl").write_text('{"step": 0, "step_time": 3.0, "phases": {"sample": 1.0, "other": 2.0}}\n')
    (tmp_path / "metrics.jsonl").touch()
    assert without_null(RunReader(tmp_path).timings) == [
        {"step": 0, "step_time": 3.0, "phases/sample": 1.0, "phases/other": 2.0}
    ]


def test_a_series_that_was_handed_out_stays_as_it_was(run):
    run.log(0, a=1)
    reader = rl.Run.open(run.path)
    _, values = reader.series("a")
    values[0] = 7
    run.log(1, a=2)
    reader.refresh()
    assert reader.series("a")[1].tolist() == [1, 2]


def test_what_was_asked_wrongly_is_named(run, tmp_path):
    run.log(0, a=1)
    log(run, 4)
    log(run, 9)
    reader = rl.Run.open(run.path)
    with pytest.raises(KeyError, match=r"no metric 'loss' was logged; there are \['a'"):
        reader.series("loss")
    with pytest.raises(KeyError, match=r"step 7 was not kept; the nearest that was is 9"):
        reader.rollouts(7)
    with pytest.raises(FileNotFoundError, match=r"is not the folder of a run: expected config\.json"):
        rl.Run.open(tmp_path / "nothing")


def test_columns_can_be_chosen(run):
    log(run, 0)
    found = rl.Run.open(run.path).rollouts(0, columns=["row_id", "completion", "unheard of"])
    assert list(found.columns) == ["row_id", "completion"] and len(found) == 4


# --- while it is written ---


def test_a_refresh_says_whether_there_was_anything(run):
    log(run, 0)
    reader = rl.Run.open(run.path)
    assert not reader.refresh()
    log(run, 1)
    assert reader.refresh() and not reader.refresh()
    assert len(reader.metrics) == 2 and reader.rollout_steps == [0, 1]


def test_half_a_line_is_left_out_until_it_is_whole(run):
    run.log(0, a=1)
    reader = rl.Run.open(run.path)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 1, "a"')
        file.flush()
        assert not reader.refresh() and len(reader.metrics) == 1
        assert reader.notes == [
            "metrics.jsonl: the last line is not whole and was left out.",
            "state.json is missing.",
        ]
        file.write(b": 2.5}\n")
        file.flush()
        assert reader.refresh() and reader.series("a")[1].tolist() == [1, 2.5]
    assert reader.notes == ["state.json is missing."]


def test_the_steps_that_the_state_counts_are_in_the_tables(run, monkeypatch):
    """The writer finishes a step, and the run, after a reader has read its first file."""
    loop = run.steps(range(9), 2, progress=False)
    step, _ = next(loop)
    reader, seen = rl.Run.open(run.path), []

    def then_write(read):
        def once(*arguments):
            found = read(*arguments)
            if not seen:
                seen.append(run.log(step, a=1))
                next(loop)
                loop.close()
            return found

        return once

    monkeypatch.setattr(reader, "_refresh_json", then_write(reader._refresh_json))
    monkeypatch.setattr(reader._metrics, "refresh", then_write(reader._metrics.refresh))
    reader.refresh()
    assert reader.state["step"] <= len(reader.metrics)
    assert reader.refresh() and reader.state["step"] == len(reader.metrics) == 1 and reader.state["stopped"] == "left"


def test_a_change_within_one_tick_of_the_file_systems_clock_is_seen(run):
    """Same size, same time stamp, same inode."""
    file = run.path / "state.json"
    file.write_text('{"step": 1}')
    reader, stamp = rl.Run.open(run.path), file.stat()
    file.write_text('{"step": 2}')
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.stat().st_ino == stamp.st_ino
    assert reader.refresh() and reader.state == {"step": 2} and not reader.refresh()


def test_a_state_that_was_read_in_the_middle_of_a_write_is_read_again(run):
    file = run.path / "state.json"
    file.write_text('{"step": 1')
    os.utime(file, ns=(0, 0))  # long ago: its stamp would count
    reader = rl.Run.open(run.path)
    assert reader.state == {} and "state.json is not whole." in reader.notes
    file.write_text('{"step":1}')
    os.utime(file, ns=(0, 0))
    assert reader.refresh() and reader.state == {"step": 1} and reader.notes == []


@pytest.mark.parametrize("longer", [False, True])
def test_a_resumed_run_that_cut_its_lines_is_read_again(run, longer):
    """The file is replaced by one that is shorter, or has grown beyond the old size by the time one looks."""
    for step in range(6):
        run.log(step, a=step)
    reader = rl.Run.open(run.path)
    file = run.path / "metrics.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)[:3]
    other = run.path / "other"
    other.write_bytes(b"".join(kept) + b"".join(b'{"step": %d, "b": 1}\n' % step for step in range(3, 30 * longer)))
    os.replace(other, file)
    assert reader.refresh()
    assert len(reader.metrics) == (30 if longer else 3)
    assert reader.series("a")[1][:3].tolist() == [0, 1, 2]


def test_rollouts_that_vanish_or_are_torn_are_left_out_with_a_note(run):
    for step in range(3):
        log(run, step)
    reader = rl.Run.open(run.path)
    part_of(run.path, 0).unlink()
    torn = part_of(run.path, 1)
    torn.write_bytes(torn.read_bytes()[:500])
    assert len(reader.rollouts(0)) == 0 and len(reader.rollouts(1)) == 0
    assert reader.rollouts()["step"].tolist() == [2] * 4
    notes = " ".join(reader.notes)
    assert "step-00000000.parquet was removed" in notes and "step-00000001.parquet cannot be read" in notes


WRITER = """
import sys, time
import torch
from builders import make_rollout, make_scores
import rlkit as rl
run = rl.Run(sys.argv[1])
for step, _ in run.steps(range(10**6), 10**6, progress=False):
    scores = make_scores([1, 0, 0.5, None], [0, 0, 1, 1])
    run.log(step, make_rollout(seed=step % 7), scores, torch.ones(4), doubled=2 * step)
    if (run.path / "enough").exists():
        break
"""


@pytest.mark.slow
def test_a_run_of_another_process_is_read_while_it_is_written(tmp_path):
    """At every look the lines and tables are whole, in order, and never fewer than before."""
    folder = tmp_path / "run"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], env=os.environ | {"PYTHONPATH": paths})
    try:
        end = time.monotonic() + 240
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        reader, seen, grew = rl.Run.open(folder), 0, 0
        while grew < 20:
            assert process.poll() is None and time.monotonic() < end, (seen, reader.notes)
            if not reader.refresh():
                continue
            steps, doubled = reader.series("doubled") if "doubled" in reader.names else (np.zeros(0), np.zeros(0))
            assert steps.tolist() == list(range(len(steps))) and (doubled == 2 * steps).all()
            assert len(steps) >= seen
            grew, seen = grew + (len(steps) > seen), len(steps)
            for step in reader.rollout_steps[-2:]:
                assert reader.rollouts(step)["step"].tolist() == [step] * 4
        assert reader.state["step"] <= seen + 1 and not any("parquet" in note for note in reader.notes)
        (folder / "enough").touch()
        assert process.wait(timeout=120) == 0
        reader.refresh()
        assert len(reader.metrics) == reader.state["step"] == len(reader.rollout_steps) and reader.notes == []
    finally:
        process.kill()
        process.wait()


# --- damaged ---


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run that really trained, and what is in it."""
    from builders import tiny_policy

    folder = tmp_path_factory.mktemp("sound") / "run"
    world = rl.setup(seed=3)
    policy, optimizer = world.prepare(tiny_policy(), lambda params: torch.optim.AdamW(params, lr=1e-2))
    prompts = rl.PromptLoader([{"prompt": f"{i}="} for i in range(5)], policy, batch_size=2, seed=3)
    run = rl.Run(folder, config={"lr": 1e-2})
    for step, batch in run.steps(prompts, 4, progress=False):
        rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=5)
        scores = rl.score(rollout, lambda completions: [float(len(text)) for text in completions])
        advantages = rl.compute_loo_advantage(scores)
        run.log(step, rollout, scores, advantages, rl.loss_step(policy, optimizer, rollout, advantages))
    return folder


@pytest.mark.slow
def test_a_folder_cut_at_any_byte_opens(sound, tmp_path):
    """200 cuts at random places of random files: whole lines are right, and notes say what was left out."""
    draw = random.Random(5)
    files = sorted(file.relative_to(sound) for file in sound.rglob("*") if file.is_file() and file.name != "lock")
    assert {file.parts[0].split(".")[0] for file in files} == {"config", "metrics", "timings", "state", "rollouts"}
    whole = {file: (sound / file).read_bytes() for file in files}
    plan = [draw.choice(files) for _ in range(CUTS)]
    assert set(plan) == set(files)
    folder = tmp_path / "cut"
    shutil.copytree(sound, folder)
    for cut in plan:
        place = draw.randrange(len(whole[cut]))
        (folder / cut).write_bytes(whole[cut][:place])
        left, reader = whole[cut][:place], rl.Run.open(folder)
        assert without_null(reader.metrics) == lines_of((folder / "metrics.jsonl").read_bytes()), (cut, place)
        tables = {step: reader.rollouts(step) for step in reader.rollout_steps}
        torn = [step for step, table in tables.items() if not len(table)]
        assert torn == ([int(cut.stem[5:])] if cut.parts[0] == "rollouts" else []), (cut, place)
        damaged = {
            ".jsonl": bool(left) and not left.endswith(b"\n"),
            ".json": left.rstrip() != whole[cut].rstrip(),
            ".parquet": True,
        }[cut.suffix]
        assert len(reader.notes) == damaged and all(cut.name in note for note in reader.notes), (cut, place)
        (folder / cut).write_bytes(whole[cut])


def test_lines_that_are_no_numbers_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 0, "a": 1}\nnot json\n[1, 2]\n{"a": 2}\n\xff\xfe\n'
        b'{"step": 1, "a": "text", "b": NaN, "c": "text"}\n\n{"step": 2, "a": 3}\n'
    )
    reader = RunReader(tmp_path)
    assert without_null(reader.metrics) == [
        {"step": 0, "a": 1, "b": None},
        {"step": 1, "a": None, "b": None},
        {"step": 2, "a": 3, "b": None},
    ]
    assert "metrics.jsonl: 2 lines are not JSON and were left out." in reader.notes
    assert "metrics.jsonl: 2 lines without a step were left out." in reader.notes


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl", "state.json"])
def test_one_file_is_enough(sound, tmp_path, left):
    shutil.copy(sound / left, tmp_path)
    reader = RunReader(tmp_path)
    assert len(reader.metrics) == (4 if left == "metrics.jsonl" else 0)
    assert len(reader.notes) == (2 if left == "metrics.jsonl" else 1)
    assert list(reader.metrics.columns)[:1] == ["step"] and reader.rollout_steps == [] and len(reader.rollouts()) == 0


# --- long ---


def refresh_seconds(reader, file, first):
    """The least CPU time of a refresh after one more line."""
    found = []
    for step in range(first, first + REPEATS):
        with open(file, "a") as handle:
            handle.write(json.dumps({"step": step, **{f"m{i}": step / 7 for i in range(30)}}) + "\n")
        start = time.thread_time()  # CPU time: other work on the machine counts little
        assert reader.refresh()
        found.append(time.thread_time() - start)
    return min(found)


@pytest.mark.slow
def test_a_long_run_opens_in_proportion_and_refreshes_at_a_flat_cost(tmp_path):
    """100,000 steps against 1,000, in one process, as ratios."""
    seconds, refreshes = {}, {}
    for steps in (SHORT, LONG):
        folder = tmp_path / str(steps)
        folder.mkdir()
        values = ", ".join(f'"m{i}": {math.pi * i}' for i in range(30))
        file = folder / "metrics.jsonl"
        file.write_text("".join(f'{{"step": {step}, {values}}}\n' for step in range(steps)))
        start = time.thread_time()
        reader = RunReader(folder)
        seconds[steps] = time.thread_time() - start
        assert len(reader.series("m29")[0]) == steps
        refreshes[steps] = refresh_seconds(reader, file, steps)
        assert reader.series("m3")[0][-1] == steps + REPEATS - 1
    assert seconds[LONG] / seconds[SHORT] < 3 * LONG / SHORT
    assert refreshes[LONG] / refreshes[SHORT] < MUCH_LONGER
