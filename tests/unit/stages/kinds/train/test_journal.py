"""The metrics log of an interrupted training has each step once; its summary covers only the latest attempt."""

import json
import sys

import pytest

from stages.core.contract import StageContext
from stages.core.metric_series import MetricSeries
from stages.kinds.train.journal import Journal, plot_loss

NUM_STEPS = 20


@pytest.fixture
def context(tmp_path):
    return StageContext(tmp_path, "sft", "0" * 12, {}, {}, tmp_path)


def test_a_resumed_run_does_not_log_a_step_twice(context):
    first = Journal(context, NUM_STEPS, log_every_steps=1)
    for step in range(1, 8):
        first.log(step, {"loss": float(step), "tokens_per_s": 1.0})
    resumed = Journal(context, NUM_STEPS, log_every_steps=1)
    for step in range(5, 11):
        resumed.log(step, {"loss": float(step), "tokens_per_s": 2.0})
    steps = list(MetricSeries(context.work).steps())
    assert [logged.step for logged in steps] == list(range(1, 11))
    assert steps[6].values["tokens_per_s"] == 1.0
    assert (context.work / "metrics.jsonl").read_text().count("\n") == 10
    assert [row["step"] for row in resumed.rows] == list(range(1, 11))
    assert resumed.summary() == {"loss": 10.0, "tokens_per_s": 2.0}


def test_a_line_that_was_cut_off_is_logged_again(context):
    Journal(context, NUM_STEPS, log_every_steps=1).log(1, {"loss": 1.0})
    with (context.work / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "lo')
    Journal(context, NUM_STEPS, log_every_steps=1).log(2, {"loss": 2.0})
    steps = MetricSeries(context.work).steps()
    assert [(logged.step, logged.values["loss"]) for logged in steps] == [(1, 1.0), (2, 2.0)]


def test_the_first_the_last_and_every_nth_step_are_due(context):
    journal = Journal(context, NUM_STEPS, log_every_steps=7)
    assert [step for step in range(1, NUM_STEPS + 1) if journal.is_due(step)] == [1, 7, 14, 20]


def test_the_summary_is_of_medians_without_the_steps_that_warm_up(context):
    journal = Journal(context, NUM_STEPS, log_every_steps=1)
    for step, rate in enumerate([1.0, 2.0, 3.0, 50.0, 70.0, 60.0], start=1):
        journal.log(step, {"tokens_per_s": rate, "loss": 1 / step})
    assert journal.summary() == {"tokens_per_s": 60.0, "loss": 1 / 6}


def test_a_teacher_of_whose_probability_much_is_not_told_apart_is_warned_of_once(context):
    journal = Journal(context, NUM_STEPS, log_every_steps=1)
    journal.log(1, {"teacher_rest": 0.02})
    assert not (context.work / "events.jsonl").exists()
    journal.log(2, {"teacher_rest": 0.12})
    journal.log(3, {"teacher_rest": 0.13})
    event = json.loads((context.work / "events.jsonl").read_text())
    assert event["event"] == "warning"
    assert event["message"].startswith("in step 2 the teacher gave 12.0% of its probability to tokens beyond its likel")


def test_much_communication_is_warned_of(context):
    journal = Journal(context, NUM_STEPS, log_every_steps=1)
    journal.log(1, {"communication_fraction": 0.2})
    assert not (context.work / "events.jsonl").exists()
    journal.log(2, {"communication_fraction": 0.4})
    event = json.loads((context.work / "events.jsonl").read_text())
    assert event["event"] == "warning"
    assert "40% of step 2" in event["message"]


def test_where_matplotlib_is_missing_no_picture_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot_loss([{"step": 1, "loss": 1.0}], tmp_path / "plots" / "loss.png")
    assert not (tmp_path / "plots").exists()
