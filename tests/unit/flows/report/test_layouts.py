"""Reports that compare parallel layouts omit warm-up and profiled steps, and have a table and bar charts."""

import shutil
from dataclasses import replace

import pytest

from flows.ledger.events import LayoutMeasured
from flows.report.layouts import COLUMNS, as_json, as_text, cells, interquartile_range, rows_of
from flows.report.tables import layout_bars
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
    killed = rows_of(record)  # in a copied home, trials are where the original home is
    assert [(row.metrics, row.error) for row in killed] == [({}, "its trials' files are gone")] * 2


def test_a_refused_layout_is_a_row_with_its_reason_and_no_trial(make_record, make_trial):
    record = make_record([make_trial(0, 1, [1.0, 1.0])])
    works, other = record.comparison.layouts
    refused = other.model_copy(update={"refused": "8 rows are not divisible by 3"})
    comparison = record.comparison.model_copy(update={"layouts": (works, refused)})
    first, second = rows_of(replace(record, comparison=comparison))
    assert first.error is None
    assert (second.error, second.metrics) == ("8 rows are not divisible by 3", {})


def test_only_what_was_measured_has_a_column(make_row):
    text = as_text([make_row(100.0), make_row(50.0, mfu=0.4)])
    heading, first, second = text.splitlines()
    assert "MFU" in heading
    assert "bubble" not in heading
    assert first.split()[-1] == "–"
    assert second.split()[-1] == "40.0%"


def test_a_table_wider_than_the_terminal_is_shown_in_parts_that_fit(make_row):
    known = dict.fromkeys(COLUMNS.keys() - {"tokens_per_s"}, 0.25)
    rows = [make_row(1000.0 * n, n, text=f"megatron tp={n} sequence_parallel=True", **known) for n in (1, 2)]
    wide, narrow = as_text(rows).splitlines(), as_text(rows, width=80).splitlines()
    assert as_text(rows, width=len(wide[0])).splitlines() == wide
    assert max(map(len, narrow)) <= 80 < len(wide[0])
    for number, line in enumerate(wide[1:], 1):
        cells = [cell for one in narrow if one.startswith(f"{number} ") for cell in one.split()[1:]]
        assert cells == line.split()
    headings = [word for one in narrow if one.startswith("  ") for word in one.split()]
    assert ["layout", *headings] == wide[0].split()


def test_failures_are_told_below_the_table(make_row):
    text = as_text([make_row(100.0), make_row(0.0, text="fsdp dp_shard=9", error="ResourceError: no memory")])
    assert text.splitlines()[-1] == "fsdp dp_shard=9  ResourceError: no memory"


def test_a_table_of_failures_alone_is_still_a_table(make_row):
    assert as_text([make_row(0.0, text="x", error="broken")]).splitlines()[-1] == "x  broken"


def test_every_line_of_the_artifact_has_the_same_keys(make_row):
    lines = cells([make_row(100.0, peak_memory_gib_rank_0=1.0), make_row(0.0, error="broken")])
    assert lines[0].keys() == lines[1].keys()
    assert as_json([make_row(0.0, error="broken")])[0]["error"] == "broken"


def test_there_are_bars_for_all_that_is_known(make_row):
    known = {"peak_memory_gib": 2.0, "peak_memory_gib_rank_0": 2.0, "peak_memory_gib_rank_1": 1.0}
    predicted = {"predicted_memory_gib": 1.5, "predicted_step_time_s": 0.9}
    rows = [make_row(100.0 * n, n, text=f"layout {n}", **known, **predicted) for n in (1, 2)]
    found = layout_bars([*rows, make_row(0.0, error="broken")])
    assert list(found) == ["Throughput", "Step time", "Memory of the process that needs most", "Strong scaling"]
    assert {tuple(bar.name for bar in one.bars) for one in list(found.values())[:3]} == {("layout 1", "layout 2")}
    rates, times, memory, _ = found.values()
    assert [bar.value for bar in rates.bars] == [100.0, 200.0]
    assert [(bar.value, bar.line) for bar in times.bars] == [(1.0, 0.9), (0.5, 0.9)]
    assert {(bar.value, bar.line, bar.dots) for bar in memory.bars} == {(2.0, 1.5, (2.0, 1.0))}
    assert memory.bars[0].text == "2 GiB, predicted 1.5"
    assert (memory.place(0.0), memory.place(1.5), memory.place(2.0)) == (0.0, 75.0, 100.0)


def test_a_whisker_is_as_wide_as_the_spread_and_does_not_reach_below_zero(make_row):
    rates, times = layout_bars([make_row(100.0, step_time_iqr_s=0.5), make_row(100.0, step_time_iqr_s=5.0)]).values()
    assert [bar.whisker for bar in rates.bars] == [(75.0, 125.0), (0.0, 350.0)]
    assert [bar.whisker for bar in times.bars] == [(0.75, 1.25), (0.0, 3.5)]
    assert rates.place(350.0) == 100.0


def test_a_rate_whose_spread_was_not_measured_has_no_whisker(make_row):
    assert layout_bars([make_row(100.0)])["Throughput"].bars[0].whisker is None


@pytest.fixture
def efficiencies():
    """Provide a function that returns the scaling efficiency of each parallel layout, for strong or weak scaling."""

    def scaling(rows, how):
        bars = layout_bars(rows).get(f"{how} scaling")
        return {bar.name: bar.value / bar.line for bar in bars.bars} if bars else {}

    return scaling


def test_perfect_scaling_is_an_efficiency_of_one(make_row, efficiencies):
    found = efficiencies([make_row(100.0 * count, num_devices=count) for count in (1, 2, 4)], "Strong")
    assert list(found.values()) == [1.0, 1.0, 1.0]


def test_no_gain_from_twice_the_devices_is_one_half(make_row, efficiencies):
    found = efficiencies([make_row(100.0, 2, text="a"), make_row(100.0, 4, text="b")], "Strong")
    assert found == {"a (devices: 2, rows a step: 8)": 1.0, "b (devices: 4, rows a step: 8)": 0.5}


def test_of_several_layouts_on_as_many_devices_the_fastest_counts(make_row, efficiencies):
    rows = [make_row(100.0, 1), make_row(150.0, 2, text="best"), make_row(120.0, 2, text="other")]
    _, (second, efficiency) = efficiencies(rows, "Strong").items()
    assert second == "best (devices: 2, rows a step: 8)"
    assert efficiency == pytest.approx(0.75)


def test_the_same_batch_is_strong_and_the_same_share_is_weak_scaling(make_row, efficiencies):
    rows = [make_row(100.0, 1, 8, "a"), make_row(190.0, 2, 8, "b"), make_row(196.0, 2, 16, "c")]
    assert efficiencies(rows, "Strong") == {
        "a (devices: 1, rows a step: 8)": 1.0,
        "b (devices: 2, rows a step: 8)": 0.95,
    }
    assert efficiencies(rows, "Weak") == {
        "a (devices: 1, rows a device: 8)": 1.0,
        "c (devices: 2, rows a device: 8)": 0.98,
    }


def test_one_number_of_devices_is_no_scaling(make_row, efficiencies):
    assert efficiencies([make_row(100.0, 2), make_row(120.0, 2)], "Strong") == {}


def test_what_failed_is_left_out_of_scaling(make_row, efficiencies):
    assert efficiencies([make_row(100.0, 1), make_row(0.0, 2, 16, error="broken")], "Weak") == {}
