"""Stand-in for a model hub, with the HTTP APIs of Hugging Face and ModelScope, that fails when a test asks for it.

It has real sockets, real redirects to a "CDN" on another host name, and real ranges. It counts the bytes that it serves
and keeps the headers of every request.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.http_server import LoopbackServer
from tests.hub_repository import LARGE_FILE_BYTES, Repository, blob_id
from tests.hub_uploads import Fault
from tests.modelscope_uploads import ModelScopeUploads


@dataclass(frozen=True)
class Request:
    """HTTP request that the stand-in for a model hub has received, kept for tests to check."""

    method: str
    host: str
    path: str
    headers: dict[str, str]


class HubServer:
    """Stand-in for a model hub on the loopback, with repositories, tokens and planned faults.

    repositories: by `org/name` or `datasets/org/name`. pages: answers that replace theirs, by path. token_roles: known
    tokens, and whether they may `read` or `write`.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.pages: dict[str, bytes] = {}
        self.token_roles: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.served_bytes: dict[str, int] = {}
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._server = LoopbackServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def repository(self, name: str) -> Repository:
        """Return the repository with this name of the stand-in hub, created if it does not exist."""
        return self.repositories.setdefault(name, Repository())

    def paths(self, pattern: str) -> list[str]:
        """Return the paths of all requests to the stand-in hub so far that match a regular expression."""
        return [request.path for request in self.requests if re.search(pattern, request.path)]

    def take_fault(self, path: str) -> Fault | None:
        """Return the planned fault for a request's path, and count it as used; None if there is none."""
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def count(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self.served_bytes[name] = self.served_bytes.get(name, 0) + num_bytes

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """Run the stand-in for a model hub until the `with` block ends."""
    hub = HubServer()
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()


class _Handler(ModelScopeUploads, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        host = self.headers.get("Host", "").partition(":")[0]
        self.server_state.requests.append(Request(self.command, host, self.path, dict(self.headers)))
        if self.take(self.command, self.path):
            return None
        fault = self.server_state.take_fault(self.path)
        if fault and fault.status:
            headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s is not None else {}
            return self._send(fault.status, b"{}", headers)
        if path in self.server_state.pages:
            return self._send(200, self.server_state.pages[path])
        if path.startswith("/api/v1/"):
            return self._modelscope(path, {key: values[0] for key, values in parse_qs(url.query).items()}, fault)
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+)|/(refs))?", path):
            return self._hub_api(*match.groups())
        if match := re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", path):
            return self._tree(match[1], match[2], match[3] or "", recursive="recursive=true" in url.query.lower())
        if match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*match.groups(), fault)
        if match := re.fullmatch(r"/cdn/((?:datasets/)?[^/]+/[^/]+)/([0-9a-f]+)/(.+)", path):
            return self._file(*match.groups(), fault)
        return self._send(404, b"{}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        match = re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)/paths-info/([^/]+)", unquote(self.path))
        self.server_state.requests.append(Request(self.command, "", self.path, dict(self.headers)))
        if self.take(self.command, self.path):
            return
        repository = self._allowed_repository(match[1]) if match else None
        if match and repository:
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._send_json(repository.paths_info(match[2], parse_qs(asked)["paths"]))

    def do_PUT(self) -> None:
        self.server_state.requests.append(Request(self.command, "", self.path, dict(self.headers)))
        self.take(self.command, self.path)

    # ------------------------------------------------------------------------------------- the Hugging Face hub

    def _hub_api(self, kind: str, name: str, revision: str | None, refs: str | None) -> None:
        repository = self._allowed_repository(name if kind == "models" else f"datasets/{name}")
        if repository is None:
            return None
        if refs:
            branches = [
                {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": c} for ref, c in repository.refs.items()
            ]
            return self._send_json({"branches": branches, "tags": [], "converts": []})
        commit = repository.commit_at(revision or "main")
        files = repository.files_at(commit)
        if files is None:
            return self._send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        siblings = [repository.sibling(file, content) for file, content in files.items()]
        return self._send_json(
            {
                "id": name,
                "modelId": name,
                "sha": commit,
                "siblings": siblings,
                "tags": [],
                "private": repository.private,
            }
        )

    def _tree(self, name: str, revision: str, folder: str, *, recursive: bool) -> None:
        if repository := self._allowed_repository(name):
            self._send_json(repository.tree(revision, folder, recursive))

    def _resolve(self, name: str, revision: str, file: str, fault: Fault | None) -> None:
        """Send a file's content: small files directly, large ones by a redirect to the CDN on another host name."""
        repository = self._allowed_repository(name)
        if repository is None:
            return None
        content = (repository.files_at(revision) or {}).get(file)
        if content is None:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        commit = repository.commit_at(revision)
        about = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(content)}"'}
        if len(content) < LARGE_FILE_BYTES:
            return self._file(name, revision, file, fault, about)
        about |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        cdn = f"http://localhost:{self.server_state.port}/cdn/{name}/{commit}/{file}"
        return self._send(302, b"", _changed({**about, "Location": cdn}, fault))

    def _allowed_repository(self, name: str) -> Repository | None:
        repository = self.server_state.repositories.get(name)
        if repository is None:
            self._send(404 if "Authorization" in self.headers else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self._send(
                403 if repository.gated else 401, b"{}", {"X-Error-Code": "GatedRepo"} if repository.gated else {}
            )
            return None
        return repository

    # ----------------------------------------------------------------------------------------------- ModelScope

    def _modelscope(self, path: str, query: dict[str, str], fault: Fault | None) -> None:
        match = re.fullmatch(r"/api/v1/(models|datasets)/([^/]+/[^/]+)/repo(/files|/tree)?", path)
        if match is None:
            return self._send(404, b"{}")
        kind, name, listing = match.groups()
        name = name if kind == "models" else f"datasets/{name}"
        repository = self.server_state.repositories.get(name)
        files = repository.files_at(query["Revision"]) if repository else None
        if repository is None or files is None:
            return self._send_json({"Code": 10010205001, "Success": False, "Message": "not found"}, 404)
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._send_json({"Code": 10010205002, "Success": False, "Message": "no permission"}, 403)
        if not listing:
            return self._file(name, query["Revision"], query["FilePath"], fault)
        entries = [self._modelscope_entry(file, content, repository) for file, content in files.items()]
        return self._send_json(
            {"Code": 200, "Success": True, "Data": {"Files": entries, "LatestCommitter": {"Id": ""}}}
        )

    def _modelscope_entry(self, file: str, content: bytes, repository: Repository) -> dict[str, object]:
        size = repository.listed_sizes.get(file, len(content))
        return {"Path": file, "Name": file, "Type": "blob", "Size": size, "Sha256": hashlib.sha256(content).hexdigest()}

    # ------------------------------------------------------------------------------------------------ both hubs

    def _file(
        self, name: str, revision: str, file: str, fault: Fault | None, about: dict[str, str] | None = None
    ) -> None:
        files = self.server_state.repositories[name].files_at(revision)
        if files is None or file not in files:
            return self._send(404, b"{}")
        content = fault.send_instead if fault and fault.send_instead is not None else files[file]
        start = self._range_start() if not (fault and fault.ignore_range) else 0
        if start and start >= len(content):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        return self._send_file(file, content, start, fault, about or {})

    def _send_file(self, file: str, content: bytes, start: int, fault: Fault | None, about: dict[str, str]) -> None:
        body = content[start:]
        short = fault is not None and fault.break_after_bytes is not None and fault.how == "short"
        self.send_response(206 if start else 200)
        headers = dict(about)
        if short:  # Without a length, the end of the connection is the end of the body.
            headers["Connection"] = "close"
            self.close_connection = True
        else:
            headers["Content-Length"] = str(len(body))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for name, value in _changed(headers, fault).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._write_body(file, body, fault)

    def _range_start(self) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match else 0

    def _write_body(self, file: str, body: bytes, fault: Fault | None) -> None:
        limit = len(body) if fault is None or fault.break_after_bytes is None else fault.break_after_bytes
        chunk_bytes = 16_384 if fault is None or fault.bytes_per_s is None else max(1, fault.bytes_per_s // 20)
        for begin in range(0, min(limit, len(body)), chunk_bytes):
            chunk = body[begin : min(begin + chunk_bytes, limit)]
            self.wfile.write(chunk)
            self.server_state.count(file, len(chunk))
            if fault and fault.bytes_per_s:
                time.sleep(0.05)
        if limit < len(body):
            self._break(fault)

    def _break(self, fault: Fault | None) -> None:
        self.close_connection = True
        if fault and fault.how == "reset":
            self.reset()

    def _send_json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the server's log of requests."""


def _changed(headers: dict[str, str], fault: Fault | None) -> dict[str, str]:
    """Return a response's headers as a planned fault of the stand-in hub changes them."""
    changed = {**headers, **(fault.headers if fault else {})}
    return {name: value for name, value in changed.items() if value is not None}
