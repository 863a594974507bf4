"""Whoever asked for it is told how refreshes end, by Prefect's automations; the receiver is a real HTTP server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from refreshes import eventually, stage

pytestmark = pytest.mark.timeout(900)
VARIABLE = "ADDRESS_OF_RECEIVER"
SECRET = "secret-4c1e"


@pytest.fixture
def receiver():
    """An HTTP server and the JSON objects that it was sent."""
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_is_told_of_a_failure_and_of_nothing_else(worker_home, receiver, monkeypatch):
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    added = worker_home.lifecycle("notify", "add", "webhook", "--url-from", VARIABLE, "--on", "failed")
    assert added.returncode == 0, added.stderr
    listed = json.loads(worker_home.lifecycle("notify", "list", "--json").stdout)["notifications"]
    assert listed == [{"channel": "webhook", "occasions": ["failed"]}]

    assert worker_home.run(worker_home.recipe("works", rows=stage("ok", "works")))[0] == 0
    _, failed = worker_home.run(worker_home.recipe("fails", rows=stage("known_error", "fails")))
    eventually(lambda: received)
    assert [message["subject"] for message in received] == [f"{failed['refresh']}: Failed"]
    assert "failed: rows" in received[0]["body"]

    assert worker_home.lifecycle("notify", "remove", "webhook").returncode == 0
    assert json.loads(worker_home.lifecycle("notify", "list", "--json").stdout)["notifications"] == []
    told = [path for path in worker_home.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert told == []


def test_an_address_of_another_kind_is_refused_without_showing_it(worker_home, monkeypatch):
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"https://example.org/{SECRET}")
    refused = worker_home.lifecycle("notify", "add", "slack", "--url-from", VARIABLE)
    assert refused.returncode == 3
    assert "does not begin with https://hooks.slack.com/services/…" in refused.stderr
    assert SECRET not in refused.stderr
    unset = worker_home.lifecycle("notify", "add", "email", "--url-from", "NOT_SET_ANYWHERE")
    assert "the environment variable NOT_SET_ANYWHERE is not set" in unset.stderr
