"""The servers of a team: compose names only what there is, in an order that works, and lets nobody in from outside."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import yaml

COMPOSE = Path(__file__).parents[3] / "deploy" / "compose.yaml"
TREE = yaml.safe_load(COMPOSE.read_text())
SERVICES = TREE["services"]
SERVERS = [name for name, service in SERVICES.items() if "restart" in service]


def flags_of(service):
    return {word for word in SERVICES[service]["command"] if word.startswith("--")}


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


def test_no_secret_is_in_the_file():
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|TOKEN|KEY|URI|URL", name):
                assert re.search(r"\$\{|^https?://[^@]+$", value), name
    assert "POSTGRES_PASSWORD:?" in SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"], "there is no default"


def test_mlflow_answers_to_the_names_by_which_it_is_asked():
    command = SERVICES["mlflow"]["command"]
    allowed = command[command.index("--allowed-hosts") + 1].split(",")
    asked = re.findall(
        r"http://([\w.]+:\d+)", str([SERVICES["worker"]["environment"], SERVICES["mlflow"]["healthcheck"]])
    )
    assert {"mlflow:5000", "localhost:5000"} <= set(asked)
    assert {host for host in asked if host.endswith(":5000")} <= set(allowed)


def test_mlflow_knows_the_options_that_it_is_started_with():
    from mlflow.cli import server

    assert SERVICES["mlflow"]["command"][:2] == ["mlflow", "server"]
    assert flags_of("mlflow") <= {option for parameter in server.params for option in parameter.opts}


def test_prefect_knows_the_options_that_it_is_started_with():
    from prefect.cli.server import start

    assert SERVICES["prefect"]["command"][:3] == ["prefect", "server", "start"]
    assert {flag.removeprefix("--") for flag in flags_of("prefect")} <= set(inspect.signature(start).parameters)


def test_the_worker_is_a_module_and_the_databases_have_drivers():
    assert importlib.util.find_spec(SERVICES["worker"]["command"][-1])
    drivers = re.findall(r"postgresql\+(\w+)://", COMPOSE.read_text())
    assert drivers == ["asyncpg", "psycopg2"]
    assert all(importlib.util.find_spec(driver) for driver in drivers)
