"""The database of a team's servers dies during a refresh and comes back; the refresh ends as if undisturbed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from postgresql import MISSING, database_environment, postgresql
from refreshes import ForkedHome, check_nothing_was_lost, disturb_every_stage

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.fixture(scope="module")
def database():
    with postgresql(["prefect", "mlflow"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def home(tmp_path_factory, database):
    home = ForkedHome(tmp_path_factory.mktemp("database") / "home")
    home.folder.mkdir()
    home.environment |= database_environment(database)
    started = home.lifecycle("up")
    assert started.returncode == 0, started.stderr
    yield home
    assert home.lifecycle("down").returncode == 0


def test_a_refresh_outlives_the_death_of_its_servers_database_in_each_of_its_stages(home, database, fault):
    fault.name, fault.stage = "SIGKILL of PostgreSQL", "each"
    with fault.timed("recovered"):
        done = disturb_every_stage(home, "database", database.kill, database.start)
    check_nothing_was_lost(home, "database", done)
