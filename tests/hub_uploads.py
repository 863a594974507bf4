"""Uploads to the stand-in for a model hub by Hugging Face's API: new repositories, large files by sha256, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import yaml

from tests.hub_repository import LARGE_FILE_BYTES, Repository, blob_id

if TYPE_CHECKING:
    from tests.hub_server import HubServer

CHUNK_BYTES = 16_384
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


@dataclass
class Fault:
    """Planned fault of the stand-in for a model hub; it affects the next `times` requests whose path matches."""

    path: str
    times: int = 1
    status: int | None = None
    retry_after_s: int | None = None
    break_after_bytes: int | None = None
    how: str = "reset"
    """Break of a response: connection `reset`, early `close`, or a `short` body that seems complete."""
    send_instead: bytes | None = None
    ignore_range: bool = False
    headers: dict[str, str | None] = field(default_factory=dict)
    """Headers that replace those of a file's response; None removes a header."""
    bytes_per_s: int | None = None


class Uploads(BaseHTTPRequestHandler):
    """Handler of uploads by Hugging Face's API in the stand-in hub, with the rights in `server_state.token_roles`."""

    server_state: HubServer

    def take(self, method: str, path: str) -> bool:
        """Answer a request that uploads files or asks who owns the token; return False for any other request."""
        routes = (
            ("GET", r"/api/whoami-v2", self._who),
            ("POST", r"/api/validate-yaml", self._validate),
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/[^/]+", self._modes),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"/lfs/([^/]+/[^/]+)/([0-9a-f]{64})", self._put),
            ("POST", r"/lfs/([^/]+/[^/]+)/([0-9a-f]{64})/verify", self._verify),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
        )
        for wanted, pattern, answer in routes:
            match = re.fullmatch(pattern, unquote(path.partition("?")[0]))
            if method == wanted and match:
                fault = self.server_state.take_fault(path)
                if fault and fault.status:
                    self._body()
                    self._answer(fault.status, {"error": "out of order"})
                elif fault and fault.break_after_bytes is not None:
                    self._cut(fault.break_after_bytes)
                else:
                    answer(*match.groups())
                return True
        return False

    def _who(self) -> None:
        role = self.server_state.token_roles.get(self._token())
        if role is None:
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        return self._answer(200, {"name": "tester", "auth": {"accessToken": {"role": role}}})

    def _validate(self) -> None:
        match = FRONT_MATTER.match(json.loads(self._body())["content"])
        errors = [] if match and isinstance(yaml.safe_load(match[1]), dict) else [{"message": "no metadata"}]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _create(self) -> None:
        asked = json.loads(self._body())
        name = f"{asked['organization']}/{asked['name']}"
        if not self._may_write():
            return None
        url = f"{self.server_state.url}/{name}"
        if name in self.server_state.repositories:
            return self._answer(409, {"error": "You already created this model repo", "url": url})
        is_private = asked.get("visibility") == "private"
        made = Repository(private=is_private, token=self._token() if is_private else None)
        made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self.server_state.repositories[name] = made
        return self._answer(200, {"url": url})

    def _modes(self, name: str) -> None:
        asked = json.loads(self._body())["files"]
        repository = self._writable(name)
        if repository is None:
            return None
        files = repository.files_at("main") or {}
        return self._answer(
            200,
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["size"] >= LARGE_FILE_BYTES else "regular",
                        "shouldIgnore": False,
                        "oid": blob_id(files[file["path"]]) if file["path"] in files else None,
                    }
                    for file in asked
                ]
            },
        )

    def _batch(self, name: str) -> None:
        asked = json.loads(self._body())["objects"]
        repository = self._writable(name)
        if repository is None:
            return None
        objects = []
        for one in asked:
            href = f"{self.server_state.url}/lfs/{name}/{one['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            is_there = one["oid"] in repository.objects
            objects.append({**one, **({} if is_there else {"actions": actions})})
        return self._answer(200, {"transfer": "basic", "objects": objects})

    def _put(self, name: str, oid: str) -> None:
        content = self._body()
        self.server_state.count(f"uploaded {oid}", len(content))
        if hashlib.sha256(content).hexdigest() != oid:
            return self._answer(400, {"error": "the content has another sha256"})
        self.server_state.repositories[name].objects[oid] = content
        return self._answer(200, {})

    def _verify(self, name: str, oid: str) -> None:
        self._body()
        self._answer(200 if oid in self.server_state.repositories[name].objects else 404, {})

    def _commit(self, name: str, branch: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        repository = self._writable(name)
        if repository is None:
            return None
        parent = lines[0]["value"].get("parentCommit")
        if parent and parent != repository.refs[branch]:
            return self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        files = dict(repository.files_at(branch) or {})
        for line in lines[1:]:
            self._apply(line["key"], line["value"], files, repository)
        commit = repository.commit(files, branch=branch)
        return self._answer(200, {"commitUrl": f"{self.server_state.url}/{name}/commit/{commit}", "commitOid": commit})

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, bytes], repository: Repository) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = repository.objects[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]

    def _writable(self, name: str) -> Repository | None:
        repository = self.server_state.repositories.get(name)
        if repository is None:
            self._answer(404, {"error": "Repository not found"})
        return repository if repository and self._may_write() else None

    def _may_write(self) -> bool:
        if self.server_state.token_roles.get(self._token()) == "write":
            return True
        self._answer(403, {"error": "You don't have the rights to write there"})
        return False

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _cut(self, after_bytes: int) -> None:
        """Read only the first bytes of an upload, then reset the connection, as a planned fault demands."""
        self.rfile.read(after_bytes)
        self.close_connection = True
        self.reset()

    def reset(self) -> None:
        """Reset the TCP connection without closing it properly, to test how clients handle a lost connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
