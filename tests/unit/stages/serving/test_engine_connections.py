"""The proxy reads an engine's HTTP responses in every HTTP/1.1 framing, also on broken or reused connections."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from stages.serving import engine_connections
from stages.serving.backend import EngineAddress
from stages.serving.engine_connections import (
    EngineConnection,
    EngineConnections,
    NotConnectedError,
    ServerDisconnectedError,
)

PATIENCE_S = 30.0
OK = b"HTTP/1.1 200 OK\r\n"
KEPT = [OK + b"Content-Length: 2\r\n\r\nab"]
"""Response after which the fake engine keeps the connection open; after other responses, it closes the connection."""


def with_engine(sent: list[bytes], trial: Callable[[EngineConnections], Awaitable[None]]) -> None:
    """Run a trial with connections to a fake engine, which answers each connection's first request with `sent`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in sent:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if sent is not KEPT:
            writer.close()

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as engine:
            connections = EngineConnections(EngineAddress(port=engine.sockets[0].getsockname()[1]))
            await asyncio.wait_for(trial(connections), PATIENCE_S)
            connections.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def body_of(answer: EngineConnection) -> bytes:
    body = await answer.part()
    while not answer.is_whole:
        body += await answer.part()
    return body


@pytest.mark.parametrize(
    "sent",
    [
        [OK + b"Content-Length: 4\r\n\r\n", b"ab", b"cd"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n2\r\nc", b"d\r\n0\r\n\r\n"],
        [OK + b"\r\nab", b"cd"],
        [b"HTTP/1.1 100 Continue\r\nX-A: b\r\n\r\n", OK + b"Content-Length: 4\r\n\r\nabcd"],
        [OK + b"Content-Le", b"ngth: 4\r\n\r\nabcd" + OK + b"Content-Length: 4\r\n\r\nefgh"],
    ],
    ids=["length", "chunks", "end of connection", "continue", "two answers"],
)
def test_an_answer_is_whole(sent: list[bytes]) -> None:
    async def trial(connections: EngineConnections) -> None:
        with await connections.ask("GET", "/", b"") as answer:
            assert (answer.status, answer.reason, "X-A" in answer.headers) == (200, "OK", False)
            assert await body_of(answer) == b"abcd"

    with_engine(sent, trial)


@pytest.mark.parametrize(
    "sent",
    [
        [OK + b"Content-Length: 4\r\n\r\n", b"ab"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\nnumber\r\n"],
    ],
    ids=["length", "chunks", "no chunk"],
)
def test_an_answer_that_is_cut_is_not_whole(sent: list[bytes]) -> None:
    async def trial(connections: EngineConnections) -> None:
        with await connections.ask("GET", "/", b"") as answer:
            with pytest.raises(ServerDisconnectedError):
                await body_of(answer)
            assert not answer.is_whole

    with_engine(sent, trial)


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b"\xff\0" * 99],
        [b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"],
        [OK + b"Content-Length: -5\r\n\r\nab"],
        [OK, *[b"X-A: " + b"b" * 2**14 + b"\r\n"] * 5],
    ],
    ids=["nothing", "no HTTP", "another protocol", "length", "headers without end"],
)
def test_what_is_no_answer_is_an_error(sent: list[bytes]) -> None:
    async def trial(connections: EngineConnections) -> None:
        with pytest.raises(ServerDisconnectedError):
            await connections.ask("GET", "/", b"")

    with_engine(sent, trial)


def test_no_engine_is_an_error_that_says_that_nothing_was_sent() -> None:
    async def trial(_: EngineConnections) -> None:
        with pytest.raises(NotConnectedError):
            await EngineConnections(EngineAddress(port=9)).ask("GET", "/", b"")

    with_engine([], trial)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_connection_is_kept_once_its_answer_is_whole(is_read: bool) -> None:
    async def trial(connections: EngineConnections) -> None:
        with await connections.ask("GET", "/", b"") as answer:
            if is_read:
                await answer.part()
                assert answer.is_whole
            else:
                answer.is_whole = False  # as if the rest were on its way
        assert len(connections._idle) == is_read
        assert answer.is_open == is_read

    with_engine(KEPT, trial)


def test_an_engine_waits_for_a_client_that_reads_slowly(monkeypatch) -> None:
    monkeypatch.setattr(engine_connections, "MAX_UNREAD_BYTES", 2**16)
    size, part = 16 * 2**20, b"x" * 2**20

    async def trial(connections: EngineConnections) -> None:
        with await connections.ask("GET", "/", b"") as answer:
            await asyncio.sleep(0.5)
            first = await answer.part()
            assert len(first) < size // 2
            assert len(first + await body_of(answer)) == size

    with_engine([OK + b"Content-Length: %d\r\n\r\n" % size, *[part] * 16], trial)
