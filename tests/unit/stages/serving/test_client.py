"""The client of a serving engine reports malformed responses as errors. A healthy vLLM never sends these."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stages.core.errors import ServerError, TransientError
from stages.rollouts.asking import ask_all
from stages.serving.client import Client, check_server
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.vllm.engine import Vllm
from tests.http_server import serving

SPEC = LaunchSpec(model=Path("model"), served_name="sft", serving=ServingConfig(), engine_version="0.32")


class Handler(BaseHTTPRequestHandler):
    """HTTP server that answers each path with the content that the test has set."""

    answers: ClassVar[dict[str, Any]] = {}
    spans: ClassVar[list[str | None]] = []

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = self.answers.get(self.path)
        self.spans.append(self.headers["traceparent"])
        allowed = self.headers["Authorization"] == "Bearer right"
        self.send_response(404 if content is None else 200 if allowed else 401)
        self.end_headers()
        self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

    do_GET = do_POST = answer  # noqa: N815 (named by http.server)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    Handler.answers = {
        "/health": b"",
        "/v1/models": {"data": [{"id": "sft", "max_model_len": 256}]},
        "/v1/completions": completion([None, -2.0, -0.5]),
    }
    with serving(Handler) as url:
        yield Client(url, "right", "sft")


def completion(log_probabilities: list[float | None]) -> dict[str, Any]:
    return {"choices": [{"text": "1", "logprobs": {"token_logprobs": log_probabilities}}]}


def test_a_server_that_does_all_it_should_passes(client: Client) -> None:
    check_server(client, Vllm().smoke_log_probabilities)

    assert client.is_healthy()
    assert Vllm().context_tokens(client, SPEC) == 256


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_a_model_with_broken_weights_is_refused(client: Client, value: float) -> None:
    Handler.answers["/v1/completions"] = completion([None, -1.0, value])

    with pytest.raises(ServerError, match="finite numbers"):
        check_server(client, Vllm().smoke_log_probabilities)


def test_a_server_of_another_model_is_refused(client: Client) -> None:
    with pytest.raises(ServerError, match="serves sft, not dpo"):
        check_server(Client(client.url, "right", "dpo"), Vllm().smoke_log_probabilities)


def test_a_wrong_key_is_told_with_the_status(client: Client) -> None:
    with pytest.raises(ServerError, match="answered 401"):
        check_server(Client(client.url, "wrong", "sft"), Vllm().smoke_log_probabilities)


def test_something_else_than_vllm_is_told(client: Client) -> None:
    Handler.answers["/v1/models"] = b"<html>"

    with pytest.raises(ServerError, match="something else than JSON"):
        client.model_names()


def test_nobody_there_may_be_tried_again() -> None:
    client = Client("http://127.0.0.1:1", "right", "sft")

    assert not client.is_healthy()
    with pytest.raises(TransientError, match="does not answer"):
        client.model_names()


def test_counters_are_summed_over_their_labels(client: Client) -> None:
    Handler.answers["/metrics"] = (
        b'# TYPE a counter\na_total{reason="stop"} 2.0\na_total{reason="length"} 3.0\nab 9.0\n'
    )

    assert client.counter("a_total") == 5.0


def test_the_key_is_not_in_what_a_client_prints(client: Client) -> None:
    assert "right" not in repr(client)


def test_requests_carry_the_span_of_their_stage(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    span = f"00-{'a' * 32}-{'b' * 16}-01"
    Handler.spans.clear()
    for known in (span, "00-a-b-01", ""):
        monkeypatch.setenv("TRACEPARENT", known)
        client.model_names()
        ask_all(client, [(0, {"prompt": "1", "max_tokens": 1})], 1, lambda *_: None)
    assert Handler.spans == [span, span, *[None] * 4]
