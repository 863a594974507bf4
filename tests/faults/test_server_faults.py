"""When Prefect's or MLflow's server or a refresh dies, training continues, and nothing is lost or recorded twice."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from disks import fill_last_block, filled, needs_root, small_disk

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from refreshes import (
    LIFECYCLE,
    PATIENCE_S,
    ForkedHome,
    Home,
    check_nothing_was_lost,
    disturb_every_stage,
    eventually,
    finish,
    stage,
    states,
)
from worker_home import STAND_IN

from flows.servers.lock import Lock
from stages.core.errors import RefreshStoppedError, ResourceError, ServerError
from stages.core.process_tree import marked_processes, started_ticks

NOWHERE = "http://127.0.0.1:9/api"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def own(tmp_path_factory, new_databases):
    """Provide the lifecycle home that all tests of this file share, without making sure that its servers are up."""
    home = ForkedHome(tmp_path_factory.mktemp("faults") / "home")
    home.folder.mkdir()
    new_databases.put_into(home.folder)
    yield home
    assert home.lifecycle("down").returncode == 0


@pytest.fixture
def home(own):
    """Provide the lifecycle home that the tests of this file share, with its servers up."""
    if Lock(own.folder).holder() is None:
        assert own.lifecycle("up").returncode == 0
    return own


def kill_server(home, name):
    os.killpg(home.servers()[name]["process"]["pid"], signal.SIGKILL)


def check_started_again(home, name, before):
    """Wait until a killed server is restarted by its supervisor, and check that port and token stayed the same."""
    eventually(lambda: home.servers()[name]["process"] != before["process"])
    eventually(lambda: is_served(home, name))
    after = home.servers()[name]
    assert (after["port"], after["token"]) == (before["port"], before["token"])


def is_served(home, name):
    """Return whether a server of the lifecycle home answers at its known address within `PATIENCE_S` seconds."""
    path = {"prefect": "/api/health"}.get(name, "/health")
    with suppress(OSError), urllib.request.urlopen(home.address(name) + path, timeout=PATIENCE_S) as answer:
        return answer.status == 200
    return False


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param((None, "prefect", None, "mlflow"), id="both"),
        *(pytest.param((name,) * 4, id=name, marks=pytest.mark.nightly) for name in ("prefect", "mlflow")),
    ],
)
def test_a_refresh_outlives_servers_that_die_in_its_stages_and_are_started_again(home, fault, victims):
    mark = "-and-".join(sorted({*victims} - {None}))
    fault.name, fault.stage = f"SIGKILL of {mark}", "each"
    turns = iter(victims)
    killed = {}

    def disturb():
        if name := next(turns):
            killed[name] = home.servers()[name]
            kill_server(home, name)

    def undo():
        while killed:
            check_started_again(home, *killed.popitem())

    with fault.timed("recovered"):
        done = disturb_every_stage(home, mark, disturb, undo)
    check_nothing_was_lost(home, mark, done)


def test_a_killed_supervisor_is_started_again_by_the_worker_and_keeps_what_lives(home, fault):
    fault.name, fault.stage = "SIGKILL of the supervisor, then of the worker", "none"
    lock, before = Lock(home.folder), home.servers()
    killed = lock.holder()
    with fault.timed("recovered"):
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: lock.holder() not in (None, killed))
    assert home.servers() == before
    kill_server(home, "worker")
    check_started_again(home, "worker", before["worker"])
    assert home.lifecycle("up").returncode == 0
    assert home.lifecycle("up").returncode == 0
    assert {name: server["port"] for name, server in home.servers().items()} == {
        name: server["port"] for name, server in before.items()
    }


def test_a_killed_refresh_leaves_no_process_and_its_next_attempt_continues(home, fault):
    fault.name, fault.stage = "SIGKILL of the whole refresh", "download"
    recipe = home.recipe("killed", steps3=stage("linger", "killed"))
    refresh = Home.start(home, recipe)  # no fork: it is sent signals
    home.work("steps3", "scratch/ready")
    with fault.timed("detected"):
        refresh.kill()
        refresh.communicate()
        eventually(lambda: home.processes() == [])

    with fault.timed("recovered"):
        code, again = home.run(recipe)
    assert code == 0
    assert again["stages"]["steps3"]["metrics"]["first_step"] == 5
    killed, finished = home.attempts("steps3")
    assert [killed["info"]["status"], finished["info"]["status"]] == ["KILLED", "FINISHED"]
    eventually(lambda: home.losses(killed) + home.losses(finished) == list(range(10)))
    # The next refresh has closed the record of the killed one before the worker saw that it was dead.
    dead = next(tag["value"] for tag in killed["data"]["tags"] if tag["key"] == "refresh")
    eventually(lambda: home.flow_run_state(dead) == "CRASHED")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_interrupted_refresh_is_cancelled_in_good_order(home, fault, number):
    fault.name, fault.stage = f"{number.name} to the refresh", "download"
    recipe = home.recipe("interrupted", **{f"tree{number}": stage("family", f"interrupted-{number}")})
    refresh = Home.start(home, recipe)  # no fork: it is sent signals
    home.work(f"tree{number}", "scratch/ready")
    with fault.timed("detected"):
        refresh.send_signal(number)
        code, done = finish(refresh)
    assert code == RefreshStoppedError.exit_code
    assert done["state"] == "cancelled"
    assert home.processes() == []
    assert home.flow_run_state(done["refresh"]) == "CANCELLED"


@pytest.mark.parametrize("variable", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_a_server_that_the_user_named_and_that_does_not_answer_is_said_before_anything_starts(home, fault, variable):
    fault.name, fault.stage = f"no server at {variable}", "all"
    began_s = time.monotonic()
    command = [LIFECYCLE, "run", home.recipe("nowhere", rows=stage("ok", variable)), "--json"]
    with fault.timed("detected"):
        done = subprocess.run(command, env={**home.environment, variable: NOWHERE}, text=True, capture_output=True)
    assert time.monotonic() - began_s < 30
    assert done.returncode == ServerError.exit_code
    assert variable in json.loads(done.stdout)["error"]


def test_two_refreshes_of_one_recipe_at_once_build_it_once(home):
    recipe = home.recipe("twice", rows=stage("steps", "twice"))
    both = [finish(refresh)[1] for refresh in [home.start(recipe), home.start(recipe)]]
    assert sorted(states(refresh)["rows"] for refresh in both) == ["built", "cached"]


def test_a_copy_of_a_running_home_leaves_the_original_alone(home, tmp_path, fault):
    fault.name, fault.stage = "home copied while it runs", "download"
    refresh = home.start(home.recipe("copied", rows=stage("pause", "copied")))
    release = home.work("rows", "scratch/ready").with_name("release")
    copy = ForkedHome(tmp_path / "copy")
    home.copy_to(copy.folder)
    assert copy.lifecycle("down").stdout == "nothing to stop\n"
    assert copy.lifecycle("rollback", "adder").returncode == ServerError.exit_code
    assert " copied " in copy.lifecycle("show").stdout
    assert " running " in home.lifecycle("show").stdout
    assert len(list(home.folder.glob("ledger/copied-*/heartbeat"))) == 1
    release.touch()
    code, done = finish(refresh)
    assert (code, states(done)) == (0, {"rows": "built"})
    assert list(home.folder.glob("ledger/copied-*/heartbeat")) == []
    assert home.lifecycle("status").returncode == 0


def test_down_leaves_no_process_no_port_and_no_supervisor(home):
    servers, supervisor = home.servers(), Lock(home.folder).holder()
    assert home.lifecycle("down").returncode == 0
    assert started_ticks(supervisor) is None
    assert Lock(home.folder).holder() is None
    for server in servers.values():
        assert marked_processes(server["token"]) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server["port"]))


@contextmanager
def in_foreground(home, manager):
    """Run `lifecycle up --foreground` from when it reports readiness to systemd, whose socket is `manager`."""
    environment = {**home.environment, "NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "60000000"}
    with subprocess.Popen([LIFECYCLE, "up", "--foreground"], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            while manager.recv(100) != b"READY=1":
                pass
            yield process
        finally:
            process.kill()


def test_a_service_that_is_killed_leaves_its_servers_to_the_next_and_one_that_is_stopped_leaves_none(
    home, fault, tmp_path
):
    fault.name, fault.stage = "SIGKILL of `up --foreground`", "none"
    before = home.servers()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        with in_foreground(home, manager) as service:
            assert Lock(home.folder).holder() == service.pid
            service.kill()
            service.wait()
        with fault.timed("recovered"), in_foreground(home, manager) as service:
            assert home.servers() == before
            service.terminate()
            assert service.wait(PATIENCE_S) == 0
    assert [marked_processes(server["token"]) for server in before.values()] == [[]] * len(before)


def test_commands_say_that_no_worker_runs_what_is_scheduled(own):
    recipe = own.recipe("nightly", rows=stage("ok", "nightly"))
    commands = (["schedules"], ["runs"], ["plan", str(recipe)])

    def warnings():
        return ["no worker runs" in own.lifecycle(*command).stderr for command in commands]

    assert own.lifecycle("down").returncode == 0
    assert warnings() == [False] * 3  # nothing is scheduled
    assert own.lifecycle("schedule", str(recipe), "--cron", "0 3 * * *").returncode == 0
    assert warnings() == [False] * 3
    assert own.lifecycle("down").returncode == 0
    assert warnings() == [True] * 3
    assert own.lifecycle("schedules", "remove", "nightly").returncode == 0
    assert warnings() == [False] * 3


@needs_root
def test_a_disk_that_is_full_while_a_refresh_is_recorded_is_named_and_costs_nothing(tmp_path, fault, new_databases):
    fault.name, fault.stage = "disk full while logging", "download"
    home = Home(tmp_path / "disk" / "home")
    with small_disk(tmp_path / "disk", 200):
        home.folder.mkdir()
        new_databases.put_into(home.folder)
        assert home.lifecycle("up").returncode == 0
        recipe = home.recipe("full", rows=stage("steps", TINY_STEP_SECONDS="2", PYTHONPATH=str(STAND_IN)))
        refresh = home.lifecycle_beside("run", str(recipe))
        checkpoint = home.work("rows", "scratch/step")
        eventually(lambda: int(checkpoint.read_text() or 0) >= 2)
        (ledger,) = home.folder.glob("ledger/*/ledger.jsonl")
        with fault.timed("detected"), filled(tmp_path / "disk"):
            fill_last_block(ledger)
            _, errors = refresh.communicate(timeout=PATIENCE_S)
        assert refresh.returncode == ResourceError.exit_code
        assert f"the disk of {home.folder}" in errors
        assert "Traceback" not in errors
        home.recipe("full", rows=stage("steps", PYTHONPATH=str(STAND_IN)))
        with fault.timed("recovered"):
            again = json.loads(home.lifecycle_beside("run", str(recipe), "--json").communicate()[0])
        assert states(again) == {"rows": "built"}
        assert again["stages"]["rows"]["metrics"]["first_step"] >= 2
        assert home.lifecycle("down").returncode == 0
