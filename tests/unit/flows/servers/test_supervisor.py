"""The supervisor restarts dead servers of a lifecycle home, tested with real processes and a small server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.ledger.process_identity import ProcessIdentity
from flows.servers import local, supervised_commands, supervisor
from flows.servers import lock as lock_module
from flows.servers.lock import Lock
from flows.servers.programs import listener
from flows.servers.records import ServerRecord, write_records
from flows.servers.supervised_commands import DESCRIPTOR, HandOver, SupervisedCommand, rotate
from stages.core.process_tree import TOKEN_VARIABLE, marked_processes, started_ticks

PATIENCE_S = 120.0
SERVER = """
import os, socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        unwell = os.path.exists("unwell")
        self.send_response(503 if unwell else 200)
        self.end_headers()
        with open("unwell answers", "a") as answers:
            answers.write("." * unwell)
        self.wfile.write(f"{os.getpid()} {os.environ['KEY']}".encode())
server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
print("serves", flush=True)
server.serve_forever()
"""
FAILING = "raise SystemExit(5)"
SLOWLY_FAILING = """
import ctypes, os, threading, time
def end():
    time.sleep(2)
    os._exit(5)
threading.Thread(target=end).start()
ctypes.CDLL(None).pthread_exit(None)  # the process is a zombie as long as its other thread lives
"""
KEEPER = """
import socket, sys, json
from flows.servers.supervised_commands import SupervisedCommand
from flows.servers.supervisor import keep
keep(SupervisedCommand(**json.load(sys.stdin)), socket.socket(fileno=int(sys.argv[1])))
"""


def eventually(condition):
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)
    return found


def said(tmp_path):
    return (tmp_path / "said").read_text()


def ask(port):
    """Return the test server's process id, and the secret in its environment, as the server reports them over HTTP."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
        pid, key = answer.read().decode().split()
    return int(pid), key


def kept(folder, port, program=SERVER, **fields):
    command = [sys.executable, "-c", program, DESCRIPTOR]
    environment = {**os.environ, "KEY": "secret", TOKEN_VARIABLE: os.urandom(16).hex()}
    return SupervisedCommand("server", command, environment, port, "/", folder=str(folder), **fields)


@contextmanager
def keeping(tmp_path, program=SERVER, environment=None, **fields):
    """Run the program that restarts a dead server, and yield the program's process and the server's port."""
    with listener() as public:
        port = public.getsockname()[1]
        one = kept(tmp_path, port, program, **fields)
        process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(public.fileno())],
            pass_fds=(public.fileno(),),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=(tmp_path / "said").open("ab"),
            text=True,
        )
        process.stdin.write(json.dumps(asdict(one)))
        process.stdin.close()
    try:
        if program not in (FAILING, SLOWLY_FAILING):
            eventually(lambda: "server answers" in said(tmp_path))
        yield process, port
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: marked_processes(one.environment[TOKEN_VARIABLE]) == [])


def test_what_is_killed_is_started_again_with_its_socket_and_key_while_clients_wait(tmp_path):
    with keeping(tmp_path) as (_, port):
        first, key = ask(port)
        os.kill(first, signal.SIGKILL)
        began_s = time.monotonic()
        second, key_again = ask(port)  # is not refused: it waits for the second one
        assert time.monotonic() - began_s < 5
        assert second != first
        assert key == key_again == "secret"
    assert "server was killed by SIGKILL; it is started again now" in said(tmp_path)


def test_what_dies_again_and_again_is_started_after_longer_and_longer_pauses(tmp_path):
    with keeping(tmp_path) as (_, port):
        began_s = time.monotonic()
        for _ in range(3):
            os.kill(ask(port)[0], signal.SIGKILL)
        ask(port)
        assert 3.0 <= time.monotonic() - began_s < 10.0
    assert [f"again {when} (" in said(tmp_path) for when in ("now", "in 1 s", "in 2 s")] == [True] * 3


@pytest.mark.parametrize("way", ["hangs", "says that it is not well"])
def test_what_lives_but_is_not_healthy_is_killed_and_started_again(tmp_path, way):
    with keeping(tmp_path, hung_after_s=2.0) as (_, port):
        first, _ = ask(port)
        if way == "hangs":
            os.kill(first, signal.SIGSTOP)
        else:
            (tmp_path / "unwell").touch()
        eventually(lambda: "is killed" in said(tmp_path) and not alive(first))  # it is said first
        (tmp_path / "unwell").unlink(missing_ok=True)
        assert ask(port)[0] != first


def test_the_worker_is_not_killed_because_the_server_that_it_needs_is_away(tmp_path):
    with keeping(tmp_path, hung_after_s=2.0, needs="another") as (_, port):
        first, _ = ask(port)
        (tmp_path / "unwell").touch()
        eventually(lambda: len((tmp_path / "unwell answers").read_text()) > 2 * supervisor.MAX_FAILURES)
        with pytest.raises(urllib.error.HTTPError):
            ask(port)
        assert alive(first)


def alive(pid):
    return started_ticks(pid) is not None


@pytest.mark.parametrize("program", [FAILING, SLOWLY_FAILING])
def test_a_command_that_ends_before_it_has_ever_answered_ends_its_supervisor_with_its_code(tmp_path, program):
    with keeping(tmp_path, program) as (process, _):
        assert process.wait(PATIENCE_S) == 5


def test_a_stopped_supervisor_lets_its_command_end_in_its_own_time(tmp_path):
    slow = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(1), sys.exit(3)))\n" + SERVER
    with keeping(tmp_path, slow) as (process, port):
        ask(port)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 3


def test_a_command_dies_with_its_killed_supervisor(tmp_path):
    with keeping(tmp_path) as (process, port):
        pid, _ = ask(port)
        process.kill()
        eventually(lambda: not alive(pid))
        with pytest.raises(urllib.error.URLError):
            ask(port)


# ---------------------------------------------------------------------------------------------------------- systemd


@pytest.fixture
def manager(tmp_path):
    """Provide a socket that receives notifications as systemd does, and its path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.settimeout(PATIENCE_S)
        receiver.bind(name := str(tmp_path / "notify"))
        yield receiver, name


def test_a_socket_of_systemd_may_be_abstract(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{receiver.getsockname()[1:].decode()}")
        supervisor.notify("READY=1")
        assert receiver.recv(100) == b"READY=1"


def test_systemd_is_told_when_all_answer_that_the_supervisor_lives_and_when_it_stops(tmp_path, manager):
    receiver, name = manager
    with keeping(tmp_path, environment={"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "4000000"}) as (process, port):
        states = set()  # signs of life come first while the server starts
        while states != {"READY=1", "WATCHDOG=1"}:
            states.add(receiver.recv(100).decode())
            assert states <= {"READY=1", "WATCHDOG=1"}
        pid, _ = ask(port)
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()

        process.send_signal(signal.SIGSTOP)  # it hangs: systemd must get no sign of life
        receiver.settimeout(2.0)
        with pytest.raises(TimeoutError):
            while True:
                receiver.recv(100)
        process.send_signal(signal.SIGCONT)
        receiver.settimeout(PATIENCE_S)
        process.terminate()
        eventually(lambda: receiver.recv(100) == b"STOPPING=1")


# ------------------------------------------------------------------------------------------------- one of each home


@contextmanager
def supervised(tmp_path):
    """Run the supervisor with one test server, and yield the lifecycle home's lock and the server's port."""
    home, folder = tmp_path / "home", tmp_path / "server"
    folder.mkdir()
    public = listener()
    port = public.getsockname()[1]
    lock = Lock(home)
    plan = lock.take()
    (one,) = plan.kept = [kept(folder, port, log=str(folder / "server.log"), descriptor=public.detach())]
    plan.home = str(home)
    supervisor.start(plan)
    try:
        eventually(lambda: "server answers" in (home / "supervisor" / "server.log").read_text())
        yield lock, port
    finally:
        if left := lock.take():
            left.release()
        for pid in marked_processes(one.environment[TOKEN_VARIABLE]):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(lock_module, "HAND_OVER_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def impatient(monkeypatch, _patient):
    monkeypatch.setattr(lock_module, "HAND_OVER_TIMEOUT_S", 0.5)


def test_a_supervisor_hands_over_what_it_keeps_and_the_successor_adopts_it(tmp_path):
    with supervised(tmp_path) as (lock, port):
        first, pid = lock.holder(), ask(port)[0]
        plan = lock.take()
        eventually(lambda: not alive(first))
        assert ask(port)[0] == pid
        assert (plan.kept[0].pid, plan.kept[0].environment["KEY"]) == (pid, "secret")
        supervisor.start(plan)
        assert lock.holder() not in (None, first)
        os.kill(pid, signal.SIGKILL)
        assert ask(port) == (ask(port)[0], "secret")
        assert ask(port)[0] != pid


def test_one_that_hangs_is_killed_and_what_it_kept_goes_on(tmp_path, impatient):
    with supervised(tmp_path) as (lock, port):
        hung, pid = lock.holder(), ask(port)[0]
        os.kill(hung, signal.SIGSTOP)
        plan = lock.take()
        assert plan.kept == []
        eventually(lambda: not alive(hung))  # the lock is free a moment before
        assert ask(port)[0] == pid
        plan.release()


def test_nobody_takes_the_lock_of_another_machine(tmp_path, impatient):
    with supervised(tmp_path) as (lock, port):
        found = json.loads(lock.path.read_text())
        lock.path.write_text(json.dumps({**found, "machine": "another"}))
        assert lock.holder() is None
        assert lock.take() is None
        lock.path.write_text(json.dumps(found))
        assert ask(port)


def test_in_a_copied_home_the_supervisor_of_the_original_is_not_asked(tmp_path):
    with supervised(tmp_path) as (lock, port):
        shutil.copytree(tmp_path / "home", tmp_path / "copy")
        copied = Lock(tmp_path / "copy")
        plan = copied.take()
        assert plan.kept == []
        assert copied.holder() is None  # it is held, by this process, which has not said so
        plan.release()
        assert lock.holder() and ask(port)


def test_nothing_is_started_in_another_home_that_is_where_its_own_was(tmp_path):
    with supervised(tmp_path) as (_, port):
        pid = ask(port)[0]
        (tmp_path / "home").rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", tmp_path / "home")
        os.kill(pid, signal.SIGKILL)
        log = tmp_path / "moved" / "supervisor" / "server.log"
        eventually(lambda: "its home was moved" in log.read_text())
        (tmp_path / "home").rename(tmp_path / "copy")
        (tmp_path / "moved").rename(tmp_path / "home")
        assert ask(port)[0] != pid


def test_the_environments_of_what_is_kept_lie_in_no_file(tmp_path):
    with supervised(tmp_path) as (_, port):
        ask(port)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files
        assert [path for path in files if b"secret" in path.read_bytes()] == []


def test_a_supervisor_is_small(tmp_path):
    with supervised(tmp_path) as (lock, port):
        ask(port)
        resident = Path(f"/proc/{lock.holder()}/smaps_rollup").read_text()
        (pss,) = [int(line.split()[1]) for line in resident.splitlines() if line.startswith("Pss:")]
        assert pss < 15 * 1024


def test_status_says_that_a_server_dies_again_and_again_and_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    one = kept(tmp_path, 1, 'raise SystemExit("the database is damaged")', log=str(tmp_path / "prefect" / "server.log"))
    one.name, one.descriptor, one.deaths = "prefect", listener().detach(), 8  # the next pause is a minute
    write_records({"prefect": ServerRecord(process=ProcessIdentity.own(), port=1, token="none", deaths=4)})
    assert local.status()[0].trouble == ""
    lock = Lock(tmp_path)
    supervisor.start(HandOver([one], str(tmp_path), lock.take().lock))
    try:
        eventually(lambda: "died 9 times in a row" in local.status()[0].trouble)
        trouble = local.status()[0].trouble
    finally:
        lock.take().release()
    assert trouble.endswith("'the database is damaged'")


# ------------------------------------------------------------------------------------------------------------- logs


def test_a_log_is_rotated_while_a_program_writes_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(supervised_commands, "LOG_BYTES", 1000)
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as program:
        for number in range(7):
            program.write(f"{number}".encode() * 1001)
            rotate(log)
            program.write(b"next ")
    contents = {path.name: path.read_bytes()[-1:] for path in tmp_path.iterdir()}
    assert contents == {
        "server.log": b" ",
        "server.log.1": b"6",
        "server.log.2": b"5",
        "server.log.3": b"4",
        "server.log.4": b"3",
    }
    assert log.read_bytes() == b"next "  # and no hole before it


def test_what_a_server_said_before_it_died_stays(tmp_path):
    with supervised(tmp_path) as (_, port):
        first = ask(port)[0]
        os.kill(first, signal.SIGKILL)
        ask(port)
        lines = (tmp_path / "server" / "server.log").read_text().splitlines()
    assert [line for line in lines if line == "serves"] == ["serves"] * 2
