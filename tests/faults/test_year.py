"""A year of nightly refreshes, on a clock of its own: no hand is needed, and nothing is lost.

YEAR_NIGHTS: how many nights (365). YEAR_SEED: of the kills (0).
"""

import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from refreshes import LIFECYCLE
from year_checks import check_artifacts, check_nights, check_requests
from year_clock import Clock
from year_nights import Year
from year_operator import NAME, YearHome, until
from year_world import Asker, Unit, receiving

NUM_NIGHTS = int(os.environ.get("YEAR_NIGHTS", "365"))
SEED = int(os.environ.get("YEAR_SEED", "0"))
START = datetime(2027, 3, 24, 12, tzinfo=UTC)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(4 * 3600)]


@pytest.fixture
def year(tmp_path):
    told = []
    clock = Clock(tmp_path, START)
    home = YearHome(tmp_path / "home", clock)
    with receiving(told) as webhook:
        home.set_up(webhook)
        try:
            yield Year(home, clock, told, Asker(free_port(), NAME), SEED, kinds=["flow", "stage", "judge"])
        finally:
            assert home.lifecycle("down").returncode == 0


def test_a_year_of_nights(year, tmp_path):
    year.run(1)
    serve = ["serve", f"models:/{NAME}@champion", "--follow", "--port", str(year.asker.port)]
    unit = Unit([str(LIFECYCLE), *serve], year.home.environment, tmp_path / "serve.log")
    try:
        year.asker.start()
        until(lambda: any(one.text for one in year.asker.asked), "the champion answers")
        year.run(NUM_NIGHTS - 1)
    finally:
        year.asker.stop()
        unit.stop()
    check_nights(year)
    check_requests(year)
    check_artifacts(year)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
