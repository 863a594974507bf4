"""The few requests that we make of a server ourselves: is it ready, is it ours, does it generate and score."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stages.core.errors import ServerError, TransientError
from stages.models.recorded import Predicted

EVENT = b"data:"
END_OF_EVENTS = b"[DONE]"


@dataclass(frozen=True)
class Client:
    """Speaks to one server. url: without `/v1`. Raises ServerError for a bad answer, TransientError for none."""

    url: str
    api_key: str = field(repr=False)
    model: str
    timeout_s: float = 120.0

    def is_healthy(self) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            self._request("/health", timeout_s=5.0)
        except (ServerError, TransientError):
            return False
        return True

    def model_names(self) -> list[str]:
        """What the server serves; needs the right key."""
        return [model["id"] for model in self.models()]

    def models(self) -> list[dict[str, Any]]:
        """What the server says of each model that it serves."""
        models: list[dict[str, Any]] = self._json("/v1/models")["data"]
        return models

    def described(self, path: str) -> Any:
        """What it answers to a GET."""
        return self._json(path)

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """The first choice of a greedy completion; `options` as in the OpenAI API."""
        request = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        choice: dict[str, Any] = self.answer("/v1/completions", request)["choices"][0]
        return choice

    def answer(self, path: str, request: dict[str, Any]) -> Any:
        """What it answers to a POST."""
        return self._json(path, request)

    def log_probabilities(self, token_ids: list[int]) -> list[float]:
        """ln p(token | those before it) of every token but the first: `len(token_ids) - 1` floats."""
        return list(self.predictions([token_ids])[0].log_probabilities)

    def predictions(self, rows: list[list[int]]) -> list[Predicted]:
        """The same of several rows of tokens, and the likeliest token in the place of each, in one request."""
        return [_predicted(one, len(row)) for one, row in zip(self.echoed(rows), rows, strict=True)]

    def echoed(self, rows: list[list[int]]) -> list[dict[str, Any]]:
        """What the server reports of each row's tokens: the `logprobs` of a completion that echoes its prompt."""
        request = {"model": self.model, "prompt": rows, "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
        answer = self._json("/v1/completions", {**request, "return_tokens_as_token_ids": True})
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return [choice["logprobs"] for choice in choices]

    def chat(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The answer to a conversation, in parts as the model makes them."""
        body = {"model": self.model, "messages": messages, "stream": True}
        with self._opened("/v1/chat/completions", body) as answer:
            for line in answer:
                event = line.removeprefix(EVENT).strip()
                if not line.startswith(EVENT) or event == END_OF_EVENTS:
                    continue
                content = json.loads(event)
                if "error" in content:
                    raise ServerError(f"{self.url} broke its answer off: {content['error']}")
                yield from (part for choice in content["choices"] if (part := choice["delta"].get("content")))

    def counter(self, name: str) -> float:
        """Sum over the samples of a counter in `/metrics`, such as `vllm:request_success_total`."""
        lines = self._request("/metrics").decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._request(path, body)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise ServerError(f"{self.url}{path} answered with something else than JSON: {answer[:200]!r}") from error

    def _request(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> bytes:
        with self._opened(path, body, timeout_s) as response:
            content: bytes = response.read()
            return content

    @contextmanager
    def _opened(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Iterator[Any]:
        """The response, to be read."""
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310 (our own http:// address)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self.timeout_s) as response:  # noqa: S310
                yield response
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self.url}{path} answered {error.code}: {error.read()[:500]!r}") from error
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"{self.url}{path} does not answer: {error}") from error


def _predicted(logprobs: dict[str, Any], num_tokens: int) -> Predicted:
    """Of all tokens of a prompt but the first; each is called `token_id:NUMBER`."""
    likeliest = [max(top, key=lambda token: float(top[token])) for top in logprobs["top_logprobs"][1:num_tokens]]
    return Predicted(
        [float(value) for value in logprobs["token_logprobs"][1:num_tokens]],
        [int(token.removeprefix("token_id:")) for token in likeliest],
    )


def check_server(client: Client, smoke_log_probabilities: Callable[[Client], list[float]]) -> None:
    """Raise ServerError unless the server serves our model, and generates with finite log-probabilities ≤ 0.

    smoke_log_probabilities: that of the server's engine.
    """
    names = client.model_names()
    if client.model not in names:
        raise ServerError(f"the server at {client.url} serves {', '.join(names)}, not {client.model}")
    values = smoke_log_probabilities(client)
    if not all(math.isfinite(value) and value <= 0 for value in values):
        raise ServerError(
            f"{client.model} gives log-probabilities {values} for its own answer; expected finite numbers ≤ 0: "
            "the weights hold NaN or inf, or the dtype is too narrow for them"
        )
