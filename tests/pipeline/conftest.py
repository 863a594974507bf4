"""Pipeline tests import their helpers by name; those about schedules and retries share one set of servers."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def worker_home(tmp_path_factory):
    """A home whose servers and worker are up."""
    from worker_home import WorkerHome

    home = WorkerHome(tmp_path_factory.mktemp("worker") / "home")
    home.folder.mkdir()
    started = home.lifecycle("up")
    assert started.returncode == 0, started.stderr
    yield home
    assert home.lifecycle("down").returncode == 0
    assert home.processes() == []
