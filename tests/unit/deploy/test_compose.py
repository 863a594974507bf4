"""The Docker Compose file for teams declares all that it uses, starts services in order, and admits no outsiders."""

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "deploy" / "compose.yaml"
TREE = yaml.safe_load(COMPOSE.read_text())
SERVICES = TREE["services"]
SERVERS = [name for name, service in SERVICES.items() if "restart" in service]


def mount_names(service):
    return [volume.partition(":")[0] for volume in service.get("volumes", [])]


@pytest.mark.parametrize("name", SERVERS)
def test_every_server_says_whether_it_is_healthy(name):
    assert SERVICES[name]["healthcheck"]["test"]


@pytest.mark.parametrize("name", SERVICES)
def test_whatever_a_service_waits_for_will_come_about(name):
    for other, wanted in SERVICES[name].get("depends_on", {}).items():
        ends = wanted["condition"] == "service_completed_successfully"
        assert ends or wanted["condition"] == "service_healthy"
        assert (other in SERVERS) is not ends


@pytest.mark.parametrize("name", SERVICES)
def test_volumes_and_configs_are_declared(name):
    assert set(mount_names(SERVICES[name])) <= set(TREE["volumes"])
    assert {config["source"] for config in SERVICES[name].get("configs", [])} <= set(TREE["configs"])


def test_what_is_written_outlives_the_containers():
    kept = {name: mount_names(SERVICES[name]) for name in ("postgres", "mlflow", "worker")}
    assert kept == {"postgres": ["postgres"], "mlflow": ["artifacts"], "worker": ["home"]}
    assert all(SERVICES[name]["read_only"] for name in ("prefect", "mlflow", "worker"))


def test_only_the_host_itself_reaches_the_servers():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_secrets_are_files_of_the_host_and_nothing_else():
    """Secrets reach services as files only, without defaults: not in variables (`docker inspect`) or command lines."""
    assert "${" not in re.sub(r"\$\{TORCH_BACKEND:-cpu\}", "", COMPOSE.read_text())
    for service in SERVICES.values():
        handed = {f"/run/secrets/{name}" for name in service.get("secrets", [])}
        settings = service.get("environment", {})
        assert handed == {value for value in settings.values() if value.startswith("/run/secrets/")}
        for name, value in settings.items():
            if re.search("PASSWORD|TOKEN|KEY|URI|URL", name) and value not in handed:
                assert re.fullmatch(r"https?://[^@]+|postgresql\+\w+://lifecycle@postgres:5432/\w+", value), name
    used = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert TREE["secrets"] == {name: {"file": f"secrets/{name}"} for name in used}


def test_secrets_are_neither_committed_nor_copied_into_images():
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    copied = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!deploy")]
    assert copied == ["!deploy/requirements", "!deploy/torchvision-without-cuda", "!deploy/vllm-metadata"]


@pytest.mark.parametrize("name", ["prefect", "mlflow", "worker"])
def test_who_speaks_to_the_servers_has_the_key(name):
    assert SERVICES[name]["environment"]["LIFECYCLE_SERVERS_KEY_FILE"] == "/run/secrets/servers_key"


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_a_server_answers_to_the_names_by_which_it_is_asked(name):
    command, port = SERVICES[name]["command"], {"prefect": 4200, "mlflow": 5000}[name]
    assert command[:5] == ["python", "-m", "flows.servers.guarded", name, "--listen"]
    hosts = [host for flag, host in pairwise(command) if flag == "--host"]
    asked = re.findall(
        rf"http://([\w.]+:{port})", str([SERVICES["worker"]["environment"], SERVICES[name]["healthcheck"]])
    )
    assert {f"{name}:{port}", f"localhost:{port}"} == set(asked)
    assert set(asked) <= set(hosts)


def test_the_worker_is_a_module_and_the_databases_have_drivers():
    modules = [module for flag, module in pairwise(SERVICES["worker"]["command"]) if flag == "-m"]
    assert modules == ["flows.servers.keyed", "flows.service.worker"]
    assert all(importlib.util.find_spec(module) for module in modules)
    drivers = re.findall(r"postgresql\+(\w+)://", COMPOSE.read_text())
    assert drivers == ["asyncpg", "psycopg2"]
    assert all(importlib.util.find_spec(driver) for driver in drivers)
