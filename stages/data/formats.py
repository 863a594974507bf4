"""A row of a dataset, in any of the formats that people have → the documents to learn from, or why it is a bad row.

| format              | columns                                                                                      |
| ------------------- | -------------------------------------------------------------------------------------------- |
| `messages`          | `messages`: list of {role, content}; maybe `tools`, what the assistant may call              |
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

from stages.core.errors import DataError
from stages.data.config import DataFormat, RowKind
from stages.data.messages import (
    Message,
    RowError,
    Tool,
    as_messages,
    kind_of,
    listed,
    make_message,
    ordered,
    parse_messages,
    parse_text,
    parse_tools,
)

Columns = dict[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True)
class Conversation:
    """Messages to render with a chat template; the first `num_prompt_messages` carry no loss, in whatever role."""

    messages: list[Message]
    num_prompt_messages: int = 0
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class PlainText:
    """Text taken as it is, loss on the completion; the end-of-text token follows."""

    prompt: str
    completion: str


Document = Conversation | PlainText


@dataclass(frozen=True)
class Format:
    """The columns that a row must have, and how it is read: one document, or chosen and rejected."""

    columns: tuple[str, ...]
    read: Callable[[Columns], tuple[Document, ...]]
    rows: RowKind = "examples"


def choose_format(wanted: DataFormat, first_row: Columns, rows: RowKind) -> Format:
    """The format named by the recipe, or (`auto`) the one that fits the columns of the first row.

    Raises DataError when no format fits these columns, or the one that fits is not what the training method needs.
    """
    possible = {name: form for name, form in FORMATS.items() if form.rows == rows}
    if wanted != "auto":
        if wanted not in possible:
            raise DataError(f"format {wanted!r} does not suit the method; expected {_describe(possible)}")
        return possible[wanted]
    for form in possible.values():
        if all(column in first_row for column in form.columns):
            return form
    hint = ""
    if rows != "pairs" and {"chosen", "rejected"} <= first_row.keys():
        hint = " These are preference pairs: `method: dpo` learns from them."
    raise DataError(f"the first row has the columns {listed(first_row)}; expected {_describe(possible)}.{hint}")


class RowReader:
    """Reads the rows of one dataset, all in the same format."""

    def __init__(self, wanted: DataFormat, rows: RowKind) -> None:
        self._wanted = wanted
        self._rows = rows
        self._format: Format | None = None

    def read(self, content: object) -> tuple[Document, ...]:
        """The documents of a row: one, or of a pair the chosen and the rejected.

        Raises RowError for a bad row, DataError when the columns of the first row are of no suitable format.
        """
        if not isinstance(content, dict):
            raise RowError(f"is {kind_of(content)}; expected an object with named columns")
        if self._format is None:
            self._format = choose_format(self._wanted, content, self._rows)
        missing = [column for column in self._format.columns if column not in content]
        if missing:
            raise RowError(f"has no {listed(missing)}; found {listed(content)}")
        return self._format.read(content)


def _read_messages(row: Columns) -> tuple[Document, ...]:
    return (Conversation(ordered(parse_messages(row["messages"], "messages")), tools=parse_tools(row)),)


def _read_sharegpt(row: Columns) -> tuple[Document, ...]:
    messages = parse_messages(row["conversations"], "conversations", ("from", "value"), SHAREGPT_ROLES)
    if row.get("system"):
        messages = [make_message("system", parse_text(row["system"], "system")), *messages]
    return (Conversation(ordered(messages)),)


def _read_alpaca(row: Columns) -> tuple[Document, ...]:
    question = parse_text(row["instruction"], "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + parse_text(row["input"], "input")
    return (
        Conversation([make_message("user", question), make_message("assistant", parse_text(row["output"], "output"))]),
    )


def _read_prompt_completion(row: Columns) -> tuple[Document, ...]:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return (PlainText(parse_text(prompt, "prompt"), parse_text(completion, "completion")),)
    before = as_messages(prompt, "prompt", "user")
    after = as_messages(completion, "completion", "assistant")
    return (Conversation(ordered(before + after), len(before), parse_tools(row)),)


def _read_text(row: Columns) -> tuple[Document, ...]:
    return (PlainText("", parse_text(row["text"], "text")),)


def _read_preference(row: Columns) -> tuple[Document, ...]:
    if row["chosen"] == row["rejected"]:
        raise RowError("has the same `chosen` and `rejected`; expected two different answers")
    if any(isinstance(row.get(column), list) for column in ("prompt", "chosen", "rejected")):
        return _read_conversational_preference(row)
    return _read_plain_preference(row)


def _read_plain_preference(row: Columns) -> tuple[Document, ...]:
    chosen, rejected = parse_text(row["chosen"], "chosen"), parse_text(row["rejected"], "rejected")
    if row.get("prompt") is not None:
        prompt = parse_text(row["prompt"], "prompt")
        return PlainText(prompt, chosen), PlainText(prompt, rejected)
    shared = chosen[: _num_shared(chosen, rejected)]
    prompt = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    if not prompt.strip():
        raise RowError("has no `prompt`, and `chosen` and `rejected` do not begin with a common one; expected either")
    chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    return PlainText(prompt, parse_text(chosen, "chosen")), PlainText(prompt, parse_text(rejected, "rejected"))


def _read_conversational_preference(row: Columns) -> tuple[Document, ...]:
    prompt = [] if row.get("prompt") is None else as_messages(row["prompt"], "prompt", "user")
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
    tools = parse_tools(row)
    return Conversation(chosen, num_shared, tools), Conversation(rejected, num_shared, tools)


def _answered(prompt: list[Message], answer: object, column: str) -> list[Message]:
    """The whole conversation: the answer after the prompt, unless the answer holds the prompt already."""
    messages = as_messages(answer, column, "assistant")
    if messages[0]["role"] == "assistant":
        return ordered(prompt + messages)
    if any(message not in messages for message in prompt):
        raise RowError(f"has a `{column}` that begins with another prompt than `prompt`; expected the answer alone")
    return ordered(messages)


def _num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many elements are the same at the beginning of both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _describe(formats: dict[str, Format]) -> str:
    return "; ".join(f"{name} ({listed(form.columns)})" for name, form in formats.items())


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), _read_messages),
    "sharegpt": Format(("conversations",), _read_sharegpt),
    "prompt_completion": Format(("prompt", "completion"), _read_prompt_completion),
    "alpaca": Format(("instruction", "output"), _read_alpaca),
    "text": Format(("text",), _read_text),
    "preference": Format(("chosen", "rejected"), _read_preference, rows="pairs"),
}
"""In the order in which `auto` tries them: a dataset with `messages` may have a `prompt` or a `text` column as well."""
