"""Numbers of every type: logged where they are plain numbers, else refused by name before anything is written."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import rlkit as rl
from rlkit.reward_calls.arguments import RewardLog
from rlkit.run.provenance import for_config

PLAIN = {
    "bool": (True, 1.0),
    "int": (3, 3.0),
    "fraction": (Fraction(1, 4), 0.25),
    "decimal": (Decimal("0.25"), 0.25),
    "numpy bool": (np.bool_(True), 1.0),
    "numpy half": (np.float16(0.5), 0.5),
    "numpy int": (np.int64(7), 7.0),
    "array without an axis": (np.float32(1).reshape(()), 1.0),
    "bool array without an axis": (np.array(False), 0.0),
    "tensor": (torch.tensor(0.5), 0.5),
    "bool tensor": (torch.tensor(True), 1.0),
    "bfloat16 tensor": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "tensor with a gradient": (torch.tensor(2.0, requires_grad=True), 2.0),
}
ROWS = {
    "array": (np.array([1.0, math.nan, 3.0]), 2.0),
    "bools": (np.array([True, False]), 0.5),
    "tensor": (torch.tensor([1, 2]), 1.5),
    "of NaN": (torch.tensor([math.nan]), None),
    "empty": (np.zeros(0), None),
}
REFUSED = {
    "text": ("0.5", TypeError),
    "bytes": (b"1", TypeError),
    "list": ([1.0], TypeError),
    "dict": ({}, TypeError),
    "complex": (1j, TypeError),
    "numpy complex": (np.complex64(1), TypeError),
    "complex tensor": (torch.tensor([1j]), TypeError),
    "numpy text": (np.str_("1"), TypeError),
    "numpy time": (np.datetime64("2026-01-01"), TypeError),
    "array of objects": (np.array([None]), TypeError),
    "array of texts": (np.array(["1"]), TypeError),
    "huge int": (10**400, ValueError),
    "signalling decimal": (Decimal("sNaN"), ValueError),
    "a function": (len, TypeError),
}


def cases(table):
    return pytest.mark.parametrize(("given", "expected"), table.values(), ids=table.keys())


@cases(PLAIN | ROWS | {"None": (None, None), "infinity": (math.inf, None)})
def test_a_number_of_any_type_is_logged(given, expected, tmp_path):
    """None and what is not finite are null in metrics.jsonl."""
    run = rl.Run(tmp_path / "r")
    assert run.log(0, x=given)["x"] == expected
    assert run.metrics["x"].isna().all() if expected is None else run.metrics["x"].tolist() == [expected]


@cases(REFUSED)
def test_what_is_no_number_is_named_before_anything_is_written(given, expected, tmp_path):
    run = rl.Run(tmp_path / "r")
    run.log(0, x=1)
    with pytest.raises(expected, match=r"^run\.log: 'y' "):
        run.log(1, x=2, y=given)
    assert run.metrics["step"].tolist() == [0] and run.log(1, x=2)["x"] == 2.0


@cases(PLAIN)
def test_a_reward_functions_numbers_may_be_of_any_type(given, expected):
    log = RewardLog(1)
    log.metric("mine", None)
    log.metric("mine", given)
    assert log.numbers == {"mine": [expected]}  # None is left out


@cases({name: row for name, row in REFUSED.items() if name != "complex tensor"} | {"rows": (np.zeros(2), TypeError)})
def test_a_reward_functions_number_that_is_none_is_named(given, expected):
    with pytest.raises(expected, match=r"^log_metric: 'mine' "):
        RewardLog(1).metric("mine", given)


@pytest.mark.parametrize(
    "values", [None, 3, "abcd", b"abcd", {1: 1, 2: 2, 3: 3, 4: 4}, torch.tensor(1.0), np.array(1), iter("abcd")]
)
def test_a_column_that_is_no_list_is_named(values):
    with pytest.raises(TypeError, match=r"^log_extra\('mine'\): expected a list of values, got "):
        RewardLog(4).extra("mine", values)


def test_a_column_of_an_array_or_tensor_holds_plain_numbers():
    log = RewardLog(2)
    log.extra("a", np.array([1.5, 2.5]))
    log.extra("b", torch.tensor([1, 2]))
    log.extra("c", ("x", None))
    assert log.columns == {"a": [1.5, 2.5], "b": [1, 2], "c": ["x", None]}
    assert {type(value) for value in log.columns["a"] + log.columns["b"]} == {float, int}


@pytest.mark.parametrize("memory", [None, 2**31], ids=["here", "in a process"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("log_metric('mine', 'x')", "log_metric: 'mine' must be a number"),
        ("log_metric('mine', [])", r"log_metric.*'mine'.*number"),
        ("log_extra('mine', None)", r"log_extra\('mine'\): expected a list"),
        ("log_extra('mine', 'ab')", r"log_extra\('mine'\): expected a list"),
    ],
)
def test_a_log_of_a_reward_is_named_in_scores_error(line, message, memory):
    policy = rl.load_policy("tiny-add")
    rollout = rl.sample(policy, ["1+2="], num_generations=2, max_completion_length=2, seed=0)
    names: dict = {}
    exec(f"def mine(completions, log_metric, log_extra):\n    {line}\n    return [0.0] * len(completions)", names)
    with pytest.raises(RuntimeError, match=message):
        rl.score(rollout, names["mine"], memory=memory)


@cases(PLAIN)
def test_knobs_and_the_configuration_take_the_same_numbers(given, expected, tmp_path):
    if not isinstance(given, bool | Decimal | np.bool_) and getattr(given, "dtype", None) not in (
        torch.bool,
        np.dtype(bool),
    ):
        knobs = rl.Run(tmp_path / "r").knobs(beta=given)
        assert knobs.beta == expected
    if not isinstance(given, Fraction | Decimal):
        written = for_config({"x": [given]})["x"][0]
        assert written == expected and type(written) in (bool, int, float)
