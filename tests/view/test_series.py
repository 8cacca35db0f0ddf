"""Curves of bounded size that hide no spike."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.view.series import Curve, Series

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=200)


def filled(values, parts=1, buckets=4):
    curve = Curve(buckets)
    for part in np.array_split(np.arange(len(values)), parts):
        curve.extend(part, [values[i] for i in part])
    return curve


@given(VALUES, st.integers(1, 7))
def test_a_thinned_curve_keeps_extremes_ends_and_size(values, parts):
    curve = filled(values, parts)
    steps, drawn = curve.points()
    assert len(steps) <= 2 * curve.buckets + 3 and curve.count == len(values)
    assert (np.diff(steps) > 0).all()
    finite = [value for value in values if math.isfinite(value)]
    assert curve.gaps == len(values) - len(finite)
    if finite:
        assert np.nanmax(drawn) == max(finite) and np.nanmin(drawn) == min(finite)
    if values:
        assert steps[0] == 0 or not math.isfinite(values[0]) or len(steps) > 1
        assert steps[-1] == len(values) - 1
    for step, value in zip(steps, drawn, strict=True):  # every point that is drawn was measured
        true = values[int(step)]
        assert value == true or (math.isnan(value) and not math.isfinite(true))


@given(VALUES, st.integers(1, 20))
def test_bit_by_bit_and_at_once_say_the_same_extremes(values, parts):
    once, bits = filled(values), filled(values, parts)
    assert once.gaps == bits.gaps and once.count == bits.count
    for curve in (once, bits):
        assert len(curve.gap_steps()) <= curve.gaps and (len(curve.gap_steps()) > 0) == (curve.gaps > 0)


def test_a_short_curve_is_drawn_point_by_point_with_its_gaps():
    curve = filled([1.0, float("nan"), 3.0, float("inf")], buckets=10)
    steps, values = curve.points()
    assert steps.tolist() == [0, 1, 2, 3]
    assert values[[0, 2]].tolist() == [1, 3] and np.isnan(values[[1, 3]]).all()
    assert curve.gap_steps().tolist() == [1, 3]


def test_a_spike_of_one_step_in_a_hundred_thousand_is_seen():
    values = np.zeros(100_000)
    values[61_803] = 7
    curve = Curve()
    curve.extend(np.arange(100_000), values)
    steps, drawn = curve.points()
    assert len(steps) < 400 and drawn.max() == 7 and steps[drawn.argmax()] == 61_803


class Log:
    """A reader with the series given."""

    def __init__(self, **found):
        self.found = found

    @property
    def names(self):
        return list(self.found)

    def series(self, name):
        steps, values = self.found[name]
        return np.array(steps, dtype=float), np.array(values, dtype=float)


@pytest.fixture
def series(unchecked):
    return Series()


def test_new_names_appear_missing_ones_stay_and_steps_may_go_backwards(series):
    series.update(Log(a=([0, 1], [1, 2])))
    series.update(Log(a=([0, 1], [1, 2]), late=([1], [5])))
    series.update(Log(a=([0, 1, 0], [1, 2, 3])))
    assert series.curves["a"].points()[0].tolist() == [0, 1, 0] and series.curves["late"].count == 1


def test_a_log_that_was_cut_is_read_again(series):
    series.update(Log(a=([0, 1, 2], [1, 2, 3])))
    series.update(Log(a=([0, 1], [1, 2])))
    assert series.curves["a"].points()[1].tolist() == [1, 2]
    series.update(Log(a=([0, 1], [1, 9])))  # as long as before, and other
    assert series.curves["a"].points()[1].tolist() == [1, 9]
    series.update(Log(a=([0, 1, 2], [1, 9, float("nan")])))
    series.update(Log(a=([0, 1, 2, 3], [1, 9, float("nan"), 4])))
    assert series.curves["a"].count == 4 and series.curves["a"].gaps == 1
