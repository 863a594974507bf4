"""A team's servers (`deploy/compose.yaml`) admit only requests with the key, also from other machines."""

import json
import shutil
import urllib.error

import pytest
from postgresql import MISSING, postgresql
from refreshes import ForkedHome, eventually, request
from team import Team

from tests.searched import commands_with, files_with

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
QUESTIONS = {
    "prefect": ("/api/deployments/filter", "/api/flows/filter", "/api/admin/version"),
    "mlflow": ("/", "/api/2.0/mlflow/experiments/search?max_results=1", "/api/2.0/mlflow-artifacts/artifacts?path="),
}


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    with postgresql([]) as database:
        team = Team(tmp_path_factory.mktemp("team"), database)
        try:
            team.start()
            yield team
        finally:
            team.stop()
        assert files_with(team.folder, database.password) == [team.secret("postgres_password")]


@pytest.fixture
def client(team, tmp_path):
    """Provide a lifecycle home as on another machine, with the servers' addresses and a copy of the key."""
    home = ForkedHome(tmp_path / "home")
    home.folder.mkdir()
    home.environment |= {
        "PREFECT_API_URL": f"{team.address('prefect')}/api",
        "MLFLOW_TRACKING_URI": team.address("mlflow"),
        "LIFECYCLE_SERVERS_KEY_FILE": str(shutil.copy(team.secret("servers_key"), tmp_path / "key")),
    }
    (tmp_path / "key").chmod(0o600)
    return home


def downloads(home, name):
    return home.recipe(name, rows={"kind": "download", "dataset": "builtin/addition"})


def status_of(address, **headers):
    try:
        request(address, None, **headers)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


@pytest.mark.parametrize(("server", "path"), [(name, path) for name, paths in QUESTIONS.items() for path in paths])
def test_without_the_key_nothing_is_answered(team, server, path):
    for key in (None, "lifecycle:wrong"):
        assert status_of(f"{team.address(server)}{path}", key=key) == 401


def test_a_client_elsewhere_shows_the_key_of_its_file(team, client, tmp_path):
    key = f"lifecycle:{team.password}"
    done = client.lifecycle("run", str(downloads(client, "elsewhere")), "--json")
    assert done.returncode == 0, done.stderr
    refresh = json.loads(done.stdout)
    assert refresh["stages"]["rows"]["mlflow_run_id"]
    wanted = {"flow_runs": {"name": {"any_": [refresh["refresh"]]}}}
    (flow_run,) = request(f"{team.address('prefect')}/api/flow_runs/filter", wanted, key)
    assert flow_run["state"]["type"] == "COMPLETED"
    assert files_with(tmp_path, team.password) == [tmp_path / "key"]


def test_the_worker_runs_what_a_client_schedules(team, client):
    key, api = f"lifecycle:{team.password}", f"{team.address('prefect')}/api"
    recipe = downloads(client, "nightly")
    scheduled = client.lifecycle("schedule", str(recipe), "--cron", "0 3 * * *")
    assert scheduled.returncode == 0, scheduled.stderr
    assert client.lifecycle("down").returncode == 0  # the client's own worker
    deployment = request(f"{api}/deployments/name/refresh/nightly", None, key)["id"]
    now = {"state": {"type": "SCHEDULED"}}
    run = request(f"{api}/deployments/{deployment}/create_flow_run", now, key)["id"]
    over = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
    state = eventually(
        lambda: found if (found := request(f"{api}/flow_runs/{run}", None, key)["state"])["type"] in over else None
    )
    assert state["type"] == "COMPLETED", state["message"]


def test_the_key_is_in_its_file_alone(team):
    """The servers' key occurs in no log, database or command line, nor in what `docker inspect` shows."""
    assert team.log("prefect").stat().st_size
    assert files_with(team.folder, team.password) == [team.secret("servers_key")]
    assert commands_with(team.password) == []
    assert team.password not in json.dumps(team.services)


@pytest.mark.parametrize("text", [None, "lifecycle:wrong", "nonsense", "lifecycle:readable"])
def test_a_client_whose_key_does_not_do_is_told_so(client, tmp_path, text):
    key = tmp_path / "key"
    key.unlink()
    if text:
        key.write_text(text)
        key.chmod(0o644 if "readable" in text else 0o600)
    refused = client.lifecycle("run", str(downloads(client, "refused")))
    assert refused.returncode == 9, refused.stderr
    assert "LIFECYCLE_SERVERS_KEY_FILE" in refused.stderr
    assert "Traceback" not in refused.stderr
