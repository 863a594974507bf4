"""Readers of preference rows, which return the chosen and the rejected document or say why a pair teaches nothing."""

import re
from collections.abc import Sequence
from typing import Any

from stages.data.messages import (
    INVISIBLE,
    SHAREGPT_ROLES,
    Conversation,
    Document,
    Message,
    PlainText,
    RowError,
    as_messages,
    ordered,
    parse_messages,
    parse_text,
    parse_tools,
    texts_of,
)
from stages.data.row_fields import (
    check_no_conversation,
    template_variables,
    unlearned_turns,
    with_system,
    with_tool_calls,
)

Columns = dict[str, Any]
HUMAN, ASSISTANT = "Human:", "Assistant:"
"""Words that begin a human's and an assistant's turn in a plain-text transcript (Anthropic's HH-RLHF)."""


def read_preference(row: Columns) -> tuple[Document, ...]:
    """Return the chosen and the rejected document of a preference row. Raises RowError."""
    if row["chosen"] == row["rejected"]:
        raise RowError("has the same `chosen` and `rejected`; expected two different answers")
    if any(isinstance(row.get(column), list | dict) for column in ("prompt", "chosen", "rejected")):
        return _read_conversations(row)
    check_no_conversation(row)
    return _read_plain(row)


def _read_plain(row: Columns) -> tuple[Document, ...]:
    chosen, rejected = parse_text(row["chosen"], "chosen"), parse_text(row["rejected"], "rejected")
    _check_difference(_visible(chosen), _visible(rejected))
    if row.get("prompt") is not None:
        prompt = parse_text(row["prompt"], "prompt")
        if _begins_with(chosen, prompt) and _begins_with(rejected, prompt):
            raise RowError(
                "has `chosen` and `rejected` that begin with `prompt`, which would be there twice; expected the "
                "answers alone, or no `prompt`"
            )
        return PlainText(prompt, chosen), PlainText(prompt, rejected)
    shared = chosen[: _num_shared(chosen, rejected)]
    _check_transcript(shared, chosen, rejected)
    # Up to the last whole word: two answers may begin with the same letters.
    prompt = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    if not prompt.strip():
        raise RowError("has no `prompt`, and `chosen` and `rejected` do not begin with a common one; expected either")
    chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    return PlainText(prompt, parse_text(chosen, "chosen")), PlainText(prompt, parse_text(rejected, "rejected"))


def _check_transcript(shared: str, chosen: str, rejected: str) -> None:
    """Raise RowError if a pair's plain-text transcripts (as in Anthropic's HH-RLHF) differ in the human's turns."""
    differ_in_question = shared.rfind(HUMAN) >= shared.rfind(ASSISTANT)
    if differ_in_question and any(ASSISTANT in text[len(shared) :] for text in (chosen, rejected)):
        raise RowError(
            "has `chosen` and `rejected` that first differ in what the human says; expected the same prompt and "
            "different answers"
        )


def _begins_with(answer: str, prompt: str) -> bool:
    answer, prompt = answer.lstrip(), prompt.strip()
    rest = answer.removeprefix(prompt)
    return answer != rest and not (prompt[-1].isalnum() and rest[:1].isalnum())


def _read_conversations(row: Columns) -> tuple[Document, ...]:
    row = {**row, **{column: _listed(row[column]) for column in ("prompt", "chosen", "rejected") if column in row}}
    prompt = [] if row.get("prompt") is None else _messages(row["prompt"], "prompt", "user")
    chosen, rejected = (_answered(row, prompt, column) for column in ("chosen", "rejected"))
    num_shared = _num_shared(chosen, rejected)
    if num_shared in (len(chosen), len(rejected)):
        raise RowError("has an answer that the other one goes on from; expected different `chosen` and `rejected`")
    role = chosen[num_shared]["role"]
    if role != "assistant":
        raise RowError(
            f"has `chosen` and `rejected` that first differ in message {num_shared + 1}, of the role `{role}`; "
            "expected the same prompt and different answers"
        )
    _check_difference(_words(chosen), _words(rejected))
    tools, variables = parse_tools(row), template_variables(row)
    return tuple(Conversation(messages, num_shared, tools, variables=variables) for messages in (chosen, rejected))


def _listed(value: object) -> Any:
    """Return the messages as a list, in which separate tool-call messages are merged into assistant turns."""
    messages = [value] if isinstance(value, dict) else value
    return with_tool_calls(messages, *(("from", "value") if _is_sharegpt(messages) else ()))


def _is_sharegpt(messages: object) -> bool:
    return isinstance(messages, list) and any(isinstance(one, dict) and "from" in one for one in messages)


def _messages(value: object, column: str, role: str) -> list[Message]:
    if _is_sharegpt(value):
        return parse_messages(value, column, ("from", "value"), SHAREGPT_ROLES)
    return as_messages(value, column, role)


def _answered(row: Columns, prompt: list[Message], column: str) -> list[Message]:
    """Return the conversation of a pair's answer: prompt and answer, or the answer alone if it repeats the prompt."""
    answer = row[column]
    messages = _messages(answer, column, "assistant")
    roles = [message["role"] == "assistant" for message in messages]
    if isinstance(answer, list) and len(roles) - 1 in unlearned_turns(answer, roles):
        raise RowError(f"has an answer in `{column}` that is marked not to be learned; expected two to compare")
    if messages[0]["role"] == "assistant":
        messages = prompt + messages
    elif any(message not in messages for message in prompt):
        raise RowError(f"has a `{column}` that begins with another prompt than `prompt`; expected the answer alone")
    return ordered(with_system(row, messages))


def _check_difference(chosen: list[Any], rejected: list[Any]) -> None:
    if chosen == rejected:
        raise RowError(
            "has `chosen` and `rejected` that differ by white space or invisible characters only; expected two "
            "different answers"
        )


def _words(messages: list[Message]) -> list[Any]:
    return [{**message, "content": _visible(" ".join(texts_of(message)))} for message in messages]


def _visible(text: str) -> list[str]:
    """Return the words of a text, ignoring invisible characters, to compare two answers."""
    return re.sub(INVISIBLE, "", text).split()


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
