"""Local Prefect and MLflow servers admit only requests with the lifecycle home's key, and only from their own pages."""

import base64
import http.client
import json
import os
import socket
import subprocess
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from refreshes import LIFECYCLE, PATIENCE_S, ForkedHome, eventually, request, stage
from worker_home import STAND_IN

from stages.core.process_tree import marked_processes
from tests.listening import listening_addresses, reachable_from_elsewhere, unix_listeners
from tests.searched import commands_with, files_with

pytestmark = pytest.mark.timeout(900)
SERVERS = ("prefect", "mlflow")
QUESTIONS = {
    "prefect": [("POST", "/api/deployments/filter", "{}"), ("GET", "/api/admin/version", None)],
    "mlflow": [
        ("GET", "/api/2.0/mlflow/experiments/search?max_results=1", None),
        ("POST", "/api/2.0/mlflow/experiments/create", "{}"),
        ("GET", "/api/2.0/mlflow-artifacts/artifacts?path=", None),
        ("PUT", "/api/2.0/mlflow-artifacts/artifacts/planted.txt", "planted"),
        ("GET", "/", None),
    ],
}
"""Requests (method, path, body) that must be refused without the key, by server."""


@pytest.fixture(scope="module")
def home(lent_home):
    return ForkedHome(lent_home)


def ask(home, server, method="GET", path="/", body=None, key=True, timeout_s=PATIENCE_S, **headers):
    """Send a request to Prefect or MLflow, and return status and body. The argument `host` replaces the Host header."""
    address = home.address(server).removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    connection.putrequest(method, path, skip_host=True)
    headers = {"host": address, "content-type": "application/json", **headers}
    if key:
        headers["authorization"] = f"Basic {base64.b64encode(home.key().encode()).decode()}"
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    data = (body or "").encode()
    connection.putheader("content-length", str(len(data)))
    connection.endheaders(data)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors="replace")


CASES = [(server, *question) for server, questions in QUESTIONS.items() for question in questions]


@pytest.mark.parametrize(("server", "method", "path", "body"), CASES)
def test_without_the_key_nothing_is_answered(home, server, method, path, body):
    assert ask(home, server, method, path, body, key=False)[0] == 401
    wrong = f"Basic {base64.b64encode(b'lifecycle:wrong').decode()}"
    assert ask(home, server, method, path, body, key=False, authorization=wrong)[0] == 401


@pytest.mark.parametrize(("server", "method", "path", "body"), CASES)
@pytest.mark.parametrize(
    "foreign",
    [
        {"host": "evil.example"},
        {"host": "evil.example:4200"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
    ],
    ids=lambda headers: "-".join(*headers.items()),
)
def test_another_name_or_another_page_is_refused_even_with_the_key(home, server, method, path, body, foreign):
    assert ask(home, server, method, path, body, **foreign)[0] == 403


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_its_own_page_is_answered_by_either_name_and_no_other_may_read_along(home, server, name):
    own = f"{name}:{home.servers()[server]['port']}"
    path = {"prefect": "/api/admin/version", "mlflow": "/version"}[server]
    assert ask(home, server, path=path, host=own, origin=f"http://{own}")[0] == 200


PATHS = ["//{}", "/health/../{}", "/health/%2e%2e/{}", "/%2e%2e/{}", "/health%2f..%2f{}", "/./{}", "/{}/", "/{}."]


@pytest.mark.parametrize("path", [*PATHS, "/health/"])
@pytest.mark.parametrize("server", SERVERS)
def test_no_spelling_of_a_path_leads_past_the_key(home, server, path):
    inside = {"prefect": "api/admin/version", "mlflow": "api/2.0/mlflow/experiments/search"}[server]
    for name in {inside, inside.upper()}:
        status, text = ask(home, server, path=path.format(name), key=False)
        assert status in (401, 404)
        assert "experiments" not in text


def test_prefects_api_is_described_to_nobody_without_the_key(home):
    """Without the key, Prefect's API schema shows one route only, from which Prefect's web pages read settings."""
    status, text = ask(home, "prefect", path="/openapi.json", key=False)
    assert (status, set(json.loads(text)["paths"])) == (200, {"/ui-settings"})
    assert ask(home, "prefect", path="/api/openapi.json", key=False)[0] == 401


def raw(home, server, *lines, body=b""):
    """Send raw bytes that no HTTP client would send to a server, and return the status codes of its responses."""
    address = home.address(server).removeprefix("http://")
    host, port = address.split(":")
    data = "\r\n".join([*lines, f"Host: {address}", "", ""]).encode() + body
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        with suppress(OSError):  # a server that has read enough may have closed it by now
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):  # who sends on when it was answered may not see the answer
            while part := connection.recv(65536):
                answer += part
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


SMUGGLED = b"GET /health HTTP/1.1\r\nHost: {}\r\n\r\n"


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    ("lengths", "body"),
    [
        (["Content-Length: 5", "Transfer-Encoding: chunked"], b"0\r\n\r\n" + SMUGGLED),
        (["Content-Length: 0", f"Content-Length: {len(SMUGGLED)}"], SMUGGLED),
        (["Transfer-Encoding: xchunked"], b"0\r\n\r\n" + SMUGGLED),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], b"0\r\n\r\n" + SMUGGLED),
    ],
    ids=["both", "two", "unknown", "chunked not last"],
)
def test_a_request_within_another_is_not_answered(home, server, lengths, body):
    assert raw(home, server, "POST /health HTTP/1.1", *lengths, body=body) == [400]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("header", ["Host: evil.example", "Authorization : Basic x"], ids=["two hosts", "space"])
def test_a_request_of_odd_headers_is_not_answered(home, server, header):
    assert raw(home, server, "GET / HTTP/1.1", header) == [400]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("depth", [150, 982, 5000])
def test_a_nesting_is_no_error_of_the_server(home, server, depth):
    path = {"prefect": "/api/flows/", "mlflow": "/api/2.0/mlflow/experiments/create"}[server]
    body = f'{{"name": {"[" * depth}{"]" * depth}}}'
    assert 400 <= ask(home, server, "POST", path, body)[0] < 500


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("credentials", ["Basic", "Basic !", "Basic w6k6eA==", "Basic //4=", "Bearer w6k6eA=="])
def test_odd_credentials_are_no_error_of_the_server(home, server, credentials):
    path = {"prefect": "/api/admin/version", "mlflow": "/"}[server]
    assert ask(home, server, "GET", path, key=False, authorization=credentials)[0] == 401


@pytest.mark.parametrize("server", SERVERS)
def test_a_header_without_end_is_not_read(home, server):
    assert raw(home, server, "GET /api/health HTTP/1.1", "X: " + "a" * 2**20) in ([400], [])


def test_a_connection_that_asks_for_nothing_is_closed(home):
    addresses = [home.address(server).removeprefix("http://").split(":") for server in SERVERS]
    silent = [socket.create_connection((host, int(port)), timeout=3 * PATIENCE_S) for host, port in addresses]
    silent[0].sendall(b"GET / HT")
    assert [connection.recv(1) for connection in silent] == [b"", b""]


def test_a_page_may_ask_no_other_server(home):
    for server, path in (("prefect", "/"), ("mlflow", "/health")):
        with urllib.request.urlopen(f"{home.address(server)}{path}", timeout=PATIENCE_S) as answer:
            policy = answer.headers["content-security-policy"]
        port = home.servers()[server]["port"]
        hosts = {urllib.parse.urlsplit(source).netloc for source in policy.split() if "://" in source}
        assert hosts == {f"127.0.0.1:{port}", f"localhost:{port}"}
        assert policy.startswith("default-src 'self' ")


@pytest.mark.parametrize("server", SERVERS)
def test_health_needs_no_key(home, server):
    assert ask(home, server, path={"prefect": "/api/health", "mlflow": "/health"}[server], key=False)[0] == 200


def test_a_web_socket_of_another_page_is_refused(home):
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec_websocket_version": "13"}
    upgrade |= {"sec_websocket_key": base64.b64encode(os.urandom(16)).decode(), "sec_websocket_protocol": "prefect"}
    path = "/api/events/out"
    assert ask(home, "prefect", path=path, origin="http://evil.example", **upgrade)[0] == 403


def test_nothing_listens_but_the_servers_and_on_the_loopback_alone(home):
    """The servers listen on the loopback alone, at known addresses; the worker's second socket asks for a token."""
    pids = {name: marked_processes(server["token"]) for name, server in home.servers().items()}
    for name in SERVERS:
        assert listening_addresses(pids[name]) == {home.address(name).removeprefix("http://")}
    worker = listening_addresses(pids["worker"])
    assert home.address("worker").removeprefix("http://") in worker
    assert len(worker) <= 2
    assert reachable_from_elsewhere(pids["worker"]) == set()
    assert unix_listeners([pid for found in pids.values() for pid in found]) == set()


def test_the_worker_tells_its_metrics_with_the_key_alone(home):
    assert ask(home, "worker", path="/metrics", key=False)[0] == 401
    status, text = ask(home, "worker", path="/metrics")
    assert status == 200
    assert "\nlifecycle_home_free_bytes " in text
    assert ask(home, "worker", path="/health", key=False)[0] == 200


def test_the_key_is_its_owners_and_in_no_command_line(home):
    file = home.folder / "servers.key"
    assert file.stat().st_mode & 0o777 == 0o600
    password = home.key().split(":")[1]
    assert commands_with(password) == []
    assert files_with(home.folder, password) == [file]


@pytest.mark.parametrize("planted", ["lifecycle:known-to-others", "nonsense"])
def test_a_key_that_others_may_know_is_not_used(tmp_path, planted):
    home = ForkedHome(tmp_path / "home")
    home.folder.mkdir()
    file = home.folder / "servers.key"
    file.write_text(planted)
    file.chmod(0o644 if ":" in planted else 0o600)
    refused = home.lifecycle("up")
    assert refused.returncode == 9
    assert "servers.key" in refused.stderr
    assert "`lifecycle up` makes a new one" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (home.folder / "servers.json").exists()


def try_while_they_start(home):
    """Check while servers start that no other process can take their public ports, and that they answer."""
    eventually(lambda: (home.folder / "servers.json").exists() and home.servers().keys() >= {*SERVERS})
    for server in SERVERS:
        port = home.servers()[server]["port"]
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(("127.0.0.1", port))
            stranger.listen()
        assert ask(home, server, path="/health", key=False)[0] in (200, 404)


@pytest.fixture(scope="module")
def second_home(tmp_path_factory):
    """Provide a second running lifecycle home, whose servers cannot get the usual ports."""
    home = ForkedHome(tmp_path_factory.mktemp("second") / "home")
    home.folder.mkdir()
    up = home.lifecycle_beside("up")
    try_while_they_start(home)
    assert up.wait(PATIENCE_S) == 0, up.stderr.read()
    yield home
    assert home.lifecycle("down").returncode == 0


def test_the_pages_of_two_homes_at_once_ask_their_own_servers(home, second_home):
    addresses = []
    for each_home in (home, second_home):
        status, text = ask(each_home, "prefect", path="/ui-settings", key=False)
        settings = json.loads(text)
        assert (status, settings["auth"], settings["api_url"]) == (200, "BASIC", f"{each_home.address('prefect')}/api")
        assert request(f"{settings['api_url']}/admin/version", key=each_home.key())
        addresses.append(settings["api_url"])
    assert len(set(addresses)) == 2
    assert ask(second_home, "prefect", path="/api/admin/version", key=False, authorization=basic(home.key()))[0] == 401


def basic(key):
    return f"Basic {base64.b64encode(key.encode()).decode()}"


def test_a_person_is_logged_in_without_the_key_on_a_command_line(second_home, tmp_path):
    """`lifecycle status --open` logs a person in without the key on a command line, as a fake browser records."""
    browser, noted = tmp_path / "browser", tmp_path / "noted"
    browser.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n')
    browser.chmod(0o700)
    environment = {**second_home.environment, "BROWSER": f"{browser} %s"}
    done = subprocess.run([LIFECYCLE, "status", "--open"], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    eventually(lambda: noted.exists() and len(noted.read_text().split()) == 2)
    addresses = noted.read_text().split()
    password = second_home.key().split(":")[1]
    assert password not in done.stdout + done.stderr + " ".join(addresses)
    pages = [Path(urllib.parse.urlsplit(address).path) for address in addresses]
    assert [page.stat().st_mode & 0o777 for page in pages] == [0o600, 0o600]
    prefect, mlflow = (urllib.parse.urlsplit(page.read_text().split('"')[-2]) for page in pages)
    assert (prefect.netloc, urllib.parse.unquote(prefect.fragment)) == (
        second_home.address("prefect").removeprefix("http://"),
        second_home.key(),
    )
    status, text = ask(second_home, "prefect", path=prefect.path, key=False)
    assert status == 200
    assert 'localStorage.setItem("prefect-password", btoa(key))' in text  # where Prefect's own login page puts it
    assert f"{mlflow.username}:{mlflow.password}" == second_home.key()
    assert ask(second_home, "mlflow", path=mlflow.path)[0] == 200


def test_servers_that_run_without_a_key_are_started_again_with_one(second_home):
    """Servers that run without a key, as those of an earlier version do, are restarted with one."""
    file = second_home.folder / "servers.json"
    old = json.loads(file.read_text())
    for server in SERVERS:
        old["servers"][server]["settings"] = None
    file.write_text(json.dumps(old))
    (second_home.folder / "servers.key").unlink()
    assert second_home.lifecycle("up").returncode == 0
    new = second_home.servers()
    for server in SERVERS:
        assert new[server]["process"] != old["servers"][server]["process"]
        assert new[server]["port"] == old["servers"][server]["port"]
    assert ask(second_home, "prefect", path="/api/admin/version")[0] == 200
    code, refresh = second_home.run(second_home.recipe("keyed", rows=stage("ok", "keyed")))
    assert (code, refresh["stages"]["rows"]["state"]) == (0, "built")
    eventually(lambda: second_home.attempts("rows"))  # a busy machine may tell MLflow after the end


def test_a_person_who_is_logged_in_sees_the_list_of_runs(second_home):
    """`lifecycle status --open` opens MLflow's list of runs, which exists after the first refresh."""
    assert second_home.run(second_home.recipe("listed", rows=stage("ok", "listed")))[0] == 0
    eventually(lambda: second_home.attempts("rows"))  # a busy machine may tell MLflow after the end
    environment = {**second_home.environment, "BROWSER": "true %s"}
    assert subprocess.run([LIFECYCLE, "status", "--open"], env=environment, capture_output=True).returncode == 0
    page = (second_home.folder / "mlflow" / "login.html").read_text().split('"')[-2]
    path, _, query = urllib.parse.unquote(urllib.parse.urlsplit(page).fragment).partition("?")
    experiment = path.removeprefix("/experiments/").removesuffix("/runs")
    status, text = ask(second_home, "mlflow", path=f"/api/2.0/mlflow/experiments/get?experiment_id={experiment}")
    assert status == 200, text
    tags = {tag["key"]: tag["value"] for tag in json.loads(text)["experiment"]["tags"]}
    asked = urllib.parse.parse_qs(query)
    assert f"mlflow.sharedViewState.{asked['viewStateShareKey'][0]}" in tags
    assert asked["workflowType"] == ["machine_learning"]


def test_servers_that_are_stopped_during_a_run_leave_its_terminal_alone(second_home):
    steps = {"TINY_STEP_SECONDS": "0.5", "PYTHONPATH": str(STAND_IN)}
    recipe = second_home.recipe("undisturbed", rows=stage("steps", "undisturbed", **steps))
    refresh = second_home.lifecycle_beside("run", str(recipe))
    second_home.work("rows", "scratch/step")
    assert second_home.lifecycle("down").returncode == 0
    _, said = refresh.communicate(timeout=PATIENCE_S)
    assert refresh.returncode == 0
    assert "Traceback" not in said
    assert "Error logging to API" not in said
    assert len(said.splitlines()) <= 4, said  # where the servers are, and that Prefect does not know the end
