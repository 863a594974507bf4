"""A simulated year of nightly refreshes needs no manual intervention and loses nothing, despite kills and outages.

YEAR_NIGHTS: how many nights (365). YEAR_SEED: of the kills (0).
"""

import dataclasses
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from disks import small_disk
from refreshes import LIFECYCLE
from year_checks import check_against_fresh, check_artifacts, check_growth, check_nights, check_requests
from year_clock import Clock
from year_events import EARLIER, events, use
from year_kills import KINDS
from year_nights import Year
from year_operator import NAME, YearHome, until
from year_world import ClientThread, Unit, receiving

NUM_NIGHTS = int(os.environ.get("YEAR_NIGHTS", "365"))
SEED = int(os.environ.get("YEAR_SEED", "0"))
DISK_MIB = 2048
KEEP = {"refreshes": min(30, NUM_NIGHTS // 4), "days": min(90, NUM_NIGHTS // 4), "champions": "all"}
START = datetime(2027, 3, 24, 12, tzinfo=UTC)

CHECKS = (check_nights, check_requests, check_artifacts, check_growth, check_against_fresh)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(4 * 3600)]


@pytest.fixture
def year(tmp_path):
    notified, disk = [], tmp_path / "disk"
    clock = Clock(tmp_path, START)
    with small_disk(disk, DISK_MIB), receiving(notified) as webhook:
        home = YearHome(disk / "home", clock)
        year = Year(home, clock, notified, ClientThread(free_port(), NAME), SEED, KEEP, events(NUM_NIGHTS))
        home.prepare()
        use(year, EARLIER[0])
        home.begin(webhook, KEEP)
        try:
            yield year
        finally:
            home.does("down")


def test_a_year_of_nights(year, tmp_path):
    year.run(len(EARLIER) + 1)
    year.kinds = [kind for kind in KINDS if kind != "rank"]  # which only the real chain has
    serve = ["serve", f"models:/{NAME}@champion", "--follow", "--port", str(year.asker.port)]
    year.unit = Unit([str(LIFECYCLE), *serve], year.home.environment, tmp_path / "serve.log")
    year.asker.start()
    try:
        until(lambda: any(one.text for one in year.asker.asked), "the champion answers")
        year.run(NUM_NIGHTS - len(year.nights))
    except AssertionError:
        keep_evidence(year.home.folder, tmp_path / "home-at-failure")
        raise
    finally:
        year.asker.stop()
        year.unit.stop()
    nights = [dataclasses.asdict(night) | {"summary": night.summary} for night in year.nights]
    (tmp_path / "nights.json").write_text(json.dumps(nights, default=str))
    problems = [problem for check in CHECKS if (problem := failure_of(check, year))]
    assert not problems, "\n\n".join(problems)


def keep_evidence(home: Path, kept: Path) -> None:
    """Copy the servers' databases and logs, and the refreshes' event logs, to a folder that outlives the test."""
    for folder in ("prefect", "mlflow", "worker", "supervisor", "ledger"):
        if (home / folder).is_dir():
            shutil.copytree(home / folder, kept / folder, ignore=shutil.ignore_patterns("artifacts", "*.sock"))


def failure_of(check: Callable[[Year], None], year: Year) -> str | None:
    """Run one check of the simulated year; return its failure or None, so that the other checks run as well."""
    try:
        check(year)
    except AssertionError as problem:
        return f"{check.__name__}: {problem}"
    return None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
