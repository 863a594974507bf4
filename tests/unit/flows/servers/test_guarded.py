"""Our HTTP servers close connections that send no request, or one byte at a time; slow answers are allowed."""

import asyncio
import contextlib
import socket
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import uvicorn

from flows.servers import guarded
from flows.servers.guard import AccessControl
from flows.servers.guarded import BoundedProtocol

PATIENCE_S = 30.0
LIMIT_S = 0.3
HEAD = "POST / HTTP/1.1\r\nHost: {}\r\nContent-Length: 10000\r\n\r\n"


class Pages:
    """ASGI application that reads a whole request, but answers only when the test allows."""

    def __init__(self):
        self.was_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await self.may_answer.wait()
            await send({"type": "websocket.send", "text": "late"})
            return
        while (await receive()).get("more_body"):
            pass
        self.was_asked.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})


@pytest.fixture
def served(monkeypatch):
    """Provide a function that runs a coroutine against a server that closes connections which send nothing."""
    monkeypatch.setattr(guarded, "LOOK_EVERY_S", 0.02)

    async def run(trial):
        public = socket.create_server(("127.0.0.1", 0))
        port, pages = public.getsockname()[1], Pages()
        guard = AccessControl(pages, [f"127.0.0.1:{port}"])
        server = uvicorn.Server(uvicorn.Config(guard, lifespan="off", http=BoundedProtocol, log_level="error"))
        serving = asyncio.create_task(server.serve(sockets=[public]))
        try:
            await asyncio.wait_for(trial(port, pages), PATIENCE_S)
        finally:
            pages.may_answer.set()
            server.should_exit = True
            await serving

    return lambda trial: asyncio.run(run(trial))


async def end_of(reader):
    """Return all bytes that are received until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def drip(writer, data):
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("begin", [b"", b"GET / HT"], ids=["nothing", "a part"])
def test_a_connection_that_asks_for_nothing_is_closed(served, monkeypatch, begin):
    monkeypatch.setattr(guarded, "HEAD_TIMEOUT_S", LIMIT_S)

    async def trial(port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        assert await end_of(reader) == b""

    served(trial)


@pytest.mark.parametrize(("limit", "head"), [("HEAD_TIMEOUT_S", ""), ("BODY_TIMEOUT_S", HEAD)])
def test_a_request_that_comes_byte_by_byte_is_not_waited_for(served, monkeypatch, limit, head):
    """A request sent byte by byte, each within the limit, is cut off at the limit for the whole request."""
    monkeypatch.setattr(guarded, "HEAD_TIMEOUT_S", 2 * PATIENCE_S)
    monkeypatch.setattr(guarded, limit, LIMIT_S)

    async def trial(port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.format(f"127.0.0.1:{port}").encode())
        dripping = asyncio.create_task(drip(writer, b"GET / HTTP/1.1\r\nX: " + b"x" * 9800))
        assert await end_of(reader) == b""
        dripping.cancel()

    served(trial)


def test_an_answer_may_take_longer_and_the_connection_be_used_again(served, monkeypatch):
    async def trial(port, pages):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            pages.may_answer.clear()
            writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            await pages.was_asked.wait()
            with monkeypatch.context() as while_answering:
                for limit in ("HEAD_TIMEOUT_S", "BODY_TIMEOUT_S"):
                    while_answering.setattr(guarded, limit, LIMIT_S)
                await asyncio.sleep(5 * LIMIT_S)
            pages.was_asked.clear()
            pages.may_answer.set()
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")

    served(trial)


def test_a_web_socket_may_be_silent(served, monkeypatch):
    async def trial(port, pages):
        from websockets.asyncio.client import connect

        async with connect(f"ws://127.0.0.1:{port}/") as open_socket:
            monkeypatch.setattr(guarded, "HEAD_TIMEOUT_S", LIMIT_S)
            await asyncio.sleep(5 * LIMIT_S)
            pages.may_answer.set()
            assert await open_socket.recv() == "late"

    served(trial)


def test_connections_beyond_the_bound_are_closed(served, monkeypatch):
    monkeypatch.setattr(guarded, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(guarded, "HEAD_TIMEOUT_S", 2 * PATIENCE_S)

    async def trial(port, pages):
        pages.may_answer.set()
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        writer = held[0][1]
        writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        await held[0][0].readuntil(b"done")  # by now all three were made
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await end_of(reader) == b""

    served(trial)


def test_pages_may_ask_their_own_server_alone(served):
    async def trial(port, pages):
        pages.may_answer.set()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        policy = head.partition("content-security-policy: ")[2].partition("\r\n")[0].split()
        assert policy[0] == "default-src"
        sources = [one for one in policy[1:] if not one.startswith("'")]
        own = {f"{scheme}://127.0.0.1:{port}" for scheme in ("http", "https", "ws", "wss")}
        assert set(sources) == {*own, "data:", "blob:"}

    served(trial)


def test_an_event_waits_a_minute_at_most_for_one_that_never_comes(monkeypatch):
    from prefect.server.events.ordering import memory
    from prefect.server.events.schemas.events import ReceivedEvent

    monkeypatch.setattr(memory, "PRECEDING_EVENT_LOOKBACK", memory.PRECEDING_EVENT_LOOKBACK)  # given back at the end
    guarded.release_events_soon()
    ordering = memory.CausalOrdering("an event that never comes")
    now = datetime.now(UTC)

    async def hold(seconds):
        event = ReceivedEvent(
            id=uuid4(),
            follows=uuid4(),
            event="prefect.flow-run.Completed",
            occurred=now,
            received=now - timedelta(seconds=seconds),
            resource={"prefect.resource.id": "prefect.flow-run.1"},
        )
        await ordering.record_follower(event)
        return event.id

    async def released():
        late, _ = await hold(61), await hold(50)
        return late, [event.id for event in await ordering.get_lost_followers()]

    late, found = asyncio.run(released())
    assert found == [late]
