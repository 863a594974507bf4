"""The refresh flow runs on a real Prefect server and is tracked by a real MLflow server."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from refreshes import ForkedHome, after, finish, model, stage, states, trained

from stages.core.errors import DataError
from tests.searched import files_with

SECRET = "do-not-tell-8d1f"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def home(lent_home):
    return ForkedHome(lent_home)


@pytest.fixture(scope="module")
def recipe(home):
    return home.recipe(
        "two-branches",
        rows=stage("steps", HUB_TOKEN=SECRET),
        base=model("transient_once"),
        scores=after("base"),
        sft=trained("base", "rows", "deaths", TINY_DEATHS="3,5"),
    )


@pytest.fixture(scope="module")
def first(home, recipe):
    code, refresh = home.run(recipe)
    assert code == 0
    return refresh


def test_everything_is_built_although_a_stage_had_to_be_tried_twice(home, first):
    assert first["state"] == "completed"
    assert states(first) == {"rows": "built", "base": "built", "scores": "built", "sft": "built"}
    assert [run["info"]["status"] for run in home.attempts("base")] == ["FAILED", "FINISHED"]


def test_a_stage_that_was_killed_twice_went_on_from_its_checkpoint_each_time(home, first):
    assert [run["info"]["status"] for run in home.attempts("sft")] == ["KILLED", "KILLED", "FINISHED"]
    assert first["stages"]["sft"]["metrics"]["first_step"] == 5
    shown = home.lifecycle("show", first["refresh"]).stdout
    assert "warning: sft: attempt 2 was killed, tried again: sft was killed by SIGKILL" in shown


def test_again_everything_is_cached_and_refers_to_the_runs_that_built_it(home, recipe, first):
    _, second = home.run(recipe)
    assert set(states(second).values()) == {"cached"}
    for name, entry in second["stages"].items():
        assert entry["mlflow_run_id"] == first["stages"][name]["mlflow_run_id"]
    assert task_states(home, second["refresh"]) == dict.fromkeys(first["stages"], "Cached")


def test_mlflow_has_every_step_once_under_the_parent_run(home, first):
    (run,) = home.attempts("rows")
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert home.losses(run) == list(range(10))
    parent = home.mlflow(f"runs/get?run_id={tags['mlflow.parentRunId']}")["run"]
    assert parent["info"]["run_name"] == first["refresh"]
    assert parent["info"]["status"] == "FINISHED"
    assert run["info"]["run_id"] == first["stages"]["rows"]["mlflow_run_id"]
    assert {param["key"] for param in run["data"]["params"]} >= {"dataset", "trust_remote_code"}


def test_the_report_is_at_the_parent_run_and_prefect_links_to_it(home, first):
    refresh = first["refresh"]
    assert refresh in (home.folder / "ledger" / refresh / "report.html").read_text()
    (run,) = home.attempts("rows")
    parent = next(tag["value"] for tag in run["data"]["tags"] if tag["key"] == "mlflow.parentRunId")
    assert "report.html" in [file["path"] for file in home.mlflow(f"artifacts/list?run_id={parent}")["files"]]
    (flow_run,) = home.prefect("flow_runs/filter", {"flow_runs": {"name": {"any_": [refresh]}}})
    wanted = {"flow_run_id": {"any_": [flow_run["id"]]}, "key": {"any_": ["report"]}}
    (link,) = home.prefect("artifacts/filter", {"artifacts": wanted})
    assert f"/runs/{parent}/artifacts/report.html" in link["data"]


def test_secrets_of_the_environment_are_nowhere_but_in_the_recipe(home, first):
    assert files_with(home.folder, SECRET) == []


def test_mlflow_knows_all_although_the_process_that_tells_it_was_killed(home):
    refresh = home.start(home.recipe("untold", told=stage("pause", "untold")))
    release = home.work("told", "scratch/ready").with_name("release")
    os.kill(shipper_of(home), signal.SIGKILL)
    release.touch()
    code, _ = finish(refresh)
    assert code == 0
    (run,) = home.attempts("told")
    assert (run["info"]["status"], home.losses(run)) == ("FINISHED", list(range(10)))


def shipper_of(home):
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"flows.tracking.shipper\0{home.folder}" in (process / "cmdline").read_text():
                return int(process.name)
    raise AssertionError("no process tells MLflow of the refresh")


def test_a_failed_stage_stops_what_stands_on_it_and_nothing_else(home):
    recipe = home.recipe(
        "failing",
        bad=model("known_error", mark="bad"),
        never=after("bad"),
        good=model("ok", mark="good"),
        scores=after("good"),
    )
    code, refresh = home.run(recipe)
    assert code == DataError.exit_code
    assert refresh["state"] == "failed"
    assert states(refresh) == {"bad": "failed", "never": "skipped", "good": "built", "scores": "built"}
    assert refresh["stages"]["bad"]["error"] == "row 3 has no messages"
    assert flow_run(home, refresh["refresh"])["state"]["type"] == "FAILED"


def flow_run(home, name):
    (found,) = home.prefect("flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
    return found


def task_states(home, name):
    ran = home.prefect("task_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
    return {run["name"]: run["state"]["name"] for run in ran}
