"""A champion's serving engine that is killed under load is restarted before all else, and no request is lost."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows.champion.registry import Registry
from flows.champion.servers_folder import own_folder
from tests.followed import Followed, following, kill_engine, load_of, registration, tiny_registry
from tests.promotion import NAME
from tests.serving import wait_for

NOTICED_S = 2.0
"""Longest time in seconds until a killed engine is noticed on an idle machine; usually one second."""


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Registry:
    return tiny_registry(tmp_path, monkeypatch)


@pytest.fixture
def gate(tmp_path) -> Path:
    """Provide a gate file: a registered model that names it starts serving only after the file is deleted."""
    (tmp_path / "gate").touch()
    return tmp_path / "gate"


def kill_champion(followed: Followed) -> float:
    """Kill the champion's engine; return the seconds until its end was noticed, once the version is served again."""
    before = followed.champion
    kill_engine(before)
    killed_s = time.monotonic()
    assert before.died.wait(60)
    noticed_s = time.monotonic() - killed_s
    wait_for(lambda: followed.champion is not before, what="the champion's next engine")
    assert followed.champion.version.number == before.version.number
    return noticed_s


def wait_for_start(followed: Followed, number: str) -> int:
    """Wait until a serving engine is being started for a model version, and return its process id."""

    def started() -> int | None:
        start = followed.follower._start
        is_its = start and start.version.number == number and start._server
        return start._server.pid if is_its else None

    return wait_for(started, what=f"the start of version {number}")


@pytest.mark.parametrize("starting", ["nothing", "a successor", "a challenger"])
def test_the_champion_is_started_again_before_all_else(registry, gate, starting, capsys):
    with following(registry) as followed, load_of(followed.client) as load, followed.going_on():
        load.more("1")
        if starting != "nothing":
            second = registry.register(registration("second", gate=str(gate)))
            registry.promote(second, "1") if starting == "a successor" else registry.challenge(second)
            followed.look_soon()
            wait_for_start(followed, "2")
        noticed_s = []
        for _ in range(2):
            noticed_s.append(kill_champion(followed))
            load.more("1")
        assert min(noticed_s) < NOTICED_S
        assert load.answers.keys() == {"1"}
        gate.unlink()
        if starting != "nothing":
            load.more("2")
    assert load.failures == []
    said = capsys.readouterr().out
    assert "another one is starting" not in said
    assert said.count("version 1 of adder is served again") == 2
    assert said.count("the start of version 2 of adder is stopped") == (0 if starting == "nothing" else 2)


def test_a_promoted_version_does_not_wait_for_a_challenger_that_starts(registry, gate, capsys):
    with following(registry) as followed, load_of(followed.client) as load, followed.going_on():
        registry.challenge(registry.register(registration("second", gate=str(gate))))
        followed.look_soon()
        starting = wait_for_start(followed, "2")
        registry.promote(registry.register(registration("third")), "1")
        followed.look_soon()
        load.more("3")
        assert not Path(f"/proc/{starting}").exists()
        gate.unlink()
        load.more("2")
    assert load.failures == []
    assert "another one is starting" not in capsys.readouterr().out


def test_a_challenger_that_is_promoted_while_it_starts_goes_on_starting(registry, gate, capsys):
    with following(registry) as followed, followed.going_on():
        registry.challenge(registry.register(registration("second", gate=str(gate))))
        followed.look_soon()
        starting = wait_for_start(followed, "2")
        registry.promote_challenger(NAME)
        followed.look_soon()
        wait_for(lambda: followed.follower._successor(), what="the promotion")
        gate.unlink()
        wait_for(lambda: followed.champion.version.number == "2", what="the exchange")
        assert followed.champion.server.pid == starting


def test_a_registry_that_hangs_holds_no_restart_up(registry, monkeypatch):
    goes_on = threading.Event()
    with following(registry) as followed, load_of(followed.client) as load, followed.going_on():
        monkeypatch.setattr(registry, "find", lambda *_: goes_on.wait(600) and None)
        followed.look_soon()
        load.more("1")
        kill_champion(followed)
        load.more("1")
        goes_on.set()
    assert load.failures == []


def test_an_engine_that_does_not_start_again_is_tried_until_it_does_or_another_version_is_served(
    registry, capsys, monkeypatch
):
    with following(registry) as followed, load_of(followed.client) as load, followed.going_on():
        load.more("1")
        model = followed.champion.server.spec.model
        (model / "broken").touch()
        before = followed.champion
        kill_engine(before)
        wait_for(lambda: followed.follower._restarts.num_deaths > 2, what="a third try")
        (model / "broken").unlink()
        wait_for(lambda: followed.champion is not before, what="the next engine")
        load.more("1")
        (model / "broken").touch()
        kill_engine(followed.champion)
        registry.promote(registry.register(registration("second")), "1")
        followed.look_soon()
        load.more("2")
    assert load.failures == []
    said = capsys.readouterr().out
    assert "cannot load the model" in said
    assert "version 1 of adder is started again in 2 s, after 3 deaths in a row" in said


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_has_is_not(registry):
    program = "import time\nfrom flows.champion.servers_folder import own_folder\nwith own_folder() as folder:\n"
    program += "    print(folder, flush=True)\n    time.sleep(600)"
    command = [sys.executable, "-c", program]
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, living = (Path(maker.stdout.readline().strip()) for maker in makers)
        (dead / "more").mkdir()
        makers[0].kill()
        makers[0].wait()
        assert dead.is_dir()
        with own_folder() as own:
            assert not dead.exists()
            assert living.is_dir()
            assert own.is_dir()
        assert not own.exists()
    finally:
        for maker in makers:
            maker.kill()
            maker.wait()
            maker.stdout.close()
