"""Proof of what a chat template writes between two turns of the model, as token ids that are appended to its own.

The model's turns are never rendered: in their place stands an answer of ours that calls the same number of tools. What
the template writes up to a prompt must be the beginning of what it writes up to the next one, token by token; what
follows the token that ended the turn is what stands between them, whatever the turn was.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from stages.core.errors import DataError
from stages.data.messages import THOUGHTS, Conversation, Message, RowError, make_message
from stages.data.tokenizer import DocumentTokenizer

PLACEHOLDER = "an answer"


class Continuation:
    """Beginning of one conversation as the template writes it, which grows by the environment's messages."""

    def __init__(self, tokenizer: DocumentTokenizer, prompt: Conversation, token_ids: Sequence[int]) -> None:
        """Create the continuation of a rendered prompt. token_ids: of the prompt."""
        self._tokenizer = tokenizer
        self._conversation = prompt
        self._token_ids = list(token_ids)

    def append(self, messages: Sequence[Message], ends: Collection[int], thoughts: str = "") -> list[int]:
        """Return the token ids between a turn's end token and the next turn of the model, whose prompt they end.

        ends: tokens that may have ended the model's turn. Raises DataError if the template writes the conversation
        before another way once it goes on, or ends turns by another token; RowError for messages that it refuses.
        """
        turn, answers = _turn(messages), _identified(messages)
        if thoughts:
            turn[THOUGHTS[0]] = thoughts
        conversation = replace(self._conversation, messages=[*self._conversation.messages, turn, *answers])
        _, token_ids = self._tokenizer.encode_prompt(conversation)
        before, rest = self._token_ids, token_ids[len(self._token_ids) :]
        if token_ids[: len(before)] != before:
            raise DataError(
                f"{self._tokenizer.template.name} writes a conversation another way once it goes on, so that the model "
                "would learn other tokens than it sampled; use a template that only appends (`data.chat_template`)"
            )
        place = next((place for place, token in enumerate(rest) if token in ends), None)
        if place is None:
            shown = " or ".join(map(self._tokenizer.decode, ([end] for end in sorted(ends))))
            raise DataError(
                f"{self._tokenizer.template.name} does not end the model's turns with {shown}, with which the model "
                "ends them; use a template that does (`data.chat_template`)"
            )
        self._conversation, self._token_ids = conversation, token_ids
        return rest[place + 1 :]


def prove(tokenizer: DocumentTokenizer, prompt: Conversation, role: str, ends: Collection[int]) -> None:
    """Prove that a template continues conversations by appending, with thoughts too. Raises DataError if it does not.

    prompt: an example. role: of the environment's messages. ends: tokens that may end a turn of the model.
    """
    for thoughts in ("", "thoughts"):
        try:
            _, token_ids = tokenizer.encode_prompt(prompt)
            continuation = Continuation(tokenizer, prompt, token_ids)
            between = [
                continuation.append([make_message(role, f"answer {number}")], ends, thoughts) for number in range(3)
            ]
        except RowError as error:
            if thoughts:  # the template has no place for them
                continue
            raise DataError(f"{tokenizer.template.name} cannot continue a conversation: it {error}") from error
        if any(f"answer {number}" not in tokenizer.decode(ids) for number, ids in enumerate(between)):
            raise DataError(
                f"{tokenizer.template.name} does not show what the environment answers; use another template "
                "(`data.chat_template`)"
            )


def _turn(messages: Sequence[Message]) -> Message:
    """Return an answer of the model before the environment's messages, with a call for each answer of a tool."""
    num_calls = sum(message["role"] == "tool" for message in messages)
    if not num_calls:
        return make_message("assistant", PLACEHOLDER)
    calls = [
        {"id": call_id(number), "type": "function", "function": {"name": "tool", "arguments": {}}}
        for number in range(num_calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _identified(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each answer of a tool names its call."""
    numbers = iter(range(len(messages)))
    return [
        {**message, "name": "tool", "tool_call_id": call_id(next(numbers))} if message["role"] == "tool" else message
        for message in messages
    ]


def call_id(number: int) -> str:
    """Return an identifier of a turn's call, of nine letters and digits, as Mistral's templates want them."""
    return f"call{number:05d}"
