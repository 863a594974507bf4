"""Authenticating HTTP proxy in front of every model server; clients reach engines only through the proxy.

Engines leave some routes open: vLLM's own key guards `/v1` only. So an engine listens where only the proxy is
(`EngineAddress`), and the proxy, on the public address, asks for the key on every path, passes on the routes of
`ROUTES` alone, and bounds the size, the number and the time of requests. Answers pass as they are made. The engine
behind it, or its model, may be exchanged under way: the public name stays (`Naming`). A share of the requests may go to
another, a canary.

It runs in a thread, so that whatever ends this process ends the proxy, and no process, port or socket is left. It and
its neighbours import nothing but their HTTP libraries, pydantic and Prometheus' client: in Kubernetes it runs in the
engine's image (`proxy_program.py`).
"""

import asyncio
import hmac
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stages.core.errors import ResourceError, ServerError
from stages.remote.http import BodyReader, Expected
from stages.serving.backend import Backend, Canary, EngineAddress, Naming, sticky_key
from stages.serving.client import Models
from stages.serving.engine_connections import (
    EngineConnection,
    EngineConnections,
    NotConnectedError,
    ServerDisconnectedError,
)
from stages.serving.exchange import Exchange, json_object
from stages.serving.http_messages import body_of, error, header_lines, passed
from stages.serving.people import People
from stages.serving.person_keys import PersonKey
from stages.serving.pictures import MAX_BODY_BYTES as MAX_BODY_BYTES_WITH_PICTURES
from stages.serving.pictures import MEDIA, RefusedRequestError, checked
from stages.serving.tally import ServedVersion, Tallies, labelled
from stages.serving.waiting import EngineGoneError, RequestQueue, not_served

MODELS = "/v1/models"
CHAT = "/v1/chat/completions"
HEALTH = "/health"
METRICS = "/metrics"
VERSIONS = "/versions"
ROUTES = {
    MODELS: "GET",
    "/v1/completions": "POST",
    CHAT: "POST",
    HEALTH: "GET",
    METRICS: "GET",
    VERSIONS: "GET",
}
"""HTTP method of each route of the proxy; an engine's others (`/collective_rpc`, `/tokenize`, …) cannot be reached."""
FOR_PEOPLE = frozenset((MODELS, "/v1/completions", CHAT, HEALTH))
"""Routes that take people's own keys; the others tell of everybody's requests."""
PERSON = web.RequestKey("person", PersonKey)
"""Key of a person that a request has, in the request's state."""
IS_COUNTED = web.RequestKey("is_counted", bool)
"""Mark, in a request's state, that the audit log has it with the tokens of its answer."""
EMBEDDED = re.compile(rb"base64,[A-Za-z0-9+/=]*")
"""Pattern of a medium in a request, whose bytes say little about its tokens."""
NOT_OF_PEOPLE = (b"authorization", b"accept-encoding")
"""Headers of people that engines do not get: they know the server's key alone, and could compress away their counts."""
MAX_BODY_BYTES = 32 * 2**20
SHORT_BYTES = 2**18
"""Largest request that the event loop looks through itself: about 1 ms."""
MAX_REQUESTS = 1024
"""Largest number of requests that the proxy handles at a time; further ones get status 429."""
API_KEY_VARIABLE = "VLLM_API_KEY"
BODY_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 3600.0
METRICS_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 5.0
VERSION_HEADER = "X-Lifecycle-Version"
OF_ENGINE = Expected("the model server", 32 * 2**20, METRICS_TIMEOUT_S)
TEXT_FORMAT = "text/plain; version=0.0.4"
"""Prometheus' text format, which the proxy requests from engines, as some would answer in another format."""
ERROR_EVENT = b'data: {"error"'
"""Beginning of the streamed answer that vLLM's server sends when its engine process has died."""
MAX_CONNECTIONS = 2048
FILES_AT_A_TIME = 65_536
IDLE_TIMEOUT_S = 60.0
"""Time in seconds after which an idle client connection is closed: without data, or without a whole request."""
MAX_UNSENT_BYTES = 64 * 2**10
"""Number of answer bytes buffered for a slow client before the proxy stops reading from the engine."""
LINGER_S = 2.0
"""Time in seconds for which a refused client's further data are read, so that the client can read the refusal."""


class BrokenStreamError(Exception):
    """Error for a stream that began with the error message of a dying engine."""


class Sampler(Protocol):
    """Protocol of a sampler, which stores a share of the served conversations."""

    def draws(self) -> bool:
        """Return whether the sampler stores the next conversation, by chance."""

    def take(self, exchange: Exchange, version: str) -> None:
        """Store a complete conversation and the model version that answered it, in the background."""


class Proxy:
    """HTTP proxy in front of a serving engine, which may send a share of the requests to a canary.

    It answers in one event loop's thread; other methods may be called from any thread.
    """

    def __init__(
        self,
        backend: Backend,
        api_key: str,
        sampler: Sampler | None = None,
        waiting: RequestQueue | None = None,
        people: People | None = None,
    ):
        """Create the proxy of an engine; clients can connect once `listening` runs the proxy.

        sampler: takes conversations for a dataset. waiting: where requests wait for the next engine, if any.
        people: those whose own keys it takes beside `api_key`.
        """
        self.tallies, self.tallies_of_canary = Tallies(), Tallies()  # since this began, since the latest canary did
        self._backend = backend
        self._canary: Canary | None = None
        self._sampler = sampler
        self._waiting = waiting
        self._people = people
        self._bearer = f"Bearer {api_key}".encode()
        self._num_requests = 0
        self._lock = threading.Lock()
        self._connections: dict[Backend, EngineConnections] = {}
        # One at a time: a picture takes up to 256 MiB while it is decoded.
        self._inspector = ThreadPoolExecutor(1, thread_name_prefix="pictures")

    def switch(self, backend: Backend) -> Backend:
        """Send new requests to another backend, no longer a canary; return the former, which may still answer some."""
        with self._lock:
            before, self._backend = self._backend, backend
            if self._canary and self._canary.backend is backend:
                self._canary = None
        if self._waiting:
            # After the change: those that it wakes look at the backend at once.
            self._waiting.wake()
        return before

    def set_canary(self, canary: Canary | None) -> None:
        """Send a share of the new requests to a canary; None removes the canary."""
        with self._lock:
            self._canary = canary
            # From 0 for both sides: a canary is compared with what its champion did at the same time.
            self.tallies_of_canary = Tallies()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Forward a client's request and the engine's answer; ends the engine's work when the client disconnects."""
        response: web.StreamResponse | None = self._refusal(request)
        if response is None:
            with self._until_revoked(request):
                response = await self._admitted(request)
        if self._people and response.status >= 400:
            self._note_refusal(self._people, request, response.status)
        return response

    async def _admitted(self, request: web.BaseRequest) -> web.StreamResponse:
        self._num_requests += 1
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await body_of(request, self._max_body_bytes)
        except TimeoutError:
            return error(408, f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s")
        else:
            if body is None:
                return error(413, f"the request is larger than {self._max_body_bytes} bytes")
            try:
                # This bounds the whole answer: else a client that stops reading would keep it open endlessly.
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    return await self._answered(request, await self._inspected(request, body))
            except RefusedRequestError as problem:
                return error(400, str(problem))
            except ResourceError as problem:  # such as a decoder of videos that is not installed
                return error(500, str(problem))
            except TimeoutError:
                # Half an answer may be sent already: only a cut connection shows the client that the rest is missing.
                if request.transport:
                    request.transport.abort()
                return web.Response()
        finally:
            self._num_requests -= 1

    async def close(self) -> None:
        self._inspector.shutdown(wait=False, cancel_futures=True)
        for connections in self._connections.values():
            connections.close()

    def side_by_side(self) -> dict[str, Any]:
        """Return the served versions, the canary's share of the requests, and the counts of each version, as JSON."""
        with self._lock:
            champion, canary = self._backend.version, self._canary
        challenger = canary.backend.version if canary else None
        return {
            "champion": champion.version if champion else None,
            "challenger": challenger.version if challenger else None,
            "share": canary.share if canary else 0.0,
            "versions": self.tallies.side_by_side(),
        }

    def _refusal(self, request: web.BaseRequest) -> web.Response | None:
        authorization = _authorization(request)
        # Takes as long for every wrong key, so that no one can find the key byte by byte.
        is_own = hmac.compare_digest(authorization, self._bearer)
        person = None if is_own or not self._people else self._people.of(authorization)
        if not is_own and person is None:
            return error(401, "the API key is missing or wrong; send it as a bearer token")
        if person:
            request[PERSON] = person
        path = _path(request)
        if path not in ROUTES:
            return error(404, f"there is no {path}; there are {', '.join(ROUTES)}")
        if request.method != ROUTES[path]:
            return error(405, f"{path} takes {ROUTES[path]} only", {"Allow": ROUTES[path]})
        # Before any of the body is read; a chunked body has no length, and is bounded by `body_of`.
        if (request.content_length or 0) > self._max_body_bytes:
            return error(413, f"the request is larger than {self._max_body_bytes} bytes")
        if self._num_requests >= MAX_REQUESTS:
            return error(429, f"{MAX_REQUESTS} requests are under way; try again later", {"Retry-After": "1"})
        return self._refusal_of(person.name, request) if person else None

    def _refusal_of(self, person: str, request: web.BaseRequest) -> web.Response | None:
        path = _path(request)
        if path not in FOR_PEOPLE:
            return error(403, f"{path} takes the server's own key only")
        return self._people.refusal(person, path) if self._people and request.method == "POST" else None

    def _note_refusal(self, people: People, request: web.BaseRequest, status: int) -> None:
        """Write into the audit log that a person, or someone without a key that holds, was refused."""
        path = _path(request)
        route = path if path in ROUTES else None
        if person := request.get(PERSON):
            if not request.get(IS_COUNTED):
                people.note_refusal(person.name, route, status)
        elif status == 401:
            people.note_wrong_key(_authorization(request), route)

    @contextmanager
    def _until_revoked(self, request: web.BaseRequest) -> Iterator[None]:
        """Cut a request off when the key of its person is revoked, until the context ends."""
        person, client = request.get(PERSON), request.transport
        if not (self._people and person and client):
            yield
            return
        is_over = False

        def cut_off() -> None:
            # Else the connection may have another request by now, with another key.
            if not is_over:
                client.abort()

        with self._people.answering(person, partial(asyncio.get_running_loop().call_soon_threadsafe, cut_off)):
            try:
                yield
            finally:
                is_over = True

    @property
    def _max_body_bytes(self) -> int:
        return MAX_BODY_BYTES_WITH_PICTURES if self._backend.limits.most else MAX_BODY_BYTES

    async def _inspected(self, request: web.BaseRequest, body: bytes) -> bytes:
        """Return a request's body for the engine, its pictures checked; raises RefusedRequestError."""
        if _path(request) != CHAT or (len(body) <= SHORT_BYTES and not MEDIA.search(body)):
            return body
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._inspector, checked, body, self._backend.limits)

    @contextmanager
    def _under_way(self, key: str | None) -> Iterator[Backend]:
        """Choose a request's backend, where it counts as active until answered. key: the client's; None: no canary."""
        with self._lock:
            backend = self._backend
            if self._canary and key is not None and self._canary.takes(key):
                backend = self._canary.backend
            backend.num_requests += 1
            backend.idle.clear()
        try:
            yield backend
        finally:
            with self._lock:
                backend.num_requests -= 1
                if not backend.num_requests:
                    backend.idle.set()

    async def _answered(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        path = _path(request)
        if path == VERSIONS:
            return web.json_response(self.side_by_side())
        # Without versions to compare, the engine's own metrics are passed on below.
        if path == METRICS and self._backend.version:
            return web.Response(text=await self._metrics(), headers={"Content-Type": TEXT_FORMAT})
        looks = self._backend.naming or self._backend.version or request.get(PERSON)
        is_read = request.method == "POST" and looks
        asked = json_object(body) if is_read else None
        key = sticky_key(request, asked) if is_read else None
        visit = self._waiting.visit(len(body)) if self._waiting else None
        while True:
            with self._under_way(key) as backend:
                try:
                    if backend.is_gone:
                        raise EngineGoneError("it is being started again", was_sent=False)
                    return await self._observed(request, body, asked, backend)
                except EngineGoneError as problem:
                    gone = problem
            # Else a canary failed, or another engine has taken over: the present one is asked at once.
            if backend is self._backend:
                if visit is None:
                    return error(502, f"the model server does not answer: {gone}")
                if path == HEALTH:
                    return not_served(f"the model server does not answer: {gone}")
                is_replaced, is_healthy = partial(self._is_replaced, backend), partial(self._is_healthy, backend)
                if refusal := await visit.wait(gone, is_replaced, is_healthy):
                    return refusal
            key = None  # leaves the canary out

    def _is_replaced(self, backend: Backend) -> bool:
        return backend is not self._backend

    async def _is_healthy(self, backend: Backend) -> bool:
        """Return an engine's health; False if it has ended, since another may listen at its address by then."""
        if backend.is_gone:
            return False
        headers = header_lines([(b"Authorization", self._bearer)])
        with suppress(NotConnectedError, ServerDisconnectedError, TimeoutError):
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                with await self._connections_to(backend).ask("GET", HEALTH, headers) as answer:
                    return answer.status == 200
        return False

    async def _is_left(self, backend: Backend) -> bool:
        """Return whether another engine should answer a failed request: a canary failed, or the engine is dying."""
        is_challenger = backend is not self._backend
        return is_challenger or (self._waiting is not None and not await self._is_healthy(backend))

    async def _observed(
        self, request: web.BaseRequest, body: bytes, asked: dict[str, Any] | None, backend: Backend
    ) -> web.StreamResponse:
        """Forward a request to an engine, and count its answer, tokens and latency for the metrics."""
        is_post = request.method == "POST"
        if is_post and (naming := backend.naming):
            if asked is None or asked.get("model") != naming.public:
                return error(404, f"expected a JSON object that asks for the model {naming.public}")
            asked = {**asked, "model": naming.inside}
        person = request.get(PERSON)
        if not (is_post and (backend.version or person)):
            return await self._passed_on(request, json.dumps(asked).encode() if asked else body, backend)
        sampler = self._sampler if _path(request) == CHAT and self._sampler and self._sampler.draws() else None
        if person and asked is None:
            return error(400, "expected a JSON object")
        exchange, began_s = Exchange(asked or {}, keeps_content=sampler is not None), time.monotonic()
        try:
            sent = exchange.body if asked else body
            response = await self._passed_on(request, sent, backend, exchange)
            if sampler and backend.version:
                sampler.take(exchange, backend.version.version)
            return response
        finally:
            # Also when the client has disconnected, which counts under status 499.
            seconds = time.monotonic() - began_s
            if version := backend.version:
                for tallies in (self.tallies, self.tallies_of_canary):
                    tallies.of(version).count(_path(request), exchange, seconds)
            if person and self._people:
                request[IS_COUNTED] = True
                self._people.count(person.name, _path(request), exchange, len(EMBEDDED.sub(b"", body)))

    async def _passed_on(
        self, request: web.BaseRequest, body: bytes, backend: Backend, exchange: Exchange | None = None
    ) -> web.StreamResponse:
        """Forward a request and its answer; raise EngineGoneError if the engine fails before any of it was sent."""
        response: web.StreamResponse | None = None
        try:
            connections, headers = self._connections_to(backend), header_lines(self._headers_of(request))
            with await connections.ask(request.method, request.raw_path, headers, body) as answer:
                if exchange:
                    exchange.begin(answer.status, answer.content_type, answer.headers.get("Content-Encoding"))
                # A 5xx of a healthy engine is an answer like any other, and is passed on.
                if answer.status >= 500 and await self._is_left(backend):
                    raise EngineGoneError(f"it answered {answer.status}")
                if backend.naming and _path(request) == MODELS and answer.status == 200:
                    return await _models(answer, backend.naming)
                response = _begun(answer, backend.version)
                await self._stream(answer, response, request, backend, exchange)
                return response
        except (NotConnectedError, ServerDisconnectedError, BrokenStreamError, OSError) as problem:
            if exchange and request.transport and not request.transport.is_closing():  # else it is the client's doing
                exchange.status = 502
            if response is None or not response.prepared:
                was_sent = not isinstance(problem, NotConnectedError)
                raise EngineGoneError(type(problem).__name__, was_sent=was_sent) from problem
            if request.transport:  # The answer was cut off: so is what the client gets.
                request.transport.abort()
            return response

    async def _stream(
        self,
        answer: EngineConnection,
        response: web.StreamResponse,
        request: web.BaseRequest,
        backend: Backend,
        exchange: Exchange | None,
    ) -> None:
        """Stream an engine's answer to the client in chunks as they arrive."""
        part, is_last = b"", False
        while not is_last:
            chunk = await answer.part()
            is_last = answer.is_whole
            part = exchange.passed(chunk) if exchange else chunk
            if is_last and exchange:
                part += exchange.end()
            if not response.prepared and (part or is_last):  # from then on, no other engine can answer
                if part.startswith(ERROR_EVENT) and await self._is_left(backend):
                    raise BrokenStreamError
                await response.prepare(request)
            if part and not is_last:
                await response.write(part)
                # Chunked answers only: `_sent_on` writes chunks to the transport itself, past aiohttp.
                if "Transfer-Encoding" in response.headers and (client := request.transport):
                    await answer.hand_on(partial(_sent_on, client, exchange))
        await response.write_eof(part)

    async def _metrics(self) -> str:
        """Return the proxy's own metrics and those of every engine, each labelled with the model version."""
        with self._lock:
            backends = [self._backend, *([self._canary.backend] if self._canary else [])]
        by_address: dict[EngineAddress, list[ServedVersion]] = {}
        for backend in backends:
            if backend.version:
                by_address.setdefault(backend.address, []).append(backend.version)
        engines = []
        for address, versions in by_address.items():  # adapters share an engine, which counts them together
            backend = next(backend for backend in backends if backend.address == address)
            together = ServedVersion(versions[0].model, ",".join(served.version for served in versions))
            engines.append((together, await self._metrics_of(backend)))
        return labelled(engines) + self.tallies.as_text()

    async def _metrics_of(self, backend: Backend) -> str:
        headers = header_lines([(b"Authorization", self._bearer), (b"Accept", TEXT_FORMAT.encode())])
        text, is_up = "", False
        # An engine that is away has no metrics but `lifecycle_engine_up`.
        with suppress(NotConnectedError, ServerDisconnectedError, TimeoutError, ServerError):
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                with await self._connections_to(backend).ask("GET", METRICS, headers) as answer:
                    is_up = answer.status == 200
                    text = (await _whole(answer)).decode(errors="replace") if is_up else ""
        about = "# HELP lifecycle_engine_up Whether the engine gave its metrics.\n# TYPE lifecycle_engine_up gauge\n"
        return f"{about}lifecycle_engine_up {int(is_up)}\n{text}"

    def _headers_of(self, request: web.BaseRequest) -> Iterable[tuple[bytes, bytes]]:
        """Return a request's headers for an engine, which gets the server's key instead of a person's."""
        if PERSON not in request:
            return request.raw_headers
        kept = [header for header in request.raw_headers if header[0].lower() not in NOT_OF_PEOPLE]
        return [*kept, (b"Authorization", self._bearer)]

    def _connections_to(self, backend: Backend) -> EngineConnections:
        if backend not in self._connections:
            self._connections[backend] = EngineConnections(backend.address)
        return self._connections[backend]


def _authorization(request: web.BaseRequest) -> bytes:
    return request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")


def _path(request: web.BaseRequest) -> str:
    """Return a request's path without decoding it, since an engine may decode it differently."""
    return request.raw_path.partition("?")[0]


def _begun(answer: EngineConnection, version: ServedVersion | None) -> web.StreamResponse:
    """Create the proxy's response to a client, with the status and headers that the engine sent."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=passed(answer.headers))
    if version:
        response.headers[VERSION_HEADER] = version.version
    return response


def _sent_on(client: asyncio.Transport, exchange: Exchange | None, chunk: bytes) -> bool:
    """Write a chunk of an answer to the client; returns False when the client reads too slowly for another."""
    if part := exchange.passed(chunk) if exchange else chunk:
        client.write(b"%x\r\n%b\r\n" % (len(part), part))  # a chunk: size in hex, then the bytes (RFC 9112, 7.1)
    return not client.is_closing() and client.get_write_buffer_size() < MAX_UNSENT_BYTES


async def _whole(answer: EngineConnection) -> bytes:
    """Read the whole body of an engine's answer. Raises ServerError if it is too large."""
    reader, body = BodyReader(OF_ENGINE, answer.headers), bytearray()
    while True:
        body += reader.add(await answer.part())
        if answer.is_whole:
            reader.end()
            return bytes(body)


async def _models(answer: EngineConnection, naming: Naming) -> web.Response:
    """Return the engine's list of models with each model's public name."""
    try:
        listed = OF_ENGINE.parsed(await _whole(answer), Models[dict[str, Any]]).data
    except ServerError as wrong:
        return error(502, str(wrong))
    known = [{**model, "id": naming.public} for model in listed if model.get("id") == naming.inside]
    return web.json_response({"object": "list", "data": known})


@contextmanager
def listening(proxy: Proxy, public: socket.socket, last_answers_s: float = 1.0) -> Iterator[None]:
    """Run the proxy in a thread on the listening socket `public`, until the context ends; then close the socket.

    last_answers_s: time in the end for answers under way.
    """
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
        loop.call_soon_threadsafe(stop.set)  # asyncio's events may be set in their loop's thread only
        thread.join()
        loop.close()


async def _answer_until(
    stop: asyncio.Event, ready: threading.Event, proxy: Proxy, public: socket.socket, last_answers_s: float
) -> None:
    server = _BoundedServer(
        proxy.answer,
        handler_cancellation=True,  # a client that disconnects ends the engine's work
        access_log=None,
        auto_decompress=False,  # the engine gets bodies as the client sent them
        keepalive_timeout=IDLE_TIMEOUT_S,
        lingering_time=LINGER_S,
    )
    listener = await asyncio.get_running_loop().create_server(server, sock=public, backlog=MAX_CONNECTIONS)
    try:
        ready.set()
        await stop.wait()
    finally:
        # No new connections, then no further requests on open ones, then time for answers under way.
        listener.close()
        server.pre_shutdown()
        await server.shutdown(last_answers_s)
        await proxy.close()


class _Connection(web.RequestHandler):
    """Client's connection to the proxy, whose invalid HTTP, with perhaps an API key, is not logged as aiohttp would."""

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
    """HTTP server that closes new connections beyond `MAX_CONNECTIONS`.

    They are closed only once they are made: before, none of many simultaneous ones would be counted.
    """

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            transport.abort()
        super().connection_made(handler, transport)
