"""What is learned of a row: a conversation that a chat template renders, or plain text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from stages.data.messages import Message, Tool

Span = tuple[int, int]
"""Begin and end, in characters of a text."""


@dataclass(frozen=True)
class Conversation:
    """Messages to render with a chat template; the first `num_prompt_messages` carry no loss, in whatever role.

    Nor do those at the positions `unlearned`, which count from 0: the row says so.
    """

    messages: list[Message]
    num_prompt_messages: int = 0
    tools: tuple[Tool, ...] = ()
    unlearned: frozenset[int] = frozenset()
    variables: dict[str, Any] = field(default_factory=dict)
    """Of the chat template, such as {"enable_thinking": false}: the row says so."""

    @property
    def learned_turns(self) -> list[int]:
        """Positions of the messages that carry loss."""
        return [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == "assistant" and number >= self.num_prompt_messages and number not in self.unlearned
        ]

    def before(self, number: int) -> Conversation:
        """The messages before a position, none of which is learned: what a model is asked there."""
        return replace(self, messages=self.messages[:number], num_prompt_messages=0, unlearned=frozenset())


@dataclass(frozen=True)
class PlainText:
    """Text taken as it is, loss on the completion; the end-of-text token follows."""

    prompt: str
    completion: str


Document = Conversation | PlainText


def answers_of(document: Document) -> Iterator[str]:
    """What is learned of it, as the row says it; tool calls left out."""
    if isinstance(document, PlainText):
        yield document.completion
        return
    for message in document.messages[document.num_prompt_messages :]:
        if message["role"] == "assistant" and "tool_calls" not in message:
            yield message["content"]
