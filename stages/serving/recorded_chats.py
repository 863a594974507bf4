"""Conversations that training recorded, with tools or media, in the form of OpenAI's requests."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.data.messages import THOUGHTS, with_calls_as
from stages.models.media import KINDS
from stages.models.recorded import RECORD, ToolPrompt, read_tool_prompts
from stages.serving.engine import LaunchSpec


def messages_of(prompt: ToolPrompt) -> list[dict[str, Any]]:
    """Return a prompt's messages as clients send them, with its media in their places."""
    return _as_client_sends(_with_pictures(prompt))


def chats_with_pictures(artifact: Path, spec: LaunchSpec) -> list[dict[str, Any]]:
    """Return request fields of the prompts with media recorded beside a model that its server takes, if any."""
    prompts = read_tool_prompts(artifact) if (artifact / RECORD).is_file() else []
    return [
        {"messages": messages_of(prompt), "chat_template_kwargs": prompt.variables}
        for prompt in prompts
        if prompt.pictures and spec.takes(prompt.pictures)
    ]


def _with_pictures(prompt: ToolPrompt) -> list[dict[str, Any]]:
    """Return a prompt's messages with its pictures in their places, as OpenAI's parts."""
    addresses = iter(prompt.pictures)
    return [
        {**message, "content": [_part(part, addresses) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in prompt.messages
    ]


def _part(part: dict[str, Any], addresses: Iterator[str]) -> dict[str, Any]:
    kind = f"{part['type']}_url"
    return part if part["type"] not in KINDS else {"type": kind, kind: {"url": next(addresses)}}


def _as_client_sends(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert chat messages from the form that chat templates take to the form of OpenAI's requests.

    Arguments of tool calls become JSON text, thoughts the field `reasoning`; calls and answers get missing ids.
    """
    sent, unanswered = [], []
    for number, message in enumerate(messages):
        fields = {"reasoning" if field in THOUGHTS else field: value for field, value in message.items()}
        if "tool_calls" in message:
            fields = with_calls_as(fields, True, False)
            fields["tool_calls"] = [
                {"id": f"call-{number}-{place}", **call} for place, call in enumerate(fields["tool_calls"])
            ]
            unanswered = [call["id"] for call in fields["tool_calls"]]
        elif message["role"] == "tool" and unanswered:
            fields.setdefault("tool_call_id", unanswered.pop(0))  # tools answer in the order of the calls
        sent.append(fields)
    return sent
