"""Scheduled refreshes run on a real Prefect server with a real worker; only the stage processes are stand-ins."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from refreshes import ROOT, after, eventually, finish, model, stage, trained
from worker_home import HOUR, NIGHTLY

from flows.service.reaper import DUE_AGAIN

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def worker_home(worker_home):
    """Provide the shared lifecycle home; refreshes that its worker starts on request are forks of a warm process.

    Those that Prefect's scheduler planned, and those that are begun again, are processes of their own.
    """
    worker_home.forks_refreshes = True
    return worker_home


@pytest.fixture(scope="module")
def nightly(worker_home):
    """Provide a scheduled recipe with two branches, one of which downloads a local folder of rows."""
    rows = worker_home.folder.parent / "rows"
    rows.mkdir()
    (rows / "train-a.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    local = {**stage("ok"), "dataset": f"file://{rows}", "files": None}
    stages = {"rows": local, "base": model("ok", "nightly"), "sft": trained("base", "rows"), "scores": after("base")}
    schedule = worker_home.schedule(worker_home.write("nightly", stages))
    return {"rows": rows, "schedule": schedule}


def test_a_schedule_says_when_it_is_due(worker_home, nightly):
    assert nightly["schedule"]["cron"] == NIGHTLY
    assert nightly["schedule"]["timezone"] == "Europe/Berlin"
    due = datetime.fromisoformat(nightly["schedule"]["next_due"])
    assert (due.hour, due.minute) == (HOUR, 0)
    assert due.utcoffset() in (timedelta(hours=1), timedelta(hours=2))
    listed = json.loads(worker_home.lifecycle("schedules", "--json").stdout)["schedules"]
    assert nightly["schedule"] in listed


def test_new_rows_rebuild_what_stands_on_them_and_nothing_new_is_said(worker_home, nightly):
    first = worker_home.run_now("nightly")
    assert set(worker_home.states(first).values()) == {"built"}

    second = worker_home.run_now("nightly")
    assert (second["state"]["type"], second["state"]["name"]) == ("COMPLETED", "Cached")
    assert second["state"]["message"] == "nothing new: 4 stages cached"
    print(f"nothing new: {second['total_run_time']:.1f} s as a scheduled run")

    (nightly["rows"] / "train-b.jsonl").write_text('{"prompt": "1+2", "completion": "3"}\n')
    third = worker_home.run_now("nightly")
    assert worker_home.states(third) == {"rows": "built", "base": "cached", "sft": "built", "scores": "cached"}


def test_overrides_from_the_form_change_that_run_only(worker_home, nightly):
    changed = worker_home.run_now("nightly", overrides=["stages.sft.learning_rate=2e-3"])
    assert worker_home.states(changed)["sft"] == "built"
    assert worker_home.deployment("nightly")["parameters"]["overrides"] == []


WRONG = {
    "stages.stf.learning_rate=2e-3": "there is no stage `stf`; did you mean `sft`?",
    "stages.sft.execution.environment.BASH_ENV=/tmp": "put the value into the recipe",
}
FORBIDDEN = {
    "stages.sft.execution.launcher=slurm": "only the recipe says where a stage runs",
    "stages.rows.dataset=file:///etc": "names a file outside the recipe's folder",
}


@pytest.mark.parametrize("overrides", [WRONG, FORBIDDEN], ids=["wrong", "forbidden"])
def test_overrides_that_may_not_be_fail_with_our_words_before_anything_runs(worker_home, nightly, overrides):
    """The form cannot choose what runs."""
    refused = worker_home.run_now("nightly", overrides=[*overrides])
    assert refused["state"]["type"] == "FAILED"
    assert [reason for reason in overrides.values() if reason not in refused["state"]["message"]] == []
    assert not (worker_home.folder / "ledger" / refused["name"]).exists()


def test_a_deployment_runs_its_own_recipe_and_the_one_by_hand_those_that_ran_here(worker_home, nightly):
    recipe = worker_home.write("ran-by-hand", {"rows": stage("ok", "by-hand")})
    refused = worker_home.run_now("nightly", recipe=str(recipe))
    assert refused["state"]["type"] == "FAILED"
    assert f"the deployment `nightly` runs {recipe.with_name('nightly.yaml')} alone" in refused["state"]["message"]
    assert finish(worker_home.start(recipe))[0] == 0
    never_run = recipe.with_name("never-run.yaml")
    never_run.write_text(recipe.read_text())
    again, refused = (worker_home.run_now("by%20hand", recipe=str(path)) for path in (recipe, never_run))
    assert again["state"]["name"] == "Cached"
    assert refused["state"]["type"] == "FAILED"
    assert "runs recipes that were run in this home" in refused["state"]["message"]


def test_a_refresh_is_called_after_its_recipe_however_it_was_started(worker_home, tmp_path):
    recipe = worker_home.write("by-file", {"rows": stage("ok", "called")})
    recipe = recipe.rename(recipe.with_name("another-file.yaml"))
    worker_home.schedule(recipe)
    scheduled = worker_home.run_now("by-file")
    assert scheduled["name"].startswith("by-file-2")
    assert worker_home.run(recipe)[1]["refresh"].startswith("by-file-2")
    assert worker_home.lifecycle("schedules", "remove", "by-file").returncode == 0


def test_missed_runs_do_not_pile_up(worker_home, nightly):
    """Only the latest of runs missed while servers were down starts; the one before is superseded, others missed."""
    runs = worker_home.miss_nights("nightly")
    assert len(runs) >= 2
    ended = [worker_home.ended(run, num_tries=0)["state"]["name"] for run in runs]
    assert ended.count("Cached") == 1
    assert ended.count("Superseded") == 1, "of which people are notified"
    assert ended.count("Missed") == len(runs) - 2


@pytest.mark.parametrize(("on_collision", "expected"), [("queue", "Cached"), ("skip", "Skipped")])
def test_a_refresh_that_is_due_while_one_of_its_recipe_runs(worker_home, on_collision, expected):
    name = f"slow-{on_collision}"
    recipe = worker_home.write(name, {f"held-{name}": stage("wait", name)}, on_collision=on_collision)
    worker_home.schedule(recipe)
    by_hand = worker_home.start(recipe)
    release = worker_home.work(f"held-{name}", "scratch/ready").with_name("release")
    due = worker_home.start_now(name)
    if on_collision == "skip":
        assert worker_home.ended(due)["state"]["name"] == expected
    else:
        eventually(lambda: f"waiting: another refresh of {name} is running" in worker_home.logs(due))
    release.touch()
    assert worker_home.ended(due)["state"]["name"] == expected
    assert finish(by_hand)[1]["state"] == "completed"


def test_a_refresh_is_skipped_while_another_recipe_holds_its_devices(worker_home):
    held = {**stage("wait", "held"), "execution": {"environment": {"TINY": "wait"}, "slots": 64}}
    other = worker_home.start(worker_home.write("holder", {"held-devices": held}))
    release = worker_home.work("held-devices", "scratch/ready").with_name("release")
    worker_home.schedule(worker_home.write("needy", {"rows": stage("ok", "needy")}, on_collision="skip"))
    skipped = worker_home.run_now("needy")
    release.touch()
    assert finish(other)[1]["state"] == "completed"
    assert skipped["state"]["name"] == "Skipped"
    assert "another refresh holds the rest" in skipped["state"]["message"]
    assert worker_home.run_now("needy")["state"]["type"] == "COMPLETED"


def taken_run(worker_home, first_state, *states):
    """Create a Prefect flow run in the state in which a worker leaves it if killed before it starts the process."""
    deployment = worker_home.deployment("nightly")
    body = {"parameters": deployment["parameters"], "state": first_state}
    run = worker_home.prefect(f"deployments/{deployment['id']}/create_flow_run", body)["id"]
    for state in states:
        worker_home.prefect(f"flow_runs/{run}/set_state", {"state": state, "force": True})
    return run


def reap(worker_home):
    """Run the service's search for dead refreshes once, as if all runs had exceeded the time allowed to start."""
    worker_home.python("from flows.service import reaper; reaper.START_TIMEOUT_S = 0.0; reaper.Reaper().reap()")


@pytest.mark.parametrize(
    "name",
    ["Submitting", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("Pending", "InfrastructurePending"))],
)
def test_a_run_that_a_killed_worker_had_taken_begins_all_the_same(worker_home, nightly, name):
    run = taken_run(worker_home, {"type": "PENDING", "name": name})
    reap(worker_home)
    assert worker_home.ended(run)["state"]["type"] == "COMPLETED"


def test_a_run_whose_process_failed_before_the_ledger_and_could_not_say_so_begins_again(worker_home, nightly):
    """A scheduled run whose process failed before the refresh began, without a report, is started again.

    On a full disk neither the ledger nor the run's end in Prefect may be written.
    """
    run = taken_run(worker_home, {"type": "PENDING"}, {"type": "RUNNING"})
    reap(worker_home)
    assert worker_home.ended(run, num_tries=2)["state"]["type"] == "COMPLETED"


def test_a_run_whose_process_twice_did_not_come_to_begin_is_called_crashed(worker_home, nightly):
    """A run whose process ended twice before its refresh began, without report (full disk), is marked as crashed."""
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    again = {"type": "SCHEDULED", "message": DUE_AGAIN, "state_details": {"scheduled_time": tomorrow}}
    run = taken_run(worker_home, again, {"type": "PENDING", "name": "Submitting"})
    reap(worker_home)
    state = worker_home.flow_run(run)["state"]
    assert (state["type"], state["name"]) == ("CRASHED", "Crashed")
    assert "its process ended twice before the refresh began" in state["message"]


def test_schedules_are_paused_resumed_and_removed(worker_home):
    worker_home.schedule(worker_home.write("fleeting", {"rows": stage("ok")}))
    paused = json.loads(worker_home.lifecycle("schedules", "pause", "fleeting", "--json").stdout)["schedules"][0]
    assert (paused["paused"], paused["next_due"]) == (True, None)
    resumed = json.loads(worker_home.lifecycle("schedules", "resume", "fleeting", "--json").stdout)["schedules"][0]
    assert resumed["next_due"]
    assert worker_home.lifecycle("schedules", "remove", "fleeting").returncode == 0
    unknown = worker_home.lifecycle("schedules", "pause", "fleeting")
    assert unknown.returncode == 3
    assert "no recipe called `fleeting` is scheduled" in unknown.stderr
    for name in ("a/b", "../x", "a?b#c", "%2F"):
        unknown = worker_home.lifecycle("schedules", "pause", name)
        assert unknown.returncode == 3, unknown.stderr
        assert f"no recipe called `{name}` is scheduled" in unknown.stderr


def test_a_paused_schedule_runs_nothing_but_what_is_started_by_hand(worker_home):
    """A paused schedule starts nothing, not even runs already taken; refreshes by hand still run."""
    worker_home.schedule(worker_home.write("resting", {"rows": stage("ok", "resting")}))
    taken = worker_home.planned("resting")[0]
    worker_home.prefect(f"flow_runs/{taken['id']}/set_state", {"state": {"type": "PENDING"}})
    assert worker_home.lifecycle("schedules", "pause", "resting").returncode == 0
    assert worker_home.planned("resting") == []
    submit = {"state": {"type": "SCHEDULED"}, "force": True}  # the worker submits what it had taken
    worker_home.prefect(f"flow_runs/{taken['id']}/set_state", submit)
    skipped = worker_home.ended(taken["id"])
    assert skipped["state"]["name"] == "Skipped"
    assert skipped["state"]["message"] == "its schedule was paused before it began"
    assert not (worker_home.folder / "ledger" / skipped["name"]).exists()
    assert worker_home.run_now("resting")["state"]["type"] == "COMPLETED"
    resumed = json.loads(worker_home.lifecycle("schedules", "resume", "resting", "--json").stdout)["schedules"][0]
    assert resumed["next_due"]
    assert worker_home.lifecycle("schedules", "remove", "resting").returncode == 0


def test_runs_of_a_removed_schedule_that_a_worker_had_taken_end_quietly(worker_home):
    """A run that a worker has taken ends as Removed if its schedule is removed before the refresh begins."""
    worker_home.schedule(worker_home.write("removed", {"rows": stage("ok", "removed")}))
    taken, begun = worker_home.planned("removed")[:2]
    worker_home.prefect(f"flow_runs/{taken['id']}/set_state", {"state": {"type": "PENDING"}})
    worker_home.prefect(f"flow_runs/{begun['id']}/set_state", {"state": {"type": "RUNNING"}, "force": True})
    assert worker_home.lifecycle("schedules", "remove", "removed").returncode == 0
    # What Prefect's worker does when the process finds no deployment: it proposes this.
    worker_home.prefect(f"flow_runs/{taken['id']}/set_state", {"state": {"type": "CRASHED"}})
    removed = worker_home.flow_run(taken["id"])
    assert (removed["state"]["type"], removed["state"]["name"]) == ("CANCELLED", "Removed")
    assert removed["state"]["message"] == "its schedule was removed before it began"

    look = (
        "from uuid import UUID; from prefect.client.orchestration import get_client; "
        "from flows.running import due; client = get_client(sync_client=True).__enter__(); "
        f"run = client.read_flow_run(UUID('{begun['id']}')); due.announce_schedule(client, run); "
        "print(due._not_wanted().name)"
    )
    assert worker_home.python(look, PREFECT__RUNTIME__FLOW_RUN__ID=begun["id"]) == "Removed\n"


def test_a_second_recipe_of_the_same_name_is_refused(worker_home, nightly, tmp_path):
    namesake = tmp_path / "other.yaml"
    namesake.write_text(json.dumps({"name": "nightly", "stages": {"rows": stage("ok")}}))
    refused = worker_home.lifecycle("schedule", str(namesake), "--cron", "0 3 * * *")
    assert refused.returncode == 3
    assert "has the same name, nightly, and is scheduled" in refused.stderr


def deploy_with_prefect(home, file):
    environment = {**home.environment, "PREFECT_API_URL": f"{home.address('prefect')}/api", "PWD": str(ROOT)}
    environment["PREFECT_API_AUTH_STRING"] = home.key()
    command = [sys.executable, "-m", "prefect", "deploy", "--prefect-file", str(file), "--all", "--no-prompt"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_what_prefect_itself_deploys_is_a_schedule_like_ours(worker_home, tmp_path):
    """`make test` holds the entrypoint in the shipped file (`test_addresses.py`), and that schedules run one recipe."""
    shipped = ROOT / "deploy" / "prefect.yaml"
    deploy_with_prefect(worker_home, shipped)
    listed = json.loads(worker_home.lifecycle("schedules", "--json").stdout)["schedules"]
    (found,) = [schedule for schedule in listed if schedule["name"] == "quickstart"]
    assert (found["cron"], found["recipe"]) == ("0 3 * * *", str(ROOT / "configs" / "quickstart.yaml"))
    other = worker_home.write("deployed", {"rows": stage("ok", "deployed")})
    refused = worker_home.run_now("quickstart", recipe=str(other))["state"]
    assert refused["type"] == "FAILED" and "the deployment `quickstart` runs" in refused["message"]
    text = shipped.read_text().replace("{{ $PWD }}/configs/quickstart.yaml", str(other))
    (tmp_path / "prefect.yaml").write_text(text.replace("name: quickstart", "name: deployed"))
    deploy_with_prefect(worker_home, tmp_path / "prefect.yaml")
    assert worker_home.run_now("deployed")["state"]["type"] == "COMPLETED"


@pytest.mark.nightly
def test_named_states_are_ends_to_the_automation_against_zombies(worker_home, nightly):
    """Prefect's documented automation against zombies, here in seconds, recognizes all ends of refreshes.

    `make test` holds names and types of all these ends, in the tests above.
    """
    ends = ["heartbeat", "Completed", "Failed", "Cancelled", "Crashed"]
    zombies = {
        "name": "zombies",
        "trigger": {
            "type": "event",
            "after": ["prefect.flow-run.heartbeat"],
            "expect": [f"prefect.flow-run.{end}" for end in ends],
            "match": {"prefect.resource.id": ["prefect.flow-run.*"]},
            "for_each": ["prefect.resource.id"],
            "posture": "Proactive",
            "threshold": 1,
            "within": 15,
        },
        "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "message": "no heartbeat"}],
    }
    automation = worker_home.prefect("automations/", zombies)["id"]
    worker_home.schedule(worker_home.write("mortal", {"mortal": stage("wait", "mortal")}, on_collision="skip"))
    runs = {"Completed": worker_home.start_now("mortal")}
    release = worker_home.work("mortal", "scratch/ready").with_name("release")
    runs["Skipped"] = worker_home.start_now("mortal")
    for flow_run in runs.values():
        worker_home.heartbeat(flow_run)
    worker_home.ended(runs["Skipped"])
    release.touch()
    worker_home.ended(runs["Completed"])
    runs["Cached"] = worker_home.start_now("mortal")
    worker_home.heartbeat(runs["Cached"])
    worker_home.ended(runs["Cached"])
    zombie = worker_home.start_now("mortal", state="PENDING")  # which no worker takes
    worker_home.heartbeat(zombie)
    assert worker_home.ended(zombie, num_tries=0)["state"]["name"] == "Crashed"
    assert {worker_home.flow_run(run)["state"]["name"]: run for run in runs.values()} == runs
    worker_home.prefect(f"automations/{automation}", method="DELETE")
    assert worker_home.lifecycle("schedules", "remove", "mortal").returncode == 0
