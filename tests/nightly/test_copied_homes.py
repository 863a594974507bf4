"""A lifecycle home copied or moved while its servers, worker and refreshes run stays usable; the copy is separate.

In `make test`: `tests/faults/test_server_faults.py`, `tests/unit/flows/servers/test_records.py`.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from refreshes import LIFECYCLE, TINY_REFRESH, eventually, stage
from worker_home import WorkerHome

from flows.champion.registrations import Registration, tags_of
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.record import COPIED
from stages.core.errors import ServerError

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
OTHER_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps"]
OTHER_MACHINE = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]


class HomeElsewhere(WorkerHome):
    """Lifecycle home whose commands run as user 1000 on a machine of another name, and so do its servers."""

    def lifecycle(self, *arguments):
        # Each command has a namespace of users of its own; from the outer one alone processes of others can be ended.
        user = OTHER_USER if arguments != ("down",) else []
        command = [*user, *OTHER_MACHINE, LIFECYCLE, *arguments]
        return subprocess.run(command, env=self.environment, text=True, capture_output=True)

    def start(self, recipe):
        command = [*OTHER_USER, *OTHER_MACHINE, sys.executable, TINY_REFRESH, recipe]
        return subprocess.Popen(command, env=self.environment, text=True, stdout=PIPE, stderr=PIPE)


@pytest.fixture
def stopped_at_end():
    """Provide a function that makes the servers of a lifecycle home stop at the end of the test."""
    with ExitStack() as stack:
        yield lambda home: stack.callback(home.lifecycle, "down")


@pytest.fixture
def home(tmp_path, stopped_at_end):
    """Provide a lifecycle home with running servers and worker, a champion with a predecessor, and a schedule."""
    home = WorkerHome(tmp_path / "home")
    home.folder.mkdir()
    stopped_at_end(home)
    home.schedule(home.write("nightly", {"rows": stage("pause", "nightly")}))
    home.mlflow("registered-models/create", {"name": "adder"})
    for number, alias in (("1", "previous"), ("2", "champion")):
        registration = Registration(name="adder", model=f"train/{number}", digest=number, evaluations=())
        tags = [{"key": key, "value": value} for key, value in tags_of(registration).items()]
        home.mlflow("model-versions/create", {"name": "adder", "source": f"s3://weights/{number}", "tags": tags})
        home.mlflow("registered-models/alias", {"name": "adder", "alias": alias, "version": number})
    return home


def copied(home, name, stopped_at_end):
    copy = WorkerHome(home.folder.with_name(name))
    home.copy_to(copy.folder)
    stopped_at_end(copy)
    return copy


def champion(home):
    return home.mlflow("registered-models/alias?name=adder&alias=champion")["model_version"]["version"]


def up(home):
    started = home.lifecycle("up")
    assert started.returncode == 0, started.stderr
    return started.stderr


def schedules(home):
    return json.loads(home.lifecycle("schedules", "--json").stdout)["schedules"]


def test_copies_of_a_running_home_have_servers_champions_and_schedules_of_their_own(home, stopped_at_end):
    flow_run = home.start_now("nightly")
    release = home.work("rows", "scratch/ready").with_name("release")
    name = home.flow_run(flow_run)["name"]
    servers = home.servers()
    copies = [copied(home, f"copy-{number}", stopped_at_end) for number in (1, 2)]

    with ThreadPoolExecutor() as pool:
        for said in pool.map(up, copies):
            assert "is a copy of another home" in said and "paused: nightly;" in said
    assert len({one.key() for one in (home, *copies)}) == 3
    for copy in copies:
        assert [one["paused"] for one in schedules(copy)] == [True]
        assert copy.flow_run(flow_run)["state"]["type"] == "CANCELLED"
        closed = eventually(lambda copy=copy: one if (one := copy.record({"name": name})).state != "running" else None)
        assert (closed.state, closed.error) == ("failed", COPIED)
    copies[0].lifecycle("rollback", "adder")
    assert [champion(one) for one in (home, *copies)] == ["2", "1", "2"]

    stopped = copies[1].lifecycle("down").stdout
    assert stopped == "stopped prefect and mlflow and worker\n"
    assert copies[0].lifecycle("status").returncode == 0
    assert "is a copy" not in up(copies[1])
    ran, _ = copies[0].lifecycle("runs"), copies[0].lifecycle("down")
    assert name in ran.stdout

    assert home.servers() == servers
    assert home.record({"name": name}).state == "running"
    assert [one["paused"] for one in schedules(home)] == [False]
    release.touch()
    assert home.ended(flow_run)["state"]["type"] == "COMPLETED"


def test_a_home_that_is_moved_keeps_its_key_and_schedules_and_one_that_is_restored_is_a_copy(home, stopped_at_end):
    key, worker = home.key(), home.servers()["worker"]["process"]
    moved = WorkerHome(home.folder.rename(home.folder.with_name("moved")))
    stopped_at_end(moved)
    eventually(lambda: not ProcessIdentity.model_validate(worker).alive())
    assert not home.folder.exists()
    assert "is a copy" not in up(moved)
    assert (moved.key(), [one["paused"] for one in schedules(moved)]) == (key, [False])
    assert moved.lifecycle("rollback", "adder").returncode != ServerError.exit_code
    assert champion(moved) == "1"
    assert moved.lifecycle("down").returncode == 0

    copied(moved, home.folder.name, stopped_at_end)  # at the path of the original; the folder is another
    assert "paused: nightly;" in up(home)
    assert home.key() != key
    assert home.lifecycle("schedules", "resume", "nightly").returncode == 0
    assert home.lifecycle("down").returncode == 0
    assert "is a copy" not in up(home)
    assert [one["paused"] for one in schedules(home)] == [False]


@pytest.mark.parametrize("restored_home", [WorkerHome, HomeElsewhere])
def test_a_backup_of_a_running_home_restores_to_a_home_in_which_all_is_cached(home, stopped_at_end, restored_home):
    may = subprocess.run([*OTHER_USER, *OTHER_MACHINE, "true"], capture_output=True).returncode == 0
    if restored_home is HomeElsewhere and not may:
        pytest.skip("this user may not make user namespaces")
    recipe = home.write("built", {"rows": stage("ok", "built")})
    assert home.run(recipe)[0] == 0
    backups = home.folder.with_name("backups")
    first = json.loads(home.lifecycle("backup", str(backups), "--json").stdout)
    second = json.loads(home.lifecycle("backup", str(backups), "--json").stdout)
    assert second["num_files"] >= first["num_files"]
    restored = restored_home(home.folder.with_name("elsewhere"))
    stopped_at_end(restored)
    done = restored.lifecycle("restore", str(backups))
    assert done.returncode == 0, done.stderr
    assert restored.lifecycle("verify").returncode == 0
    # While the original still runs: it is a copy, with servers, key and paused schedules of its own.
    assert "paused: nightly;" in up(restored)
    assert restored.key() != home.key()
    ended, refresh = restored.run(recipe)
    assert (ended, [one["state"] for one in refresh["stages"].values()]) == (0, ["cached"])
    assert champion(restored) == "2"
    restored.lifecycle("rollback", "adder")
    assert [champion(one) for one in (home, restored)] == ["2", "1"]
    assert restored.lifecycle("schedules", "resume", "nightly").returncode == 0
    flow_run = restored.start_now("nightly")
    restored.work("rows", "scratch/ready").with_name("release").touch()
    assert restored.ended(flow_run)["state"]["type"] == "COMPLETED"


def test_from_another_container_nothing_of_a_running_home_is_touched(home):
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make PID namespaces")
    flow_run = home.start_now("nightly")
    release = home.work("rows", "scratch/ready").with_name("release")
    name = home.flow_run(flow_run)["name"]
    before = (home.servers(), (home.folder / "ledger" / name / "ledger.jsonl").read_bytes())

    def inside(*arguments):
        command = [*NAMESPACE, LIFECYCLE, *arguments]
        return subprocess.run(command, env=home.environment, text=True, capture_output=True)

    assert "unknown, on " in inside("show").stdout
    assert "unknown, on " in inside("runs").stdout
    assert "unknown" in inside("status").stdout
    for command in (("up",), ("down",), ("run", str(home.folder.with_name("nightly.yaml")))):
        refused = inside(*command)
        assert refused.returncode == 9 and "`lifecycle down` there" in refused.stderr
    assert (home.servers(), (home.folder / "ledger" / name / "ledger.jsonl").read_bytes()) == before
    release.touch()
    assert home.ended(flow_run)["state"]["type"] == "COMPLETED"
