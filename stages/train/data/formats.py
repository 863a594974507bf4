"""A row of a dataset, in any of the formats that people have → the documents to learn from, or why it is a bad row.

| format              | columns                                                                                      |
| ------------------- | -------------------------------------------------------------------------------------------- |
| `messages`          | `messages`: list of {role, content}                                                          |
| `sharegpt`          | `conversations`: list of {from, value}; maybe `system`                                       |
| `prompt_completion` | `prompt`, `completion`: two strings, taken as they are, or lists of messages                 |
| `alpaca`            | `instruction`, `output`, maybe `input`: one turn each                                        |
| `text`              | `text`: a string, taken as it is                                                             |
| `preference`        | `chosen`, `rejected`: strings, taken as they are, or lists of messages; maybe `prompt`, which |
|                     | may also be contained in both                                                                |

Where some of `prompt`, `completion`, `chosen`, `rejected` are lists and others strings, the strings are messages too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.errors import DataError
from stages.train.config import DataFormat

Message = dict[str, str]
Columns = dict[str, Any]

ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True)
class Conversation:
    """Messages to render with a chat template; the first `num_prompt_messages` carry no loss, whoever speaks."""

    messages: list[Message]
    num_prompt_messages: int = 0


@dataclass(frozen=True)
class PlainText:
    """Text taken as it is, loss on the completion; the end-of-text token follows."""

    prompt: str
    completion: str


Document = Conversation | PlainText


class RowError(ValueError):
    """What is wrong with a row, and what was expected; goes on from "train.jsonl:17 "."""


@dataclass(frozen=True)
class Format:
    """The columns that a row must have, and how it is read: one document, or chosen and rejected."""

    columns: tuple[str, ...]
    read: Callable[[Columns], tuple[Document, ...]]


def choose_format(wanted: DataFormat, first_row: Columns, preference: bool) -> Format:
    """The format named by the recipe, or (`auto`) the one that the columns of the first row tell.

    Raises DataError when no format fits these columns, or the one that fits is not what the training method needs.
    """
    possible = {name: form for name, form in FORMATS.items() if (name == "preference") == preference}
    if wanted != "auto":
        if wanted not in possible:
            raise DataError(f"format {wanted!r} does not suit the method; expected {_describe(possible)}")
        return possible[wanted]
    for form in possible.values():
        if all(column in first_row for column in form.columns):
            return form
    hint = ""
    if not preference and {"chosen", "rejected"} <= first_row.keys():
        hint = " These are preference pairs: `method: dpo` learns from them."
    raise DataError(f"the first row has the columns {_names(first_row)}; expected {_describe(possible)}.{hint}")


class RowReader:
    """Reads the rows of one dataset, all in the same format."""

    def __init__(self, wanted: DataFormat, preference: bool) -> None:
        self._wanted = wanted
        self._preference = preference
        self._format: Format | None = None

    def read(self, content: object) -> tuple[Document, ...]:
        """The documents of a row: one, or with `preference` the chosen and the rejected.

        Raises RowError for a bad row, DataError when the first row tells that the dataset is of no suitable format.
        """
        if not isinstance(content, dict):
            raise RowError(f"is {_kind(content)}; expected an object with named columns")
        if self._format is None:
            self._format = choose_format(self._wanted, content, self._preference)
        missing = [column for column in self._format.columns if column not in content]
        if missing:
            raise RowError(f"has no {_names(missing)}; found {_names(content)}")
        return self._format.read(content)


def _read_messages(row: Columns) -> tuple[Document, ...]:
    return (Conversation(_ordered(_messages(row["messages"], "messages"))),)


def _read_sharegpt(row: Columns) -> tuple[Document, ...]:
    messages = _messages(row["conversations"], "conversations", ("from", "value"), SHAREGPT_ROLES)
    if row.get("system"):
        messages = [_message("system", _text(row["system"], "system")), *messages]
    return (Conversation(_ordered(messages)),)


def _read_alpaca(row: Columns) -> tuple[Document, ...]:
    question = _text(row["instruction"], "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + _text(row["input"], "input")
    return (Conversation([_message("user", question), _message("assistant", _text(row["output"], "output"))]),)


def _read_prompt_completion(row: Columns) -> tuple[Document, ...]:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return (PlainText(_text(prompt, "prompt"), _text(completion, "completion")),)
    before = _as_messages(prompt, "prompt", "user")
    after = _as_messages(completion, "completion", "assistant")
    return (Conversation(_ordered(before + after), len(before)),)


def _read_text(row: Columns) -> tuple[Document, ...]:
    return (PlainText("", _text(row["text"], "text")),)


def _read_preference(row: Columns) -> tuple[Document, ...]:
    if row["chosen"] == row["rejected"]:
        raise RowError("has the same `chosen` and `rejected`; expected two different answers")
    if any(isinstance(row.get(column), list) for column in ("prompt", "chosen", "rejected")):
        return _read_conversational_preference(row)
    return _read_plain_preference(row)


def _read_plain_preference(row: Columns) -> tuple[Document, ...]:
    chosen, rejected = _text(row["chosen"], "chosen"), _text(row["rejected"], "rejected")
    if row.get("prompt") is not None:
        prompt = _text(row["prompt"], "prompt")
        return PlainText(prompt, chosen), PlainText(prompt, rejected)
    shared = chosen[: _num_shared(chosen, rejected)]
    prompt = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    if not prompt.strip():
        raise RowError("has no `prompt`, and `chosen` and `rejected` do not begin with a common one; expected either")
    chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    return PlainText(prompt, _text(chosen, "chosen")), PlainText(prompt, _text(rejected, "rejected"))


def _read_conversational_preference(row: Columns) -> tuple[Document, ...]:
    prompt = [] if row.get("prompt") is None else _as_messages(row["prompt"], "prompt", "user")
    chosen, rejected = _answered(prompt, row["chosen"], "chosen"), _answered(prompt, row["rejected"], "rejected")
    num_shared = _num_shared(chosen, rejected)
    if num_shared in (len(chosen), len(rejected)):
        raise RowError("has an answer that the other one goes on from; expected different `chosen` and `rejected`")
    role = chosen[num_shared]["role"]
    if role != "assistant":
        raise RowError(
            f"has `chosen` and `rejected` that first differ in message {num_shared + 1}, of the role `{role}`; "
            "expected the same prompt and different answers"
        )
    return Conversation(chosen, num_shared), Conversation(rejected, num_shared)


def _answered(prompt: list[Message], answer: object, column: str) -> list[Message]:
    """The whole conversation: the answer after the prompt, unless the answer holds the prompt already."""
    messages = _as_messages(answer, column, "assistant")
    if messages[0]["role"] == "assistant":
        return _ordered(prompt + messages)
    if any(message not in messages for message in prompt):
        raise RowError(f"has a `{column}` that begins with another prompt than `prompt`; expected the answer alone")
    return _ordered(messages)


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many elements are the same at the beginning of both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _as_messages(value: object, column: str, role: str) -> list[Message]:
    return [_message(role, _text(value, column))] if isinstance(value, str) else _messages(value, column)


def _messages(
    value: object,
    column: str,
    keys: tuple[str, str] = ("role", "content"),
    roles: dict[str, str] | None = None,
) -> list[Message]:
    """A list of messages, each checked by itself. `keys` and `roles` say how the format calls things."""
    if not isinstance(value, list):
        raise RowError(f"has {_kind(value)} in `{column}`; expected a list of messages {{{', '.join(keys)}}}")
    if not value:
        raise RowError(f"has an empty list in `{column}`; expected messages")
    named = roles or {role: role for role in ROLES}
    return [_checked(item, f"message {number} of `{column}`", keys, named) for number, item in enumerate(value, 1)]


def _checked(item: object, name: str, keys: tuple[str, str], roles: dict[str, str]) -> Message:
    role_key, content_key = keys
    if not isinstance(item, dict) or not {role_key, content_key} <= item.keys():
        found = _names(item) if isinstance(item, dict) else _kind(item)
        raise RowError(f"has {found} as {name}; expected an object with {_names(keys)}")
    role, content = item[role_key], item[content_key]
    if not isinstance(role, str) or role not in roles:
        raise RowError(f"has the unknown role {role!r} in {name}; expected {', '.join(roles)}")
    if item.get("tool_calls"):
        raise RowError(f"has tool calls in {name}; expected text only, tools are not supported")
    if not isinstance(content, str):
        raise RowError(f"has {_kind(content)} as `{content_key}` of {name}; expected a string")
    if roles[role] != "system" and not content.strip():
        raise RowError(f"has an empty `{content_key}` in {name}; expected text")
    return _message(roles[role], content)


def _ordered(messages: list[Message]) -> list[Message]:
    """The same messages: maybe `system`, then `user` and `assistant` in turn, the last one from the assistant."""
    turns = messages[messages[0]["role"] == "system" :]
    if not any(message["role"] == "assistant" for message in turns):
        raise RowError("has no assistant turn, so there is nothing to learn; expected at least one")
    for number, message in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if message["role"] != expected:
            position = number + 1 + len(messages) - len(turns)
            raise RowError(
                f"has `{message['role']}` in message {position} where `{expected}` was expected; user and assistant "
                "take turns, after at most one system message"
            )
    if turns[-1]["role"] != "assistant":
        raise RowError("ends with a `user` message; expected the assistant's answer to be the last")
    return messages


def _text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"has {_kind(value)} in `{column}`; expected a string")
    if not value.strip():
        raise RowError(f"has an empty `{column}`; expected text")
    return value


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _kind(value: object) -> str:
    kinds = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def _names(columns: Columns | tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{column}`" for column in columns) or "no columns"


def _describe(formats: dict[str, Format]) -> str:
    return "; ".join(f"{name} ({_names(form.columns)})" for name, form in formats.items())


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), _read_messages),
    "sharegpt": Format(("conversations",), _read_sharegpt),
    "prompt_completion": Format(("prompt", "completion"), _read_prompt_completion),
    "alpaca": Format(("instruction", "output"), _read_alpaca),
    "text": Format(("text",), _read_text),
    "preference": Format(("chosen", "rejected"), _read_preference),
}
"""In the order in which `auto` tries them: a dataset with `messages` may have a `prompt` or a `text` column as well."""
