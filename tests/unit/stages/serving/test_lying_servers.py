"""Malicious servers cause a ServerError in every request of our client, and no traceback, hang or leak."""

import gzip
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import ServerError, TransientError
from stages.remote import http
from stages.rollouts.asking import ask_all
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.config import BenchmarkConfig
from stages.serving.exchange import Exchange
from stages.serving.llama_cpp.queries import meta_of, predictions, tokenize
from stages.serving.packaged import LMDEPLOY
from stages.serving.streamed_load import generate_load
from stages.serving.vllm.swap import check_takes_weights, reload_weights
from tests.lying_server import head, lying_server, whole

KEY = "a-key-that-is-secret"
Ask = Callable[[Client], object]


def sampled(client: Client) -> None:
    request = {"model": "m", "prompt": [1, 2], "max_tokens": 4}
    ask_all(client, [(1, request)], 1, lambda job, request, answer: answer.choices[0].written("the server"))


def loaded(client: Client) -> None:
    reload_weights(EngineAddress(named=client.url), client.api_key, Path("weights"), 60.0)


def tokenized(client: Client) -> object:
    return tokenize(EngineAddress(named=client.url), client.api_key, ["a"], add_special=False)


ASKED: dict[str, Ask] = {
    "models": lambda client: client.model_names(),
    "context": lambda client: client.context_tokens(),
    "completion": lambda client: client.complete("a", max_tokens=4).written("the server"),
    "predictions": lambda client: client.predictions([[1, 2, 3]]),
    "chat": lambda client: list(client.chat([{"role": "user", "content": "a"}])),
    "completions": sampled,
    "tokens": tokenized,
    "named": lambda client: check_takes_weights(client, 8, "float32"),
    "llama_cpp": meta_of,
    "llama_cpp predictions": lambda client: predictions(client, [[1, 2]]),
    "lmdeploy": LMDEPLOY.smoke_log_probabilities,
}
BOMB = gzip.compress(bytes(8 * 2**20))
EVENT = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


def answered(ask: Ask, sent: bytes) -> str:
    """Return the error message that a malicious answer of a server leads to."""
    with lying_server(lambda send, _: send(sent)) as server:
        with pytest.raises(ServerError) as caught:
            ask(Client(server.url, KEY, "m", timeout_s=60.0))
        return str(caught.value).replace(server.url, "URL")


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b"<html>",
        b'{"data": [], "choices": [], "tokens": [NaN]}',
        b'{"data": {}, "choices": {}, "tokens": {}, "vllm_config": []}',
        b'{"data": [{}], "choices": [{}], "tokens": [-1], "vllm_config": {}}',
        b'{"data": [{"id": 5}], "choices": [{"text": 5}], "tokens": ["5"]}',
        b'{"data": ' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"data": [{"id": "\\ud800"}]}',
    ],
)
def test_answers_of_another_form_are_errors(name: str, body: bytes) -> None:
    if name == "chat":
        body = b"data: " + body + b"\n\n"
    message = answered(ASKED[name], whole(body))
    assert len(message) < 900
    assert "URL" in message or "asking llama.cpp" in message or "the server answered with a completion" in message


@pytest.mark.parametrize("name", [*ASKED, "reload"])
def test_a_redirect_is_an_error_and_the_key_goes_to_no_other_host(name: str) -> None:
    with lying_server(lambda send, _: send(whole(b"{}"))) as other:
        moved = whole(b"", "307 Moved", Location=f"{other.url}/steal")
        message = answered({**ASKED, "reload": loaded}[name], moved)
        assert f"answered 307, a redirect to '{other.url}/steal'" in message
        assert not other.requests


@pytest.mark.parametrize("name", [*ASKED, "reload"])
def test_what_is_too_large_is_left(name: str) -> None:
    message = answered({**ASKED, "reload": loaded}[name], whole(BOMB, Content_Encoding="gzip"))
    assert re.search(r"answered with (an event of )?more than \d+ bytes", message)


@pytest.mark.parametrize("name", [*ASKED, "reload"])
def test_an_error_shows_what_the_server_says_without_the_key(name: str) -> None:
    message = answered({**ASKED, "reload": loaded}[name], whole(f"bad {KEY} {'x' * 9999}".encode(), "400 Bad"))
    assert "answered 400: 'bad *** xxx" in message
    assert len(message) < 900


@pytest.mark.parametrize("name", [*ASKED, "reload"])
@pytest.mark.parametrize("sent", [b"", b"\xff\0" * 9999, b"HTTP/1.1 abc\r\n\r\n", head(Content_Length="-5") + b"{}"])
def test_what_is_no_http_is_no_answer(name: str, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
    with lying_server(lambda send, _: send(sent)) as server, pytest.raises((TransientError, ServerError)) as caught:
        {**ASKED, "reload": loaded}[name](Client(server.url, KEY, "m", timeout_s=60.0))
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize("name", ["models", "completions", "tokens"])
def test_a_server_that_dribbles_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(send: Callable[[bytes], None], _: bytes) -> None:
        send(head())
        while True:
            send(b" ")
            time.sleep(0.01)

    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("stages.serving.llama_cpp.queries.TOKENIZE_TIMEOUT_S", 0.1)
    with lying_server(answer) as server, pytest.raises(TransientError):
        ASKED[name](Client(server.url, KEY, "m", timeout_s=0.1))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (EVENT, "broke its answer off"),
        (EVENT + 'data: {"error": {"message": "out of memory"}}\n\n', 'broke its answer off: \'{"message": "out of'),
        (EVENT + "data: {\n\n", "something else than JSON"),
        ('data: {"choices": [{"delta": {"content": 5}}]}\n\n', "choices.0.delta.content"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(stream: str, message: str) -> None:
    assert message in answered(ASKED["chat"], whole(stream.encode(), Content_Type="text/event-stream"))


def test_a_load_that_is_answered_with_lies_has_failed(tmp_path: Path) -> None:
    benchmark = BenchmarkConfig(concurrencies=(1,), requests_per_concurrency=2, input_tokens=3, output_tokens=5)
    usage = 'data: {"choices": [], "usage": {"completion_tokens": Infinity}}\n\ndata: [DONE]\n\n'
    for stream in (EVENT + usage, EVENT, "data: []\n\n", "x" * 2**21):
        with lying_server(lambda send, _, sent=stream: send(whole(sent.encode()))) as server:
            (result,) = generate_load(Client(server.url, KEY, "m"), 9, benchmark, tmp_path)
        assert (result.num_requests, result.num_failed) == (2, 2)


@pytest.mark.parametrize("counted", ["1e999", "-1", "1e300", '"5"', "[]", "9" * 40, "true"])
def test_odd_counts_and_reasons_of_an_engine_are_not_counted(counted: str) -> None:
    exchange = Exchange({})
    exchange.begin(200, "application/json", None)
    usage = f'{{"prompt_tokens": {counted}, "completion_tokens": 3}}'
    choices: list[dict[str, Any]] = [{"index": 0, "finish_reason": {"a": 1}}, {"index": 1, "finish_reason": "stop"}]
    exchange.passed(f'{{"usage": {usage}, "choices": {json.dumps(choices)}}}'.encode())
    exchange.end()
    assert (exchange.prompt_tokens, exchange.completion_tokens) == (0, 3)
    assert exchange.finish_reasons == ["stop"]
