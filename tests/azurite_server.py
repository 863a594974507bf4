"""Azure's blob storage for tests: npm's Azurite on the loopback, and the environment variables that az:// needs.

`make azurite` installs it. Requests pass through a WSGI application of this process, which may throttle, delay or
refuse them.
"""

import base64
import hmac
import http.client
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
from obstore.store import from_url
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.s3_server import BUCKET, ObjectServer

PROGRAM = Path(__file__).parents[1] / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT = "devstoreaccount1"
KEY = "c2VjcmV0LW9mLXRoZS10ZXN0LXdpdGgtZW5vdWdoLWJ5dGVz"
PATIENCE_S = 60.0
ONE_CONNECTIONS = frozenset({"connection", "transfer-encoding", "keep-alive"})


class AzureServer(ObjectServer):
    """Client of the tests' Azurite, in which a container has been created."""

    scheme = "az"

    def __init__(self, wsgi: Any) -> None:
        super().__init__(wsgi)
        _create_container(BUCKET)
        self._store = from_url(f"az://{BUCKET}", client_options={"allow_http": True})

    def put(self, objects: Mapping[str, bytes]) -> None:
        for key, content in objects.items():
            obstore.put(self._store, key, content)

    def objects(self) -> dict[str, bytes]:
        keys = [one["path"] for page in obstore.list(self._store) for one in page]
        return {key: bytes(obstore.get(self._store, key).bytes()) for key in keys}

    def delete(self, key: str) -> None:
        obstore.delete(self._store, key)


def _create_container(name: str) -> None:
    """Create a container by a request with a signature of its own ("Shared Key"): obstore can create none."""
    address = f"{os.environ['AZURE_ENDPOINT']}/{name}"
    signed = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in signed.items())]
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
    digest = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), "sha256")
    headers = {**signed, "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"}
    httpx.put(address, params={"restype": "container"}, headers=headers).raise_for_status()


def _port(azurite: subprocess.Popen[bytes], log: Path) -> int:
    """Return the port on which Azurite listens, as its log names it."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"successfully listens on http://127\.0\.0\.1:(\d+)", log.read_text())):
        assert azurite.poll() is None and time.monotonic() < end_s, log.read_text()
        time.sleep(0.05)
    return int(found[1])


def _passes_to(port: int) -> Any:
    """Return a WSGI application that passes each request on to Azurite."""

    def app(environ: Any, start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers = {name[5:].replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
        if content_type := environ.get("CONTENT_TYPE"):
            headers["Content-Type"] = content_type
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body or None, headers)
        answer = connection.getresponse()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in ONE_CONNECTIONS]
        start_response(f"{answer.status} {answer.reason}", kept)
        content = answer.read()
        connection.close()
        return [content]

    return app


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *_: object) -> None:
        """Suppress the server's log of requests."""


@contextmanager
def running_azurite(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[AzureServer]:
    monkeypatch.setenv("AZURITE_ACCOUNTS", f"{ACCOUNT}:{KEY}")
    command = [PROGRAM, "--inMemoryPersistence", "--blobPort", "0", "--skipApiVersionCheck", "--disableTelemetry"]
    log = folder / "azurite.log"
    with log.open("w") as stream:
        azurite = subprocess.Popen([*command], cwd=folder, stdout=stream, stderr=stream)
    try:
        port = _port(azurite, log)
        front = make_server("127.0.0.1", 0, _passes_to(port), threaded=True, request_handler=_Quiet)
        thread = threading.Thread(target=front.serve_forever)
        thread.start()
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_ENDPOINT", f"http://127.0.0.1:{front.server_port}/{ACCOUNT}")
        try:
            yield AzureServer(front)
        finally:
            front.shutdown()
            thread.join()
            front.server_close()
    finally:
        azurite.terminate()
        with suppress(subprocess.TimeoutExpired):
            azurite.wait(10)
        azurite.kill()
        azurite.wait()
