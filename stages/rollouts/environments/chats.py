"""Chat requests in OpenAI's form, as the gateway of an agent program reads them, and its answers to them.

What would change the episode is refused by name; parameters of sampling are the recipe's, and are ignored.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stages.data.json_values import DECODER, flaw_of
from stages.data.messages import ROLES, THOUGHTS, Message, RowError, Tool, parse_messages, parse_tools
from stages.rollouts.environments.environment import Action

MODEL = "policy"
"""Name by which programs ask for the model."""
ROLES_OF_CLIENTS = {role: role for role in ROLES} | {"developer": "system"}
"""Role of a message by its name in OpenAI's API, which has two names for the system's."""
READ = frozenset({"model", "messages", "tools", "stream", "stream_options"})
OF_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
IGNORED = frozenset(
    {*OF_SAMPLING, "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
)
"""Fields of a request that change nothing, as the recipe says how tokens are sampled and how many."""
WITHOUT_EFFECT: dict[str, Any] = {
    "n": 1,
    "logprobs": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "stop": [],
    "logit_bias": {},
}
"""Values of further fields that ask for what a request without them gets; others are refused."""


class RefusedRequestError(Exception):
    """Raised for a request that is refused, with the reason. status: of HTTP. code: in the form of OpenAI's API."""

    def __init__(self, reason: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(reason)
        self.status, self.code = status, code

    @property
    def content(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """Request for a turn. raw: its messages, unread. streams: the answer is sent in events.

    shows_usage: events end with the numbers of tokens.
    """

    raw: list[dict[str, Any]]
    tools: tuple[Tool, ...]
    streams: bool
    shows_usage: bool

    @classmethod
    def parsed(cls, body: bytes) -> "ChatRequest":
        """Return the request in a body; raise RefusedRequestError for one that cannot be a turn of an episode."""
        try:
            asked = DECODER.decode(body.decode())
        except (ValueError, RecursionError) as error:
            raise RefusedRequestError(f"the body is no JSON: {error}") from error
        if not isinstance(asked, dict):
            raise RefusedRequestError("the body is no JSON object")
        if flaw := flaw_of(asked):
            raise RefusedRequestError(f"the request {flaw}")
        asked = {name: value for name, value in asked.items() if value is not None and name not in IGNORED}
        for name, value in asked.items():
            if name not in READ and WITHOUT_EFFECT.get(name) != value:
                raise RefusedRequestError(
                    f"`{name}` is not supported in an episode, which is one conversation of sampled turns; remove it",
                    "unsupported_parameter",
                )
        if asked.get("model") != MODEL:
            raise RefusedRequestError(f"there is no such model; ask for {MODEL!r}", "model_not_found", 404)
        messages = asked.get("messages")
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages) or not messages:
            raise RefusedRequestError("`messages` is no list of messages")
        try:
            tools = parse_tools(asked)
        except RowError as error:
            raise RefusedRequestError(f"the request {error}") from error
        options = asked.get("stream_options")
        shows_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return cls(messages, tools, bool(asked.get("stream")), shows_usage)


def read_messages(raw: Sequence[dict[str, Any]]) -> list[Message]:
    """Return checked messages, of text alone. Raises RefusedRequestError."""
    try:
        messages = parse_messages(list(raw), "messages", roles=ROLES_OF_CLIENTS)
    except RowError as error:
        raise RefusedRequestError(f"the request {error}") from error
    if any(isinstance(message["content"], list) for message in messages):
        raise RefusedRequestError("the messages hold media; expected text alone")
    return messages


def comparable(message: dict[str, Any]) -> Any:
    """Return those parts of a message that a model is shown, in one form however a client writes them.

    Clients send back null fields or leave them out, and send texts as lists of parts.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if isinstance(calls, list):
        functions = [(call, call.get("function")) for call in calls if isinstance(call, dict)]
        calls = [
            (call.get("id"), function.get("name"), function.get("arguments"))
            for call, function in functions
            if isinstance(function, dict)
        ]
    thoughts = [message.get(name) or None for name in THOUGHTS]
    return [message.get("role"), content or "", calls or [], message.get("tool_call_id"), thoughts]


@dataclass(frozen=True)
class ChatAnswer:
    """Answer to a chat request: the model's message, in OpenAI's form, and the reason for its end.

    num_tokens: as of `Action`.
    """

    message: dict[str, Any]
    finish_reason: str
    num_tokens: tuple[int, int]

    @classmethod
    def of(cls, action: Action, turn: int) -> "ChatAnswer":
        """Return the answer with a turn of the model, by its number; calls that cannot be read stay text."""
        if not action.calls:
            return cls({"role": "assistant", "content": action.text}, "stop", action.num_tokens)
        calls = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(action.calls)
        ]
        content = action.before.strip() or None
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        return cls(message, "tool_calls", action.num_tokens)

    @property
    def calls(self) -> list[str]:
        """Identifiers of the calls, each of which the next request answers."""
        return [call["id"] for call in self.message.get("tool_calls", ())]

    @property
    def content(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, "logprobs": None}
        return {**_head("chat.completion"), "choices": [choice], "usage": self._usage}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, sampled = self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def events(self, shows_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer in the events of a stream."""
        calls = [{"index": number, **call} for number, call in enumerate(self.message.get("tool_calls", ()))]
        parts: list[dict[str, Any]] = [{"role": "assistant", "content": self.message["content"] or ""}]
        parts += [{"tool_calls": [call]} for call in calls]
        for delta in parts:
            yield self._event({"index": 0, "delta": delta, "finish_reason": None})
        yield self._event({"index": 0, "delta": {}, "finish_reason": self.finish_reason})
        if shows_usage:
            yield {**_head("chat.completion.chunk"), "choices": [], "usage": self._usage}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**_head("chat.completion.chunk"), "choices": [choice]}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-episode", "object": kind, "created": int(time.time()), "model": MODEL}
