"""Chats with media in the form of OpenAI's API, in which servers of models that see take them, and judges."""

from collections.abc import Callable, Iterator
from typing import Any

from stages.data.media_reference import MediaReference
from stages.data.messages import Conversation


def openai_messages(conversation: Conversation, address: Callable[[MediaReference], str]) -> list[dict[str, Any]]:
    """Return a conversation's messages, each medium in its place. address: returns a medium's `data:` address."""
    addresses = map(address, conversation.media)
    return [
        {**message, "content": [*_parts(message["content"], addresses)]}
        if isinstance(message["content"], list)
        else {**message}
        for message in conversation.messages
    ]


def _parts(content: list[dict[str, Any]], addresses: Iterator[str]) -> Iterator[dict[str, Any]]:
    for part in content:
        name = f"{part['type']}_url"
        yield part if part["type"] == "text" else {"type": name, name: {"url": next(addresses)}}
