"""HTTP/1.1 client of the proxy for its engines, which costs less processor time than aiohttp's client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import httptools
from multidict import CIMultiDict

from stages.serving.backend import EngineAddress

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 2.0
"""Longest idle time, in seconds, of a reused connection; most engines (uvicorn) close theirs after 5 s."""
MAX_HEAD_BYTES = 64 * 2**10
MAX_UNREAD_BYTES = 256 * 2**10
"""Number of buffered answer bytes at which the engine must wait for a client that reads more slowly."""


class NotConnectedError(Exception):
    """Error for an engine that accepts no connection, so it has not received the request."""


class ServerDisconnectedError(Exception):
    """Error for an engine that closed its connection before the answer was complete, or that sent invalid HTTP."""


class EngineConnections:
    """Pool of reusable connections from the proxy to one engine, for use in one event loop."""

    def __init__(self, address: EngineAddress):
        self._address = address
        self._idle: deque[tuple[EngineConnection, float]] = deque()

    async def ask(self, method: str, target: str, headers: bytes, body: bytes = b"") -> EngineConnection:
        """Send a request to the engine; return the connection once the headers of the answer have arrived.

        headers: lines, without host and length. Raises NotConnectedError and ServerDisconnectedError.
        """
        line = f"{method} {target} HTTP/1.1\r\nHost: engine\r\n".encode("utf-8", "surrogateescape")
        # A POST says its length even if it is 0 (RFC 9110, 8.6).
        length = b"Content-Length: %d\r\n" % len(body) if body or method == "POST" else b""
        request = b"%b%b%b\r\n%b" % (line, length, headers, body)
        idle = self._take_idle()
        if idle is None:
            return await (await self._connected()).ask(request)
        try:
            return await idle.ask(request)
        except ServerDisconnectedError as closed:
            # An engine may close an idle connection just when it is used again, so the request is sent once more. If it
            # takes no new connection, the request may have crashed it: the caller must know that it was sent.
            try:
                new = await self._connected()
            except NotConnectedError:
                raise closed from None
            return await new.ask(request)

    def keep(self, connection: EngineConnection) -> None:
        """Return a connection whose answer is complete to the pool, for the next request."""
        now_s = time.monotonic()
        # The latest are on the right, where `_take_idle` takes them; those on the left have been idle for longest.
        self._idle.append((connection, now_s))
        while self._idle[0][1] + KEEP_ALIVE_S < now_s:
            self._idle.popleft()[0].close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()

    def _take_idle(self) -> EngineConnection | None:
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.is_open and time.monotonic() < since_s + KEEP_ALIVE_S:
                return connection
            connection.close()
        return None

    async def _connected(self) -> EngineConnection:
        loop, connection = asyncio.get_running_loop(), EngineConnection(self)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._address.socket:
                    await loop.create_unix_connection(lambda: connection, str(self._address.socket))
                else:
                    assert self._address.port, "an engine behind the proxy has a socket or a port"
                    await loop.create_connection(lambda: connection, "127.0.0.1", self._address.port)
        except OSError as error:  # or its TimeoutError
            raise NotConnectedError from error
        return connection


class EngineConnection(asyncio.Protocol):
    """Connection to an engine, for one request at a time; as a context, it is kept after a complete answer.

    status: of the answer; 0 until its headers have arrived. is_whole: whether the engine has sent all of it.
    """

    status: int
    reason: str
    headers: CIMultiDict[str]
    is_whole: bool
    _transport: asyncio.Transport

    def __init__(self, connections: EngineConnections):
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None

    @property
    def is_open(self) -> bool:
        """True while neither the engine nor the proxy has closed the connection."""
        return not self._transport.is_closing()

    @property
    def content_type(self) -> str:
        """Media type of the engine's answer, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def ask(self, request: bytes) -> Self:
        """Send a request; return once the answer's headers have arrived. Raises ServerDisconnectedError."""
        self.status, self.reason, self.headers = 0, "", CIMultiDict()
        self.is_whole = self._is_kept_alive = False
        self._parts: list[bytes] = []
        self._num_head_bytes = self._num_unread_bytes = 0
        self._parser = httptools.HttpResponseParser(self)  # calls the `on_…` methods below
        self._transport.write(request)
        try:
            while not self.status:
                await self._wait()
        # Cancelled, too: an answer that is still to come must not meet the next request on this connection.
        except BaseException:
            self.close()
            raise
        return self

    async def part(self) -> bytes:
        """Wait for the next bytes of the body, perhaps none at its end. Raises ServerDisconnectedError."""
        while not self._parts and not self.is_whole:
            await self._wait()
        return self._arrived()

    async def hand_on(self, take: Callable[[bytes], bool]) -> None:
        """Call `take` with each chunk of an answer as it arrives, until it returns False or the last (left to `part`).

        No task is woken for the others, which would take half of the proxy's time for a part.
        """
        self._take = take
        try:
            self._hand_on_arrived()  # parts that came before `take` was known
            while self._take is not None and not self.is_whole:
                await self._wait()
        finally:
            self._take = None

    def close(self) -> None:
        """Close the connection at once, so that the engine stops generating an answer that no one reads."""
        self._transport.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        # An engine may answer before it has read a whole request.
        if self.is_whole and self._is_kept_alive and self.is_open and not self._transport.get_write_buffer_size():
            self._connections.keep(self)
        else:
            self.close()

    def _arrived(self) -> bytes:
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._num_unread_bytes > MAX_UNREAD_BYTES and self.is_open:
            self._transport.resume_reading()
        self._num_unread_bytes = 0
        return part

    def _hand_on_arrived(self) -> None:
        if self._take and self._parts and not self.is_whole and not self._take(self._arrived()):
            self._take = None

    async def _wait(self) -> None:
        if not self.is_open:
            raise ServerDisconnectedError
        self._arrival = self._loop.create_future()
        await self._arrival

    def _wake(self) -> None:
        if self._arrival and not self._arrival.done():
            self._arrival.set_result(None)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no instances of it

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += 0 if self.status else len(data)  # `status` is 0 until the headers are complete
        try:
            self._parser.feed_data(data)
        # Errors of the `on_…` methods come as HttpParserError, too. `_wait` then finds the connection closed.
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()
        if not self.status and self._num_head_bytes > MAX_HEAD_BYTES:
            self.close()
        if self._num_unread_bytes > MAX_UNREAD_BYTES and self.is_open:
            self._transport.pause_reading()
        self._hand_on_arrived()
        if not self._take or self.is_whole or not self.is_open:
            self._wake()

    def eof_received(self) -> None:
        if self.status and "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers:
            self.is_whole = True  # such an answer ends with its connection
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._wake()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.is_whole:
            raise ValueError("more than one answer came to a request")

    def on_status(self, reason: bytes) -> None:
        self.reason = reason.decode("utf-8", "surrogateescape")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # such as 100, which another answer follows
            self.reason, self.headers = "", CIMultiDict()
        else:
            self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self._num_unread_bytes += len(part)

    def on_message_complete(self) -> None:
        if self.status:
            self.is_whole, self._is_kept_alive = True, self._parser.should_keep_alive()
