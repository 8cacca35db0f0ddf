"""trackio and wandb, the real packages, without a network: what arrives there; a fault of theirs stops nothing."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import make_rollout, make_scores
from waiting import LONG

import rlkit as rl
from rlkit.run import trackers
from rlkit.run.line_files import read_lines
from rlkit.run.trackers import TABLE_ROWS, Sink, completions_frame

ROOT = Path(__file__).parents[2]
LOOP = """
import os, socket, sys, json, time
asked, connect = [], socket.socket.connect
def remember(self, address):
    asked.append(repr(address))
    return connect(self, address)
socket.socket.connect = remember
import torch
from builders import make_rollout, make_scores
import rlkit as rl
run = rl.Run("run", config={"lr": 0.1}, report_to=("trackio", "wandb"), log_completions=True)
for stop in (2, 3):  # the loop goes on: the same run of the tracker does too
    for step, _ in run.steps(range(10), stop, progress=False):
        rollout = make_rollout(completions=["<b>", "$x$", "\\x00", "d"])
        scores = make_scores([1, 0, 1, None], rollout.group_id.tolist())
        run.log(step, rollout, scores, torch.ones(4), gap=float("nan"), mine=step / 2)
    time.sleep(1.1)  # wandb names its folders by the second
print("ASKED", json.dumps(asked))
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A loop in a process of its own, since both trackers keep the state of a process."""
    folder = tmp_path_factory.mktemp("tracked")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "WANDB_MODE": "offline",
        "WANDB__SERVICE_WAIT": str(LONG),  # for its helper process to start
        "TRACKIO_DIR": str(folder / "trackio"),
        "HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:rlkit", "-c", LOOP],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=2 * LONG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done


@pytest.mark.slow
def test_no_request_leaves_the_machine(tracked):
    """wandb talks to its own helper process through a socket file, or the loopback."""
    _, done = tracked
    asked = done.stdout.partition("ASKED")[2]
    for address in json.loads(asked):
        assert address.startswith("'/") or "127.0.0.1" in address or "::1" in address, address


@pytest.mark.slow
def test_trackio_has_the_numbers_and_the_completions(tracked):
    folder, _ = tracked
    with sqlite3.connect(folder / "trackio" / "rlkit.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("run", 0), ("run", 1), ("run", 2)]
    for step, (_, _, text) in enumerate(rows):
        values = json.loads(text)
        assert values["mine"] == step / 2 and "gap" not in values and values["reward"] == pytest.approx(2 / 3)
        table = json.dumps(values["completions"])
        assert "<b>" in table and "advantage" in table


@pytest.mark.slow
def test_wandb_has_the_numbers_and_the_completions(tracked):
    folder, _ = tracked
    files = sorted((folder / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1 and len(files) == 2  # the same run, gone on with
    found = {}
    for file in files:
        for record in records(file):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "_step" in items:
                found[items["_step"]] = items
    assert sorted(found) == [0, 1, 2]
    assert [found[step]["mine"] for step in range(3)] == [0, 0.5, 1] and "gap" not in found[0]
    tables = sorted((folder / "run" / "wandb").glob("offline-run-*/files/media/table/completions_0_*.table.json"))
    table = json.loads(tables[0].read_text())
    assert table["columns"] == ["step", "prompt", "completion", "r", "advantage"]
    assert [row[2] for row in table["data"]] == ["<b>", "$x$", "\x00", "d"]


def records(file):
    """The records of wandb's file: a header of 7 bytes, then LevelDB's log format, https://github.com/google/leveldb,
    doc/log_format.md: blocks of 32 KiB with pieces of records (checksum, length, kind: 1 whole, 2 first, 4 last).
    """
    from wandb.proto import wandb_internal_pb2

    data, place, text = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if place % 2**15 > 2**15 - 7:  # the rest of a block is too short for a piece
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        text = (text if kind in (3, 4) else b"") + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            yield record


# --- faults ---


class Broken(Sink):
    """A tracker that cannot be reached: at once, or when something is sent."""

    opened = 0
    at = "open"

    def __init__(self, *arguments):
        Broken.opened += 1
        if self.at == "open":
            raise ConnectionError("no route to host")
        self.id = "x"

    def log(self, step, values):
        raise ConnectionError("gone")

    def table(self, frame):
        return frame

    def close(self):
        raise ConnectionError("gone for good")


@pytest.mark.parametrize(("at", "message", "opened"), [("open", "is not used", 1), ("log", "missed something", 1)])
def test_a_sink_that_fails_warns_once_and_the_training_goes_on(tmp_path, monkeypatch, at, message, opened):
    monkeypatch.setattr(Broken, "at", at)
    monkeypatch.setattr(Broken, "opened", 0)
    monkeypatch.setitem(trackers.KINDS, "wandb", Broken)
    run = rl.Run(tmp_path / "run", report_to="wandb")
    with pytest.warns(UserWarning, match=f"wandb failed and {message}.*training goes on. ConnectionError") as caught:
        for step, _ in run.steps(range(4), 4, progress=False):
            run.log(step, loss=1.0)
    assert len(caught) == 1 and Broken.opened == opened and run.stopped == "done"
    assert len(read_lines(run.path / "metrics.jsonl")) == 4


def test_only_the_main_process_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(Broken, "opened", 0)
    monkeypatch.setitem(trackers.KINDS, "wandb", Broken)
    run = rl.Run(tmp_path / "run", report_to="wandb")
    _ = run.path
    monkeypatch.setattr("rlkit.distributed.collectives.rank", lambda: 1)
    for step, _ in run.steps(range(2), 2, progress=False):
        run.log(step, loss=1.0)
    assert Broken.opened == 0


def test_an_interrupt_goes_through(tmp_path, monkeypatch):
    """The user's own interrupt goes through."""

    def stop(self, step, values):
        raise KeyboardInterrupt

    monkeypatch.setattr(Broken, "at", "log")
    monkeypatch.setattr(Broken, "log", stop)
    monkeypatch.setitem(trackers.KINDS, "wandb", Broken)
    run = rl.Run(tmp_path / "run", report_to="wandb")
    with pytest.raises(KeyboardInterrupt):
        run.log(0, loss=1.0)


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'trackio' is not installed: pip install 'rlkit-llm\[track\]'"):
        rl.Run(tmp_path / "run", report_to="trackio")
    assert not (tmp_path / "run").exists()


def test_what_was_asked_wrongly_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected one of \['trackio', 'wandb'\], got 'tensorboard'"):
        rl.Run(tmp_path / "run", report_to=["tensorboard"])
    run = rl.Run(tmp_path / "run")
    run.report_to("wandb", project="mine")
    with pytest.raises(ValueError, match="reports to wandb already"):
        run.report_to("wandb")


def test_the_table_of_completions_is_trls_and_bounded(tmp_path):
    from rlkit.run.rollout_rows import StepRecords, rows_of, table_of

    rows = TABLE_ROWS + 5
    rollout, scores = make_rollout([1] * rows), make_scores([1.0] * rows)
    frame = completions_frame(table_of(3, [rows_of(rollout, StepRecords(rollout, scores, torch.ones(rows)))]))
    assert list(frame.columns) == ["step", "prompt", "completion", "r", "advantage"]
    assert len(frame) == TABLE_ROWS and frame["completion"].tolist() == [str(row) for row in range(TABLE_ROWS)]


@pytest.mark.integration
def test_nothing_is_imported_for_runs_without_sinks(tmp_path):
    """wandb and trackio take a second each."""
    code = "import sys, rlkit as rl; r = rl.Run('run'); r.log(0, a=1); print({'wandb', 'trackio'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.stdout.strip().endswith(b"set()"), done.stderr
