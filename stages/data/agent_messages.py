"""Messages of the roles `tool_call` and `tool_response`, as ms-swift's agents have them → calls of the assistant."""

from __future__ import annotations

from typing import Any

from stages.data.messages import RowError, decoded, kind_of


def with_tool_calls(messages: object) -> Any:
    """The same messages, each call with the assistant's text before it, if any; anything else as it is.

    A call's content is {name, arguments}, as an object or as JSON text. Raises RowError for one that is not.
    """
    if not isinstance(messages, list) or not any(
        _role(message) in ("tool_call", "tool_response") for message in messages
    ):
        return messages
    found: list[Any] = []
    for number, message in enumerate(messages, 1):
        if _role(message) == "tool_response":
            found.append({**message, "role": "tool"})
        elif _role(message) == "tool_call":
            if not found or _role(found[-1]) != "assistant":
                found.append({"role": "assistant", "content": ""})
            calls = [*found[-1].get("tool_calls", []), _call(message.get("content"), number)]
            found[-1] = {**found[-1], "tool_calls": calls}
        else:
            found.append(message)
    return found


def _role(message: object) -> str:
    return str(message.get("role")) if isinstance(message, dict) else ""


def _call(content: object, number: int) -> dict[str, Any]:
    call = decoded(content)
    if not isinstance(call, dict):
        raise RowError(f"has {kind_of(call)} as the call in message {number}; expected {{name, arguments}}")
    return call
