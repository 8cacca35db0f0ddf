"""`score`: what reward functions get, what they may return, and what the error says where they do not."""

import functools
import itertools
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import assert_identical, make_rollout
from hypothesis import given
from hypothesis import strategies as st
from tolerances import CLOSE, EXACT, FLOAT32

import rlkit as rl
from rlkit.reward_calls.arguments import unique_names
from rlkit.scoring import weighted_sum

NAN, INF = math.nan, math.inf
ROLLOUT = make_rollout(
    (3, 1, 2, 3),
    columns={"solution": ([1, 2], [1, 2], [3], [3]), "answer": ("3", "3", "3", "3"), "missing": (None, None, "x", "x")},
    completions=("3", "4", "3", ""),
)


def returning(value):
    def reward(**kwargs):
        return value

    return reward


def parts(*functions, **options):
    return rl.score(ROLLOUT, list(functions), **options).parts


# --- what functions may return ---

GOOD_RETURNS = {
    "list": [1.0, 0.5, -2.0, 0.0],
    "tuple": (1.0, 0.5, -2.0, 0.0),
    "integers": [1, 0, -2, 3],
    "bools": [True, False, True, True],
    "numpy": np.array([1.0, 0.5, -2.0, 0.0]),
    "numpy bools": np.array([True, False, True, True]),
    "list of numpy scalars": [np.float32(1), np.bool_(True), np.int64(2), np.float64(0)],
    "tensor": torch.tensor([1.0, 0.5, -2.0, 0.0]),
    "bool tensor": torch.tensor([True, False, True, True]),
    "tensor with gradient": torch.ones(4, requires_grad=True),
    "list of scalar tensors": [torch.tensor(1.0), torch.tensor(2), torch.tensor(True), torch.tensor(0.5)],
    "bfloat16": torch.tensor([1.0, 0.5, -2.0, 0.0], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("value", GOOD_RETURNS.values(), ids=GOOD_RETURNS.keys())
def test_one_number_or_bool_per_completion_in_any_common_container(value):
    """List, tuple, array or 1-D tensor of numbers, bools or None."""
    want = torch.tensor(
        [float(element) for element in list(value.detach() if isinstance(value, torch.Tensor) else value)]
    )
    scores = rl.score(ROLLOUT, returning(value))
    torch.testing.assert_close(scores.reward, want, **EXACT)
    assert scores.parts.shape == (4, 1) and scores.reward.dtype == torch.float32
    assert not scores.reward.requires_grad


@pytest.mark.parametrize("value", [[1, None, 0, NAN], np.array([1, None, 0, NAN], dtype=object), (1, None, 0, NAN)])
def test_none_and_nan_abstain(value):
    """Neither is 0."""
    scores = rl.score(ROLLOUT, returning(value))
    torch.testing.assert_close(scores.reward, torch.tensor([1, NAN, 0, NAN]), equal_nan=True, **EXACT)
    assert scores.scorable.tolist() == [True, False, True, False]


BAD_RETURNS = {
    "one number in a list": ([1.0], ValueError, "must return 4 rewards, one number or None per completion; got 1"),
    "one too few": ([1.0, 2.0, 3.0], ValueError, r"must return 4 rewards.*; got 3"),
    "one too many": ([1.0] * 5, ValueError, r"must return 4 rewards.*; got 5"),
    "a number": (1.0, TypeError, r"must return 4 rewards.*; got float: '1\.0'"),
    "a numpy number": (np.float32(1), ValueError, r"must return 4 rewards.*; got an array of shape \(\)"),
    "a scalar tensor": (torch.tensor(1.0), ValueError, r"must return 4 rewards.*; got an array of shape \(\)"),
    "a (N,1) tensor": (
        torch.ones(4, 1),
        ValueError,
        r"must return 4 rewards.*; got an array of shape \(4, 1\)\. Flatten",
    ),
    "a (1,N) array": (
        np.ones((1, 4)),
        ValueError,
        r"must return 4 rewards.*; got an array of shape \(1, 4\)\. Flatten",
    ),
    "nothing": (None, TypeError, r"must return 4 rewards.*; got NoneType"),
    "text": ("1111", TypeError, r"must return 4 rewards.*; got str: '1111'"),
    "a dict": ({0: 1, 1: 1, 2: 1, 3: 1}, TypeError, r"must return 4 rewards.*; got dict"),
    "a set": ({1, 2, 3, 4}, TypeError, r"must return 4 rewards.*; got set"),
    "a generator": ((1.0 for _ in range(4)), TypeError, r"must return 4 rewards.*; got generator"),
    "text among numbers": (
        [1, 2, "3", 4],
        TypeError,
        r"returned str '3' for completion 2; expected a number, a bool or None",
    ),
    "a list among numbers": ([1, [2], 3, 4], TypeError, r"returned list '\[2\]' for completion 1; expected a number"),
    "a vector among numbers": (
        [torch.ones(2)] * 4,
        TypeError,
        r"returned Tensor .* for completion 0; expected a number",
    ),
    "a complex number": ([1, 2, 3, 1j], TypeError, r"returned complex '1j' for completion 3"),
    "inf": ([1, INF, 0, 0], ValueError, r"returned inf for completion 1; rewards must be finite"),
    "-inf": (torch.tensor([1, 0, 0, -INF]), ValueError, r"returned -inf for completion 3; rewards must be finite"),
    "too large for float32": ([1, 1e39, 0, 0], ValueError, r"returned .* for completion 1; rewards must be finite"),
}


@pytest.mark.parametrize(("value", "kind", "message"), BAD_RETURNS.values(), ids=BAD_RETURNS.keys())
def test_other_returns_are_refused_with_function_expected_and_got(value, kind, message):
    """Never broadcast; the error names the function and both lengths."""
    with pytest.raises(kind, match=rf"score: reward function 'reward' {message}"):
        rl.score(ROLLOUT, returning(value))


# --- sums, weights, clipping ---


def test_total_is_the_weighted_sum_over_functions_that_did_not_abstain():
    """Formula 1 of RLOO by hand: .5*1 + 2*3; .5*1; 2*3; nothing."""
    first, second = returning([1, 1, None, None]), returning([3, None, 3, None])
    scores = rl.score(ROLLOUT, [first, second], weights=[0.5, 2.0])
    torch.testing.assert_close(scores.reward, torch.tensor([6.5, 0.5, 6.0, NAN]), equal_nan=True, **FLOAT32)
    torch.testing.assert_close(
        scores.parts, torch.tensor([[1, 3], [1, NAN], [NAN, 3], [NAN, NAN]]), equal_nan=True, **EXACT
    )
    assert scores.weights.tolist() == [0.5, 2.0]


def test_the_weighted_sum_is_clipped_and_gaps_stay_gaps():
    scores = rl.score(ROLLOUT, returning([5, -5, None, 0.25]), weights=[2.0], clip_range=(-1.0, 1.0))
    torch.testing.assert_close(scores.reward, torch.tensor([1, -1, NAN, 0.5]), equal_nan=True, **EXACT)
    torch.testing.assert_close(scores.parts[:, 0], torch.tensor([5, -5, NAN, 0.25]), equal_nan=True, **EXACT)


@given(st.lists(st.lists(st.floats(-5, 5, width=32) | st.just(NAN), min_size=2, max_size=2), min_size=1, max_size=6))
def test_weighted_sum_matches_python(rows):
    got = weighted_sum(torch.tensor(rows), torch.tensor([0.5, -2.0]))
    for value, row in zip(got.tolist(), rows, strict=True):
        known = [w * r for w, r in zip([0.5, -2.0], row, strict=True) if not math.isnan(r)]
        assert math.isnan(value) if not known else value == pytest.approx(sum(known), rel=CLOSE, abs=1e-6)


def test_equal_sums_are_equal_rewards_whatever_the_order_of_their_parts():
    """In float32, .1 + .7 + .2 and .2 + .1 + .7 differ in the last digit: a group without signal would get one."""
    orders = torch.tensor(list(itertools.permutations([0.1, 0.7, 0.2, 0.3, 1e3])))
    assert len(weighted_sum(orders, torch.ones(5)).unique()) == 1


def test_groups_and_device_are_those_of_the_rollout():
    rollout = make_rollout((1, 1, 1), group_id=[5, -2, 5])
    scores = rl.score(rollout, returning([1, 2, 3]))
    assert scores.group_id.tolist() == [5, -2, 5]


BAD_ARGUMENTS = {
    "no function": (
        {"reward_funcs": []},
        ValueError,
        "score: expected at least one reward function, got an empty list",
    ),
    "weights": (
        {"weights": [1.0, 2.0]},
        ValueError,
        r"score: expected one weight per reward function \(1: \['reward'\]\), got 2",
    ),
    "nan weight": ({"weights": [NAN]}, ValueError, "score: .*weight.*nan"),
    "infinite weight": ({"weights": [INF]}, ValueError, "score: .*weight.*inf"),
    "clip order": (
        {"clip_range": (1, -1)},
        ValueError,
        r"score: clip_range must be \(low, high\) with low < high, got \(1, -1\)",
    ),
    "clip nan": ({"clip_range": (NAN, 1)}, ValueError, "score: clip_range must be"),
    "no such model": (
        {"reward_funcs": ["accuracy"]},
        OSError,
        "score: expected a reward function or the name or folder of a .* model, got 'accuracy', which cannot be loaded",
    ),
    "not callable": ({"reward_funcs": [3]}, TypeError, "score: expected a reward function, got int: 3"),
    "a class": ({"reward_funcs": [dict]}, TypeError, r"score: dict is a class; pass an object of it, dict\(\)"),
    "timeout": ({"timeout": 0.0}, ValueError, "score: timeout must be seconds above 0 or None, got 0.0"),
    "timeout nan": ({"timeout": NAN}, ValueError, "score: timeout must be seconds above 0 or None, got nan"),
    "timeout name": ({"timeout": {"f": 1.0}}, ValueError, r"score: timeout names \['f'\], but .* \['reward'\]"),
    "on_timeout": ({"on_timeout": INF}, ValueError, "score: on_timeout must be a finite reward or None, got inf"),
    "on_error": ({"on_error": "skip"}, ValueError, "score: on_error must be 'raise' or 'none', got 'skip'"),
    "memory": ({"memory": 0}, ValueError, "score: memory must be bytes above 0 or None, got 0"),
    "none": ({"reward_funcs": [None]}, TypeError, "score: expected a reward function, got NoneType"),
    "a dict": ({"reward_funcs": {"a": returning([1] * 4)}}, TypeError, "score: expected a reward function, got dict"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments_are_named(unchecked, arguments, kind, message):
    """An empty list of functions is a clear error."""
    options = {"reward_funcs": returning([1, 2, 3, 4])} | arguments
    with pytest.raises(kind, match=message):
        rl.score(ROLLOUT, options.pop("reward_funcs"), **options)


# --- what functions get ---


def test_functions_get_the_dataset_columns_one_value_per_completion():
    """Row order, list-valued cells whole, None stays None."""
    seen = {}

    def reward(completions, **kwargs):
        seen.update(kwargs, completions=completions)
        return [0.0] * len(completions)

    rl.score(ROLLOUT, reward)
    assert seen["solution"] == [[1, 2], [1, 2], [3], [3]]
    assert seen["answer"] == ["3"] * 4 and seen["missing"] == [None, None, "x", "x"]
    assert seen["completions"] == ["3", "4", "3", ""] and seen["prompts"] == ["0+1=", "1+1=", "2+1=", "3+1="]
    lengths = [3, 1, 2, 3]
    assert seen["completion_ids"] == [row[:n] for row, n in zip(ROLLOUT.completion_ids.tolist(), lengths, strict=True)]
    assert not {"input_ids", "attention_mask", "prompt_ids"} & seen.keys()


def test_functions_get_only_what_they_accept():
    """A strict signature, keyword-only arguments, a bound method, a partial and a callable object."""

    def strict(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def keyword_only(*, completions):
        return [float(len(c)) for c in completions]

    class Judge:
        bonus = 1.0

        def __call__(self, completions):
            return [self.bonus] * len(completions)

        def method(self, completion_ids):
            return [float(len(ids)) for ids in completion_ids]

    partial = functools.partial(lambda completions, scale: [scale] * len(completions), scale=0.5)
    got = parts(strict, keyword_only, Judge(), Judge().method, partial)
    want = [[1, 1, 1, 3, 0.5], [0, 1, 1, 1, 0.5], [1, 1, 1, 2, 0.5], [0, 0, 1, 3, 0.5]]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), **EXACT)


def test_columns_that_clash_with_rlkits_own_arguments_do_not_hide_them():
    """A dataset with columns `completion`, `completions` and `log_extra`."""
    rollout = make_rollout(
        (1, 1), columns={"completion": ("gold", "gold"), "completions": ("bad", "bad"), "log_extra": (1, 2)}
    )
    seen = {}

    def reward(completions, log_extra, **kwargs):
        seen.update(kwargs, completions=completions, log_extra=log_extra)
        return [0.0, 0.0]

    rl.score(rollout, reward)
    assert seen["completions"] == ["0", "1"] and callable(seen["log_extra"]) and "completion" not in seen


def test_conversations_reach_functions_as_messages():
    """TRL's form."""
    answers = [[{"role": "assistant", "content": str(row)}] for row in range(2)]
    rollout = make_rollout((1, 1), prompts=[[{"role": "user", "content": "1+1="}]] * 2, completions=answers)
    got = rl.score(rollout, lambda completions, prompts: [float(c[0]["content"]) for c in completions])
    assert got.reward.tolist() == [0.0, 1.0]


def test_one_function_cannot_spoil_what_the_next_one_gets():
    """Each function has lists of its own, and the rollout stays as it is."""

    def rude(completions, answer, completion_ids, **kwargs):
        count = len(completions)
        completions.reverse()
        answer.clear()
        completion_ids[0].clear()
        return [0.0] * count

    seen = {}

    def reward(completions, answer, completion_ids, **kwargs):
        seen.update(completions=completions, answer=answer, first=completion_ids[0])
        return [0.0] * 4

    before = (list(ROLLOUT.completions), ROLLOUT.completion_ids.clone())
    rl.score(ROLLOUT, [rude, reward])
    assert_identical((list(ROLLOUT.completions), ROLLOUT.completion_ids), before)
    assert seen == {"completions": ["3", "4", "3", ""], "answer": ["3"] * 4, "first": before[1][0, :3].tolist()}


def test_a_given_state_is_passed_on():
    """The step, for rewards that change during a run."""
    state = {"global_step": 7}
    seen = []

    def reward(completions, trainer_state):
        seen.append(trainer_state)
        return [0.0] * 4

    rl.score(ROLLOUT, reward, state=state)
    assert seen == [state]


def test_the_default_state_knows_the_step_of_the_policy():
    """As documented, the number of optimizer steps that the policy had taken."""
    seen = []

    def reward(completions, trainer_state):
        seen.append(trainer_state.global_step)
        return [0.0] * 4

    for step in range(3):
        rl.score(replace(ROLLOUT, policy_version=step), reward)
    assert seen == [0, 1, 2]


def test_functions_log_columns_and_numbers():
    def reward(completions, log_extra, log_metric):
        log_extra("length", [len(c) for c in completions])
        log_metric("judged", 1.0)
        log_metric("judged", 2.0)
        return [0.0] * 4

    scores = rl.score(ROLLOUT, reward)
    assert scores.extra == {"length": (1, 1, 1, 0)} and scores.metrics == {"judged": 1.5}
    assert scores.to_pandas()["length"].tolist() == [1, 1, 1, 0]


def test_a_logged_column_of_the_wrong_length_is_named():
    def reward(log_extra, **kwargs):
        log_extra("length", [1, 2])
        return [0.0] * 4

    with pytest.raises(
        RuntimeError, match=r"'reward' failed with ValueError: log_extra\('length'\): expected 4 values, one per"
    ):
        rl.score(ROLLOUT, reward)


# --- what goes wrong inside ---


def test_a_failing_function_is_named_and_its_error_kept():
    def broken(**kwargs):
        raise KeyError("solution")

    with pytest.raises(
        RuntimeError, match=r"score: reward function 'broken' failed with KeyError: 'solution'"
    ) as caught:
        rl.score(ROLLOUT, [returning([0] * 4), broken])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_fails_on_the_only_completion_is_an_error_too():
    def broken(**kwargs):
        raise KeyError("solution")

    with pytest.raises(RuntimeError, match=r"'broken' failed with KeyError: 'solution'. It fails on completion 0: '3'"):
        rl.score(ROLLOUT.select([0]), broken)


def test_a_missing_column_is_named_with_what_there_is():
    """An argument that the dataset does not have."""

    def reward(completions, label):
        return [0.0] * 4

    with pytest.raises(
        RuntimeError, match=r"'reward' failed with TypeError.*label.*It was offered: answer, completion_ids"
    ):
        rl.score(ROLLOUT, reward)


def test_a_module_that_is_no_reward_model_gives_a_clear_error():
    """Only an nn.Module as reward."""
    with pytest.raises(
        TypeError, match=r"expected a sequence-classification model .*got Linear. Wrap any other module"
    ):
        rl.score(ROLLOUT, torch.nn.Linear(2, 1))


def test_rows_without_any_reward_warn_with_prompt_completion_and_columns(caplog):
    """A warning that says which row it was."""
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        rl.score(ROLLOUT, returning([1, None, 0, None]))
    assert "returned None for 2 of 4 completions; they take no part in baseline and update" in caplog.text
    assert "prompt '1+1='" in caplog.text and "completion '4'" in caplog.text and "'answer': '3'" in caplog.text
    caplog.clear()
    rl.score(ROLLOUT, lambda completions: [1.0] * len(completions), weights=[0.0])
    assert "every reward function with a weight other than 0 returned None for ALL of 4 completions" in caplog.text


def test_no_warning_where_every_row_has_a_reward(caplog):
    rl.score(ROLLOUT, [returning([1, None, 0, None]), returning([0, 0, None, 0])])
    assert not caplog.records


# --- names ---


def test_names_are_those_of_the_functions():
    class Judge:
        def __call__(self):
            pass

    def accuracy():
        pass

    partial = functools.partial(functools.partial(accuracy, 1), 2)
    names = unique_names([accuracy, accuracy, Judge(), partial, lambda: 0, lambda: 1])
    assert names == ("accuracy", "accuracy_2", "Judge", "accuracy_3", "lambda", "lambda_2")


@given(st.lists(st.sampled_from(["f", "f_2", "f_3", "f_2_2", "g"]), min_size=1, max_size=6))
def test_names_are_unique_whatever_the_functions_are_called(chosen):
    """Two metrics with one name would overwrite one another."""
    functions = []
    for name in chosen:
        function = returning([])
        function.__name__ = name
        functions.append(function)
    names = unique_names(functions)
    assert len(set(names)) == len(names)
    for name, own in zip(names, chosen, strict=True):
        assert name.startswith(own)


def test_a_function_of_weight_0_is_a_metric_and_no_judge():
    """Where only it answers, the row has no reward; 0 would pull on the baseline of its group."""
    scores = rl.score(
        ROLLOUT, [returning([1.0, None, None, 0.0]), returning([5.0, 5.0, None, 5.0])], weights=[1.0, 0.0]
    )
    assert scores.reward[[0, 3]].tolist() == [1.0, 0.0] and bool(scores.reward[[1, 2]].isnan().all())


def test_a_logged_metric_cannot_hide_a_measured_one():
    def reward(completions, log_metric):
        log_metric("reward", 1.0)
        return [0.0] * 4

    with pytest.raises(RuntimeError, match=r"log_metric\('reward'\): rlkit measures a metric of that name"):
        rl.score(ROLLOUT, reward)


def test_settings_say_the_same_as_keywords():
    """One object, given to `score` instead of the six keywords; both at once is an error."""
    rewards = [returning([5.0, -5.0, None, 0.25]), returning([1.0, 1.0, 1.0, 1.0])]
    keywords = {"weights": [2.0, 0.5], "clip_range": (-1.0, 1.0), "on_error": "none"}
    settings = rl.rewards.RewardSettings(**keywords)
    assert rl.score(ROLLOUT, rewards, settings=settings).reward.tolist() == [1.0, -1.0, 0.5, 1.0]
    assert rl.score(ROLLOUT, rewards, **keywords).reward.tolist() == [1.0, -1.0, 0.5, 1.0]
    with pytest.raises(TypeError, match=r"give \['on_timeout'\] as keywords or in settings=RewardSettings"):
        rl.score(ROLLOUT, rewards, settings=settings, on_timeout=0.0)
