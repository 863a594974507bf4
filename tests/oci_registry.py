"""Stand-in for an OCI registry, which accepts pushes as the Distribution Specification 1.1 demands."""

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tests.http_server import serving

TOKEN = "a-token-of-the-registry"


class Registry:
    """State of the stand-in for an OCI registry: blobs by digest, manifests by tag, and how pushes are authorized.

    credentials: USER:PASSWORD that pushes need. bearer: whether these are exchanged for a token. store: another
    registry, to which blobs are uploaded. lent: another registry, to which blob requests are redirected.
    authorizations: the Authorization headers of all requests.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.uploads: set[str] = set()
        self.received: list[str] = []
        self.refused: dict[str, int] = {}
        self.credentials = ""
        self.bearer = False
        self.store: Registry | None = None
        self.lent: Registry | None = None
        self.authorizations: list[str] = []
        registry = self

        class Handler(_Handler):
            state = registry

        self.handler = Handler
        self.host = ""


@contextmanager
def running_registry() -> Iterator[Registry]:
    registry = Registry()
    with serving(registry.handler) as url:
        registry.host = url.removeprefix("http://")
        yield registry


class _Handler(BaseHTTPRequestHandler):
    state: Registry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/token?"):
            known = self._authorization() == _basic(self.state.credentials)
            return self._answer(200 if known else 401, json.dumps({"token": TOKEN}).encode())
        kind, reference = self._asked(r"/v2/.+/(manifests|blobs)/([^/]+)")
        if kind == "blobs" and self.state.lent and self._is_admitted():
            return self._answer(307, b"", Location=f"http://{self.state.lent.host}{self.path}")
        content = (self.state.manifests if kind == "manifests" else self.state.blobs).get(reference)
        return self._answer(404 if content is None else 200, content or b"") if self._is_admitted() else None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._asked(r"/v2/.+/blobs/(uploads)/()")
        self._body()
        if self._is_admitted():
            upload = uuid.uuid4().hex
            self.state.uploads.add(upload)
            place = f"http://{self.state.store.host}" if self.state.store else ""
            self._answer(202, b"", Location=f"{place}{self.path}{upload}?state=kept")

    def do_DELETE(self) -> None:
        _, upload = self._asked(r"/v2/.+/blobs/(uploads)/([0-9a-f]+)")
        self.state.uploads.remove(upload)
        self._answer(204)

    def do_PUT(self) -> None:
        kind, name = self._asked(r"/v2/.+/(manifests|blobs/uploads)/([^/]+)")
        content = self._body()
        if not self._is_admitted():
            return None
        if kind == "manifests":
            return self._put_manifest(name, content)
        query = parse_qs(urlsplit(self.path).query)
        digest = query["digest"][0]
        self.state.uploads.remove(name)
        if query.get("state") != ["kept"] or digest != f"sha256:{hashlib.sha256(content).hexdigest()}":
            return self._answer(400, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
        self.state.received.append(digest)
        self.state.blobs[digest] = content
        return self._answer(201)

    def _put_manifest(self, tag: str, content: bytes) -> None:
        if self.state.refused.pop("manifest", 0):
            return self._answer(503)
        manifest = json.loads(content)
        parts = [manifest["config"], *manifest["layers"]]
        if any(len(self.state.blobs.get(one["digest"], b"")) != one["size"] for one in parts):
            return self._answer(400, b'{"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}')
        self.state.manifests[tag] = content
        return self._answer(201)

    def _asked(self, pattern: str) -> tuple[str, str]:
        match = re.fullmatch(pattern, urlsplit(self.path).path)
        assert match, self.path
        return match[1], match[2]

    def _is_admitted(self) -> bool:
        if not self.state.credentials:
            return True
        needed = f"Bearer {TOKEN}" if self.state.bearer else _basic(self.state.credentials)
        if self._authorization() == needed:
            return True
        realm = f'Bearer realm="http://{self.state.host}/token",service="registry"'
        self._answer(401, b"", **{"WWW-Authenticate": realm if self.state.bearer else 'Basic realm="registry"'})
        return False

    def _authorization(self) -> str:
        return self.headers.get("Authorization", "")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.state.authorizations.append(self._authorization())
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the server's log of requests."""


def _basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"
