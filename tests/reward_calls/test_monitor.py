"""A reward that never changes is reported, once."""

import math

import pytest
from builders import make_rollout

import rlkit as rl
from rlkit.reward_calls.monitor import Monitor

ROLLOUT = make_rollout((1,) * 4)


def metrics_of(values):
    return rl.metrics.score_metrics(rl.score(ROLLOUT, lambda completions: values))


def test_a_constant_reward_is_reported_once_after_so_many_steps(caplog):
    monitor = Monitor(patience=3)
    said = [monitor.update(metrics_of([0.5] * 4)) for _ in range(6)]
    assert [len(news) for news in said] == [0, 0, 1, 0, 0, 0]
    assert said[2] == ["reward function 'lambda' gave 0.5 to every completion of the last 3 steps"]
    assert caplog.text.count("it gives no signal") == 1


@pytest.mark.parametrize(
    "steps",
    [
        [[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1.0]] * 3,  # it varies now and then
        [[0.0] * 4, [1.0] * 4] * 5,  # constant within a step only
        [[None] * 4] * 9,  # it abstained
        [[0.0] * 4, [0.0] * 4, [1.0] * 4] * 3,
    ],
)
def test_one_that_varies_or_abstains_is_not_reported(steps):
    monitor = Monitor(patience=3)
    assert not any(monitor.update(metrics_of(values)) for values in steps)


def test_a_step_without_an_answer_does_not_break_the_row():
    monitor = Monitor(patience=2)
    steps = [[1.0] * 4, [None] * 4, [1.0] * 4]
    assert [len(monitor.update(metrics_of(values))) for values in steps] == [0, 0, 1]


def test_each_function_has_its_own_count():
    monitor = Monitor(patience=2)
    step = {"rewards/a/mean": 1.0, "rewards/a/std": 0.0, "rewards/b/mean": 1.0, "rewards/b/std": 0.1}
    still = {"rewards/b/mean": 2.0, "rewards/b/std": 0.0, "rewards/a/mean": None, "rewards/a/std": math.nan}
    assert [monitor.update(m) for m in (step, step)][1] == [
        "reward function 'a' gave 1 to every completion of the last 2 steps"
    ]
    assert monitor.update(still) == [] and len(monitor.update(still)) == 1


def test_patience_is_checked():
    with pytest.raises(ValueError, match="patience must be at least 2 steps, got 1"):
        Monitor(patience=1)
