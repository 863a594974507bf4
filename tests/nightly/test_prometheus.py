"""Debian's Prometheus scrapes worker and proxy by the shipped settings, and every panel of the board shows data."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from flows.service.worker import add_metrics
from flows.store.store import Store
from stages.serving.exchange import Exchange
from stages.serving.tally import ServedVersion, Tallies
from tests.http_server import serving
from tests.unit.flows.report.conftest import Night

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
KEY, API_KEY = "the-key-of-the-servers", "the-key-of-the-model"
PATIENCE_S = 120
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is missing"),
]


@contextmanager
def worker():
    """Serve the metrics of the present home as the worker does; yield its address."""
    application = FastAPI()
    add_metrics(application, KEY)
    public = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="error"))
    thread = threading.Thread(target=server.run, args=([public],))
    thread.start()
    yield f"127.0.0.1:{public.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def proxy(tallies):
    """Return a handler that answers as a proxy does which has the given counts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = self.headers["authorization"] == f"Bearer {API_KEY}"
            self.send_response(200 if allowed else 401)
            self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(tallies.as_text().encode() if allowed else b"")

        def log_message(self, *_):
            pass

    return Handler


@contextmanager
def prometheus(folder, targets):
    """Run Prometheus with the shipped settings, but other ports and a second between scrapes; yield its address."""
    text = (DEPLOY / "prometheus.yml").read_text()
    changes = {
        **targets,
        "/etc/prometheus": str(folder),
        "scrape_interval: 1m": "scrape_interval: 1s",
        "scrape_interval: 30s": "scrape_interval: 1s",
        "[alerts.yml, serving-alerts.yml]": f"[{DEPLOY}/alerts.yml, {DEPLOY}/serving-alerts.yml]",
    }
    for shipped, used in changes.items():
        assert shipped in text
        text = text.replace(shipped, used)
    (folder / "prometheus.yml").write_text(text)
    (folder / "llm-lifecycle-key").write_text(KEY)
    (folder / "vllm-api-key").write_text(API_KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def answers(address, expression):
    """Return the samples of a PromQL expression; raise what Prometheus says of a wrong one."""
    question = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{address}/api/v1/query?{question}", timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def test_every_panel_of_the_board_shows_what_was_scraped(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    (tmp_path / "hardware.yaml").write_text("like: h200\nprice_per_device_hour: 2.5\n")
    night = Night(Store(tmp_path / "store"), tmp_path)
    night.refresh()
    night.refresh(failing="sft")
    tallies = Tallies()
    for status in (200, 200, 503):
        exchange = Exchange({})
        exchange.status = status
        tallies.of(ServedVersion("adder", "1")).count("/v1/chat/completions", exchange, 0.2)
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = {target["expr"] for panel in board["panels"] for target in panel["targets"]}
    with worker() as own, serving(proxy(tallies)) as served:
        targets = {"127.0.0.1:4300": own, "127.0.0.1:8000": served.removeprefix("http://")}
        with prometheus(tmp_path, targets) as address:
            end_s = time.monotonic() + PATIENCE_S
            while expressions and time.monotonic() < end_s:
                time.sleep(1)
                with suppress(urllib.error.URLError):  # it is starting
                    expressions -= {expression for expression in expressions if answers(address, expression)}
            assert expressions == set(), (tmp_path / "log").read_text()[-2000:]
