"""Client of an OpenAI-compatible server: health, models, completions, chats, log-probabilities; answers are checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pydantic import Field

from stages.core.errors import ServerError, TransientError
from stages.core.redaction import quoted, shortened
from stages.models.recorded import Predicted
from stages.remote.http import (
    QUOTED_CHARACTERS,
    Answer,
    AnswerModel,
    EventReader,
    Expected,
    direct_chunks,
    number_in,
    opened_directly,
    read_directly,
    server_headers,
)

if TYPE_CHECKING:
    import http.client

Count = Annotated[int, Field(ge=0, le=2**53)]
Shape = TypeVar("Shape")
Value = TypeVar("Value")

NUMBERED = "token_id:"
"""Prefix of token ids in answers that name tokens by id instead of text (option `return_tokens_as_token_ids`)."""
BASE_BYTES = 2**20
TOKEN_BYTES = 512
"""Upper bound of the JSON bytes of one token in an answer: some 100 characters of up to 6 bytes each."""
DEFAULT_TOKENS = 128 * 1024
"""Number of answer tokens by which a response's size is limited if its request sets no `max_tokens`."""


HEALTH_TIMEOUT_S = 5.0
STREAM_TIMEOUT_S = 3600.0
"""Time limit of a whole streamed answer, in seconds."""
METRICS_BYTES = 32 * 2**20
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Client:
    """Client of an OpenAI-compatible server; raises ServerError for a bad answer, TransientError for none.

    url: without `/v1`. model: name that requests ask for.
    """

    url: str
    api_key: str = field(repr=False)
    model: str
    timeout_s: float = 120.0

    def expected(self, path: str, max_bytes: int, total_s: float | None = None) -> Expected:
        """Return the limits of size and time within which the client accepts an answer from its server."""
        return Expected(f"{self.url}{path}", max_bytes, total_s or self.timeout_s, key=self.api_key)

    def is_healthy(self) -> bool:
        """Return whether the server answers and its engine is alive."""
        return self.health_status() == HTTPStatus.OK

    def health_status(self) -> int | None:
        """Return the HTTP status of the server's `/health` route; None if the server does not answer in time."""
        try:
            return self._asked("/health", BASE_BYTES, total_s=HEALTH_TIMEOUT_S).status
        except (ServerError, TransientError):
            return None

    def model_names(self) -> list[str]:
        """Return the names of the models that the server serves; raises ServerError for a wrong API key."""
        return [model.id for model in self.models()]

    def models(self) -> list[ListedModel]:
        return self.answer("/v1/models", Models[ListedModel]).data

    def check_lists_model(self, server: str, advice: str = "") -> None:
        """Raise ServerError, ending with `advice`, unless the server (named `server`) lists this client's model."""
        if self.model not in (names := self.model_names()):
            serves = shortened(", ".join(names), QUOTED_CHARACTERS)
            raise ServerError(f"{server} at {self.url} serves {serves}, not {self.model}{advice}")

    def context_tokens(self) -> int:
        """Return the context length (prompt and answer together) that the server reports for its first listed model."""
        listed = self.models()
        if not listed or listed[0].max_model_len is None:
            raise ServerError(f"{self.url}/v1/models lists no model with a `max_model_len`")
        return listed[0].max_model_len

    def complete(self, prompt: str | list[int], **options: Any) -> Choice:
        """Return a greedy completion of a prompt (text or token ids); `options` are fields of OpenAI's request."""
        request = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        return self.answer(COMPLETIONS, Choices[Choice], request).choices[0]

    def answer(self, path: str, shape: type[Shape], request: dict[str, Any] | None = None) -> Shape:
        """Send a GET request to the server, or a POST if `request` is given; return the parsed JSON answer."""
        max_bytes = BASE_BYTES if request is None else answer_bytes(request)
        return self._asked(path, max_bytes, request).parsed(shape)

    def log_probabilities(self, token_ids: list[int]) -> list[float]:
        """Return the model's ln p of every given token but the first, each after the tokens before it."""
        return list(self.predictions([token_ids])[0].log_probabilities)

    def predictions(self, rows: list[list[int]]) -> list[Predicted]:
        """Return the server's ln p and likeliest token at each given token but a sequence's first."""
        return [self._predicted(echoed, len(row)) for echoed, row in zip(self.echoed(rows), rows, strict=True)]

    def echoed(self, rows: list[list[int]]) -> list[TokenLogProbs]:
        """Return the `logprobs` that the server gives for token sequences sent as prompts with `echo`."""
        request = {"model": self.model, "prompt": rows, "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
        answer = self.answer(COMPLETIONS, Choices[Choice], {**request, "return_tokens_as_token_ids": True})
        choices = sorted(answer.choices, key=lambda choice: choice.index)  # one for each prompt, in any order
        if len(choices) != len(rows):
            raise ServerError(f"{self.url} answered to {len(choices)} of {len(rows)} prompts")
        return [choice.reported(self.url) for choice in choices]

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Iterator[str]:
        """Yield the answer to a chat in pieces as the server streams them; `options` are fields of OpenAI's request."""
        request = {"model": self.model, "messages": messages, "stream": True, **options}
        expected = self.expected(CHAT, answer_bytes(request), STREAM_TIMEOUT_S)
        with self._opened(CHAT, expected, request) as response:
            if response.status != HTTPStatus.OK:
                raise read_directly(expected, response).refusal()
            events = EventReader(expected, dict(response.getheaders()), ChatEvent)
            for chunk in direct_chunks(response):
                for event in events.add(chunk):
                    if event.error is not None:
                        raise ServerError(f"{self.url} broke its answer off: {quoted(event.error, QUOTED_CHARACTERS)}")
                    yield from (choice.delta.content for choice in event.choices if choice.delta.content)
            events.end()

    def prompt_tokens(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the token ids into which the server's chat template turns a conversation."""
        request = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 1, **options}
        return self.answer(CHAT, ChatPrompt, {**request, "return_token_ids": True}).prompt_token_ids

    def counter(self, name: str) -> float:
        """Return a Prometheus counter of `/metrics`, such as `vllm:request_success_total`, summed over its labels."""
        lines = self._asked("/metrics", METRICS_BYTES).check().body.decode(errors="replace").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def _predicted(self, logprobs: TokenLogProbs, num_tokens: int) -> Predicted:
        """Return ln p and the likeliest token at each token of an echoed prompt but the first."""
        # Each entry lists the prompt's own token, too, beside the likeliest.
        likeliest = [max(top, key=lambda name: top[name]) for top in logprobs.likeliest_of_prompt(num_tokens, self.url)]
        return Predicted(logprobs.of_prompt(num_tokens, self.url), [token_number(name, self.url) for name in likeliest])

    def _asked(
        self, path: str, max_bytes: int, request: dict[str, Any] | None = None, total_s: float | None = None
    ) -> Answer:
        expected = self.expected(path, max_bytes, total_s)
        with self._opened(path, expected, request) as response:
            return read_directly(expected, response)

    @contextmanager
    def _opened(
        self, path: str, expected: Expected, request: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request to the server, and provide the HTTP response for reading."""
        import http.client  # with ssl and email, which a plan needs nowhere

        headers = {**server_headers(self.api_key), "Content-Type": "application/json"}
        body = None if request is None else json.dumps(request).encode()
        try:
            with opened_directly(expected, self.url + path, headers, body, self.timeout_s) as response:
                yield response
        except (OSError, http.client.HTTPException) as error:
            cause = shortened(str(error), QUOTED_CHARACTERS)  # it may quote what the server sent
            raise TransientError(f"{self.url}{path} does not answer: {cause}") from error


def check_server(client: Client, smoke_log_probabilities: Callable[[Client], list[float]]) -> None:
    """Raise ServerError unless the server lists its model and generates tokens with finite log-probabilities ≤ 0.

    smoke_log_probabilities: request of the server's engine that returns a few log-probabilities.
    """
    client.check_lists_model("the server")
    expected = "expected finite numbers ≤ 0: the weights hold NaN or inf, or the dtype is too narrow for them"
    try:
        values = smoke_log_probabilities(client)
    except ServerError as error:
        raise ServerError(f"{error}; if these are log-probabilities, {expected}") from error
    if not values or not all(math.isfinite(value) and value <= 0 for value in values):
        shown = shortened(str(values), QUOTED_CHARACTERS)
        raise ServerError(f"{client.model} gives log-probabilities {shown} for its own answer; {expected}")


class Usage(AnswerModel):
    """Token counts reported by the server for one answer; None where it reports none."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class TokenLogProbs(AnswerModel):
    """Log-probabilities of the tokens of a completion; None for a prompt's first token, which nothing precedes."""

    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None

    def of_prompt(self, num_tokens: int, server: str) -> list[float]:
        """Return ln p of every token but the first of an echoed prompt. Raises ServerError if some are missing."""
        return _all(self.token_logprobs[1:num_tokens], num_tokens - 1, server)

    def likeliest_of_prompt(self, num_tokens: int, server: str) -> list[dict[str, float]]:
        """Return ln p of the likeliest tokens at each prompt token but the first; raise ServerError if some lack it."""
        return _all([top or None for top in (self.top_logprobs or ())[1:num_tokens]], num_tokens - 1, server)


class Choice(AnswerModel):
    """Completion in an answer of the server; vLLM adds token ids where the request has `return_token_ids`."""

    index: Count = 0
    text: str | None = None
    finish_reason: str | None = None
    logprobs: TokenLogProbs | None = None
    prompt_token_ids: list[Count] | None = None
    token_ids: list[Count] | None = None

    def written(self, server: str) -> str:
        if self.text is None:
            raise ServerError(f"{server} answered with a completion that has no text")
        return self.text

    def sampled(self, server: str) -> tuple[list[int], list[float]]:
        """Return the sampled token ids and ln p of each. Raises ServerError unless there are equally many of both."""
        values = [value for value in self.reported(server).token_logprobs if value is not None]
        if self.token_ids is None or len(values) != len(self.token_ids):
            count = "no tokens" if self.token_ids is None else f"{len(self.token_ids)} tokens"
            raise ServerError(f"{server} answered with {count} and {len(values)} log-probabilities; expected one each")
        return self.token_ids, values

    def reported(self, server: str) -> TokenLogProbs:
        """Return the log-probabilities that came with a completion. Raises ServerError if there are none."""
        if self.logprobs is None:
            raise ServerError(f"{server} returned no log-probabilities, which were requested")
        return self.logprobs


class Choices(AnswerModel, Generic[Shape]):
    """Answer of the server to a completion or chat request: its choices and token counts."""

    choices: Annotated[list[Shape], Field(min_length=1)]
    usage: Usage | None = None


class Message(AnswerModel):
    """Text of a chat answer, or of the piece of an answer in one event of a stream."""

    content: str | None = None


class ChatToken(AnswerModel):
    """Log-probability of one token of a chat answer."""

    logprob: float


class ChatLogProbs(AnswerModel):
    """Log-probabilities of the tokens of a chat answer."""

    content: list[ChatToken] | None = None


class ChatChoice(AnswerModel):
    """Choice in the server's answer to a chat: the message and, if requested, its log-probabilities."""

    message: Message
    finish_reason: str | None = None
    logprobs: ChatLogProbs | None = None


class ChatAnswer(Choices[ChatChoice]):
    """Answer to a chat; vLLM adds the prompt's token ids where the request has `return_token_ids`."""

    prompt_token_ids: list[Count] | None = None


class ChatPrompt(AnswerModel):
    """Token ids of a chat's prompt as vLLM's chat template made them, returned for `return_token_ids`."""

    prompt_token_ids: list[Count]


class EventChoice(AnswerModel):
    """Piece of an answer in one event of a streamed chat."""

    delta: Message = Message()


class ChatEvent(AnswerModel):
    """Event of a streamed chat or completion; the last may hold only `usage`. error: why the server ended it early."""

    choices: list[EventChoice] = Field(default_factory=list)
    usage: Usage | None = None
    error: Any = None


class Models(AnswerModel, Generic[Shape]):
    """List of models in the server's answer at `/v1/models`."""

    data: list[Shape]


class ListedModel(AnswerModel):
    """Entry of the server's model list. max_model_len: length of prompt and answer together; None if unreported."""

    id: str
    max_model_len: Annotated[int, Field(gt=0)] | None = None


def _all(values: Sequence[Value | None], count: int, server: str) -> list[Value]:
    present = [value for value in values if value is not None]
    if len(present) < count:
        raise ServerError(f"{server} gave log-probabilities of {len(present)} of {count} tokens of a prompt")
    return present


def answer_bytes(request: Mapping[str, Any]) -> int:
    """Return an upper bound of an answer's bytes, from requested tokens and log-probabilities (of prompts too)."""
    prompt = request.get("prompt") or []
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    of_prompts = sum(map(len, prompts))  # of a text, there are fewer tokens than characters
    answers = (request.get("n") or 1) * max(1, len(prompts))
    tokens = answers * (request.get("max_tokens") or DEFAULT_TOKENS) + (of_prompts if request.get("echo") else 0)
    return BASE_BYTES + (of_prompts + tokens * (2 + int(request.get("logprobs") or 0))) * TOKEN_BYTES


def token_number(name: str, server: str) -> int:
    """Return the token id in a token's name of the form `token_id:NUMBER`. Raises ServerError for another form."""
    number = number_in(name.removeprefix(NUMBERED)) if name.startswith(NUMBERED) else None
    if number is None or number >= 2**31:
        raise ServerError(f"{server} calls a token {quoted(name, 50)}; expected `{NUMBERED}` and its number")
    return number
