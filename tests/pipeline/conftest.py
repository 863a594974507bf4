"""Fixtures of the pipeline tests; most of them share one lifecycle home whose servers are running."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def home_with_servers(tmp_path_factory, new_databases):
    """Provide the home that a worker's test files share one after another, as an object that starts and empties it."""
    from lent_home import LentHome

    home = LentHome(tmp_path_factory.mktemp("lent") / "home")
    home.begin(new_databases)
    yield home
    home.stop()


@pytest.fixture(scope="module")
def lent_home(home_with_servers):
    """Provide the folder of the shared lifecycle home, emptied, with running servers and worker."""
    yield home_with_servers.folder
    home_with_servers.empty()


@pytest.fixture(scope="module")
def worker_home(lent_home):
    """Provide the shared lifecycle home, emptied, with running servers and worker, for tests of schedules."""
    from worker_home import WorkerHome

    return WorkerHome(lent_home)
