# ruff: noqa: E501
"""Folders of runs that somebody else made, by hand or by another program: every reader takes what it can, and says the rest."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_rollout, make_scores
from run_folders import write_run

import rlkit as rl
from rlkit.cli import main
from rlkit.view.panel_data import answer
from rlkit.view.terminal import show_completions

LAST = "rollouts/step-00000002.parquet"
PANDAS = (
    [1],
    {"index_columns": ["nope"], "columns": [{"name": "x"}], "column_indexes": []},
    {"index_columns": [], "columns": 5},
)
COLUMNS = {
    "reward": [["a"], [{"a": 1}], [[1.0]], [b"1"]],
    "rewards/correct": [["a"], [datetime.datetime(2026, 1, 1)]],
    "row_id": [[[1]], [{"a": 1}]],
    "row": [["0"]],
    "advantage": [["x"]],
    "completion": [[1], [["a"]], [b"x"]],
    "tokens": [["abc"], [[1]]],
    "logp": [[["x"]], [0.5]],
}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=3)


def read_by_all(run):
    """Every reader; returns the notes."""
    reader = rl.Run.open(run)
    assert len(reader.metrics) >= 0 and len(reader.evaluations) >= 0 and len(reader.rollouts()) >= 0
    for kind in ("overview", "table", "pin"):
        json.dumps(answer([reader], {"kind": kind, "run": 0, "row_id": 0}), allow_nan=False)
    sides = {"left": {"run": 0, "step": 0}, "right": {"run": 0, "step": 2}}
    json.dumps(answer([reader], {"kind": "compare", **sides}), allow_nan=False)
    show_completions(run)
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 0
    assert main(["ctl", str(run), "status"]) == 0
    return reader.notes


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in COLUMNS.items() for value in values])
def test_a_column_that_holds_something_else_is_named_and_the_step_left_out(run, name, value):
    table = pq.read_table(run / LAST)
    place = table.column_names.index(name)
    pq.write_table(table.set_column(place, name, pa.array(value * len(table))), run / LAST)
    (note,) = read_by_all(run)
    assert note.startswith("step-00000002.parquet cannot be read and was left out: its column") and repr(name) in note


def test_tables_of_another_make_are_left_out_or_read(run):
    table = pq.read_table(run / LAST)
    twice = pa.Table.from_arrays([table["completion"]] * 2, ["completion"] * 2)
    for odd, is_read in ((twice, False), (pa.table({}), True), (pa.table({"x": [1]}), True), (table[:0], True)):
        pq.write_table(odd, run / LAST)
        assert is_read != any("left out" in note for note in read_by_all(run))
    for said in PANDAS:  # what pandas would read of a file's metadata
        pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(said)}), run / LAST)
        assert not read_by_all(run) and len(rl.Run.open(run).rollouts(2)) == len(table)


@pytest.mark.parametrize("state", [{"time": int("9" * 400)}, {"time": 1e300, "step": int("9" * 400)}, {"time": -1e300}])
def test_a_time_may_be_any_number(run, state):
    said = json.loads((run / "state.json").read_text()) | {"status": "running"}
    (run / "state.json").write_text(json.dumps(said | state))
    assert not read_by_all(run)


def test_a_name_may_hold_half_a_letter(run):
    (run / "evaluations.jsonl").write_text('{"name": "a\\ud800", "step": 1, "\\ud800": 2}\n')
    assert not read_by_all(run)
    assert rl.Run.open(run).evaluations["name"].tolist() == ["a\ufffd"]


def test_a_datasets_column_is_no_part_of_the_reward(tmp_path):
    run = rl.Run(tmp_path / "run")
    rollout = make_rollout((2, 2), columns={"rewards/mine": ("a", "b"), "reward": (1, 2)})
    run.log(0, rollout, make_scores([1.0, 0.0], [0, 0]))
    frame = rl.Run.open(run.path).rollouts(0)
    assert frame["column:rewards/mine"].tolist() == ["a", "b"] and frame["reward"].tolist() == [1, 0]
