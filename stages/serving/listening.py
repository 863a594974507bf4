"""Runs the proxy of a server: a thread that answers on a socket until the server that it stands before is ended.

A thread, so that whatever ends this process ends the proxy, and no process, port or socket is left.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stages.serving.http_messages import error
from stages.serving.proxy import Proxy

MAX_CONNECTIONS = 2048
FILES_AT_A_TIME = 65_536
IDLE_TIMEOUT_S = 60.0
"""A connection that sends nothing, or no whole request, is closed."""
LINGER_S = 2.0
"""What a refused client goes on sending is read so long, or it might not see why it was refused."""


@contextmanager
def listening(proxy: Proxy, public: socket.socket, last_answers_s: float = 1.0) -> Iterator[None]:
    """Answer on `public`, a listening socket, which is closed in the end; then, answers under way get some more
    seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_AT_A_TIME:  # usually 1,024; a request takes two
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, FILES_AT_A_TIME), hard))
    loop = uvloop.new_event_loop()  # for this thread alone: 0.1 ms less of the processor a request than asyncio's
    stop, ready = asyncio.Event(), threading.Event()
    answering = _answer_until(stop, ready, proxy, public, last_answers_s)
    thread = threading.Thread(target=loop.run_until_complete, args=(answering,), name="proxy", daemon=True)
    thread.start()
    try:
        ready.wait()
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _answer_until(
    stop: asyncio.Event, ready: threading.Event, proxy: Proxy, public: socket.socket, last_answers_s: float
) -> None:
    server = _BoundedServer(
        proxy.answer,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=IDLE_TIMEOUT_S,
        lingering_time=LINGER_S,
    )
    listener = await asyncio.get_running_loop().create_server(server, sock=public, backlog=MAX_CONNECTIONS)
    try:
        ready.set()
        await stop.wait()
    finally:
        listener.close()
        server.pre_shutdown()
        await server.shutdown(last_answers_s)
        await proxy.close()


class _Connection(web.RequestHandler):
    """Refuses what is no HTTP without its text: a malformed line may hold a key, and aiohttp logs it."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        self.logger.warning("refused a request from %s that is no HTTP (%s)", request.remote, type(exc).__name__)
        response = error(400, "the request is no HTTP/1.1")
        response.force_close()
        return response


class _BoundedServer(web.Server):
    """Closes connections that are too many. Not before they are made: of many at once, none would count yet."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            transport.abort()
        super().connection_made(handler, transport)
