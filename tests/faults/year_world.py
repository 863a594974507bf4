"""Surroundings of a lifecycle home in the simulated year: webhook, service manager, and clients of the champion."""

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.http_server import serving

API_KEY = "sk-of-the-year"
PAUSE_S = 0.1
ANSWER_TIMEOUT_S = 150.0
"""Seconds that a client waits for an answer; more than the 120 s for which the proxy holds a request."""
RESTART_S = 1.0


@dataclass
class Notification:
    """Notification that the webhook received: how a refresh ended, and when it arrived (monotonic clock)."""

    refresh: str
    state: str
    body: str
    at_s: float

    @property
    def date(self) -> str:
        """Return the date of the refresh as YYYYMMDD."""
        return self.refresh.split("-")[1]


@contextmanager
def receiving(notified: list[Notification]) -> Iterator[str]:
    """Run a webhook that appends the notifications it receives to a list; yield its URL."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            refresh, _, state = message["subject"].partition(": ")
            notified.append(Notification(refresh, state, message["body"], time.monotonic()))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with serving(Receiver) as url:
        yield url


class Unit:
    """Process of the simulated year that is restarted whenever it ends, like systemd's `Restart=always`."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.command, self.environment, self.log = command, environment, log
        self.restarts_s: list[float] = []
        """Times at which the test itself restarted the process, in seconds (monotonic clock)."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        while not self._stopped.is_set():
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)
            self._process.wait()
            self._stopped.wait(RESTART_S)

    def restart(self) -> None:
        self.restarts_s.append(time.monotonic())
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._process.send_signal(signal.SIGTERM)
        self._thread.join(90)
        assert not self._thread.is_alive(), f"{self.command} does not end"


@dataclass
class ClientRequest:
    """Record of a request to the champion: begin and end (monotonic clock), answer and model version, or the error."""

    began_s: float
    ended_s: float = 0.0
    text: str = ""
    version: str = ""
    trouble: str = ""
    was_sent: bool = False

    @property
    def was_cut(self) -> bool:
        """Return whether the connection broke while the client waited for the answer."""
        return bool(self.trouble) and self.was_sent and not self.trouble.startswith(("HTTP", "TimeoutError"))


@dataclass
class ClientThread:
    """Client that sends requests to the champion one after another without end, and retries refused connections."""

    port: int
    name: str
    asked: list[ClientRequest] = field(default_factory=list)
    _enough: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._ask_forever)
        self._thread.start()

    def stop(self) -> None:
        self._enough.set()
        self._thread.join(ANSWER_TIMEOUT_S + 10)

    def _ask_forever(self) -> None:
        while not self._enough.wait(PAUSE_S):
            request = ClientRequest(time.monotonic())
            self.asked.append(request)
            try:
                self._ask(request)
            except (OSError, http.client.HTTPException) as error:
                request.trouble = repr(error)
            request.ended_s = time.monotonic()

    def _ask(self, request: ClientRequest) -> None:
        connection = self._connected(request.began_s + ANSWER_TIMEOUT_S)
        try:
            body = json.dumps({"model": self.name, "messages": [{"role": "user", "content": "Who are you?"}]})
            headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            request.was_sent = True
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            request.trouble = f"HTTP {answer.status}: {content[:200]!r}"
            return
        request.text = json.loads(content)["choices"][0]["message"]["content"]
        request.version = answer.headers.get("X-Lifecycle-Version", "")

    def _connected(self, end_s: float) -> http.client.HTTPConnection:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_TIMEOUT_S)
            try:
                connection.connect()
                return connection
            except ConnectionRefusedError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(PAUSE_S)


def environ_of(pid: int) -> str:
    """Return the environment variables of a process; "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def kill(pid: int) -> bool:
    """Kill a process, and return whether it existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
