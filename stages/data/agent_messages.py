"""Messages that are a tool call or its result, as agents' data have them → calls of the assistant.

| whose                     | a call          | its result      |
| ------------------------- | --------------- | --------------- |
| ms-swift (`role`)         | `tool_call`     | `tool_response` |
| ShareGPT's users (`from`) | `function_call` | `observation`   |
"""

from __future__ import annotations

from typing import Any

from stages.data.messages import RowError, decoded, kind_of
from stages.data.row_fields import LEARNED_MARKS

CALLS = ("tool_call", "function_call")
RESULTS = ("tool_response", "observation")


def with_tool_calls(messages: object, role_key: str = "role", content_key: str = "content") -> Any:
    """The same messages, each call with the assistant's text before it, if any; anything else as it is.

    A call's content is {name, arguments}, or a list of them, as it is or as JSON text. Raises RowError for one that is
    not, and for calls of one turn of which some are to be learned and some are not.
    """

    def role(message: object) -> str:
        return str(message.get(role_key)) if isinstance(message, dict) else ""

    if not isinstance(messages, list) or not any(role(message) in CALLS + RESULTS for message in messages):
        return messages
    found: list[Any] = []
    for number, message in enumerate(messages, 1):
        if role(message) in RESULTS:
            found.append({**message, role_key: "tool"})
        elif role(message) in CALLS:
            if not found or role(found[-1]) not in ("assistant", "gpt"):
                found.append({role_key: "assistant", content_key: "", **_marks(message)})
            found[-1] = _with_calls(found[-1], message, _calls(message.get(content_key), number), number)
        else:
            found.append(message)
    return found


def _with_calls(turn: dict[str, Any], message: dict[str, Any], calls: list[Any], number: int) -> dict[str, Any]:
    """The assistant's turn with the calls of a message after it, which is learned as the turn is."""
    if _marks(message) and _is_learned(turn) != _is_learned(message):
        raise RowError(
            f"has a call in message {number} that is {'' if _is_learned(message) else 'not '}to be learned, unlike the "
            "text or the call before it, which is of the same turn; expected the same mark on both"
        )
    return {**turn, **_marks(message), "tool_calls": [*(turn.get("tool_calls") or []), *calls]}


def _marks(message: dict[str, Any]) -> dict[str, Any]:
    return {mark: message[mark] for mark in LEARNED_MARKS if message.get(mark) is not None}


def _is_learned(message: dict[str, Any]) -> bool:
    return 0 not in _marks(message).values()  # False is 0, to Python too


def _calls(content: object, number: int) -> list[Any]:
    calls = decoded(content)
    if isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls):
        return calls
    if not isinstance(calls, dict):
        raise RowError(f"has {kind_of(calls)} as the call in message {number}; expected {{name, arguments}}")
    return [calls]
