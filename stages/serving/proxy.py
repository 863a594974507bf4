"""A reverse proxy in front of one server at a time, which may be exchanged while requests are under way.

An ASGI application: every request goes to the backend that is current when it arrives, and stays with it to its end,
streamed answers included. Keys are checked by the backend. Which backend is current is for others to decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

CONNECT_TIMEOUT_S = 10.0
HOP_BY_HOP_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of one connection, which are not passed on (RFC 9110, section 7.6.1)."""
OWN_HEADERS = HOP_BY_HOP_HEADERS | {"host", "date", "server"}


class Backend:
    """A server behind the proxy. url: without `/v1`."""

    def __init__(self, url: str):
        self.url = url
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request from its arrival to the last byte of its answer."""
        self._num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def drained(self) -> None:
        """Return when no request is under way."""
        await self._idle.wait()


class Proxy:
    """The ASGI application."""

    def __init__(self, backend: Backend):
        self._backend = backend
        # Connections are not used again: one that the backend is about to close would lose a request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self._client.headers.clear()

    def switch(self, backend: Backend) -> Backend:
        """Send requests to `backend` from now on; returns the one before, which may still have some."""
        before, self._backend = self._backend, backend
        return before

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        backend = self._backend
        with backend.request(), suppress(ClientDisconnect):
            asked = await self._asked(Request(scope, receive), backend)
            try:
                answer = await self._client.send(asked, stream=True)
            except httpx.TransportError as error:
                await _unreachable(error)(scope, receive, send)
                return
            try:
                await _passed_on(answer)(scope, receive, send)
            finally:
                await answer.aclose()

    async def _asked(self, request: Request, backend: Backend) -> httpx.Request:
        """The request as the backend gets it."""
        url = httpx.URL(backend.url).copy_with(raw_path=_raw_path(request.scope))
        headers = [(name, value) for name, value in request.headers.items() if name not in OWN_HEADERS]
        return self._client.build_request(request.method, url, headers=headers, content=await request.body())


def _raw_path(scope: Scope) -> bytes:
    """Path and query as they were sent."""
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _passed_on(answer: httpx.Response) -> Response:
    response = StreamingResponse(answer.aiter_raw(), answer.status_code)
    response.raw_headers = [pair for pair in answer.headers.raw if pair[0].decode().lower() not in OWN_HEADERS]
    return response


def _unreachable(error: httpx.TransportError) -> Response:
    message = f"the model server does not answer: {type(error).__name__}"
    return JSONResponse({"error": {"message": message, "type": "BadGatewayError", "code": 502}}, 502)
