"""Images of `deploy/docker` are built here; a refresh ends with a champion in one, a team's servers run in another."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from stages.core.supervised import SupervisedProcess
from tests.images.builder import NAMES, ROOT, Builder
from tests.serving import wait_for

# Building them, before the first test, takes eight minutes of both cores.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

OWNER = 1000
POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
SERVICES = ("prefect", "mlflow", "worker")
START_S = 600
CYCLONEDX = "cyclonedx-bom==7.5.0"


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    builder = Builder(tmp_path_factory.mktemp("images"))
    try:
        builder.make_python_image()
        for name in NAMES:
            builder.build(name)
        yield builder
    finally:
        builder.remove()


@pytest.fixture
def network():
    """Make a network of its own, with a loopback interface alone, and return what runs a command in it."""
    name = f"lifecycle-images-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    inside = ["ip", "netns", "exec", name]
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@contextmanager
def running(command, log, folder):
    with log.open("wb") as output:
        process = SupervisedProcess(command, environment=dict(os.environ), output=output, folder=folder)
    try:
        yield process
    finally:
        process.stop()


def owned(folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, OWNER, OWNER)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_user_can_write_to_its_home_and_to_tmp_alone(builder, name):
    look = ["find", "/", "-xdev", "(", "-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/dev", ")", "-prune"]
    with builder.container(name) as container:
        who = subprocess.run(container.command("id", "-u"), stdout=subprocess.PIPE, text=True, check=True)
        assert who.stdout.strip() == str(OWNER)
        found = subprocess.run(
            container.command(*look, "-o", "-writable", "-not", "-type", "l", "-print"),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert set(found.stdout.split()) <= {"/tmp", "/lifecycle"}


@pytest.mark.parametrize("name", ["pipeline", "serve"])
def test_what_an_image_holds_is_written_down(builder, name):
    """Write the packages of an image, with licences, as CycloneDX, and its size and digest, into `build/images`."""
    python = f"/opt/{name}/bin/python"
    listed = "import importlib.metadata as m; print(*{one.name for one in m.distributions()}, sep='\\n')"
    write = f"python3 -m venv /tmp/bom && /tmp/bom/bin/pip install -q {CYCLONEDX} && exec /tmp/bom/bin/cyclonedx-py "
    write += f"environment --output-format JSON --output-reproducible {python}"
    with builder.container(name) as container:
        installed, bill = (
            subprocess.run(container.command(*words), stdout=subprocess.PIPE, text=True, check=True).stdout
            for words in ([python, "-c", listed], ["sh", "-c", write])
        )
    components = json.loads(bill)["components"]
    assert {normalized(one["name"]) for one in components} == {normalized(one) for one in installed.split()}
    folder = ROOT / "build" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cdx.json").write_text(bill)
    found = builder.describe(name) | {"packages": len(components)}
    found["without a licence"] = sum(not one.get("licenses") for one in components)
    (folder / f"{name}.json").write_text(json.dumps(found))


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_a_refresh_ends_with_a_champion_in_the_image_that_holds_all(builder, tmp_path):
    home = owned(tmp_path / "home")
    with builder.container("all") as container:
        volumes = {home: "/lifecycle"}
        for words in (["run", "/opt/configs/quickstart.yaml"], ["champion", "adder", "--json"], ["down"]):
            ran = subprocess.run(
                container.command("lifecycle", *words, volumes=volumes), stdout=subprocess.PIPE, text=True, check=False
            )
            assert ran.returncode == 0, ran.stdout[-3000:]
            if "--json" in words:
                assert json.loads(ran.stdout)["version"]


@pytest.fixture
def secrets(tmp_path):
    folder = owned(tmp_path / "secrets")
    for name, words in {"postgres_password": "right", "servers_key": "lifecycle:" + "a" * 64, "hub_token": ""}.items():
        (folder / name).write_text(words)
        os.chown(folder / name, OWNER, OWNER)
        (folder / name).chmod(0o400)
    return folder


@contextmanager
def database(network, password):
    """Run Debian's PostgreSQL, with the user and the databases of the compose file, in a network of its own."""
    assert POSTGRES, "needs Debian's package postgresql"
    # The user postgres may not enter the temporary folders of pytest.
    folder = Path(tempfile.mkdtemp(prefix="lifecycle-postgresql-", dir="/tmp"))
    try:
        words = folder / "password"
        shutil.copyfile(password, words)
        for path in (folder, words):
            shutil.chown(path, "postgres")
        as_owner = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        initial = ["-D", folder / "data", "-U", "lifecycle", f"--pwfile={words}", "--auth=scram-sha-256", "--no-sync"]
        subprocess.run([*as_owner, POSTGRES[0] / "initdb", *initial], cwd=folder, check=True, capture_output=True)
        settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "dynamic_shared_memory_type=mmap"]
        flags = [flag for setting in settings for flag in ("-c", setting)]
        command = [*network, *as_owner, str(POSTGRES[0] / "postgres"), "-D", str(folder / "data"), *flags]
        with running(command, folder / "log", folder):
            there = [*network, "env", f"PGPASSWORD={words.read_text()}", POSTGRES[0] / "psql"]
            there += ["-h", "127.0.0.1", "-U", "lifecycle", "-d", "postgres", "-q", "-c"]
            wait_for(lambda: subprocess.run([*there, "select 1"], capture_output=True, check=False).returncode == 0)
            for name in ("prefect", "mlflow"):
                subprocess.run([*there, f"CREATE DATABASE {name}"], check=True)
            yield
    finally:
        shutil.rmtree(folder)


def test_the_servers_of_a_team_become_healthy_in_the_image(builder, network, secrets, tmp_path):
    """Each command of the compose file runs until its own health check passes, in the order in which it says."""
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost postgres prefect mlflow\n")
    volumes = {names: "/etc/hosts:ro", secrets: "/run/secrets:ro"}
    volumes |= {owned(tmp_path / "artifacts"): "/artifacts", owned(tmp_path / "home"): "/lifecycle"}
    with ExitStack() as stack:
        stack.enter_context(database(network, secrets / "postgres_password"))
        beside = stack.enter_context(builder.container("pipeline"))  # a second command in one ends the first's mounts
        for name in SERVICES:
            service = COMPOSE[name]
            container = stack.enter_context(builder.container("pipeline"))
            log = tmp_path / f"{name}.log"
            serve = container.command(*service["command"], environment=service["environment"], volumes=volumes)
            process = stack.enter_context(running([*network, *serve], log, tmp_path))
            ask = [*network, *beside.command(*service["healthcheck"]["test"][1:], volumes=volumes)]

            def healthy(process=process, log=log, ask=ask):
                assert process.alive(), log.read_text()[-3000:]
                return subprocess.run(ask, capture_output=True, check=False).returncode == 0

            wait_for(healthy, START_S)
