"""Publishing target in an OCI registry (`oci://host/name:tag`), with one layer for each file, as ORAS stores them.

OCI Distribution Specification 1.1: blobs by digest, then the manifest, which makes all files visible at once.
Credentials: OCI_USERNAME and OCI_PASSWORD, or none. Plain HTTP is for the loopback only.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from pydantic import Field

from stages.core.errors import PublishError, TransientError
from stages.core.redaction import quoted
from stages.hubs.listing import Digest
from stages.kinds.publish.targets.target import Address, LocalFile, LocalFiles, Names, Sent, TargetContents
from stages.remote.http import AnswerModel, Expected, busy_from_status

USER_VARIABLE, PASSWORD_VARIABLE = "OCI_USERNAME", "OCI_PASSWORD"
ARTIFACT_TYPE = "application/vnd.llm-lifecycle.model.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LAYER_TYPE = "application/octet-stream"
EMPTY_TYPE, EMPTY = "application/vnd.oci.empty.v1+json", b"{}"
TITLE = "org.opencontainers.image.title"
PLACE = re.compile(r"(?P<host>[^/]+)/(?P<name>.+):(?P<tag>[^:/]+)")
LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
CHUNK_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
MAX_MANIFEST_BYTES = 4 << 20
"""Largest allowed OCI manifest in bytes, as in the specification."""
MAX_SHOWN_CHARACTERS = 200


class _Token(AnswerModel):
    """Answer of an OCI registry's token server to a login request."""

    token: str | None = None
    access_token: str | None = None


class _Layer(AnswerModel):
    """Layer of an OCI manifest: one file, whose name is among the annotations."""

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    annotations: dict[str, str] = Field(default_factory=dict)


class _Manifest(AnswerModel):
    """OCI manifest: the list of files behind a tag."""

    layers: list[_Layer] = Field(default_factory=list)


class OciRegistry:
    """Publishing target under a tag in an OCI registry; the tag's manifest has a layer for each file."""

    def __init__(self, address: Address) -> None:
        match = PLACE.fullmatch(address.place)
        assert match
        self._address = address
        scheme = "http" if LOOPBACK.fullmatch(match["host"]) else "https"
        self._root = f"{scheme}://{match['host']}/v2/{match['name']}"
        self._tag = match["tag"]
        self._expected = Expected(
            f"publishing to {address}: the registry", MAX_MANIFEST_BYTES, TIMEOUT.read or 0, PublishError
        )
        auth = _Auth(match["name"], httpx.URL(self._root), self._expected)
        self._client = httpx.Client(timeout=TIMEOUT, auth=auth)

    def check(self) -> None:
        """Check write access to the OCI registry by beginning an upload and cancelling it."""
        self._ask("DELETE", str(self._begin_upload()), accepted=(202, 204, 404, 405))

    def prepare(self, licence: str | None) -> None:
        """Do nothing: a repository in an OCI registry need not exist before the first push."""

    def held(self, expected: LocalFiles) -> TargetContents:
        answer = self._ask(
            "GET", f"{self._root}/manifests/{self._tag}", accepted=(200, 404), headers={"Accept": MANIFEST_TYPE}
        )
        if answer.status_code == httpx.codes.NOT_FOUND:
            return TargetContents({})
        manifest = self._expected.parsed(answer.content, _Manifest)
        digests = {layer.annotations.get(TITLE): layer.digest for layer in manifest.layers}
        held: dict[str, Digest | None] = {
            title: Digest("sha256", digest.removeprefix("sha256:"))
            for title, digest in digests.items()
            if title and self._has(digest)
        }
        return TargetContents(held, f"sha256:{hashlib.sha256(answer.content).hexdigest()}")

    def read_text(self, name: str) -> str | None:
        """Return None: no outdated files need to be found, since the new manifest lists all files."""
        return None

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        for name in missing:
            file = files[name]
            if not self._has(f"sha256:{file.sha256}"):
                self._put_blob(f"sha256:{file.sha256}", file.size_bytes, _chunks(file))
            sent(file.size_bytes)
        empty = f"sha256:{hashlib.sha256(EMPTY).hexdigest()}"
        if not self._has(empty):
            self._put_blob(empty, len(EMPTY), iter([EMPTY]))
        # Last, since it makes all files visible at once: a reader sees the former content, or all of this one.
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": {"mediaType": EMPTY_TYPE, "digest": empty, "size": len(EMPTY)},
            "layers": [
                {
                    "mediaType": LAYER_TYPE,
                    "digest": f"sha256:{file.sha256}",
                    "size": file.size_bytes,
                    "annotations": {TITLE: name},
                }
                for name, file in sorted(files.items())
            ],
        }
        self._ask(
            "PUT",
            f"{self._root}/manifests/{self._tag}",
            accepted=(201,),
            headers={"Content-Type": MANIFEST_TYPE},
            content=json.dumps(manifest).encode(),
        )

    def _has(self, digest: str) -> bool:
        return self._ask("HEAD", f"{self._root}/blobs/{digest}", accepted=(200, 404)).status_code == httpx.codes.OK

    def _begin_upload(self) -> httpx.URL:
        """Begin the upload of a blob to the OCI registry; returns the URL that the blob's content must be sent to."""
        begun = self._ask("POST", f"{self._root}/blobs/uploads/", accepted=(202,))
        try:
            # The location may be relative, and may be of another host.
            return begun.url.join(begun.headers["Location"])
        except (KeyError, httpx.InvalidURL):
            location = quoted(begun.headers.get("Location", ""), MAX_SHOWN_CHARACTERS)
            raise self._expected.wrong(f"began an upload at {location}; expected an address") from None

    def _put_blob(self, digest: str, size_bytes: int, content: Iterator[bytes]) -> None:
        """Upload a blob in one request; the registry checks its content against the digest."""
        url = self._begin_upload().copy_merge_params({"digest": digest})  # keeps the location's own parameters
        headers = {"Content-Type": LAYER_TYPE, "Content-Length": str(size_bytes)}
        self._ask("PUT", str(url), accepted=(201,), headers=headers, content=content)

    def _ask(self, method: str, url: str, *, accepted: Collection[int], **request: Any) -> httpx.Response:
        """Send a request to the OCI registry; raise for statuses not in `accepted`. Only reads follow redirects."""
        with self._explained():
            answer = self._client.request(method, url, follow_redirects=method in ("GET", "HEAD"), **request)
        if answer.status_code in accepted:
            return answer
        doing = f"publishing to {self._address}: the registry answered {answer.status_code} to {method}"
        if busy_from_status(answer.status_code, answer.headers):
            raise TransientError(f"{doing}; try again later, what was sent is not sent again")
        if answer.status_code in (401, 403):
            raise PublishError(
                f"{doing}; set {USER_VARIABLE} and {PASSWORD_VARIABLE} to those of one who may write there"
            )
        raise PublishError(f"{doing}: {self._expected.quoted(answer.content)}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise self._expected.wrong(f"sends its clients elsewhere, and that is no address ({error})") from None
        except httpx.TransportError as error:
            raise TransientError(
                f"publishing to {self._address}: the connection failed ({type(error).__name__}: {error}); check the "
                "network, or try again later: what was sent is not sent again"
            ) from None


class _Auth(httpx.Auth):
    """Authentication to an OCI registry, and to it alone: Basic, or a bearer token from its token server."""

    requires_response_body = True  # of the token server

    def __init__(self, name: str, registry: httpx.URL, expected: Expected) -> None:
        self._expected = expected
        self._registry = registry.scheme, registry.netloc
        self._scope = f"repository:{name}:pull,push"
        user, password = (os.environ.get(variable, "") for variable in (USER_VARIABLE, PASSWORD_VARIABLE))
        self._basic = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if user else ""
        self._header = ""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request with credentials; after a 401, log in (Distribution Specification, Docker's protocol)."""
        if (request.url.scheme, request.url.netloc) != self._registry:
            yield request
            return
        if self._header:
            request.headers["Authorization"] = self._header
        response = yield request  # httpx sends what is yielded, and returns the answer
        if response.status_code != httpx.codes.UNAUTHORIZED:
            return
        challenge = response.headers.get("WWW-Authenticate", "")
        self._header = self._basic
        if challenge.lower().startswith("bearer"):
            fields = dict(CHALLENGE.findall(challenge))
            realm = httpx.URL(fields.get("realm", ""))
            if realm.scheme != "https" and not LOOPBACK.fullmatch(realm.host):
                return  # plain HTTP would expose the password
            # Docker's token protocol: the challenge names the server that gives tokens, and what it wants to know.
            asked = {"service": fields.get("service", ""), "scope": self._scope}
            headers = {"Authorization": self._basic} if self._basic else {}
            answer = yield httpx.Request("GET", realm, params=asked, headers=headers)
            if answer.status_code == httpx.codes.OK:
                given = self._expected.parsed(answer.content, _Token)
                self._header = f"Bearer {given.token or given.access_token}"
            else:
                self._header = ""
        if self._header:
            request.headers["Authorization"] = self._header
            yield request


def _chunks(file: LocalFile) -> Iterator[bytes]:
    with file.path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def open_target(address: Address, *, private: bool) -> OciRegistry:
    """Open a tag in an OCI registry as target; the registry decides who may read it, whatever `private` says."""
    return OciRegistry(address)
