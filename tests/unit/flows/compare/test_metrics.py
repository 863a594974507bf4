"""Metrics of comparison trials: which steps count, and robustness to a machine that slows down for a while."""

import shutil
from dataclasses import replace

import pytest

from flows.compare.metrics import interquartile_range, rows_of
from flows.ledger.events import LayoutMeasured
from flows.running.comparison import turns

WARMUP_S = 50.0


def test_warm_up_does_not_count(make_record, make_trial):
    trials = [make_trial(layout, 1, [WARMUP_S, 1.0, 2.0, 3.0]) for layout in (0, 1)]
    (first, _) = rows_of(make_record(trials))
    assert first.metrics["step_time_s"] == 2.0
    assert first.metrics["tokens_per_s"] == 50.0


def test_the_step_under_a_profiler_does_not_count(make_record, make_trial):
    trial = make_trial(0, 1, [WARMUP_S, 1.0, 9.0, 1.0], profiled=2)
    first = rows_of(make_record([trial, make_trial(1, 1, [WARMUP_S, 1.0])]))[0]
    assert first.metrics["step_time_s"] == 1.0
    assert first.metrics["communication_fraction"] == 0.25


def test_one_slow_round_of_three_changes_no_metric(make_record, make_trial):
    rounds = [[WARMUP_S, 1.0, 1.0], [WARMUP_S, 8.0, 9.0], [WARMUP_S, 1.0, 1.0]]
    trials = [make_trial(layout, n, times) for n, times in enumerate(rounds, 1) for layout in (0, 1)]
    assert {row.metrics["step_time_s"] for row in rows_of(make_record(trials))} == {1.0}


def test_a_layout_that_failed_once_has_a_reason_and_no_metrics(make_record, make_trial):
    failed = make_trial(1, 2, []).model_copy(update={"error": "no memory\nlong log", "error_class": "ResourceError"})
    trials = [make_trial(0, 1, [1.0, 1.0]), make_trial(1, 1, [1.0, 1.0]), failed]
    _, second = rows_of(make_record(trials))
    assert second.error == "ResourceError: no memory"
    assert second.metrics == {}


def test_a_layout_that_was_not_reached_says_so(make_record, make_trial):
    assert rows_of(make_record([make_trial(0, 1, [1.0, 1.0])]))[1].error == "was not reached"


def test_all_is_relative_to_the_first_layout_that_ran(make_record, make_trial):
    failed = make_trial(0, 1, []).model_copy(update={"error": "broken", "error_class": "ModelError"})
    trials = [failed, make_trial(1, 1, [1.0, 2.0]), make_trial(2, 1, [1.0, 1.0])]
    _, second, third = rows_of(make_record(trials, num_layouts=3, batches=(8, 8, 8)))
    assert (second.metrics["relative_tokens_per_s"], third.metrics["relative_tokens_per_s"]) == (1.0, 2.0)
    assert (second.metrics["loss_difference"], third.metrics["loss_difference"]) == (0.0, 0.0)


def test_losses_of_different_batches_are_not_compared(make_record, make_trial):
    trials = [make_trial(layout, 1, [1.0, 1.0]) for layout in (0, 1)]
    _, second = rows_of(make_record(trials, batches=(8, 16)))
    assert "loss_difference" not in second.metrics
    assert second.metrics["relative_tokens_per_s"] == 1.0


def test_layouts_take_turns_in_alternating_order():
    assert list(turns(3, 2)) == [(1, 0), (1, 1), (1, 2), (2, 2), (2, 1), (2, 0)]


def test_under_a_steady_drift_equal_layouts_get_equal_mean_places():
    order = [layout for _, layout in turns(4, 2)]
    places = [[place for place, one in enumerate(order) if one == layout] for layout in range(4)]
    assert len({sum(found) for found in places}) == 1


@pytest.mark.parametrize(("values", "expected"), [([3.0], 0.0), ([0.0, 1.0, 2.0, 3.0, 4.0], 2.0), ([5.0] * 9, 0.0)])
def test_the_spread_is_the_middle_half(values, expected):
    assert interquartile_range(values) == expected


def test_rows_of_a_comparison_that_is_over_are_those_that_were_noted_though_its_trials_are_gone(
    make_record, make_trial, tmp_path
):
    record = make_record([make_trial(0, 1, [1.0, 1.0]), make_trial(1, 1, [1.0, 0.5])])
    rows = rows_of(record)
    noted = {n: LayoutMeasured(layout=n, metrics=row.metrics, error=row.error) for n, row in enumerate(rows)}
    for trial in record.trials:
        shutil.rmtree(trial.work)
    assert rows_of(replace(record, measured=noted)) == rows


def test_a_refused_layout_is_a_row_with_its_reason_and_no_trial(make_record, make_trial):
    record = make_record([make_trial(0, 1, [1.0, 1.0])])
    works, other = record.comparison.layouts
    refused = other.model_copy(update={"refused": "8 rows are not divisible by 3"})
    comparison = record.comparison.model_copy(update={"layouts": (works, refused)})
    first, second = rows_of(replace(record, comparison=comparison))
    assert first.error is None
    assert (second.error, second.metrics) == ("8 rows are not divisible by 3", {})
