"""The worker begins only the latest of the runs that a schedule has missed."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from prefect.client.schemas.objects import FlowRun

from flows.service.due_runs import missed_runs

NOW = datetime(2026, 11, 24, 3, tzinfo=UTC)
NIGHTLY, HOURLY = uuid4(), uuid4()


def run(schedule, days, **fields):
    due = {"auto_scheduled": True, "expected_start_time": NOW + timedelta(days=days), "run_count": 0, **fields}
    return FlowRun(id=uuid4(), flow_id=uuid4(), deployment_id=schedule, **due)


def test_the_latest_comes_last_whatever_the_order():
    runs = [run(NIGHTLY, -1), run(NIGHTLY, -3), run(NIGHTLY, -2)]
    assert missed_runs(runs, NOW) == [[runs[1], runs[2], runs[0]]]


def test_one_that_is_yet_to_come_keeps_none_from_running():
    assert missed_runs([run(NIGHTLY, -1), run(NIGHTLY, 0.0001)], NOW) == []


def test_schedules_retries_and_runs_by_hand_are_not_mixed():
    runs = [
        run(NIGHTLY, -1),
        run(HOURLY, -2),
        run(NIGHTLY, -3, run_count=1),
        run(HOURLY, -4, auto_scheduled=False),
        run(None, -5, auto_scheduled=False),
    ]
    assert missed_runs(runs, NOW) == []
