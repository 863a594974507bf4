"""The proxy program of a Kubernetes pod runs in vLLM's image, which has only our folder `stages`."""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import httpx

from stages.serving.proxy_program import LOCK_NAME
from stages.serving.vllm.engine import find_vllm
from tests.serving import wait_for
from tests.slurm_cluster import free_ports

ROOT = Path(__file__).parents[4]


class Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"models")

    def log_message(self, *_: object) -> None:
        pass


def test_it_stands_before_an_engine_until_it_is_asked_to_end(tmp_path):
    port = free_ports(1)[0]
    command = [find_vllm().python, "-m", "stages.serving.proxy_program", tmp_path / "engine.sock", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_API_KEY": "key"}
    with (
        ThreadingUnixStreamServer(str(tmp_path / "engine.sock"), Engine) as engine,
        subprocess.Popen(command, env=environment, cwd=tmp_path) as process,
    ):
        threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True).start()
        try:
            wait_for(lambda: answer(port, "wrong") is not None, timeout_s=300)
            assert answer(port, "wrong").status_code == 401
            assert answer(port, "key").text == "models"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            engine.shutdown()
    assert answer(port, "key") is None


def test_it_answers_no_one_before_it_has_the_lock_that_an_ending_engine_waits_for(tmp_path):
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "stages.serving.proxy_program", tmp_path / "engine.sock", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_API_KEY": "key"}
    with (tmp_path / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(command, env=environment, cwd=tmp_path) as process:
            try:
                wait_for(lambda: waits_for_a_lock(process.pid), timeout_s=300)
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert select.select([client], [], [], 0.5)[0] == []
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    assert client.recv(100).startswith(b"HTTP/1.1 401")
            finally:
                process.kill()


def waits_for_a_lock(pid: int) -> bool:
    """Return whether a process waits for a lock of a file: /proc/locks marks those that do by an arrow."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " -> " in line]
    return any(str(pid) in fields for fields in lines)


def answer(port: int, key: str) -> httpx.Response | None:
    """Return the answer to a request to a local port, or None if no program listens there."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=60)
    except httpx.ConnectError:
        return None
