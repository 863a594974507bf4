"""The proxy in front of every server: the only door to an engine, whichever it is.

Engines guard some of their routes with a key, and leave others open: vLLM's own key guards `/v1` only. So an engine
listens where only the proxy is (`EngineAddress`), and the proxy, on the address that people are given, asks for the key
on every path, passes on the routes of `ROUTES` alone, and bounds the size, the number and the time of requests.
Answers pass as they are made. The engine behind it may be exchanged while requests are under way, or the model in it:
people go on asking by the same name (`Naming`).

It imports nothing of ours: in Kubernetes it runs in the engine's image (`proxy_program.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

MODELS = "/v1/models"
ROUTES = {
    MODELS: "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/health": "GET",
    "/metrics": "GET",
}
"""Path → method. What else an engine answers (vLLM: `/collective_rpc`, `/tokenize`, …) never leaves its socket."""
MAX_BODY_BYTES = 32 * 2**20
MAX_REQUESTS = 1024
"""Under way at a time."""
API_KEY_VARIABLE = "VLLM_API_KEY"
BODY_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 3600.0
CONNECT_TIMEOUT_S = 10.0
NOT_PASSED_ON = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        *("host", "date", "server", "origin", "expect"),
    }
)
"""Headers of one connection (RFC 9110, section 7.6.1), and of one server: without an origin, engines allow none."""


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens: on a Unix socket in a private folder, or on a port of the loopback."""

    socket: Path | None = None
    port: int | None = None

    def connector(self) -> aiohttp.BaseConnector:
        """Connections are not used again: one that the engine is about to close would lose a request."""
        if self.socket:
            return aiohttp.UnixConnector(str(self.socket), force_close=True, limit=0)
        return aiohttp.TCPConnector(force_close=True, limit=0)

    @property
    def url(self) -> URL:
        return URL(f"http://127.0.0.1:{self.port}" if self.port else "http://engine")


@dataclass(frozen=True)
class Naming:
    """The name of the one model that people may ask for, and what the engine calls it, which has others too."""

    public: str
    inside: str


class Backend:
    """An engine behind the proxy, or a model in it, and how many requests it has."""

    def __init__(self, address: EngineAddress, naming: Naming | None):
        self.address = address
        self.naming = naming
        self.num_requests = 0
        self.idle = threading.Event()
        self.idle.set()


class Proxy:
    """Answers requests, in the thread of one event loop; the other methods may be called from any thread."""

    def __init__(self, address: EngineAddress, api_key: str, naming: Naming | None = None):
        """naming: None for an engine whose names are those that people ask for."""
        self._backend = Backend(address, naming)
        self._bearer = f"Bearer {api_key}".encode()
        self._num_requests = 0
        self._lock = threading.Lock()
        self._sessions: dict[Backend, aiohttp.ClientSession] = {}

    def switch(self, address: EngineAddress, naming: Naming | None = None) -> Backend:
        """Send requests to another engine or model from now on; returns the one before, which may still have some."""
        with self._lock:
            before, self._backend = self._backend, Backend(address, naming)
        return before

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Cancelled when the client goes away, which ends the engine's work on it too."""
        refusal = self._refusal(request)
        if refusal:
            return refusal
        with self._under_way() as backend:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    body = await _body(request)
            except TimeoutError:
                return _error(408, f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s")
            if body is None:
                return _error(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
            if backend.naming and request.method == "POST":
                body = _renamed(body, backend.naming)
                if body is None:
                    return _error(404, f"expected a JSON object that asks for the model {backend.naming.public}")
            try:
                # Of the whole answer: a client that stops reading would hold it for ever.
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    return await self._passed_on(request, body, backend)
            except TimeoutError:
                if request.transport:
                    request.transport.abort()
                return web.Response()

    async def close(self) -> None:
        """Close what is open to engines."""
        for session in self._sessions.values():
            await session.close()

    def _refusal(self, request: web.BaseRequest) -> web.Response | None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._bearer):
            return _error(401, "the API key is missing or wrong; send it as a bearer token")
        path = request.raw_path.partition("?")[0]  # as it is passed on: an engine may decode it in another way
        if path not in ROUTES:
            return _error(404, f"there is no {path}; there are {', '.join(ROUTES)}")
        if request.method != ROUTES[path]:
            return _error(405, f"{path} takes {ROUTES[path]} only", {"Allow": ROUTES[path]})
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return _error(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
        if self._num_requests >= MAX_REQUESTS:
            return _error(429, f"{MAX_REQUESTS} requests are under way; try again later", {"Retry-After": "1"})
        return None

    @contextmanager
    def _under_way(self) -> Iterator[Backend]:
        """Count a request, with the engine that has it, from its arrival to the last byte of its answer."""
        with self._lock:
            backend = self._backend
            backend.num_requests += 1
            backend.idle.clear()
            self._num_requests += 1
        try:
            yield backend
        finally:
            with self._lock:
                self._num_requests -= 1
                backend.num_requests -= 1
                if not backend.num_requests:
                    backend.idle.set()

    async def _passed_on(self, request: web.BaseRequest, body: bytes, backend: Backend) -> web.StreamResponse:
        url = backend.address.url.join(URL(request.raw_path, encoded=True))
        headers = _passed(request.headers)
        if backend.naming:
            headers.popall("Content-Length", None)  # of a body with the engine's name of the model
        response: web.StreamResponse | None = None
        try:
            async with self._session(backend).request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                if backend.naming and url.path == MODELS:
                    return web.json_response(_listed(await answer.json(), backend.naming), status=answer.status)
                response = web.StreamResponse(
                    status=answer.status, reason=answer.reason, headers=_passed(answer.headers)
                )
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if response is None:
                return _error(502, f"the model server does not answer: {type(error).__name__}")
            if request.transport:  # The answer was cut off: so is what the client gets.
                request.transport.abort()
            return response

    def _session(self, backend: Backend) -> aiohttp.ClientSession:
        if backend not in self._sessions:
            self._sessions[backend] = aiohttp.ClientSession(
                connector=backend.address.connector(),
                timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                auto_decompress=False,
            )
        return self._sessions[backend]


async def _body(request: web.BaseRequest) -> bytes | None:
    """What was sent; None when it is too much."""
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _renamed(body: bytes, naming: Naming) -> bytes | None:
    """The request with the engine's name of the model; None when it is no object, or asks for another model."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict) or asked.get("model") != naming.public:
        return None
    return json.dumps({**asked, "model": naming.inside}).encode()


def _listed(models: dict[str, Any], naming: Naming) -> dict[str, Any]:
    """The list of models as people may know it."""
    known = [{**one, "id": naming.public} for one in models.get("data", []) if one["id"] == naming.inside]
    return {**models, "data": known}


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in NOT_PASSED_ON)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """As OpenAI's clients expect errors."""
    return web.json_response(
        {"error": {"message": message, "type": "ProxyError", "code": status}}, status=status, headers=headers
    )
