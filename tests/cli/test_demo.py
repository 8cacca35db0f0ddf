"""The main job: the offline model learns, by both algorithms, over three seeds; and the command line's manners."""

import json

import pytest

import rlkit as rl
from rlkit.cli import main
from rlkit.cli.demo_loops import run_demo

pytestmark = pytest.mark.integration


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ["rloo", "a2po"])
def test_held_out_accuracy_rises_from_at_most_045_to_at_least_075(algorithm, seed, tmp_path):
    result = run_demo("tiny-add", algorithm, seed=seed, out=tmp_path)
    assert result.before <= 0.45 and result.after >= 0.75, (result.before, result.after)
    assert result.run.stopped == "done"


@pytest.mark.parametrize("algorithm", ["rloo", "a2po"])
def test_two_steps_write_a_run_that_can_be_read(algorithm, tmp_path, capsys):
    assert main(["demo", "--algorithm", algorithm, "--max-steps", "2", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "held-out accuracy" in said and "before" in said
    folder = tmp_path / f"demo-tiny-add-{algorithm}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for name in lines[0]:
        rl.metrics.describe(name)  # every number that is written is declared


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    for place in ("a", "b"):
        main(["demo", "--algorithm", "rloo", "--max-steps", "2", "--seed", "5", "--out", str(tmp_path / place)])
    one, two = (tmp_path / place / "demo-tiny-add-rloo" / "metrics.jsonl" for place in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("arguments", [["demo", "--max-steps", "0"], ["demo", "--model", "gpt5"], ["dmo"], []])
def test_bad_arguments_end_with_status_2_and_a_hint(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: rlkit" in capsys.readouterr().err


def test_an_unknown_pair_is_named():
    with pytest.raises(ValueError, match=r"demo: expected one of tiny-add with rloo.*got tiny-add with ppo"):
        run_demo("tiny-add", "ppo")
