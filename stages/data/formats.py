"""A row of a dataset, in any of the formats that people have → the documents to learn from, or why it is a bad row.

| format              | columns                                                                                      |
| ------------------- | -------------------------------------------------------------------------------------------- |
| `messages`          | `messages`: list of {role, content}                                                          |
| `sharegpt`          | `conversations`: list of {from, value}                                                       |
| `prompt_completion` | `prompt`, `completion`: two strings, taken as they are, or lists of messages                 |
| `alpaca`            | `instruction`, `output`: one turn each; maybe `input`, which follows the instruction in the  |
|                     | next line; maybe `history`: earlier questions and answers                                    |
| `query_response`    | `query`, `response`; maybe `history`, as above                                               |
| `human_assistant`   | `conversation`: list of {human, assistant}, a question and its answer each                   |
| `text`              | `text`: a string, taken as it is                                                             |
| `preference`        | `chosen`, `rejected`: strings, taken as they are, or lists of messages; maybe `prompt`, which |
|                     | may also be contained in both; of all pairs maybe `margin`: by how much the better answer is |
|                     | better                                                                                       |
| `rejected_response` | `messages`, and `rejected_response`: a worse answer than their last                          |
| `rejected_messages` | `messages`, and `rejected_messages`: the same with a worse answer                            |
| `labelled`          | `prompt`, `completion` as above, and `label`: true, it is a good answer, or false            |
| `labelled_messages` | `messages`, and `label`: of their last answer                                                |

Conversations of every format may have `system`, `tools`, what the assistant may call, and `chat_template_kwargs`,
variables of the chat template.
Where some of `prompt`, `completion`, `chosen`, `rejected` are lists and others strings, the strings are messages too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stages.core.errors import DataError
from stages.data.agent_messages import with_tool_calls
from stages.data.config import METHODS_FOR, DataFormat, RowKind
from stages.data.documents import Conversation, Document, PlainText
from stages.data.messages import (
    Message,
    RowError,
    as_messages,
    decoded,
    kind_of,
    listed,
    make_message,
    ordered,
    parse_messages,
    parse_text,
    parse_tools,
)
from stages.data.preferences import Columns, read_preference
from stages.data.row_fields import (
    Unread,
    check_no_conversation,
    check_row,
    parse_label,
    parse_margin,
    template_variables,
    unlearned_turns,
    with_system,
)

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


WORDS_FOR: dict[RowKind, str] = {
    "examples": "examples",
    "pairs": "preference pairs",
    "labelled": "labelled answers",
    "prompts": "prompts",
}
OTHER_FORMATS = {
    frozenset({"prompt", "completions", "labels"}): "stepwise supervision (TRL), which no method here learns from",
    frozenset({"input_ids"}): "tokens; give the text, which is tokenized here",
    frozenset({"anchor", "positive"}): "embedding pairs, which no method here learns from",
}
"""Columns of formats that are known by name, and not read."""
OF_CONVERSATIONS = ("system", "tools", "chat_template_kwargs")
OF_PAIRS = ("margin", *OF_CONVERSATIONS)


@dataclass(frozen=True)
class Format:
    """The columns that a row must and may have, and how it is read: one document, or chosen and rejected."""

    columns: tuple[str, ...]
    read: Callable[[Columns], tuple[Document, ...]]
    optional: tuple[str, ...] = OF_CONVERSATIONS
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
    raise DataError(
        f"the first row has the columns {listed(first_row)}; expected {_describe(possible)}.{_hint(first_row)}"
    )


def _hint(first_row: Columns) -> str:
    """What rows of these columns are, or which method they are for; the format with the most columns says it."""
    if named := next((name for columns, name in OTHER_FORMATS.items() if columns <= first_row.keys()), None):
        return f" These look like {named}."
    fitting = [form for form in FORMATS.values() if all(column in first_row for column in form.columns)]
    if not fitting:
        return ""
    found = max(fitting, key=lambda form: len(form.columns)).rows
    return f" These are {WORDS_FOR[found]}: {METHODS_FOR[found]}."


class RowReader:
    """Reads the rows of one dataset, all in the same format, and all conversations or all plain text."""

    def __init__(self, wanted: DataFormat, rows: RowKind) -> None:
        self._wanted = wanted
        self._rows = rows
        self._format: Format | None = None
        self.has_margins = False
        self._is_plain: bool | None = None
        self.unread = Unread()

    def __str__(self) -> str:  # what the first rows have decided
        return f"{self._format and self._format.columns} {self.has_margins} {self._is_plain}"

    def read(self, content: object) -> tuple[Document, ...]:
        """The documents of a row: one, or of a pair the chosen and the rejected.

        Raises RowError for a bad row, DataError when the columns of the first row are of no suitable format.
        """
        if not isinstance(content, dict):
            raise RowError(f"is {kind_of(content)}; expected an object with named columns")
        if self._format is None:
            self._format = choose_format(self._wanted, content, self._rows)
            self.has_margins = self._rows == "pairs" and content.get("margin") is not None
        missing = [column for column in self._format.columns if column not in content]
        if missing:
            raise RowError(f"has no {listed(missing)}; found {listed(content)}")
        read = self._format.columns + self._format.optional
        check_row(content, read)
        documents = self._format.read(content)
        self._check_form(isinstance(documents[0], PlainText))
        self.unread.add(content, read)
        return documents

    def label(self, content: Any) -> bool | None:
        """Of a labelled row that was read, whether its answer is a good one. Raises RowError."""
        return parse_label(content["label"]) if self._rows == "labelled" else None

    def margin(self, content: Any) -> float | None:
        """Of a pair that was read, by how much the chosen answer is better, if the first row says it. Raises RowError
        where only some do."""
        value = content.get("margin") if self._rows == "pairs" else None
        if (value is not None) != self.has_margins:
            raise RowError(
                f"has {'a' if value is not None else 'no'} `margin`, unlike the first row; expected it in all"
            )
        return None if value is None else parse_margin(value)

    def _check_form(self, is_plain: bool) -> None:
        """One half of a dataset would be learned with the chat template, the other without."""
        if self._is_plain is None:
            self._is_plain = is_plain
        if self._is_plain != is_plain:
            forms = {True: "plain text", False: "a conversation"}
            raise RowError(f"is {forms[is_plain]}, but the first row is {forms[self._is_plain]}; expected one form")


def _read_messages(row: Columns) -> tuple[Document, ...]:
    raw = with_tool_calls(row["messages"])
    messages = parse_messages(raw, "messages")
    if [message["role"] for message in messages] == ["assistant"]:
        raise RowError(
            "has one message, of the assistant, as ms-swift's pre-training rows have; expected a question before it, "
            "or its text in a column `text`"
        )
    return (_conversation(row, messages, raw),)


def _read_labelled_messages(row: Columns) -> tuple[Document, ...]:
    """The last message is the answer that the label is of."""
    raw = with_tool_calls(row["messages"])
    messages = parse_messages(raw, "messages")
    return (_conversation(row, messages, raw, len(messages) - 1),)


def _read_human_assistant(row: Columns) -> tuple[Document, ...]:
    turns = decoded(row["conversation"])
    if not (isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns)):
        raise RowError(f"has {kind_of(turns)} in `conversation`; expected a list of {{human, assistant}}")
    pairs = [(parse_text(turn.get("human"), "human"), parse_text(turn.get("assistant"), "assistant")) for turn in turns]
    return (_conversation(row, _turns(pairs), None),)


def _read_query_response(row: Columns) -> tuple[Document, ...]:
    last = parse_text(row["query"], "query"), parse_text(row["response"], "response")
    return (_conversation(row, _turns([*_history(row), last]), None),)


def _read_rejected_response(row: Columns) -> tuple[Document, ...]:
    raw = with_tool_calls(row["messages"])
    rejected = make_message("assistant", parse_text(row["rejected_response"], "rejected_response"))
    return _read_rejected(row, raw, [*raw[:-1], rejected] if isinstance(raw, list) else raw)


def _read_rejected_messages(row: Columns) -> tuple[Document, ...]:
    return _read_rejected(row, *(with_tool_calls(row[column]) for column in ("messages", "rejected_messages")))


def _read_rejected(row: Columns, chosen: object, rejected: object) -> tuple[Document, ...]:
    for column, messages in (("messages", chosen), ("rejected_messages", rejected)):
        parse_messages(messages, column)
    shared = {column: row[column] for column in OF_CONVERSATIONS if column in row}
    return read_preference({**shared, "chosen": chosen, "rejected": rejected})


def _read_sharegpt(row: Columns) -> tuple[Document, ...]:
    raw = with_tool_calls(row["conversations"], "from", "value")
    return (_conversation(row, parse_messages(raw, "conversations", ("from", "value"), SHAREGPT_ROLES), raw),)


def _conversation(row: Columns, messages: list[Message], marked: object, num_prompt_messages: int = 0) -> Conversation:
    """`marked`: the last messages as the row has them, which may say what is not learned of them."""
    whole = ordered(with_system(row, messages))
    num_before = len(whole) - len(marked) if isinstance(marked, list) else 0
    roles = [message["role"] == "assistant" for message in whole[num_before:]]
    unlearned = unlearned_turns(marked, roles, num_before) if isinstance(marked, list) else frozenset()
    num_prompt_messages += len(whole) - len(messages) if num_prompt_messages else 0
    return Conversation(whole, num_prompt_messages, parse_tools(row), unlearned, template_variables(row))


def _read_alpaca(row: Columns) -> tuple[Document, ...]:
    question = parse_text(row["instruction"], "instruction")
    if row.get("input") not in (None, ""):
        question += "\n" + parse_text(row["input"], "input")  # one newline, as LLaMA-Factory and ms-swift
    return (_conversation(row, _turns([*_history(row), (question, parse_text(row["output"], "output"))]), None),)


def _turns(turns: list[tuple[str, str]]) -> list[Message]:
    """Questions and their answers as messages."""
    return [make_message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def _history(row: Columns) -> list[tuple[str, str]]:
    """Earlier turns: pairs of a question and its answer."""
    history = decoded(row.get("history"))
    if history in (None, ""):
        return []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise RowError(f"has {kind_of(history)} in `history`; expected a list of [question, answer]")
    return [(parse_text(question, "history"), parse_text(answer, "history")) for question, answer in history]


def _read_prompt_completion(row: Columns) -> tuple[Document, ...]:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        check_no_conversation(row)
        return (PlainText(parse_text(prompt, "prompt"), parse_text(completion, "completion")),)
    before = as_messages(prompt, "prompt", "user")
    after = as_messages(completion, "completion", "assistant")
    return (_conversation(row, before + after, completion, len(before)),)


def _read_text(row: Columns) -> tuple[Document, ...]:
    return (PlainText("", parse_text(row["text"], "text")),)


def _describe(formats: dict[str, Format]) -> str:
    return "; ".join(f"{name} ({listed(form.columns)})" for name, form in formats.items())


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), _read_messages),
    "sharegpt": Format(("conversations",), _read_sharegpt),
    "prompt_completion": Format(("prompt", "completion"), _read_prompt_completion),
    "alpaca": Format(("instruction", "output"), _read_alpaca, ("input", "history", *OF_CONVERSATIONS)),
    "query_response": Format(("query", "response"), _read_query_response, ("history", *OF_CONVERSATIONS)),
    "human_assistant": Format(("conversation",), _read_human_assistant),
    "text": Format(("text",), _read_text, ()),
    "preference": Format(("chosen", "rejected"), read_preference, ("prompt", *OF_PAIRS), rows="pairs"),
    "rejected_response": Format(("messages", "rejected_response"), _read_rejected_response, OF_PAIRS, rows="pairs"),
    "rejected_messages": Format(("messages", "rejected_messages"), _read_rejected_messages, OF_PAIRS, rows="pairs"),
    "labelled": Format(("prompt", "completion", "label"), _read_prompt_completion, rows="labelled"),
    "labelled_messages": Format(("messages", "label"), _read_labelled_messages, rows="labelled"),
}
"""In the order in which `auto` tries them: a dataset with `messages` may have a `prompt` or a `text` column as well."""
