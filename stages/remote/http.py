"""HTTP requests to untrusted servers, with limits on size, time and decompression, checked JSON, and retries.

An `Expected` says what may arrive; an `Answer`'s JSON is checked against a pydantic type. No redirect is followed: a
key would go to another host. Imports none of the HTTP libraries that it reads from (httpx, aiohttp).

Retries wait ever longer, or as long as the server asks, a few times in a row. Not tenacity: its count of attempts
cannot start again when a transfer progresses between two failures.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from stages.core.errors import DownloadError, LifecycleError, RecipeError, ServerError, TransientError
from stages.core.redaction import quoted, redact, shortened

if TYPE_CHECKING:
    import http.client

    import aiohttp
    import httpx


QUOTED_CHARACTERS = 200
"""Largest number of characters from the beginning of an HTTP answer that a message quotes."""
CHUNK_BYTES = 64 * 2**10
EVENT_BYTES = 2**20
"""Largest size in bytes of a server-sent event; usual events hold one or a few tokens."""
REFUSAL_BYTES = 64 * 2**10
"""Largest number of bytes read from the body of an error answer."""
ACCEPTED = {"Accept-Encoding": "gzip"}
COMPRESSED = ("gzip", "x-gzip", "deflate")
EVENT = b"data:"
END_OF_EVENTS = b"[DONE]"

NUM_ATTEMPTS = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
_BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
HEADER_CHARACTERS = 100
# At most 18 digits, so that each number is below 2**63.
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_NUMBER = re.compile(r"[0-9]{1,18}")
TRACE_VARIABLE = "TRACEPARENT"
"""Environment variable with the OpenTelemetry span in which this process works, in the form of W3C's `traceparent`."""
_SPAN = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Shape = TypeVar("Shape")


def number_in(header: str) -> int | None:
    """Return an HTTP header's value as a number; None if it is not one."""
    return int(header) if _NUMBER.fullmatch(header) else None


def key_in(variable: str | None, field: str) -> str:
    """Return the API key in an environment variable, "" if none is named; RecipeError if `field`'s is not set."""
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise RecipeError(
            f"the environment has no {variable}, which `{field}` names; set it, for instance in `execution.environment`"
        )
    return key


class AnswerModel(BaseModel):
    """Base of pydantic models for JSON answers: types are strict, numbers finite, and unknown fields ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, defer_build=True)


def server_headers(key: str) -> dict[str, str]:
    """Return the headers of a request to a model server: its key, and the span in which this process works, if any."""
    span = os.environ.get(TRACE_VARIABLE, "")
    return {"Authorization": f"Bearer {key}", **({"traceparent": span} if _SPAN.fullmatch(span) else {})}


@dataclass(frozen=True)
class Expected:
    """Limits of an HTTP answer (size, total time), with the server's name and the error class for messages.

    server: such as `the judge at https://…`. max_bytes: of the decompressed body. total_s: from the connection to the
    last byte. error: class of errors that are the server's fault. key: sent with the request, and never shown.
    """

    server: str
    max_bytes: int
    total_s: float
    error: type[LifecycleError] = ServerError
    key: str = field(default="", repr=False)

    def wrong(self, found: str, body: bytes | None = None) -> LifecycleError:
        """Return the error for a malformed HTTP answer, which quotes the beginning of the body."""
        shown = "" if body is None else f": {self.quoted(body)}"
        return self.error(f"{self.server} {found}{shown}")

    def quoted(self, body: bytes) -> str:
        """Return the beginning of an HTTP body for a message, with the API key removed."""
        text = body.decode(errors="replace")
        return quoted(redact(text, [self.key]) if self.key else text, QUOTED_CHARACTERS)

    def parsed(self, body: bytes, shape: type[Shape]) -> Shape:
        """Return a body's JSON, validated as `shape`; raise the error class `error` for anything else."""
        try:
            # Not the `json` module: it takes NaN, lone surrogates and any nesting that the stack has room for.
            return TypeAdapter(shape).validate_python(from_json(body, allow_inf_nan=False), strict=True)
        except ValidationError as error:  # a ValueError too
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"])) or "the answer"
            place = quoted(place, QUOTED_CHARACTERS)  # keys of an object may be in it
            raise self.wrong(f"answered with JSON of another form ({place}: {first['msg']})", body) from None
        except ValueError as error:
            raise self.wrong(f"answered with something else than JSON ({error})", body) from None


@dataclass(frozen=True)
class Answer:
    """Complete HTTP answer: status, headers (names in lower case) and body."""

    expected: Expected
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def check(self) -> Self:
        """Return this answer if its status is a success (2xx); else raise an error of `expected`'s class."""
        if self.is_success:
            return self
        raise self.refusal()

    def refusal(self) -> LifecycleError:
        if not 300 <= self.status < 400:
            return self.expected.wrong(f"answered {self.status}", self.body)
        target = quoted(self.headers.get("location", ""), QUOTED_CHARACTERS)
        return self.expected.wrong(
            f"answered {self.status}, a redirect to {target}, which is not followed; name the address that it leads to"
        )

    def parsed(self, shape: type[Shape]) -> Shape:
        """Return the answer's JSON, validated as the type `shape`. Raises the error that `Expected` names."""
        return self.expected.parsed(self.check().body, shape)


class BodyReader:
    """Decompressor of an HTTP body that arrives in chunks, with a limit on the decompressed size.

    Raises `Expected.error` for a larger body (`cuts`: cut instead), or no gzip.
    """

    def __init__(self, expected: Expected, headers: Mapping[str, str], *, cuts: bool = False) -> None:
        self._expected = expected
        self._cuts = cuts
        self._num_bytes = 0
        self._encoding = headers.get("content-encoding", "").strip().lower()
        # + 32: the header says whether it is gzip or zlib.
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if self._encoding in COMPRESSED else None

    def add(self, chunk: bytes) -> bytes:
        """Return the decompressed bytes of the next chunk of an HTTP body."""
        if self._encoding not in (*COMPRESSED, "", "identity"):
            shown = quoted(self._encoding, QUOTED_CHARACTERS)
            raise self._expected.wrong(f"answered with the content encoding {shown}; gzip was accepted")
        room = self._expected.max_bytes - self._num_bytes
        if self._inflate:
            try:
                # One byte more than there is room for: a bomb is noticed before it is large.
                chunk = self._inflate.decompress(chunk, room + 1)
            except zlib.error as error:
                raise self._expected.wrong(f"answered with broken gzip ({error})") from None
            if self._inflate.unused_data:
                raise self._expected.wrong("answered with broken gzip (more follows its end)")
        if len(chunk) > room and not self._cuts:
            raise self._expected.wrong(f"answered with more than {self._expected.max_bytes} bytes", chunk)
        # Counted before the cut, so that `is_full` knows that there was more.
        self._num_bytes += len(chunk)
        return chunk[:room]

    @property
    def is_full(self) -> bool:
        return self._num_bytes > self._expected.max_bytes

    def end(self) -> None:
        """Raise an error if the compressed HTTP body ended too early."""
        if self._inflate and self._num_bytes and not self._inflate.eof:
            raise self._expected.wrong("answered with broken gzip (its end is missing)")


class EventReader(Generic[Shape]):
    """Parser of server-sent events (such as streamed tokens), each a JSON object, from chunks of an HTTP body."""

    def __init__(self, expected: Expected, headers: Mapping[str, str], shape: type[Shape]) -> None:
        self._expected = expected
        self._body = BodyReader(expected, {name.lower(): value for name, value in headers.items()})
        self._shape = shape
        self._line = bytearray()
        self._is_over = False

    def add(self, chunk: bytes) -> Iterator[Shape]:
        """Yield the events that the next chunk completes; raise the error of `Expected` for a malformed one."""
        lines = self._body.add(chunk).split(b"\n")
        for line in lines[:-1]:
            event, self._line = bytes(self._line + line), bytearray()
            content = event.removeprefix(EVENT).strip()
            self._is_over |= content == END_OF_EVENTS
            if event.startswith(EVENT) and content != END_OF_EVENTS:
                yield self._expected.parsed(content, self._shape)
        # The last line may go on in the next chunk.
        self._line += lines[-1]
        if len(self._line) > EVENT_BYTES:
            raise self._expected.wrong(f"answered with an event of more than {EVENT_BYTES} bytes", bytes(self._line))

    def end(self) -> None:
        """Raise an error if the stream of events ended without its end mark `[DONE]`."""
        if not self._is_over:
            raise self._expected.wrong(f"broke its answer off (without `{END_OF_EVENTS.decode()}`)")


class Deadline:
    """Time limit of a whole HTTP request, enforced by shutting down the request's sockets.

    As a context, it then raises TimeoutError: to some readers, a socket that is shut down is the end of the body.
    """

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._end_s = time.monotonic() + total_s
        self._timer = threading.Timer(total_s, self._end)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_over = False

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.append(connection)
        if self._is_over:  # the timer came before this socket
            self._end()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Record the sockets that httpx opens (request extension `trace`), to shut them down at the time limit."""
        if event.endswith((".connect_tcp.complete", ".connect_unix_socket.complete", ".start_tls.complete")):
            self.watch(info["return_value"].get_extra_info("socket"))

    def _end(self) -> None:
        self._is_over = True
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):  # it may be closed
                    # SSLSocket's own method takes the TLS state away from the thread that reads.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._timer.cancel()
        # On a busy machine, a library's own limit may be noticed before the timer's thread gets its turn.
        is_over = self._is_over or (error is not None and time.monotonic() >= self._end_s)
        if is_over and not isinstance(error, LifecycleError | GeneratorExit | KeyboardInterrupt):
            raise TimeoutError(f"no whole answer within {self._total_s:g} s") from error


class _Parts:
    """Collector of an HTTP answer's body from chunks, shared by synchronous and asynchronous readers."""

    def __init__(self, expected: Expected, status: int, headers: Mapping[str, str]) -> None:
        self._answer = Answer(expected, status, {name.lower(): value for name, value in headers.items()}, b"")
        cuts = not self._answer.is_success
        bounds = replace(expected, max_bytes=REFUSAL_BYTES) if cuts else expected
        self._reader = BodyReader(bounds, self._answer.headers, cuts=cuts)
        self._body = bytearray()

    def add(self, chunk: bytes) -> bool:
        """Add a chunk of a response body; return False if no more is needed. An error's body is cut off early."""
        try:
            self._body += self._reader.add(chunk)
        except LifecycleError:
            if self._answer.is_success:
                raise
            return False
        return not self._reader.is_full

    def answer(self) -> Answer:
        if self._answer.is_success:
            self._reader.end()
        return replace(self._answer, body=bytes(self._body))


def _read(expected: Expected, status: int, headers: Mapping[str, str], chunks: Iterable[bytes]) -> Answer:
    parts = _Parts(expected, status, headers)
    for chunk in chunks:
        if not parts.add(chunk):
            break
    return parts.answer()


@contextmanager
def opened_directly(
    expected: Expected, url: str, headers: Mapping[str, str], body: bytes | None, read_s: float | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Send an HTTP request with Python's standard library, without proxies: POST if there is a body, else GET.

    read_s: limit of each read. Raises OSError and http.client.HTTPException for a server that does not answer.
    """
    import http.client  # with ssl and email, which a plan needs nowhere

    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=min(expected.total_s, read_s or expected.total_s))
    with closing(connection), Deadline(expected.total_s) as deadline:
        connection.connect()
        deadline.watch(connection.sock)
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        connection.request("GET" if body is None else "POST", target, body, {**ACCEPTED, **headers})
        with connection.getresponse() as response:
            yield response


def read_directly(expected: Expected, response: http.client.HTTPResponse) -> Answer:
    """Read a response from `opened_directly` to its end; raise the error of `expected` beyond its limits."""
    return _read(expected, response.status, dict(response.getheaders()), direct_chunks(response))


def direct_chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the chunks of an HTTP body as they arrive. Raises http.client.IncompleteRead for a cut-off body."""
    while chunk := response.read1(CHUNK_BYTES):
        yield chunk
    if response.length:  # `read1` does not look
        import http.client

        raise http.client.IncompleteRead(b"", response.length)


def httpx_client(**options: Any) -> httpx.Client:
    """Return an httpx client that reuses no connection, so that the time limit can shut down each request's socket."""
    import httpx

    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), **options)


def ask_httpx(client: httpx.Client, expected: Expected, method: str, url: str, **request: Any) -> Answer:
    """Send an HTTP request with httpx and return the whole response, within limits of size and time (`expected`).

    Raises httpx.TransportError and TimeoutError for no answer, `Expected.error` for one out of bounds.
    """
    headers = {**ACCEPTED, **request.pop("headers", {})}
    with Deadline(expected.total_s) as deadline:
        extensions = {"trace": deadline.trace}
        with client.stream(method, url, headers=headers, extensions=extensions, **request) as response:
            # `iter_raw`: httpx would decompress without a limit.
            return _read(expected, response.status_code, response.headers, response.iter_raw())


@asynccontextmanager
async def opened_aiohttp(
    session: aiohttp.ClientSession,
    expected: Expected,
    method: str,
    url: Any,
    read_s: float | None = None,
    **request: Any,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send an HTTP request with aiohttp, to read the answer in chunks. read_s: time limit of each read in seconds.

    Raises aiohttp.ClientError, OSError and TimeoutError for a server that does not answer.
    """
    import aiohttp

    # Not decompressed by aiohttp, which knows no limit of the size.
    options: Any = {"allow_redirects": False, "auto_decompress": False, "headers": ACCEPTED, **request}
    timeout = aiohttp.ClientTimeout(total=expected.total_s, sock_connect=read_s, sock_read=read_s)
    async with session.request(method, url, timeout=timeout, **options) as response:
        yield response


async def ask_aiohttp(
    session: aiohttp.ClientSession, expected: Expected, method: str, url: Any, **request: Any
) -> Answer:
    """Send an HTTP request with aiohttp and return the whole answer, within the limits of `expected`."""
    async with opened_aiohttp(session, expected, method, url, **request) as response:
        parts = _Parts(expected, response.status, response.headers)
        async for chunk in response.content.iter_any():
            if not parts.add(chunk):
                break
        return parts.answer()


def check_status(status: int, headers: Mapping[str, str], doing: str, token_variable: str) -> None:
    """Raise BusyError for an HTTP status that allows a retry, and DownloadError for any other error status."""
    if 200 <= status < 300:
        return
    if busy := busy_from_status(status, headers):
        raise busy
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        advice = f"set {token_variable} to a token that may read it"
    else:
        advice = "check that the repository still has this revision"
    raise DownloadError(f"{doing}: the server answered {status}; {advice}")


def check_part(response: httpx.Response, start: int, size_bytes: int, doing: str) -> None:
    """Raise DownloadError unless the server sends a file of `size_bytes` bytes from byte `start` on.

    A whole file may come without a length; then its reader counts.
    """
    if response.status_code == HTTPStatus.PARTIAL_CONTENT:
        content_range = response.headers.get("content-range", "")
        part = _PART.fullmatch(content_range)
        is_right = part is not None and (int(part[1]), int(part[3])) == (start, size_bytes)
        sent = f"a part with the Content-Range {quoted(content_range, HEADER_CHARACTERS)}"
    else:
        length = response.headers.get("content-length")
        is_right = start == 0 and (length is None or number_in(length) == size_bytes)
        sent = f"{shortened(length or 'all', HEADER_CHARACTERS)} bytes from the beginning"
    if not is_right:
        raise DownloadError(
            f"{doing}: the hub listed {size_bytes} bytes, of which those from byte {start} on were asked for, but the "
            f"server sends {sent}; the hub, a mirror or a proxy is wrong"
        )


class BusyError(Exception):
    """Raised when a request failed but may succeed later. retry_after_s: seconds that the server asks to wait."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class RetryBackoff:
    """Wait between retries of a request, which grows with each failure in a row and finally ends in an error."""

    def __init__(self, doing: str, stop: threading.Event | None = None, num_attempts: int = NUM_ATTEMPTS) -> None:
        self._doing = doing
        self._stop = stop or threading.Event()
        self._num_attempts = num_attempts
        self._failures = 0

    def progressed(self) -> None:
        """Reset a download's count of failures in a row, since some bytes have arrived."""
        self._failures = 0

    def wait(self, busy: BusyError) -> None:
        """Sleep before the next retry of a request. Raises TransientError when the retries are used up."""
        self._failures += 1
        wait_s = busy.retry_after_s if busy.retry_after_s is not None else FIRST_WAIT_S * 2 ** (self._failures - 1)
        if wait_s > LONGEST_WAIT_S:
            raise TransientError(f"{self._doing}: {busy}, and asks to wait {wait_s:.0f} s; try again then") from busy
        if self._failures == self._num_attempts:
            tried = f" ({self._num_attempts} attempts)" if self._num_attempts > 1 else ""
            raise TransientError(f"{self._doing}: {busy}{tried}; check the network, or try again later") from busy
        self._stop.wait(wait_s)


def busy_from_status(status: int, headers: Mapping[str, str]) -> BusyError | None:
    """Return a BusyError for an HTTP status that allows a retry; None for other statuses."""
    if status not in _BUSY_STATUSES:
        return None
    return BusyError(f"the server answered {status}", number_in(headers.get("retry-after", "")))


def busy_from_transport(error: Exception) -> BusyError:
    """Return a BusyError, which allows a retry, for a connection that failed or broke."""
    cause = shortened(str(error), 200)  # it may quote what the server sent
    return BusyError(f"the connection failed ({type(error).__name__}: {cause})")
