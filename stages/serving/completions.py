"""Answers of OpenAI's API as they are checked, and how large they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from stages.core.errors import ServerError
from stages.core.redaction import quoted
from stages.remote.http_answers import AnswerModel, number_in

Count = Annotated[int, Field(ge=0, le=2**53)]
Shape = TypeVar("Shape")
Value = TypeVar("Value")

NUMBERED = "token_id:"
"""Before the number of a token, where a server is asked for numbers in the place of texts."""
BASE_BYTES = 2**20
TOKEN_BYTES = 512
"""JSON around and of one token; a token has some 100 characters at most, and a character up to 6 bytes in JSON."""
DEFAULT_TOKENS = 128 * 1024
"""Of an answer for which no `max_tokens` is sent."""


class Usage(AnswerModel):
    """Tokens as the server counts them; None where it does not say."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class TokenLogProbs(AnswerModel):
    """Log-probabilities by token. None: of the first token of a prompt."""

    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None

    def of_prompt(self, num_tokens: int, server: str) -> list[float]:
        """Return ln p of every token but the first of an echoed prompt. Raises ServerError when some are missing."""
        return _all(self.token_logprobs[1:num_tokens], num_tokens - 1, server)

    def likeliest_of_prompt(self, num_tokens: int, server: str) -> list[dict[str, float]]:
        """Return ln p of the likeliest tokens in the place of every token but the first. Raises as `of_prompt` does."""
        return _all([top or None for top in (self.top_logprobs or ())[1:num_tokens]], num_tokens - 1, server)


class Choice(AnswerModel):
    """A completion. The last two are vLLM's, asked for by `return_token_ids`."""

    index: Count = 0
    text: str | None = None
    finish_reason: str | None = None
    logprobs: TokenLogProbs | None = None
    prompt_token_ids: list[Count] | None = None
    token_ids: list[Count] | None = None

    def written(self, server: str) -> str:
        """Return the text of the completion. Raises ServerError when there is none."""
        if self.text is None:
            raise ServerError(f"{server} answered with a completion that has no text")
        return self.text

    def sampled(self, server: str) -> tuple[list[int], list[float]]:
        """Return the tokens of the completion and ln p of each. Raises ServerError unless there are as many of both."""
        values = [value for value in self.reported(server).token_logprobs if value is not None]
        if self.token_ids is None or len(values) != len(self.token_ids):
            count = "no tokens" if self.token_ids is None else f"{len(self.token_ids)} tokens"
            raise ServerError(f"{server} answered with {count} and {len(values)} log-probabilities; expected one each")
        return self.token_ids, values

    def reported(self, server: str) -> TokenLogProbs:
        """Return the log-probabilities. Raises ServerError when there are none."""
        if self.logprobs is None:
            raise ServerError(f"{server} gave no log-probabilities, which it was asked for")
        return self.logprobs


class Choices(AnswerModel, Generic[Shape]):
    """An answer to a request for completions or for a chat."""

    choices: Annotated[list[Shape], Field(min_length=1)]
    usage: Usage | None = None


class Message(AnswerModel):
    """The text of a chat's answer, or the part that an event adds."""

    content: str | None = None


class ChatToken(AnswerModel):
    """A token of a chat's answer."""

    logprob: float


class ChatLogProbs(AnswerModel):
    """Log-probabilities of a chat's answer."""

    content: list[ChatToken] | None = None


class ChatChoice(AnswerModel):
    """An answer to a chat."""

    message: Message
    logprobs: ChatLogProbs | None = None


class ChatPrompt(AnswerModel):
    """The prompt of a chat as the server made it; vLLM's, asked for by `return_token_ids`."""

    prompt_token_ids: list[Count]


class EventChoice(AnswerModel):
    """What an event adds to an answer."""

    delta: Message = Message()


class ChatEvent(AnswerModel):
    """An event of a streamed chat or completion; the last one may hold the usage alone. error: why it breaks off."""

    choices: list[EventChoice] = Field(default_factory=list)
    usage: Usage | None = None
    error: Any = None


class Models(AnswerModel, Generic[Shape]):
    """The models that a server lists."""

    data: list[Shape]


class ListedModel(AnswerModel):
    """A model as every server lists it. max_model_len: tokens of a prompt and its answer, where the server says it."""

    id: str
    max_model_len: Annotated[int, Field(gt=0)] | None = None


def _all(values: Sequence[Value | None], count: int, server: str) -> list[Value]:
    present = [value for value in values if value is not None]
    if len(present) < count:
        raise ServerError(f"{server} gave log-probabilities of {len(present)} of {count} tokens of a prompt")
    return present


def answer_bytes(request: Mapping[str, Any]) -> int:
    """Return the largest size of an honest answer to a request: of the tokens and log-probabilities asked for.

    Echoed prompts are answered with theirs, which makes large answers of right.
    """
    prompt = request.get("prompt") or []
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    of_prompts = sum(map(len, prompts))  # of a text, there are fewer tokens than characters
    answers = (request.get("n") or 1) * max(1, len(prompts))
    tokens = answers * (request.get("max_tokens") or DEFAULT_TOKENS) + (of_prompts if request.get("echo") else 0)
    return BASE_BYTES + (of_prompts + tokens * (2 + int(request.get("logprobs") or 0))) * TOKEN_BYTES


def token_number(name: str, server: str) -> int:
    """Return the number of a token that is called `token_id:NUMBER`. Raises ServerError for another name."""
    number = number_in(name.removeprefix(NUMBERED)) if name.startswith(NUMBERED) else None
    if number is None or number >= 2**31:
        raise ServerError(f"{server} calls a token {quoted(name, 50)}; expected `{NUMBERED}` and its number")
    return number
