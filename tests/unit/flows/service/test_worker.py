"""The worker plans runs while a clock that was set back stops Prefect's server, and removes folders of killed ones."""

import subprocess
import time

from flows.service.worker import Clock, remove_left_folders


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
