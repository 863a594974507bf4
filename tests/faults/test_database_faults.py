"""The database of a team's servers dies while a refresh runs, and comes back: as if nothing had been."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from postgresql import MISSING, database_environment, postgresql
from refreshes import Home, eventually, finish, model, stage, states

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.fixture(scope="module")
def database():
    with postgresql(["prefect", "mlflow"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def home(tmp_path_factory, database):
    home = Home(tmp_path_factory.mktemp("database") / "home")
    home.folder.mkdir()
    home.environment |= database_environment(database)
    started = home.lifecycle("up")
    assert started.returncode == 0, started.stderr
    yield home
    assert home.lifecycle("down").returncode == 0


def test_a_refresh_outlives_the_death_of_its_servers_database(home, database, fault):
    fault.name, fault.stage = "SIGKILL of PostgreSQL", "download"
    recipe = home.recipe("database", rows=stage("steps", TINY_STEP_SECONDS="0.5"), base=model("ok"))
    refresh = home.start(recipe)
    checkpoint = home.work("rows", "scratch/step")
    with fault.timed("recovered"):
        database.kill()
        reached = int(checkpoint.read_text())
        eventually(lambda: not checkpoint.exists() or int(checkpoint.read_text()) >= reached + 3)
        database.start()
        code, done = finish(refresh)
    assert (code, states(done)) == (0, {"rows": "built", "base": "built"}), done

    code, again = home.run(recipe)
    assert (code, states(again)) == (0, {"rows": "cached", "base": "cached"})
    versions = {name: entry["version"] for name, entry in done["stages"].items()}
    assert {name: entry["version"] for name, entry in again["stages"].items()} == versions
    (attempt,) = home.attempts("rows")
    eventually(lambda: home.losses(attempt) == list(range(10)))
