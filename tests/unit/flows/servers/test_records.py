"""Records of running servers are ignored in a copied lifecycle home, and respected on another machine."""

import os
import shutil
import time

import pytest

from flows.ledger.process_identity import ProcessIdentity
from flows.servers import local
from flows.servers.records import (
    ServerRecord,
    address_of,
    host_of,
    is_unsettled_copy,
    read_records,
    server_heartbeat,
    write_records,
)
from stages.core.errors import ServerError

ELSEWHERE = {"host": "other", "boot": "00000000-0000-0000-0000-000000000000"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "home"


@pytest.fixture
def record():
    """Provide a function that returns the record of a fake server run by this process, whose identity it may change."""
    return lambda **changes: ServerRecord(
        process=ProcessIdentity.own().model_copy(update=changes), port=4200, token="0" * 32
    )


@pytest.fixture
def in_copy(home, monkeypatch):
    """Provide a function that copies the lifecycle home, and sets `$LIFECYCLE_HOME` to the copy."""

    def copy():
        shutil.copytree(home, home.with_name("copy"))
        monkeypatch.setenv("LIFECYCLE_HOME", str(home.with_name("copy")))

    return copy


def test_records_are_void_in_a_copy_of_the_home(record, in_copy):
    write_records({"prefect": record()})
    assert address_of("prefect") == "http://127.0.0.1:4200" and not is_unsettled_copy()
    in_copy()
    assert read_records() == {} and address_of("prefect") is None and is_unsettled_copy()


def test_a_copy_is_settled_only_when_that_is_said(record, in_copy):
    """A copied lifecycle home remains marked as a copy until its schedules are paused.

    A command may die after starting a copied home's servers; then the next one pauses its schedules.
    """
    write_records({})
    in_copy()
    assert local.down() == []
    write_records({"prefect": record()})
    assert list(read_records()) == ["prefect"] and is_unsettled_copy()
    write_records({"prefect": record()}, settled=True)
    assert list(read_records()) == ["prefect"] and not is_unsettled_copy()


def test_records_of_an_earlier_version_count_as_before(home, record):
    text = f'{{"servers": {{"prefect": {record().model_dump_json()}}}}}'
    (home / "servers.json").write_text(text)
    assert address_of("prefect") and not is_unsettled_copy()


def test_second_servers_of_a_home_are_refused_while_the_first_show_signs_of_life(home, record):
    write_records({name: record(**ELSEWHERE) for name in ("prefect", "mlflow", "worker")})
    assert {(one.url, one.host, one.trouble) for one in local.status()} == {(None, "other", "")}
    for command in (local.up, local.down):
        with pytest.raises(ServerError, match=r"prefect on other, mlflow on other.*`lifecycle down` there"):
            command()
    assert list(read_records()) == ["prefect", "mlflow", "worker"]
    long_ago_s = time.time() - 3600
    os.utime(home / "servers.json", (long_ago_s, long_ago_s))
    heartbeat = server_heartbeat()
    heartbeat.start()
    assert host_of(read_records()["prefect"]) == "other"
    heartbeat.stop()
    assert host_of(read_records()["prefect"]) is None
    assert local.down() == ["prefect", "mlflow", "worker"]


def test_servers_know_their_home_until_it_is_moved(home, record, monkeypatch):
    started = record().model_copy(update={"home": home})
    assert started.knows_home and record().knows_home
    home.with_name("link").symlink_to(home)
    monkeypatch.setenv("LIFECYCLE_HOME", str(home.with_name("link")))
    assert started.knows_home
    home.rename(home.with_name("moved"))
    monkeypatch.setenv("LIFECYCLE_HOME", str(home.with_name("moved")))
    assert not started.knows_home
    home.mkdir()
    assert not started.knows_home
