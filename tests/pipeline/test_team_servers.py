"""A team's servers work: Prefect and MLflow store their data in PostgreSQL, and MLflow may require a login."""

import os
import re
import secrets
import signal
import subprocess
import sys

import psycopg2
import pytest
from postgresql import MISSING, database_environment, postgresql
from refreshes import ForkedHome, after, eventually, model, stage, states

from flows.servers.local import is_answering
from flows.service.backup import back_up, backup_names, restore
from flows.service.database_dumps import VARIABLES
from stages.core.errors import StoreError
from tests.searched import commands_with, files_with
from tests.slurm_cluster import free_ports

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
TREE = {"rows": stage("steps"), "base": model("transient_once"), "scores": after("base")}


@pytest.fixture(scope="module")
def database():
    with postgresql(["prefect", "mlflow"]) as found:
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory, database):
    """Provide a lifecycle home whose servers store everything in PostgreSQL."""
    home = ForkedHome(tmp_path_factory.mktemp("team") / "home")
    home.folder.mkdir()
    home.environment |= database_environment(database)
    yield home
    assert home.lifecycle("down").returncode == 0


def test_a_refresh_is_kept_in_postgresql(home, database):
    address, password = database.address, database.password
    code, refresh = home.run(home.recipe("team", **TREE))
    assert code == 0
    assert states(refresh) == {"rows": "built", "base": "built", "scores": "built"}
    assert rows(address, "prefect", "SELECT name, state_type FROM flow_run") == [(refresh["refresh"], "COMPLETED")]
    runs = rows(address, "mlflow", "SELECT name, status FROM runs")
    assert sorted(runs) == sorted(
        [
            (refresh["refresh"], "FINISHED"),
            ("rows", "FINISHED"),
            ("base", "FAILED"),
            ("base", "FINISHED"),
            ("scores", "FINISHED"),
        ]
    )
    assert list(home.folder.rglob("*.db")) == []
    assert files_with(home.folder, password) == []
    assert commands_with(password) == []


def test_a_backup_of_tables_is_restored_into_databases_of_another_owner(database, tmp_path, monkeypatch):
    database.create(["held_prefect", "held_mlflow", "other_prefect", "other_mlflow", "used"])
    execute(database, "CREATE ROLE heir LOGIN PASSWORD 'an inheritance'", "postgres")
    for name in ("other_prefect", "other_mlflow"):
        execute(database, f"ALTER DATABASE {name} OWNER TO heir", "postgres")
        execute(database, "GRANT ALL ON SCHEMA public TO heir", name)
    for name in ("held_prefect", "held_mlflow", "used"):
        execute(database, f"CREATE TABLE night (name text); INSERT INTO night VALUES ('{name}')", name)
    (tmp_path / "home" / "ledger").mkdir(parents=True)
    held = {variable: url.replace("postgresql", "postgresql+asyncpg", 1) for variable, url in urls(database, "held")}
    set_all(monkeypatch, {**held, "LIFECYCLE_HOME": str(tmp_path / "home")})
    saved = back_up(tmp_path / "backups")
    assert (saved.left_out, backup_names(tmp_path / "backups")) == ((), [saved.name])
    assert files_with(tmp_path / "backups", database.password) == []

    set_all(monkeypatch, {"LIFECYCLE_HOME": str(tmp_path / "heirs")})
    heir = {variable: re.sub("//.*@", "//heir:an%20inheritance@", url) for variable, url in urls(database, "other")}
    used = {variable: url.replace("held_prefect", "used") for variable, url in urls(database, "held")}
    for named, said in (
        (dict.fromkeys(heir, ""), "name a new, empty one in"),
        (used, 'relation "night" already exists.*; it must be a new database without tables'),
        ({variable: url.replace("heir:", "heir:not%20") for variable, url in heir.items()}, "authentication failed"),
    ):
        set_all(monkeypatch, named)
        with pytest.raises(StoreError, match=said):
            restore(tmp_path / "backups")
        assert not (tmp_path / "heirs").exists()
    set_all(monkeypatch, heir)
    restore(tmp_path / "backups")
    for name in ("prefect", "mlflow"):
        assert rows(f"heir:an%20inheritance@127.0.0.1:{database.port}", f"other_{name}", "SELECT name FROM night") == [
            (f"held_{name}",)
        ]
    assert [path.name for path in (tmp_path / "heirs").iterdir()] == ["servers.json"]


def urls(database, prefix):
    """Return the variables of Prefect's and MLflow's databases with URLs of those that begin with a prefix."""
    return [(variable, f"postgresql://{database.address}/{prefix}_{server}") for server, variable in VARIABLES.items()]


def set_all(monkeypatch, variables):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)


def execute(database, statement, name):
    connection = psycopg2.connect(f"postgresql://{database.address}/{name}")
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(statement)
    connection.close()


@pytest.mark.nightly
def test_a_home_restored_from_another_path_has_everything_and_its_schedules_pause(home, database, tmp_path):
    """All is cached in a home restored from a backup, under another path, with other databases and their owner."""
    database.create(["late_prefect", "late_mlflow"])
    recipe = home.recipe("kept", **TREE)
    code, refresh = home.run(recipe)
    assert code == 0
    before = refresh["refresh"]
    assert home.lifecycle("schedule", str(recipe), "--cron", "0 3 * * *").returncode == 0
    saved = home.lifecycle("backup", str(tmp_path / "backups"))
    assert (saved.returncode, saved.stderr) == (0, "")
    heir = ForkedHome(tmp_path / "another" / "place")
    heir.environment |= {
        variable: re.sub(r"/(\w+)$", r"/late_\1", home.environment[variable]) for variable in VARIABLES.values()
    }
    try:
        done = heir.lifecycle("restore", str(tmp_path / "backups"))
        assert done.returncode == 0, done.stderr
        assert "paused: kept;" in heir.lifecycle("up").stderr
        code, refresh = heir.run(recipe)
        assert (code, set(states(refresh).values())) == (0, {"cached"})
        assert (before,) in rows(database.address, "late_prefect", "SELECT name FROM flow_run")
        assert (before,) in rows(database.address, "late_mlflow", "SELECT name FROM runs")
        assert list(heir.folder.rglob("*.db")) == []
    finally:
        assert heir.lifecycle("down").returncode == 0


def rows(address, database, query):
    connection = psycopg2.connect(f"postgresql://{address}/{database}")
    with connection.cursor() as cursor:
        cursor.execute(query)
        found = cursor.fetchall()
    connection.close()
    return found


@pytest.fixture(scope="module")
def guarded_mlflow(tmp_path_factory):
    """Provide address and administrator's password of an MLflow server that requires a login."""
    folder = tmp_path_factory.mktemp("guarded")
    password = secrets.token_hex(16)
    settings = folder / "auth.ini"
    settings.write_text(
        "[mlflow]\ndefault_permission = NO_PERMISSIONS\nadmin_username = refresher\n"
        f"admin_password = {password}\ndatabase_uri = sqlite:///{folder}/users.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    storage = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *storage, "--host", "127.0.0.1", "--port", str(port)],
            env={
                **os.environ,
                "MLFLOW_AUTH_CONFIG_PATH": str(settings),
                "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16),
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            },
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    eventually(lambda: is_answering(f"http://127.0.0.1:{port}/health"))
    yield f"http://127.0.0.1:{port}", password
    os.killpg(server.pid, signal.SIGTERM)
    server.wait()


def test_credentials_for_mlflow_come_from_the_environment_and_stay_there(home, guarded_mlflow):
    address, password = guarded_mlflow
    recipe = home.recipe("guarded", **{"rows-guarded": stage("steps", "guarded")})
    home.environment |= {
        "MLFLOW_TRACKING_URI": address,
        "MLFLOW_TRACKING_USERNAME": "refresher",
        "MLFLOW_TRACKING_PASSWORD": password,
    }
    code, refresh = home.run(recipe)
    assert code == 0
    assert refresh["stages"]["rows-guarded"]["mlflow_run_id"]
    assert files_with(home.folder, password) == []

    home.environment["MLFLOW_TRACKING_PASSWORD"] = "wrong-password"
    code, refresh = home.run(home.recipe("barred", **{"rows-barred": stage("ok", "barred")}))
    assert (code, refresh["stages"]["rows-barred"]["mlflow_run_id"]) == (0, None)
    (log,) = home.folder.glob(f"ledger/{refresh['refresh']}/tracking.log")
    assert "not shipped" in log.read_text()
