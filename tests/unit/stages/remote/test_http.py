"""Malicious HTTP answers are refused or limited with each of the three HTTP libraries that we use."""

import asyncio
import gzip
import http.client
import os
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any

import aiohttp
import httpx
import pytest
from pydantic import NonNegativeInt

from stages.core.errors import DownloadError, ServerError
from stages.remote.http import (
    Answer,
    AnswerModel,
    EventReader,
    Expected,
    ask_aiohttp,
    ask_httpx,
    busy_from_status,
    httpx_client,
    opened_directly,
    read_directly,
)
from tests.lying_server import head, lying_server, whole

KEY = "key-0123456789"
Ask = Callable[[Expected, str], Answer]


class Listed(AnswerModel):
    size: NonNegativeInt
    share: float


def by_httpx(expected: Expected, url: str) -> Answer:
    with httpx_client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        return ask_httpx(client, expected, "POST", url, json={})


def by_aiohttp(expected: Expected, url: str) -> Answer:
    async def ask() -> Answer:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
            return await ask_aiohttp(session, expected, "POST", url, json={})

    return asyncio.run(ask())


def directly(expected: Expected, url: str) -> Answer:
    with opened_directly(expected, url, {"Authorization": f"Bearer {KEY}"}, b"{}") as response:
        return read_directly(expected, response)


@pytest.fixture(params=[by_httpx, by_aiohttp, directly])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param


def expected(url: str, **changed: Any) -> Expected:
    return Expected(f"the server at {url}", **{"max_bytes": 100_000, "total_s": 60.0, "key": KEY, **changed})


def answered(ask: Ask, sent: bytes, **changed: Any) -> Answer:
    with lying_server(lambda send, _: send(sent)) as server:
        return ask(expected(server.url, **changed), server.url)


@pytest.mark.parametrize("compress", [False, True])
def test_a_right_answer_is_read(ask: Ask, compress: bool) -> None:
    body = b'{"size": 3, "share": 1, "more": []}'
    sent = whole(gzip.compress(body), Content_Encoding="gzip") if compress else whole(body)
    answer = answered(ask, sent, max_bytes=len(body))
    assert (answer.body, answer.parsed(Listed)) == (body, Listed(size=3, share=1.0))


@pytest.mark.parametrize("compress", [False, True])
def test_an_endless_body_is_left_at_its_limit(ask: Ask, compress: bool) -> None:
    endless = gzip.compress(bytes(100 * 2**20)) if compress else b"x" * 65536
    num_sent = 0

    def answer(send: Callable[[bytes], None], _: bytes) -> None:
        nonlocal num_sent
        send(head(Content_Encoding="gzip") if compress else head())
        for part in [endless] if compress else repeat(endless):
            send(part)
            num_sent += len(part)

    with lying_server(answer) as server, pytest.raises(ServerError, match="answered with more than 100000 bytes"):
        ask(expected(server.url), server.url)
    assert num_sent < 20 * 2**20


@pytest.mark.parametrize("begins", [b"HTTP/1.1 200 OK\r\nX-Slow: ", head(), head(Content_Encoding="gzip")])
def test_dribbled_bytes_end_with_the_time_of_the_whole_answer(ask: Ask, begins: bytes) -> None:
    def answer(send: Callable[[bytes], None], _: bytes) -> None:
        send(begins)
        for byte in gzip.compress(os.urandom(10_000)) if b"gzip" in begins else repeat(ord("x")):
            send(bytes([byte]))
            time.sleep(0.02)

    began_s = time.monotonic()
    with lying_server(answer) as server, pytest.raises(TimeoutError):
        ask(expected(server.url, total_s=0.2), server.url)
    assert time.monotonic() - began_s < 60, "all bytes take more than 200 s"


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("gzip", b"not gzip", "broken gzip"),
        ("gzip", gzip.compress(b"{}" * 1000, mtime=0)[:-9], "its end is missing"),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"{}", "more follows"),
        ("br", b"{}", "content encoding 'br'"),
        ("gzip, gzip", b"{}", "content encoding 'gzip, gzip'"),
    ],
)
def test_broken_compression_is_an_error_of_the_server(ask: Ask, encoding: str, body: bytes, message: str) -> None:
    with pytest.raises(DownloadError, match=rf"the server at http://127\.0\.0\.1:\d+ answered .*{message}"):
        answered(ask, whole(body, Content_Encoding=encoding), error=DownloadError)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b"null",
        b'{"size": -5, "share": 0}',
        b'{"size": "9", "share": 0}',
        b'{"size": 1.5, "share": 0}',
        b'{"size": true, "share": 0}',
        b'{"size": 1, "share": NaN}',
        b'{"size": 1, "share": -Infinity}',
        b'{"size": 1, "share": 1e999}',
        b'{"size": 1, "share": 0, "more": NaN}',
        b'{"size": 1, "share": 0, "more": "\\ud800"}',
        b'{"size": 1, "share": 0, "more": "\xed\xa0\x80"}',
        b'{"size": 1, "share": 0, "more": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"size": ' + b"1" * 5000 + b', "share": 0}',
        b'{"size": 1, "share": 0} {}',
    ],
)
def test_json_of_another_form_names_the_server_and_shows_what_it_sent(body: bytes) -> None:
    with pytest.raises(ServerError, match=r"the server at x answered with .*: '") as caught:
        Answer(expected("x"), 200, {}, body).parsed(Listed)
    assert len(str(caught.value)) < 500


def test_a_redirect_is_no_success_and_the_key_does_not_follow_it(ask: Ask) -> None:
    with lying_server(lambda send, _: send(whole(b"{}"))) as other:
        with pytest.raises(ServerError, match=f"answered 307, a redirect to '{other.url}/steal'"):
            answered(ask, whole(b"", "307 Moved", Location=f"{other.url}/steal")).check()
        assert not other.requests


@pytest.mark.parametrize(
    ("encoding", "encoded", "shown"),
    [
        ("identity", bytes, r"no: Bearer \*\*\* xxx"),
        ("gzip", gzip.compress, r"no: Bearer \*\*\* xxx"),
        ("br", bytes, "'"),
    ],
)
def test_an_error_is_shown_by_its_beginning_without_the_key(
    ask: Ask, encoding: str, encoded: Callable[[bytes], bytes], shown: str
) -> None:
    body = encoded(f"no: Bearer {KEY} {'x' * 300_000}".encode())
    with pytest.raises(ServerError, match=f"answered 401: '{shown}") as caught:
        answered(ask, whole(body, "401 No", Content_Encoding=encoding)).check()
    assert len(str(caught.value)) < 400


def test_an_answer_that_breaks_off_is_no_answer(ask: Ask) -> None:
    with pytest.raises((httpx.TransportError, aiohttp.ClientError, http.client.HTTPException)):
        answered(ask, head(Content_Length="99") + b"{}")


def test_events_are_read_however_they_arrive() -> None:
    reader = EventReader(expected("x"), {}, dict[str, int])
    stream = b': hello\r\ndata: {"a": 1}\r\n\r\ndata:{"a": 2}\n\nevent: end\ndata: [DONE]\n\n'
    assert [event for byte in stream for event in reader.add(bytes([byte]))] == [{"a": 1}, {"a": 2}]
    reader.end()


@pytest.mark.parametrize("sent", [b"data: []\n", b"data: <html>\n", b"data: " + b"x" * 100_000])
def test_events_that_are_none_are_errors_of_the_server(sent: bytes) -> None:
    with pytest.raises(ServerError, match="the server at x answered with "):
        list(EventReader(expected("x"), {}, dict[str, int]).add(sent))


def test_events_that_break_off_are_an_error_of_the_server() -> None:
    reader = EventReader(expected("x"), {}, dict[str, int])
    assert list(reader.add(b'data: {"a": 1}\n\ndata: {"a"')) == [{"a": 1}]
    with pytest.raises(ServerError, match="the server at x broke its answer off"):
        reader.end()


@pytest.mark.parametrize(
    ("header", "waits_s"),
    [("3", 3), ("", None), ("²", None), ("٣", None), ("-1", None), ("1.5", None), ("9" * 5000, None), ("soon", None)],
)
def test_what_a_server_asks_to_wait_is_a_number_or_nothing(header: str, waits_s: float | None) -> None:
    busy = busy_from_status(503, {"retry-after": header})
    assert busy
    assert busy.retry_after_s == waits_s
