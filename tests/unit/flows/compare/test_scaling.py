"""Strong and weak scaling: which sizes are held fixed, and the baseline of the efficiency."""

import pytest

from flows.compare.report import strong_scaling, weak_scaling


def test_perfect_scaling_is_an_efficiency_of_one(make_row):
    (series,) = strong_scaling([make_row(100.0 * count, num_devices=count) for count in (1, 2, 4)])
    assert [point.efficiency for point in series.points] == [1.0, 1.0, 1.0]


def test_no_gain_from_twice_the_devices_is_one_half(make_row):
    (series,) = strong_scaling([make_row(100.0, 2), make_row(100.0, 4)])
    assert [(point.num_devices, point.efficiency) for point in series.points] == [(2, 1.0), (4, 0.5)]


def test_of_several_layouts_on_as_many_devices_the_fastest_counts(make_row):
    rows = [make_row(100.0, 1), make_row(150.0, 2, text="best"), make_row(120.0, 2, text="other")]
    (series,) = strong_scaling(rows)
    assert [point.text for point in series.points][1:] == ["best"]
    assert series.points[1].efficiency == pytest.approx(0.75)


def test_the_same_batch_is_strong_and_the_same_share_is_weak_scaling(make_row):
    rows = [make_row(100.0, 1, 8), make_row(190.0, 2, 8), make_row(196.0, 2, 16)]
    (strong,), (weak,) = strong_scaling(rows), weak_scaling(rows)
    assert [point.efficiency for point in strong.points] == [1.0, 0.95]
    assert [point.efficiency for point in weak.points] == [1.0, 0.98]
    assert (strong.fixed, weak.fixed) == ("8 rows a step", "8 rows a step and device")


def test_one_number_of_devices_is_no_scaling(make_row):
    assert strong_scaling([make_row(100.0, 2), make_row(120.0, 2)]) == []


def test_what_failed_is_left_out(make_row):
    assert weak_scaling([make_row(100.0, 1), make_row(0.0, 2, 16, error="broken")]) == []
