"""Exchange: a request and its answer, from which the proxy reads token counts, finish reasons and content.

An engine counts a stream's tokens only if asked: so the proxy always asks, and removes the event with the counts for a
client that did not. Nothing else is changed.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

MAX_ANSWER_BYTES = 32 * 2**20
"""Largest answer, or event of a stream, that the proxy parses, in bytes; longer ones pass unparsed."""
CLIENT_CLOSED = 499
"""HTTP status under which the proxy counts requests whose client disconnected, as nginx does."""
MAX_COUNT = 2**53
END_BYTES = 3
"""Number of last bytes of a chunk in which an end-of-event marker may have begun: the longest marker less one byte."""
END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
ENDS_OF_EVENTS = (b"\n\n", b"\n\r\n")
DATA = b"data:"
# Possessive: a plain `\s*` would give back the space before `null`, and match that.
COUNTED = re.compile(rb'"(?:usage|finish_reason)"\s*+:\s*+(?!null)')
"""Pattern of events with token counts or a finish reason; in a generated text, the quotes would be escaped."""


@dataclass
class Choice:
    """Choice of an answer: text, tool calls and finish reason, joined from the events of a stream."""

    content: str = ""
    reasoning: str = ""
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    def add(self, message: dict[str, Any]) -> None:
        """Append a whole message, or the delta of a streamed event, to a choice of the answer."""
        self.content += message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or ""
        for position, call in enumerate(message.get("tool_calls") or ()):
            # Events of a stream number their calls; a whole message only orders them.
            whole = self.tool_calls.setdefault(int(call.get("index", position)), {"name": "", "arguments": ""})
            function = call.get("function") or {}
            whole["id"] = call.get("id") or whole.get("id")
            whole["name"] += function.get("name") or ""
            whole["arguments"] += function.get("arguments") or ""

    @property
    def message(self) -> dict[str, Any]:
        """Assistant message in OpenAI's form, built from one choice of an answer."""
        calls = [
            {
                "type": "function",
                **({"id": call["id"]} if call["id"] else {}),
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for _, call in sorted(self.tool_calls.items())
        ]
        return {
            "role": "assistant",
            "content": self.content,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }


class Exchange:
    """Request and what the proxy has read of its answer so far: status, token counts, finish reasons, content.

    status: 502 if the engine broke the answer off. num_events: of a stream, whose ends no chunk splits. num_bytes: of
    the answer. asked: the request's JSON object. keeps_content: whether `choices` get the text; else most events of a
    stream pass unread.
    """

    def __init__(self, asked: dict[str, Any], *, keeps_content: bool = False):
        self.asked = asked
        self.keeps_content = keeps_content
        self.status = CLIENT_CLOSED
        self._answer_status = CLIENT_CLOSED
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.num_events = 0
        self.num_bytes = 0
        self.choices: dict[int, Choice] = {}
        options = asked.get("stream_options")
        wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        # Invalid `stream_options` stay as they are, for the engine to refuse.
        self._adds_usage = bool(asked.get("stream")) and not wants_usage and isinstance(options, dict | None)
        self._reads_events = False
        self._is_read = False
        self._held = bytearray()

    @property
    def body(self) -> bytes:
        """Body of the request to the engine, with `include_usage` added to streams so that the engine counts tokens."""
        if not self._adds_usage:
            return json.dumps(self.asked).encode()
        options = {**(self.asked.get("stream_options") or {}), "include_usage": True}
        return json.dumps({**self.asked, "stream_options": options}).encode()

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the answer's complete choices, such as `stop` and `length`."""
        return [choice.finish_reason for choice in self.choices.values() if choice.finish_reason]

    def begin(self, status: int, content_type: str, encoding: str | None) -> None:
        """Record the status and headers of the engine's response, before its body arrives."""
        self._answer_status = status
        # An error counts at once, also when its client leaves before the end.
        if status >= 400:
            self.status = status
        self._reads_events = content_type == "text/event-stream" and not encoding
        self._is_read = status == 200 and not encoding

    def passed(self, chunk: bytes) -> bytes:
        """Parse the next bytes of an answer; returns the bytes that the proxy can send to the client now."""
        self.num_bytes += len(chunk)
        if not self._is_read:
            return chunk
        if self._reads_events:
            self.num_events += sum(chunk.count(end) for end in ENDS_OF_EVENTS)
        # Most chunks of a stream are whole events without counts: they pass without being split or parsed.
        if self._reads_events and not self._held and chunk.endswith(ENDS_OF_EVENTS) and not self._counts(chunk):
            return chunk
        start = max(0, len(self._held) - END_BYTES)  # the end of an event may have begun before this chunk
        self._held += chunk
        out = b"".join(self._events(start)) if self._reads_events else chunk
        if len(self._held) > MAX_ANSWER_BYTES:
            # Too large to parse: what was held goes out, and the rest passes without being read.
            out += self._unread()
            self._is_read = False
        return out

    def end(self) -> bytes:
        """Finish parsing an answer once it is complete; returns bytes that were not sent to the client yet."""
        self.status = self._answer_status
        if self._is_read and not self._reads_events:
            self._read(_object(bytes(self._held)))
        return self._unread()

    def _unread(self) -> bytes:
        """Return the buffered bytes of a stream that were not sent to the client yet, and clear the buffer."""
        held, self._held = bytes(self._held), bytearray()
        return held if self._reads_events else b""

    def _events(self, start: int) -> Iterator[bytes]:
        """Remove the buffer's complete events, none of which ends before `start`, and yield those to send on."""
        while end := END_OF_EVENT.search(self._held, start):
            start = 0
            event = bytes(self._held[: end.end()])
            del self._held[: end.end()]
            content = _object(event.removeprefix(DATA)) if event.startswith(DATA) and self._counts(event) else {}
            self._read(content)
            # The event that `include_usage` adds at the end of a stream: counts, without choices.
            is_usage_alone = content.get("usage") and content.get("choices") == []
            if not (self._adds_usage and is_usage_alone):
                yield event

    def _counts(self, events: bytes) -> bool:
        """Return whether a chunk of a stream must be parsed, for its token counts or for content to be stored."""
        return self.keeps_content or COUNTED.search(events) is not None

    def _read(self, content: dict[str, Any]) -> None:
        """Collect counts, finish reasons and content from an answer or event; invalid ones still reach the client."""
        with suppress(TypeError, ValueError, AttributeError, OverflowError):
            usage = content.get("usage") or {}
            self.prompt_tokens = _count(usage.get("prompt_tokens")) or self.prompt_tokens
            self.completion_tokens = _count(usage.get("completion_tokens")) or self.completion_tokens
            for received in content.get("choices") or ():
                choice = self.choices.setdefault(int(received.get("index", 0)), Choice())
                reason = received.get("finish_reason")
                choice.finish_reason = reason if reason and isinstance(reason, str) else choice.finish_reason
                # `delta` is of a stream, `message` of a whole chat answer; a completion has neither.
                choice.add(received.get("delta") or received.get("message") or {})


def _count(value: object) -> int:
    """Return a token count from an answer, or 0 for an invalid value, which would spoil the sums."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0  # True is no count


def json_object(body: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else, and, as some parsers refuse it: NaN, lone surrogates, 200 levels."""
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _object(body: bytes) -> dict[str, Any]:
    return json_object(body) or {}
