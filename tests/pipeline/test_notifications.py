"""Prefect's automations send notifications of how refreshes end; the receiver is a real HTTP server."""

import base64
import json
import os
import re
import signal
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
from contextlib import closing
from datetime import UTC, datetime
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import uuid4

import pytest
from refreshes import eventually, finish, request, stage

from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import Ledger
from flows.servers.local import is_answering
from tests.beginnings import beginning
from tests.searched import files_with

pytestmark = pytest.mark.timeout(900)
VARIABLE = "ADDRESS_OF_RECEIVER"
SECRET = "secret-4c1e"
REPEATED_WITHIN_S = 35.0
"""Seconds within which Prefect's disconnected event client reconnects and sends its events again, with a margin."""


@pytest.fixture
def receiver():
    """Provide a receiver: the port of an HTTP server, and the list of JSON bodies received (None for a ping)."""
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            received.append(None)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
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
    reason, link = received[0]["body"].split("failed: rows", 1)[1].split("Prefect: ")
    assert "rows: DataError: " in reason  # in which stage, and why
    assert "MLflow: http" in reason
    (flow_run,) = worker_home.prefect("flow_runs/filter", {"flow_runs": {"name": {"any_": [failed["refresh"]]}}})
    assert link.startswith(worker_home.address("prefect"))
    assert link.endswith(flow_run["id"])

    received.clear()
    tested = worker_home.lifecycle("notify", "test", "webhook")
    assert tested.returncode == 0, tested.stderr
    assert [message["subject"] for message in received] == ["llm-lifecycle: a test"]

    assert worker_home.lifecycle("notify", "remove", "webhook").returncode == 0
    assert json.loads(worker_home.lifecycle("notify", "list", "--json").stdout)["notifications"] == []
    assert files_with(worker_home.folder, SECRET) == []


@pytest.mark.nightly
def test_a_decision_about_a_promotion_reaches_prefect_and_who_waits_for_it(worker_home, receiver, monkeypatch):
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    added = worker_home.lifecycle("notify", "add", "webhook", "--url-from", VARIABLE, "--on", "promoted")
    assert added.returncode == 0, added.stderr
    _, ended = worker_home.run(worker_home.recipe("decided", rows=stage("ok", "decided")))
    (flow_run,) = worker_home.prefect("flow_runs/filter", {"flow_runs": {"name": {"any_": [ended["refresh"]]}}})
    waiting = {"state": {"type": "CANCELLED", "name": "WaitingForApproval"}, "force": True}
    worker_home.prefect(f"flow_runs/{flow_run['id']}/set_state", waiting)
    program = f"""
import json
from dataclasses import replace
from flows.ledger.refreshes import ledger_of
from flows.running.flow_runs import settle_flow_runs
record = ledger_of({ended["refresh"]!r}).read()
entry = record.stages["rows"]
verdict = {{"outcome": "promoted", "name": "adder", "champion_version": None, "against": None, "missed": []}}
(entry.artifact / "verdict.json").write_text(json.dumps(verdict))
result = entry.result.model_copy(update={{"tags": {{**entry.result.tags, "verdict": "promoted"}}}})
settle_flow_runs([replace(record, stages={{"rows": replace(entry, built=result)}})])
"""
    api = {"PREFECT_API_URL": f"{worker_home.address('prefect')}/api", "PREFECT_API_AUTH_STRING": worker_home.key()}
    environment = {**os.environ, **worker_home.environment, **api}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert worker_home.prefect(f"flow_runs/{flow_run['id']}")["state"]["name"] == "Promoted"
    eventually(lambda: received)
    assert [message["subject"] for message in received] == [f"{ended['refresh']}: Promoted"]
    assert worker_home.lifecycle("notify", "remove", "webhook").returncode == 0


def test_a_webhook_is_told_of_what_prefects_scheduler_began(worker_home, receiver, monkeypatch):
    """A webhook hears promptly that a scheduled run fails or crashes, whose first event Prefect omits.

    Prefect would delay the later ones by 15 minutes.
    """
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    added = worker_home.lifecycle("notify", "add", "webhook", "--url-from", VARIABLE, "--on", "failed")
    assert added.returncode == 0, added.stderr
    worker_home.schedule(worker_home.write("unlucky", {"rows": stage("known_error", "unlucky")}))
    (run,) = worker_home.miss_nights("unlucky", 1)
    ended = worker_home.ended(run)
    eventually(lambda: received)
    assert [message["subject"] for message in received] == [f"{ended['name']}: Failed"]

    received.clear()  # the process of the next one dies before it can say anything
    deployment = worker_home.deployment("unlucky")
    dying = {"job_variables": {**deployment["job_variables"], "command": "false"}}
    worker_home.prefect(f"deployments/{deployment['id']}", dying, "PATCH")  # which removes what is planned
    worker_home.prefect(f"deployments/{deployment['id']}/schedule", {})
    (run,) = worker_home.miss_nights("unlucky", 1)
    worker_home.ended(run, num_tries=0)
    eventually(lambda: received)
    assert [message["subject"] for message in received] == ["unlucky: Crashed"]
    assert worker_home.lifecycle("schedules", "remove", "unlucky").returncode == 0
    assert worker_home.lifecycle("notify", "remove", "webhook").returncode == 0


def test_people_are_told_of_nights_that_nobody_begins_and_a_service_of_those_that_ran(
    worker_home, receiver, monkeypatch
):
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    refused = worker_home.lifecycle("notify", "add", "ping", "--url-from", VARIABLE, "--on", "late")
    assert refused.returncode == 3 and "leave out `--on`" in refused.stderr
    for channel in ("webhook", "ping"):
        assert worker_home.lifecycle("notify", "add", channel, "--url-from", VARIABLE).returncode == 0
    listed = json.loads(worker_home.lifecycle("notify", "list", "--json").stdout)["notifications"]
    everything = ["failed", "late", "skipped", "not-promoted", "waiting", "promoted"]
    assert [one["occasions"] for one in listed] == [["ran"], everything]
    worker_home.schedule(worker_home.write("late", {"rows": stage("ok", "late")}))
    worker = worker_home.servers()["worker"]["process"]["pid"]
    os.kill(worker, signal.SIGSTOP)  # Prefect notifies without it
    try:
        runs = worker_home.miss_nights("late", 2, planned_days_ago=3)
        eventually(lambda: len(received) == 2)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert {message["subject"] for message in received} == {"late: Late"}
    assert all("no worker has begun it; look at `lifecycle status`" in message["body"] for message in received)
    received.clear()
    assert worker_home.ended(runs[1], num_tries=0)["state"]["name"] == "Superseded"
    eventually(lambda: len(received) == 2)
    assert None in received  # the ping
    (message,) = [message for message in received if message]
    assert message["subject"] == "late: Superseded"
    assert "one run, due at" in message["body"] and "did not begin in time" in message["body"]

    received.clear()
    assert worker_home.lifecycle("notify", "test", "ping").returncode == 0
    assert received == [None]
    assert worker_home.lifecycle("schedules", "remove", "late").returncode == 0
    for channel in ("webhook", "ping"):
        assert worker_home.lifecycle("notify", "remove", channel).returncode == 0


def test_a_webhook_is_told_of_a_death_whose_prior_event_prefect_does_not_have(worker_home, receiver, monkeypatch):
    """A webhook hears promptly of a crash, though Prefect's server, restarted, has forgotten the run's events.

    It would delay the crash event by 15 minutes.
    """
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    assert worker_home.lifecycle("notify", "add", "webhook", "--url-from", VARIABLE).returncode == 0
    worker_home.schedule(worker_home.write("mortal", {"rows": stage("ok", "mortal")}))
    run = worker_home.planned("mortal")[0]  # which has no event: Prefect's scheduler leaves it out
    began = time.monotonic()
    worker_home.prefect(f"flow_runs/{run['id']}/set_state", {"state": {"type": "RUNNING"}, "force": True})
    died = ProcessIdentity(pid=os.getpid(), started_ticks=1)  # no process of this number began then
    began_here = beginning(worker_home.folder.parent, {}, run["name"], "mortal", process=died)
    Ledger(worker_home.folder / "ledger" / run["name"]).append(began_here)
    eventually(lambda: received)
    assert [message["subject"] for message in received] == [f"{run['name']}: Crashed"]
    eventually(lambda: worker_home.record(run).state == "failed")
    assert time.monotonic() - began < 60
    assert worker_home.lifecycle("schedules", "remove", "mortal").returncode == 0
    assert worker_home.lifecycle("notify", "remove", "webhook").returncode == 0


@pytest.mark.nightly
def test_a_webhook_is_told_of_an_end_whose_event_died_with_prefects_server(worker_home, receiver, monkeypatch):
    """A webhook is notified once of a refresh's end, even if Prefect's server dies before it emits the event.

    A state in its database is then left without event. The next server notifies once. The one after it does not, though
    Prefect drops what was notified after some minutes.

    `make test`: the tests before and after this, of a death without event and of a server that died in between.
    """
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    assert worker_home.lifecycle("notify", "add", "webhook", "--url-from", VARIABLE).returncode == 0
    worker_home.schedule(worker_home.write("unheard", {"rows": stage("ok", "unheard")}))
    run = worker_home.planned("unheard")[0]
    ended = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}"
    state = {
        "id": str(uuid4()),
        "flow_run_id": run["id"],
        "timestamp": ended,
        "type": "COMPLETED",
        "name": "Promoted",
        "message": "it is better",
        "state_details": "{}",
        "data": "null",
        "created": ended,
        "updated": ended,
    }
    database_file = worker_home.folder / "prefect" / "prefect.db"
    with closing(sqlite3.connect(database_file, timeout=30)) as database, database:
        columns, values = ", ".join(state), ", ".join(f":{column}" for column in state)
        database.execute(f"INSERT INTO flow_run_state ({columns}) VALUES ({values})", state)
        change = "state_id = :id, state_type = :type, state_name = :name, state_timestamp = :timestamp"
        database.execute(f"UPDATE flow_run SET {change}, end_time = :timestamp WHERE id = :flow_run_id", state)
    eventually(lambda: received)
    assert [message["subject"] for message in received] == ["unheard: Promoted"]
    assert "it is better" in received[0]["body"]

    with closing(sqlite3.connect(database_file, timeout=30)) as database:
        eventually(lambda: database.execute("SELECT 1 FROM events WHERE id = ?", [state["id"]]).fetchone())
        with database:
            database.execute("DELETE FROM automation_bucket")
    before = worker_home.servers()["prefect"]["process"]
    os.killpg(before["pid"], signal.SIGKILL)
    eventually(lambda: worker_home.servers()["prefect"]["process"] != before)
    eventually(lambda: is_answering(f"{worker_home.address('prefect')}/api/health"))
    time.sleep(REPEATED_WITHIN_S)
    assert len(received) == 1
    assert worker_home.lifecycle("schedules", "remove", "unheard").returncode == 0
    assert worker_home.lifecycle("notify", "remove", "webhook").returncode == 0


def test_a_ping_comes_soon_of_a_refresh_in_whose_midst_prefects_server_died(worker_home, receiver, monkeypatch):
    """A ping comes soon after a refresh, though Prefect's server was restarted meanwhile.

    Prefect would delay the final event by 15 minutes, waiting for the start event that it has forgotten.
    """
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    assert worker_home.lifecycle("notify", "add", "ping", "--url-from", VARIABLE).returncode == 0
    refresh = worker_home.start(worker_home.recipe("interrupted", rows=stage("pause", "interrupted")))
    release = worker_home.work("rows", "scratch/ready").with_name("release")
    before = worker_home.servers()["prefect"]["process"]
    os.killpg(before["pid"], signal.SIGKILL)
    eventually(lambda: worker_home.servers()["prefect"]["process"] != before)
    eventually(lambda: is_answering(f"{worker_home.address('prefect')}/api/health"))
    release.touch()
    assert finish(refresh)[0] == 0
    eventually(lambda: received)
    assert received == [None]
    assert worker_home.lifecycle("notify", "remove", "ping").returncode == 0


@pytest.mark.nightly
def test_a_ping_comes_though_prefect_never_hears_that_the_refresh_was_running(worker_home, receiver, monkeypatch):
    """A ping comes within two minutes of an end whose prior event was lost on the way, not after Prefect's 15.

    `make test`: an event that waits, in the ordering of Prefect's server alone.
    """
    port, received = receiver
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:{port}/{SECRET}")
    assert worker_home.lifecycle("notify", "add", "ping", "--url-from", VARIABLE).returncode == 0
    worker_home.schedule(worker_home.write("lossy", {"rows": stage("ok", "lossy")}))
    run = worker_home.planned("lossy")[0]
    of_flow = {"prefect.resource.role": "flow", "prefect.resource.name": "refresh"}
    event = {
        "id": str(uuid4()),
        "follows": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "prefect.flow-run.Completed",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run['id']}", "prefect.state-name": "Completed"},
        "related": [{"prefect.resource.id": f"prefect.flow.{run['flow_id']}", **of_flow}],
    }
    began_s = time.monotonic()
    worker_home.prefect("events", [event])
    eventually(lambda: received)
    assert 50 < time.monotonic() - began_s < 150
    assert worker_home.lifecycle("schedules", "remove", "lossy").returncode == 0
    assert worker_home.lifecycle("notify", "remove", "ping").returncode == 0


@pytest.fixture
def post_office():
    """Provide the port of a mail server that requires a password, and the letters received, each with its login."""
    letters = []

    class Office(socketserver.StreamRequestHandler):
        def say(self, text):
            self.wfile.write(f"{text}\r\n".encode())

        def handle(self):
            self.say("220 here")
            user, data = None, b""
            while line := self.rfile.readline():
                word = line.split()[0].upper() if line.split() else b""
                if word == b"EHLO":
                    self.say("250-here")
                    self.say("250 AUTH PLAIN")
                elif word == b"AUTH":
                    user = base64.b64decode(line.split()[2]).decode().split("\0")[1:]
                    self.say("235 come in")
                elif word == b"DATA":
                    self.say("354 go on")
                    while (line := self.rfile.readline()) != b".\r\n":
                        data += line
                    letters.append((user, message_from_bytes(data, policy=policy.default)))
                    self.say("250 sent")
                elif word == b"QUIT":
                    self.say("221 bye")
                    return
                else:
                    self.say("250 fine")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Office) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1], letters
        server.shutdown()
        thread.join()


def test_a_letter_is_sent_to_the_address_of_the_readme(worker_home, post_office, monkeypatch):
    port, letters = post_office
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"mailto://me:{SECRET}@localhost:{port}?to=you@example.org")
    added = worker_home.lifecycle("notify", "add", "email", "--url-from", VARIABLE)
    assert added.returncode == 0, added.stderr
    assert worker_home.lifecycle("notify", "test", "email").returncode == 0
    (user, letter) = letters.pop()
    assert (user, letter["Subject"]) == (["me", SECRET], "llm-lifecycle: a test")
    assert "you@example.org" in letter["To"]

    _, failed = worker_home.run(worker_home.recipe("fails-by-letter", rows=stage("known_error", "by-letter")))
    eventually(lambda: letters)
    assert letters[0][1]["Subject"] == f"{failed['refresh']}: Failed"
    assert "failed: rows" in letters[0][1].as_string()
    assert_told_to_nobody_else(worker_home)
    assert worker_home.lifecycle("notify", "remove", "email").returncode == 0


def assert_told_to_nobody_else(home):
    """Check that Prefect's API shows notification secrets to requests with the key, and refuses all others."""
    question = {"block_documents": {}, "include_secrets": True}
    assert SECRET in json.dumps(home.prefect("block_documents/filter", question))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        request(f"{home.address('prefect')}/api/block_documents/filter", question)


def test_a_test_that_does_not_arrive_is_said_without_the_address(worker_home, monkeypatch):
    for channel, address in (
        ("webhook", f"http://127.0.0.1:9/{SECRET}"),
        ("email", f"mailto://me:{SECRET}@localhost:9?to=a@b.org"),
    ):
        monkeypatch.setitem(worker_home.environment, VARIABLE, address)
        assert worker_home.lifecycle("notify", "add", channel, "--url-from", VARIABLE).returncode == 0
        said = worker_home.lifecycle("notify", "test", channel)
        assert said.returncode == 9, said.stderr
        assert re.search(f"ServerError: notifying by {channel}: .", said.stderr)
        assert "Traceback" not in said.stderr
        assert SECRET not in said.stdout + said.stderr
        assert worker_home.lifecycle("notify", "remove", channel).returncode == 0
    unknown = worker_home.lifecycle("notify", "test", "slack")
    assert unknown.returncode == 3
    assert "`lifecycle notify add slack` adds them" in unknown.stderr


def test_an_address_of_another_kind_is_refused_without_showing_it(worker_home, monkeypatch):
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"https://example.org/{SECRET}")
    refused = worker_home.lifecycle("notify", "add", "slack", "--url-from", VARIABLE)
    assert refused.returncode == 3
    assert "does not begin with https://hooks.slack.com/services/…" in refused.stderr
    assert SECRET not in refused.stderr
    for channel, address in (
        ("email", f"mailto://me:{SECRET}@127.0.0.1"),
        ("slack", "https://hooks.slack.com/services/T1"),
    ):
        monkeypatch.setitem(worker_home.environment, VARIABLE, address)
        refused = worker_home.lifecycle("notify", "add", channel, "--url-from", VARIABLE)
        assert refused.returncode == 3
        assert f"what {VARIABLE} holds is no whole address; expected " in refused.stderr
        assert SECRET not in refused.stderr
    monkeypatch.setitem(worker_home.environment, VARIABLE, f"http://127.0.0.1:99999/{SECRET}")
    refused = worker_home.lifecycle("notify", "add", "webhook", "--url-from", VARIABLE)
    assert refused.returncode == 3
    assert f"what {VARIABLE} holds is no URL; expected http://HOST:PORT/PATH" in refused.stderr
    assert SECRET not in refused.stderr
    unset = worker_home.lifecycle("notify", "add", "email", "--url-from", "NOT_SET_ANYWHERE")
    assert "the environment variable NOT_SET_ANYWHERE is not set" in unset.stderr
