"""Gateway of agent programs: an OpenAI-compatible server whose answers are the turns of episodes.

It listens on the loopback interface. Each episode has a session with a port and a random key, which is one
conversation: a request must hold all that was sent and answered before, and something new. So what is new can be
appended as token ids to what was sampled (`continuation.py`), and anything else is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import queue
import resource
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stages.data.messages import Message, Tool
from stages.rollouts.environments.chats import (
    MODEL,
    ChatAnswer,
    ChatRequest,
    RefusedRequestError,
    comparable,
    read_messages,
)

MAX_BODY_BYTES = 8 * 2**20
BODY_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 128
"""Largest number of connections of an episode at a time."""
UNKNOWN_KEY = 401
CLOSE_TIMEOUT_S = 1.0
LINGER_S = 2.0
"""Time in seconds for which a refused program's further data are read, so that it can read the refusal."""
RETRIES = "X-Stainless-Retry-Count"
"""Header by which OpenAI's clients say that they repeat a request whose answer they did not get in time."""
MODEL_SHOWN = {"id": MODEL, "object": "model", "created": 0, "owned_by": "llm-lifecycle"}
MODELS = {"/v1/models": {"object": "list", "data": [MODEL_SHOWN]}, f"/v1/models/{MODEL}": MODEL_SHOWN}
ONE_CONVERSATION = "an episode is one conversation, with one request at a time"
GROWS = (
    "is not what the conversation has there: it may only grow, so send what was sent before, the answers as they were "
    "given, and then what is new"
)


@dataclass(frozen=True)
class Asked:
    """Request for a turn: what is new since the last one, in the first all of it. tools: those of the conversation."""

    messages: list[Message]
    tools: tuple[Tool, ...]


class Session:
    """Conversation of one episode. Its requests come in the gateway's thread; other methods are for the episode's.

    events: requests, and whatever else the episode waits for. port: on which the gateway listens to it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most_bytes: int) -> None:
        """Create the session. most_bytes: of the new messages of a request, after the first."""
        self.key = secrets.token_urlsafe(32)
        self.port = 0
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.num_refused = 0
        self._loop = loop
        self._most_bytes = most_bytes
        self._history: list[Any] = []
        self._tools: tuple[Tool, ...] = ()
        self._due: list[str] = []
        """Calls that the next request must answer."""
        self._is_busy = False
        self._over: RefusedRequestError | None = None
        self._pending: asyncio.Future[ChatAnswer] | None = None
        self._num_asked = 0
        """Number of messages of the request that was taken last."""
        self.repeating = asyncio.Lock()
        """Held while a repeated request is read."""

    def answer(self, answer: ChatAnswer) -> None:
        """Answer the request that was taken last."""
        self._loop.call_soon_threadsafe(self._answer, answer)

    def end(self, reason: str) -> None:
        """Refuse the request that is under way, if one is, and all that follow. reason: for the program."""
        self._loop.call_soon_threadsafe(self._end, RefusedRequestError(reason, "context_length_exceeded"))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the session for one request. Raises RefusedRequestError while another is under way."""
        if self._is_busy:
            raise RefusedRequestError(f"another request is under way: {ONE_CONVERSATION}")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Let the episode answer a request. Raises RefusedRequestError for one that does not go on with it."""
        if self._over:
            raise self._over
        known = len(self._history)
        self._check_before(request)
        new = read_messages(request.raw[known:])
        if known:
            self._check_new(new)
        self._pending = self._loop.create_future()
        self._history += map(comparable, request.raw[known:])
        self._tools, self._num_asked = request.tools, len(request.raw)
        self.events.put(Asked(new, request.tools))
        return await asyncio.shield(self._pending)  # the program may hang up, and ask again

    async def ask_again(self, request: ChatRequest) -> ChatAnswer | None:
        """Return the answer to the request that was taken last if this repeats it; None if it is another one."""
        asked = self._history[: self._num_asked]
        if not self._pending or request.tools != self._tools or [*map(comparable, request.raw)] != asked:
            return None
        return await asyncio.shield(self._pending)

    def _check_before(self, request: ChatRequest) -> None:
        known = len(self._history)
        for number, (message, before) in enumerate(zip(request.raw, self._history, strict=False), 1):
            if comparable(message) != before:
                raise RefusedRequestError(f"message {number} {GROWS}")
        if len(request.raw) <= known:
            raise RefusedRequestError(
                f"the request has {len(request.raw)} messages and nothing new: {ONE_CONVERSATION}"
            )
        if known and request.tools != self._tools:
            raise RefusedRequestError(
                f"the tools are not those of the conversation's first request: {ONE_CONVERSATION}"
            )

    def _check_new(self, messages: list[Message]) -> None:
        """Raise RefusedRequestError unless messages answer each call of the turn before, and then are the user's."""
        count = len(self._due)
        answered = [message.get("tool_call_id") for message in messages if message["role"] == "tool"]
        if answered != self._due or any(message["role"] != "tool" for message in messages[:count]):
            raise RefusedRequestError(
                f"the new messages answer the calls {answered}; expected first a message of the role `tool` for each "
                f"of {self._due}, in this order"
            )
        if others := {message["role"] for message in messages[count:]} - {"user"}:
            raise RefusedRequestError(f"a new message has the role {', '.join(sorted(others))}; expected `user`")
        num_bytes = sum(len(message["content"].encode()) for message in messages)
        if num_bytes > self._most_bytes:
            raise RefusedRequestError(
                f"the new messages have {num_bytes} bytes, of at most {self._most_bytes} (`max_answer_bytes`)",
                "string_above_max_length",
            )

    def _answer(self, answer: ChatAnswer) -> None:
        assert self._pending
        self._history.append(comparable(answer.message))
        self._due = answer.calls
        self._pending.set_result(answer)

    def _end(self, refusal: RefusedRequestError) -> None:
        self._over = refusal
        if self._pending and not self._pending.done():
            self._pending.set_exception(refusal)
            self._pending.exception()  # or asyncio reports it where the program has hung up


class Gateway:
    """HTTP servers of the sessions of episodes, which answer in one thread of their own.

    Each session has a port, so that a program that opens many connections keeps none from other episodes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most_connections: int) -> None:
        """Create the gateway. most_connections: of a session."""
        self._loop = loop
        self._most_connections = most_connections
        self._servers: dict[Session, tuple[asyncio.Server, web.Server]] = {}

    def session(self, most_bytes: int) -> Session:
        """Open a session, with a key and a port of its own. most_bytes: as of `Session`."""
        return asyncio.run_coroutine_threadsafe(self._opened(most_bytes), self._loop).result()

    def close(self, session: Session) -> None:
        """Close a session: its program is answered no longer."""
        session.end("the episode is over")
        asyncio.run_coroutine_threadsafe(self._closed(session), self._loop).result()

    async def end(self) -> None:
        """Close the sessions that are open."""
        for session in [*self._servers]:
            await self._closed(session)

    async def _opened(self, most_bytes: int) -> Session:
        session = Session(self._loop, most_bytes)
        server = _BoundedServer(
            partial(_responded, session),
            self._most_connections,
            handler_cancellation=True,
            access_log=None,
            lingering_time=LINGER_S,
            logger=_logger,
        )
        listener = await self._loop.create_server(server, "127.0.0.1", 0)
        session.port = listener.sockets[0].getsockname()[1]
        self._servers[session] = listener, server
        return session

    async def _closed(self, session: Session) -> None:
        if servers := self._servers.pop(session, None):
            listener, server = servers
            listener.close()
            server.pre_shutdown()
            await server.shutdown(CLOSE_TIMEOUT_S)


async def _responded(session: Session, request: web.BaseRequest) -> web.StreamResponse:
    """Answer a request of a program."""
    try:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(f"Bearer {session.key}".encode(), given):
            raise RefusedRequestError("the key is not that of the episode", "invalid_api_key", UNKNOWN_KEY)
        if request.method == "GET" and request.path in MODELS:
            return web.json_response(MODELS[request.path])
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            raise RefusedRequestError("there are /v1/chat/completions and /v1/models alone", "not_found", 404)
        chat, answer = await _asked(session, request)
        return await _streamed(request, answer, chat) if chat.streams else web.json_response(answer.content)
    except RefusedRequestError as refusal:
        session.num_refused += refusal.status != UNKNOWN_KEY
        response = web.json_response(refusal.content, status=refusal.status)
        response.force_close()  # its body may not have been read
        return response


async def _asked(session: Session, request: web.BaseRequest) -> tuple[ChatRequest, ChatAnswer]:
    """Return a request for a turn, and the answer to it. One body of a session is read at a time."""
    if request.headers.get(RETRIES, "0") != "0":
        async with session.repeating:
            chat = ChatRequest.parsed(await _body_of(request))
        if answer := await session.ask_again(chat):
            return chat, answer
        with session.taken():
            return chat, await session.ask(chat)
    with session.taken():
        chat = ChatRequest.parsed(await _body_of(request))
        return chat, await session.ask(chat)


async def _body_of(request: web.BaseRequest) -> bytes:
    too_large = RefusedRequestError(f"the body has more than {MAX_BODY_BYTES} bytes", "request_too_large", 413)
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.content.iter_any():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except web.RequestPayloadError as error:  # such as one that is not compressed as its header says
        raise RefusedRequestError("the body cannot be read") from error
    except TimeoutError as error:
        raise RefusedRequestError(f"the body took over {BODY_TIMEOUT_S:g} s", "timeout", 408) from error
    return bytes(body)


async def _streamed(request: web.BaseRequest, answer: ChatAnswer, chat: ChatRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in answer.events(chat.shows_usage):
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write_eof(b"data: [DONE]\n\n")
    return response


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a report of the HTTP server is not of a program's request that is no HTTP."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_logger = logging.getLogger(__name__)
_logger.addFilter(_is_ours)


class _BoundedServer(web.Server):
    """HTTP server that closes connections beyond a number of them."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any], most_connections: int, **options: Any) -> None:
        super().__init__(handler, **options)
        self._most_connections = most_connections

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        if len(self.connections) >= self._most_connections:
            transport.abort()
        super().connection_made(handler, transport)


@contextmanager
def listening(num_together: int) -> Iterator[Gateway]:
    """Run a gateway in a thread, on free ports of the loopback interface, until the context ends.

    num_together: of sessions. They share half of the files that this process may open, which connections are.
    """
    most_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.new_event_loop()
    gateway = Gateway(loop, min(MAX_CONNECTIONS, max(1, most_open // 2 // num_together)))
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()
    try:
        yield gateway
    finally:
        asyncio.run_coroutine_threadsafe(gateway.end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
