"""Flags: strict types, files below flags, unknown names with the nearest suggestion."""

import json

import pytest
import torch
from builders import tiny_policy
from cells import cell, exported, plain, run_text

import rlkit as rl
from rlkit.export import ExportError
from rlkit.export.runtime.flags import Parameter, parse
from rlkit.export.runtime.kinds import accept, from_text
from rlkit.support import process_state

CELL = """
from typing import Literal, Optional

name = "tiny-add"  # a folder, or 100% of a hub id
steps = 120  # updates
lr = 3e-4  # step size
clip = True  # clip the ratio
sizes = [1, 2]  # JSON
options = {"a": 1}
pair = (1, 2)
limit: int | None = None  # none: no limit
rate: Optional[float] = 1
mode: Literal["fast", "slow"] = "fast"
batch = 2 * 64
shape: tuple[int, ...] = (3,)
below = -1.5
_hidden = "x"
"""
DEFAULTS = {
    "name": "tiny-add",
    "steps": 120,
    "lr": 3e-4,
    "clip": True,
    "sizes": [1, 2],
    "options": {"a": 1},
    "pair": (1, 2),
    "limit": None,
    "rate": 1,
    "mode": "fast",
    "batch": 128,
    "shape": (3,),
    "below": -1.5,
    "_hidden": "x",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A script with one parameter of every kind."""
    return exported(tmp_path_factory.mktemp("flags"), "import math", cell(CELL, "parameters"), "twice = steps * 2").text


def values(text, *arguments, name="__main__"):
    found = run_text(text, *arguments, name=name)
    return {key: found[key] for key in DEFAULTS} | ({"twice": found["twice"]} if "twice" in found else {})


def refused(capsys, text, *arguments):
    """What the script says when it refuses a command line."""
    with pytest.raises(SystemExit) as caught:
        run_text(text, *arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_defaults_are_the_cells_values(text):
    assert values(text) == DEFAULTS | {"twice": 240}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "3"], {"steps": 3, "twice": 6}),
        (["--steps=-3"], {"steps": -3, "twice": -6}),
        (["--lr", "1"], {"lr": 1.0}),
        (["--lr", "-1e-5"], {"lr": -1e-5}),
        (["--lr", "inf"], {"lr": float("inf")}),
        (["--no-clip"], {"clip": False}),
        (["--clip"], {"clip": True}),
        (["--name", "a b"], {"name": "a b"}),
        (["--name=--odd"], {"name": "--odd"}),
        (["--sizes", "[3]"], {"sizes": [3]}),
        (["--options", '{"b": 2}'], {"options": {"b": 2}}),
        (["--pair", "[5, 6]"], {"pair": (5, 6)}),
        (["--limit", "4"], {"limit": 4}),
        (["--limit", "4", "--limit", "none"], {"limit": None}),
        (["--rate", "2"], {"rate": 2.0}),
        (["--mode", "slow"], {"mode": "slow"}),
        (["--shape", "[4, 5]"], {"shape": (4, 5)}),
        (["--below", "-2"], {"below": -2.0}),
        (["--_hidden", "y"], {"_hidden": "y"}),
    ],
)
def test_flags(text, arguments, expected):
    found = values(text, *arguments)
    assert found == DEFAULTS | {"twice": 240} | expected
    assert all(type(found[key]) is type(value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "3.0"], "argument --steps: expected int, got '3.0'"),
        (["--steps", "many"], "argument --steps: expected int, got 'many'"),
        (["--lr", "fast"], "argument --lr: expected float, got 'fast'"),
        (["--clip", "False"], "unexpected 'False'. A switch takes no value: --name or --no-name."),
        (["--clip=False"], "argument --clip"),
        (["--sizes", "3"], "argument --sizes: expected list, got '3'"),
        (["--sizes", "[3"], "argument --sizes: expected list, got '[3'"),
        (["--shape", '["a"]'], "argument --shape: expected tuple[int, ...]"),
        (["--mode", "medium"], "expected Literal['fast', 'slow'], got 'medium'"),
        (["--step", "3"], "unknown flag --step. Did you mean --steps?"),
        (["--nam=x"], "unknown flag --nam. Did you mean --name?"),
        (["--no-clipp"], "unknown flag --no-clipp. Did you mean --clip?"),
        (["--strateg", "ddp"], "unknown flag --strateg. Did you mean --strategy?"),
        (["--strategy", "fsdp"], "--strategy: expected Literal["),
        (["--zzz"], "unknown flag --zzz.\n"),
    ],
)
def test_wrong_flags(text, arguments, reason, capsys):
    """A misspelt name, or a value of another type, ends the script before anything runs."""
    assert reason in refused(capsys, text, *arguments)


def test_config_files_stand_below_flags(text, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"steps": 7, "lr": 1, "pair": [8, 9], "limit": None}))
    (tmp_path / "a.yaml").write_text("steps: 7\nlr: 3e-6\nclip: false\nmode: slow\nmax-steps: 4\n")
    found = values(text, "--steps", "9", "--config", str(tmp_path / "a.json"))
    assert found == DEFAULTS | {"steps": 9, "twice": 18, "lr": 1.0, "pair": (8, 9)}
    found = values(text, "--config", str(tmp_path / "a.yaml"))
    assert found == DEFAULTS | {"steps": 7, "twice": 14, "lr": 3e-6, "clip": False, "mode": "slow"}
    assert process_state.current.max_steps == 4


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", '{"step": 7}', "unknown name 'step'. Did you mean 'steps'?"),
        ("a.json", '{"steps": 7.0}', "steps: expected int, got 7.0"),
        ("a.json", '{"clip": "False"}', "clip: expected bool, got 'False'"),
        ("a.json", '{"clip": 1}', "clip: expected bool, got 1"),
        ("a.json", '{"steps": true}', "steps: expected int, got True"),
        ("a.json", '{"lr": "3e-4"}', "lr: expected float, got '3e-4'"),
        ("a.json", "[1]", "expected names and values, got list"),
        ("a.json", "{", "not JSON"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.yaml", "lr: fast", "lr: expected float, got 'fast'"),
    ],
)
def test_wrong_config_files(text, name, content, reason, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert reason in refused(capsys, text, "--config", str(tmp_path / name))
    assert "No such file" in refused(capsys, text, "--config", str(tmp_path / "missing.json"))


def test_help_and_print_config(text, capsys):
    with pytest.raises(SystemExit) as caught:
        run_text(text, "--help")
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert 'a folder, or 100% of a hub id ("tiny-add")' in said and "--no-clip" in said and "--resume" in said
    assert "--mode fast|slow" in said  # as they must be written
    assert "--max-steps INT" in said and "--max_steps" not in said
    with pytest.raises(SystemExit):
        run_text(text, "--print-config", "--steps", "5", "--out", "x")
    said = json.loads(capsys.readouterr().out)
    assert (said["steps"], said["out"], said["strategy"], said["mode"]) == (5, "x", "auto", "fast")


def test_workers_see_the_flags_and_an_import_does_not(text):
    assert values(text, "--steps", "3", name="__mp_main__")["steps"] == 3
    assert values(text, "--steps", "3", name="nb")["steps"] == 120
    assert "twice" not in run_text(text, name="__mp_main__")


def test_run_flags_reach_the_run(text, monkeypatch):
    import os

    run_text(text, "--out", "x/y", "--resume", "auto", "--save-every", "5", "--keep", "3", "--strategy", "fsdp2")
    now = process_state.current
    assert (str(now.out), now.resume, now.save_every, now.keep) == ("x/y", "auto", 5, 3)
    assert os.environ["RLKIT_STRATEGY"] == "fsdp2"
    assert now.parameters == DEFAULTS | {"rate": 1.0}
    assert now.script["flags"]["strategy"] == "fsdp2" and now.script["notebook"] == "n.ipynb"


def test_flags_of_servers_and_processes_reach_setup_and_prepare(text):
    urls = "http://a:8000,http://b:8000"
    arguments = ["--vllm-url", urls, "--vllm-folder", "/shared", "--vllm-group-port", "7000", "--vllm-deadline", "9"]
    run_text(text, *arguments, "--dist-timeout", "5", "--backend", "gloo", "--deterministic")
    now = process_state.current
    assert (now.vllm_url, now.vllm_folder, now.vllm_group_port, now.vllm_deadline) == (urls, "/shared", 7000, 9)
    assert (now.dist_timeout, now.backend, now.deterministic) == (5.0, "gloo", True)


def test_a_seed_reaches_setup_and_the_order_of_the_prompts(text):
    rows = [{"prompt": str(number)} for number in range(20)]

    def plan(seed):
        world = rl.setup(seed=seed)
        loader = rl.PromptLoader(rows, tiny_policy(), batch_size=20, seed=seed)
        return world.seed, next(iter(loader)).row_id.tolist(), float(torch.rand(1))

    expected = plan(7)
    assert plan(0)[1:] != expected[1:]
    run_text(text, "--seed", "7")
    assert plan(0) == expected
    run_text(text, "--seed", "-1")
    with pytest.raises(ValueError, match=r"rl\.setup: seed must be at least 0, got -1"):
        rl.setup(seed=0)


def test_deterministic_algorithms_and_a_timeout_that_is_none(monkeypatch):
    monkeypatch.setattr(process_state.current, "deterministic", True)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        rl.setup(seed=0)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)
    monkeypatch.setattr(process_state.current, "dist_timeout", 0.0)
    with pytest.raises(ValueError, match=r"--dist-timeout must be > 0 minutes, got 0.0"):
        rl.setup(seed=0)


def test_the_trained_policy_samples_from_the_servers_of_the_flag(monkeypatch):
    """Nobody listens on port 9, so `prepare` says whom it looked for; a frozen policy stays as it is."""
    monkeypatch.setattr(process_state.current, "vllm_url", "http://127.0.0.1:9")
    monkeypatch.setattr(process_state.current, "vllm_deadline", 0.1)
    world = rl.setup(seed=0)
    assert world.prepare(tiny_policy()).engine is None
    with pytest.raises(rl.EngineError, match=r"no vLLM server answered at 127.0.0.1:9"):
        world.prepare(tiny_policy(), lambda params: torch.optim.SGD(params, lr=0.1))


def test_a_notebooks_own_parameter_is_the_flag(tmp_path):
    """`max_steps` and `strategy` of the notebook win: it passes them on itself."""
    text = exported(tmp_path, cell("max_steps = 10\nstrategy = 'mine'", "parameters"), "total = max_steps").text
    found = run_text(text, "--max-steps", "3", "--strategy", "other")
    assert (found["total"], found["strategy"]) == (3, "other")
    assert process_state.current.max_steps is None


@pytest.mark.parametrize(
    ("arguments", "value"), [([], False), (["--no-kl"], True), (["--no-no-kl"], False), (["--no_kl"], True)]
)
def test_a_switch_whose_name_begins_with_no(tmp_path, arguments, value):
    text = exported(tmp_path, cell("no_kl = False  # leave the KL out", "parameters")).text
    assert run_text(text, *arguments)["no_kl"] is value


@pytest.mark.parametrize("name", ["help", "config", "print_config", "print_all_ranks", "out", "resume"])
def test_reserved_names(name, tmp_path):
    with pytest.raises(ExportError, match="E105"):
        exported(tmp_path, cell(f"{name} = 'x'", "parameters"))


def test_without_parameters_there_are_the_run_flags(tmp_path, capsys):
    text = exported(tmp_path, "x = 1").text
    assert plain(run_text(text, "--max-steps", "3"))["x"] == 1
    assert process_state.current.max_steps == 3
    assert "unknown flag --x." in refused(capsys, text, "--x", "1")


def test_comments_of_colab_are_no_help(tmp_path, capsys):
    text = exported(tmp_path, cell('#@title Settings\nn = 5 #@param {type:"integer"}', "parameters")).text
    with pytest.raises(SystemExit):
        run_text(text, "--help")
    assert "@param" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1", "int | str", 1),
        ("x", "int | str", "x"),
        ("none", "str | None", None),
        ("true", "bool | None", True),
        ("2", "Literal[1, 2]", 2),
        ('{"a": [1]}', "dict[str, list[int]]", {"a": [1]}),
        ("[1, 1]", "set", {1}),
        ('[1, "a"]', "tuple[int, str]", (1, "a")),
    ],
)
def test_kinds(text, kind, value):
    assert from_text(text, kind) == value
    assert accept(value, kind) == value


def test_two_words_of_one_flag():
    parameters = [Parameter("max_len", "int", 1)]
    for flag in ("--max-len", "--max_len"):
        assert parse(parameters, [flag, "3"], prog="p").parameters == {"max_len": 3}
    with pytest.raises(SystemExit):
        parse(parameters, ["--max", "3"], prog="p")  # no abbreviations
