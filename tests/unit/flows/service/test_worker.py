"""The worker for schedules plans runs again after the clock was set back, and removes folders of killed runs."""

import subprocess
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from prefect.client.schemas.objects import FlowRun

from flows.service.worker import Clock, missed_runs, remove_left_folders


def test_runs_are_planned_after_the_clock_was_set_back_and_it_is_said_once(capsys):
    set_by_s = 0.0
    planned = []
    clock = Clock(lambda: planned.append(time.monotonic()), wall_s=lambda: time.time() + set_by_s)
    clock.look()
    set_by_s = 3600.0  # forward: Prefect's loops are due at once
    clock.look()
    assert (planned, capsys.readouterr().out) == ([], "")
    set_by_s = 0.0
    clock.look()
    clock.look()
    assert len(planned) == 2
    said = capsys.readouterr().out
    assert said.count("the clock was set back by 60 min") == 1


def test_a_planning_that_failed_is_tried_again(capsys):
    set_by_s = 0.0
    answers = [ConnectionError(), None]

    def plan():
        if (answer := answers.pop(0)) is not None:
            raise answer

    clock = Clock(plan, wall_s=lambda: time.time() + set_by_s)
    set_by_s = -3600.0
    for _ in range(2):
        try:
            clock.look()
        except ConnectionError:
            continue
    assert answers == []
    assert "set back by 60 min" in capsys.readouterr().out


def test_working_directories_of_a_killed_worker_are_removed_unless_a_refresh_goes_on_there(tmp_path):
    for name in ("tmpdeadprefect", "tmpliveprefect", "runner_storage"):
        (tmp_path / name / "below").mkdir(parents=True)
    refresh = subprocess.Popen(["sleep", "100"], cwd=tmp_path / "tmpliveprefect" / "below")
    try:
        remove_left_folders(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"tmpliveprefect", "runner_storage"}
    finally:
        refresh.kill()
        refresh.wait()
    remove_left_folders(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"runner_storage"}


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
