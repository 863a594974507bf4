"""A failed stage is retried by Prefect's Retry button and by command, on real servers with a real worker.

Done stages are reused, the failed one continues from its checkpoint, and MLflow shows a new attempt of the refresh.
"""

import json
import os
import signal
import sqlite3
import time

import pytest
from refreshes import TINY_REFRESH, after, eventually, model, stage, states
from worker_home import POLL_S

from stages.core.errors import DataError, StoreError
from tests.forked import run_forked

pytestmark = pytest.mark.timeout(900)
DETECTION_BOUND_S = 120


def recipe(home, name, mode):
    """Write a recipe of three stages: one succeeds, a slow stand-in runs in the given mode, and one depends on it."""
    base = model(mode, name, TINY_STEP_SECONDS="0.5")
    stages = {f"rows-{name}": stage("ok", name), f"base-{name}": base, f"scores-{name}": after(f"base-{name}")}
    return home.write(name, stages)


def tags(run):
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


def check_attempts(home, name, refresh, expected):
    """Check that MLflow has a run for each try of a failed stage, below the single finished run of the refresh."""

    def ended_runs():
        runs = home.attempts(f"base-{name}")
        return runs if [run["info"]["status"] for run in runs] == expected else None

    runs = eventually(ended_runs, POLL_S)
    parents = {tags(run)["mlflow.parentRunId"] for run in runs}
    assert [tags(run)["attempt"] for run in runs] == [str(1 + number) for number in range(len(expected))]
    assert {tags(run)["refresh"] for run in runs} == {refresh}
    assert len(parents) == 1
    parent = eventually(lambda: finished_parent(home, parents.copy().pop()), POLL_S)
    assert parent["info"]["run_name"] == refresh
    assert len(home.attempts(f"rows-{name}")) == 1


def finished_parent(home, run_id):
    parent = home.mlflow(f"runs/get?run_id={run_id}")["run"]
    return parent if parent["info"]["status"] == "FINISHED" else None


def test_retry_button_continues_the_failed_stage_and_what_stands_on_it(worker_home):
    worker_home.schedule(recipe(worker_home, "button", "stumble"))
    failed = worker_home.run_now("button")
    assert failed["state"]["type"] == "FAILED"
    assert worker_home.states(failed) == {"rows-button": "built", "base-button": "failed", "scores-button": "skipped"}
    assert worker_home.task_states(failed)["scores-button"] == ("CANCELLED", "Skipped")

    worker_home.press_retry(failed["id"])
    done = worker_home.ended(failed["id"], num_tries=2)
    assert (done["name"], done["state"]["type"]) == (failed["name"], "COMPLETED")
    assert worker_home.states(done) == {"rows-button": "cached", "base-button": "built", "scores-button": "built"}
    assert worker_home.record(done).stages["base-button"].metrics["first_step"] == 5
    check_attempts(worker_home, "button", done["name"], ["FAILED", "FINISHED"])


def test_command_line_retries_the_same_refresh(worker_home):
    code, failed = worker_home.run(recipe(worker_home, "command", "stumble"))
    assert code == DataError.exit_code
    again = run_forked(TINY_REFRESH, "--retry", failed["refresh"], environment=worker_home.environment)
    done = json.loads(again.stdout)
    assert (again.returncode, done["refresh"]) == (0, failed["refresh"])
    assert states(done) == {"rows-command": "cached", "base-command": "built", "scores-command": "built"}
    assert done["stages"]["base-command"]["metrics"]["first_step"] == 5
    check_attempts(worker_home, "command", done["refresh"], ["FAILED", "FINISHED"])

    listed = json.loads(worker_home.lifecycle("runs", "--recipe", "command", "--json").stdout)["runs"]
    assert [(run["stage"], run["number"], run["outcome"]) for run in listed if run["stage"] == "base-command"] == [
        ("base-command", 2, "finished"),
        ("base-command", 1, "failed"),
    ]
    nothing = worker_home.lifecycle("retry", done["refresh"])
    assert nothing.returncode == StoreError.exit_code
    assert "it is completed, expected one that failed" in nothing.stderr


@pytest.mark.parametrize("started_by", ["worker", pytest.param("command", marks=pytest.mark.nightly)])
def test_a_killed_refresh_is_recognised_as_dead_and_retried_with_the_button(worker_home, started_by):
    name = f"killed-{started_by}"
    path = recipe(worker_home, name, "linger")  # it must not have ended when it is killed
    if started_by == "worker":
        worker_home.schedule(path)
        flow_run = worker_home.start_now(name)
        checkpoint = worker_home.work(f"base-{name}", "scratch/step")
    else:
        by_hand = worker_home.start(path)
        checkpoint = worker_home.work(f"base-{name}", "scratch/step")
        (file,) = worker_home.folder.glob(f"ledger/{name}-*/ledger.jsonl")
        flow_run = worker_home.record({"name": file.parent.name}).prefect_flow_run_id
    eventually(lambda: int(checkpoint.read_text() or 0) >= 2)
    eventually(lambda: worker_home.states(worker_home.flow_run(flow_run))[f"rows-{name}"] == "built")
    worker_home.kill_refresh(flow_run)
    if started_by == "command":
        by_hand.communicate()
    killed_s = time.monotonic()
    dead = worker_home.ended(flow_run)
    detected_s = time.monotonic() - killed_s
    print(f"recognised as dead after {detected_s:.1f} s")
    assert dead["state"]["type"] == "CRASHED"
    assert detected_s < DETECTION_BOUND_S
    # The worker tells Prefect twice, within a second, and the second time would undo a retry that came in between.
    eventually(lambda: worker_home.record(dead).error == "its process was killed")

    worker_home.press_retry(flow_run)
    done = worker_home.ended(flow_run, num_tries=2)
    assert done["state"]["type"] == "COMPLETED"
    assert worker_home.record(done).stages[f"base-{name}"].metrics["first_step"] >= 2
    check_attempts(worker_home, name, done["name"], ["KILLED", "FINISHED"])


def test_a_refresh_outlives_its_worker_and_the_next_one_leaves_it_alone(worker_home):
    worker_home.schedule(worker_home.write("orphan", {"held-orphan": stage("wait", "orphan")}))
    flow_run = worker_home.start_now("orphan")
    release = worker_home.work("held-orphan", "scratch/ready").with_name("release")
    before = worker_home.servers()["worker"]["process"]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lambda: worker_home.servers()["worker"]["process"] != before)  # its supervisor has started it again
    release.touch()
    assert worker_home.ended(flow_run)["state"]["type"] == "COMPLETED"


def test_a_schedule_of_an_earlier_version_runs_once_the_worker_was_started_again(worker_home):
    worker_home.schedule(worker_home.write("aged", {"rows": stage("ok", "aged")}))
    with sqlite3.connect(worker_home.folder / "prefect" / "prefect.db", timeout=60) as connection:
        connection.execute("UPDATE deployment SET entrypoint = 'flows.refresh.refresh' WHERE name = 'aged'")
    os.kill(worker_home.servers()["worker"]["process"]["pid"], signal.SIGKILL)
    assert worker_home.lifecycle("up").returncode == 0
    eventually(lambda: worker_home.deployment("aged")["entrypoint"] == "flows.running.refresh.refresh")
    assert worker_home.run_now("aged")["state"]["type"] == "COMPLETED"


def test_a_refresh_that_is_stopped_with_its_worker_is_cancelled_in_good_order(worker_home):
    worker_home.schedule(worker_home.write("stopped", {"held-stopped": stage("wait", "stopped")}))
    flow_run = worker_home.start_now("stopped")
    worker_home.work("held-stopped", "scratch/ready")
    down = worker_home.lifecycle("down", "--json")
    assert "worker" in json.loads(down.stdout)["stopped"]
    assert worker_home.processes() == []
    assert worker_home.lifecycle("up").returncode == 0
    stopped = worker_home.ended(flow_run)
    assert (stopped["state"]["type"], stopped["state"]["message"]) == ("CANCELLED", "stopped on request")
