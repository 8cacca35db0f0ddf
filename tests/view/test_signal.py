"""Groups without signal: one sentence, from the log alone."""

import json

import numpy as np
from folders import write_run

from rlkit.run.reader import RunReader
from rlkit.view import Dashboard
from rlkit.view.panels import History
from rlkit.view.signal_warning import METRIC, STEPS, Signal, first_without_signal
from rlkit.view.static import as_page


def write_shares(folder, shares, first=0):
    write_run(folder, 1) if not folder.exists() else None
    with open(folder / "metrics.jsonl", "a") as file:
        for place, share in enumerate(shares):
            file.write(json.dumps({"step": 1 + first + place, "reward": 0.5, METRIC: share}) + "\n")


def test_it_is_said_once_and_in_the_same_words_however_often_one_looks(tmp_path):
    shares = [0.2] * 15 + [0.9, 0.4] * 10
    write_shares(tmp_path / "whole", shares)
    whole = History(RunReader(tmp_path / "whole"))
    whole.update()
    slow = Signal()
    for place, share in enumerate(shares):
        write_shares(tmp_path / "slow", [share], first=place)
        reader = RunReader(tmp_path / "slow")
        slow.update(reader)
    assert slow.said == whole.signal.said
    assert whole.signal.said.startswith("Since step 13 more than half of the groups had no signal")


def test_one_batch_of_such_groups_is_chance():
    steps = np.arange(40.0)
    assert first_without_signal(steps, np.where(steps % 7 == 0, 1.0, 0.45)) is not None
    assert first_without_signal(steps, np.where(steps % 7 == 0, 1.0, 0.3)) is None
    assert first_without_signal(steps, np.full(40, 0.5)) is None  # half is not more than half
    assert first_without_signal(steps[: STEPS - 1], np.ones(STEPS - 1)) is None
    assert first_without_signal(steps, np.where(steps < 20, np.nan, 0.8)) == 20


def test_the_view_says_it_beside_the_charts_in_its_notes_and_in_the_picture(tmp_path):
    write_shares(tmp_path / "r", [0.9] * 12)
    dash = Dashboard(tmp_path / "r", live=True)
    assert len([note for note in dash.notes if "had no signal" in note]) == 1
    dash.refresh()
    assert dash._said.value.count("had no signal") == 1
    history = History(RunReader(tmp_path / "r"))
    history.update()
    assert as_page([history]).count("had no signal") == 1
    dash.close()
