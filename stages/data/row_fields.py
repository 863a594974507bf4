"""Treatment of row fields that change what a row means: each is applied or refused with an error, never ignored.

| field                                        | treatment                                                             |
| -------------------------------------------- | --------------------------------------------------------------------- |
| `loss`, `loss_scale`, `loss_weight`,         | false or 0: the turn is context, and not learned                      |
| `weight`, `train` of an assistant's message  |                                                                       |
| the same of another role                     | false or 0: nothing changes; else refused                             |
| the same of a row                            | false or 0: refused                                                   |
| `system` of a row                            | the system message                                                    |
| `label: false`                               | refused where answers are imitated: this is a bad one                 |
| `images` and the like of a row               | its media (`stages/data/media/rows.py`); of a message: refused        |
| `objects` (ms-swift)                         | refused where the text has places for boxes; else they are in it      |
| `chat_template_kwargs` of a row              | variables of the template; those that it never reads: refused         |
| `function_call` and the like                 | refused                                                               |

Fields that no format reads are counted (`IgnoredFields`).

Agents' data have messages of their own for tool calls and results; `with_tool_calls` turns them into calls of the
assistant and messages of the role `tool`:

| source                    | a call          | its result      |
| ------------------------- | --------------- | --------------- |
| ms-swift (`role`)         | `tool_call`     | `tool_response` |
| ShareGPT's users (`from`) | `function_call` | `observation`   |
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from stages.core.fields import LARGEST
from stages.core.lines import counted
from stages.data.media_reference import KINDS, MediaKind
from stages.data.messages import (
    FUNCTION_FIELDS,
    MESSAGE_FIELDS,
    TOOL_ANSWER_FIELDS,
    TOOL_FIELDS,
    Message,
    RowError,
    check_json,
    decoded,
    kind_of,
    listed,
    listed_tools,
    make_message,
    parse_text,
)

LEARNED_MARKS = ("loss", "loss_scale", "loss_weight", "weight", "train")
NOT_LEARNED = ("false", "0", "0.0")
"""Lower-case texts (CSV has nothing else) of `loss`, `train`, … that exclude an assistant's turn from the loss."""
MEDIA_COLUMNS: dict[str, MediaKind] = {column: kind for kind in KINDS for column in (kind, f"{kind}s")}
"""Columns that hold a row's media, such as `image` and `images`, with the kind of each."""
BOXES = re.compile(r"<bbox>|<ref-object>")
REFUSED = {
    "function_call": "a form of tool calls that is not read; expected `tool_calls`",
    "positive_messages": "what embedding and reranking learn from (ms-swift), which no method here does",
    "negative_messages": "what embedding and reranking learn from (ms-swift), which no method here does",
}
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Meaning of each label of an answer (True for good, False for bad), by its lower-case text as in CSV."""
CALLS = ("tool_call", "function_call")
RESULTS = ("tool_response", "observation")


def check_row(row: dict[str, Any], read: tuple[str, ...]) -> None:
    """Raise RowError for an unsupported field of a row, or of messages in the columns `read`, such as `images`."""
    _check_fields(row, "")
    if unlearned := [mark for mark in LEARNED_MARKS if str(row.get(mark)).lower() in NOT_LEARNED]:
        raise RowError(f"has {listed(unlearned)} {row[unlearned[0]]!r}: it is not to be learned; leave this row out")
    for column, number, message in _messages(row, read):
        where = f" of message {number} of `{column}`"
        if media := [name for name in MEDIA_COLUMNS if says_something(message.get(name))]:
            raise RowError(
                f"has {listed(media)}{where}; expected media in columns of the row, or in parts of `content`"
            )
        _check_fields(message, where)
    if says_something(row.get("objects")) and BOXES.search(json.dumps([row.get(name) for name in read], default=str)):
        raise RowError(
            "has `objects` beside `<bbox>` or `<ref-object>` in its text, which ms-swift fills in with boxes of each "
            "model's own scale; expected the boxes written out in the text"
        )
    if has_bad_answer(row) and "label" not in read:
        raise RowError(
            "has `label: false`, so its answer is a bad one, which would be learned; expected good answers alone "
            "(`method: kto` learns from both, or leave this row out)"
        )


def with_tool_calls(messages: object, role_key: str = "role", content_key: str = "content") -> Any:
    """Return the messages with separate tool-call messages merged into the assistant's turn before them.

    A call's content is {name, arguments}, or a list of them, as it is or as JSON text. Raises RowError for anything
    else, and for calls of one turn of which only some are learned. What is no list is returned unchanged.
    """

    def role(message: object) -> str:
        return str(message.get(role_key)) if isinstance(message, dict) else ""

    if not isinstance(messages, list) or not any(role(message) in CALLS + RESULTS for message in messages):
        return messages
    merged: list[Any] = []
    for number, message in enumerate(messages, 1):
        if role(message) in RESULTS:
            merged.append({**message, role_key: "tool"})
        elif role(message) in CALLS:
            if not merged or role(merged[-1]) not in ("assistant", "gpt"):
                merged.append({role_key: "assistant", content_key: "", **_marks(message)})
            merged[-1] = _with_calls(merged[-1], message, _calls(message.get(content_key), number), number)
        else:
            merged.append(message)
    return merged


def unlearned_turns(messages: object, is_assistant: list[bool], num_before: int = 0) -> frozenset[int]:
    """Return the indices of messages that a row excludes from the loss (by `loss: false` and similar fields).

    Raises RowError for a mark that is neither yes nor no, or that asks to learn what another role says.
    """
    unlearned = set()
    assert isinstance(messages, list)
    for position, (message, is_learnable) in enumerate(zip(messages, is_assistant, strict=True)):
        for mark in (mark for mark in LEARNED_MARKS if message.get(mark) is not None):
            value = message[mark]
            if value not in (0, 1):  # True and False are 1 and 0, to Python too
                raise RowError(f"has {value!r} as `{mark}` of message {position + 1}; expected true or false, 1 or 0")
            if value and not is_learnable:
                raise RowError(
                    f"has `{mark}: {value}` in message {position + 1}, which is not the assistant's; only the "
                    "assistant's turns are learned, or everything (`train_on: all`)"
                )
            if not value and is_learnable:
                unlearned.add(num_before + position)
    return frozenset(unlearned)


def with_system(row: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Return the messages, preceded by a system message if the row has a column `system`. Raises RowError for two."""
    if not says_something(row.get("system")):
        return messages
    system = make_message("system", parse_text(row["system"], "system"))
    if messages[0]["role"] == "system" and messages[0] != system:
        raise RowError("has a column `system` and another system message; expected one of the two")
    return messages if messages[0] == system else [system, *messages]  # not the same prompt twice


def template_variables(row: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that a row sets for the chat template (`chat_template_kwargs`). Raises RowError."""
    variables = decoded(row.get("chat_template_kwargs"))
    if not says_something(variables):
        return {}
    if not isinstance(variables, dict):
        raise RowError(f"has {kind_of(variables)} as `chat_template_kwargs`; expected an object")
    check_json(variables, "`chat_template_kwargs`")
    return {name: value for name, value in variables.items() if value is not None}


def has_bad_answer(row: Mapping[str, Any]) -> bool:
    """Return whether a row labels its answer as bad (`label: false`)."""
    return str(row.get("label")).lower() == "false"  # 0 may well be a class


def check_no_conversation(row: dict[str, Any]) -> None:
    """Raise RowError if a row of plain text has columns for conversations, such as `system` or `tools`."""
    for column in ("system", "tools", "chat_template_kwargs"):
        if says_something(decoded(row.get(column))):
            raise RowError(f"has a column `{column}` beside plain text, which has no place for it; expected messages")


def is_label(value: object) -> bool:
    """Return whether a column's value can be a label of an answer (good or bad)."""
    return str(value).lower() in LABELS


def parse_label(value: object) -> bool:
    """Return whether a label says that an answer is good. Raises RowError for any other value."""
    found = LABELS.get(str(value).lower())
    if found is None:
        raise RowError(f"has {value!r} as `label`; expected true, for a good answer, or false")
    return found


def parse_margin(value: object) -> float:
    """Return a pair's margin as a number, also if it is text as in CSV. Raises RowError."""
    try:
        margin = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        margin = math.nan
    if not abs(margin) <= LARGEST:
        raise RowError(f"has {value!r} as `margin`; expected a number")
    return margin


def says_something(value: object) -> bool:
    """Return whether a row's column has a value that is not empty."""
    return value is not None and value not in ("", [], {})


class IgnoredFields:
    """Counter of row fields that the reader of the dataset's format ignores, to warn the user."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of rows in which each ignored field has a value."""

    def add(self, row: dict[str, Any], read: tuple[str, ...]) -> None:
        known = {*read, *MEDIA_COLUMNS, "objects"}
        self.counts.update(name for name, value in row.items() if name not in known and says_something(value))
        self.counts.update(
            {
                f"{column}[].{name}"
                for column, _, message in _messages(row, read)
                for name, value in message.items()
                if name not in MESSAGE_FIELDS and says_something(value)
                if name not in TOOL_ANSWER_FIELDS or message.get("role") != "tool"
            }
        )
        if "tools" in read:
            self.counts.update({f"tools[].{name}" for tool in listed_tools(row) for name in _unread_of_tool(tool)})

    def warning(self) -> str | None:
        """Return a warning that lists all ignored fields with their number of rows; None if there are none."""
        if not self.counts:
            return None
        fields = ", ".join(f"`{name}` ({counted(count, 'row')})" for name, count in sorted(self.counts.items()))
        return f"fields that are not read, and teach nothing: {fields}"


def _check_fields(fields: dict[str, Any], where: str) -> None:
    for name, reason in REFUSED.items():
        if says_something(fields.get(name)):
            raise RowError(f"has {kind_of(fields[name])} as `{name}`{where}, {reason}")


def _messages(row: dict[str, Any], columns: tuple[str, ...]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield each message in the given columns of a row, with the column's name and the message's number."""
    for column in columns:
        for number, item in enumerate(row[column] if isinstance(row.get(column), list) else [], 1):
            if isinstance(item, dict) and {"role", "from"} & item.keys():
                yield column, number, item


def _unread_of_tool(tool: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a tool definition that are ignored because servers hide them from chat templates."""
    outer, inner = (tool, decoded(tool["function"])) if "function" in tool else ({}, tool)
    assert isinstance(inner, dict), "the row was read"
    known = (*FUNCTION_FIELDS, "type") if inner is tool else FUNCTION_FIELDS
    yield from (name for name, value in outer.items() if name not in TOOL_FIELDS and says_something(value))
    yield from (name for name, value in inner.items() if name not in known and says_something(value))


def _with_calls(turn: dict[str, Any], message: dict[str, Any], calls: list[Any], number: int) -> dict[str, Any]:
    """Return an assistant's turn with the next message's tool calls; raise RowError if loss marks differ."""
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
