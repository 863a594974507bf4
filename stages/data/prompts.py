"""A row of a dataset, in any format → what a model is asked, and the right answer where the row has one.

| row                                                        | asked                    | right answer          |
| ---------------------------------------------------------- | ------------------------ | --------------------- |
| `prompt` alone: text, or messages                          | the prompt               | `answer`, `solution`, |
|                                                            |                          | or `ground_truth`     |
| `messages` that end with a question                        | the messages             | the same              |
| of a format with answers (`stages/data/formats.py`)        | all before the last one  | the last answer       |
| of labelled answers                                        | all before the answer    | a good answer         |
| of preferences                                             | what both answer         | the chosen answer     |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stages.data.agent_messages import RESULTS, with_tool_calls
from stages.data.documents import Conversation, Document, PlainText
from stages.data.formats import FORMATS, RowReader, likeliest_format, rename_columns
from stages.data.messages import (
    Message,
    RowError,
    as_messages,
    decoded,
    kind_of,
    make_message,
    ordered,
    parse_text,
    parse_tools,
)
from stages.data.row_fields import check_row, has_bad_answer, template_variables, with_system

REFERENCE_COLUMNS = ("answer", "solution", "ground_truth")


@dataclass(frozen=True)
class Prompt:
    """`document` without an answer: messages that end with a question, or plain text without a completion."""

    document: Document
    reference: str | None
    row: dict[str, Any]


class PromptReader:
    """Reads the prompts of one dataset, whose rows are all of one format."""

    def __init__(
        self,
        reference_column: str | None,
        named_in: str = "prompts.reference",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        """reference_column: where the right answer stands, as the recipe's field `named_in` says; None for the usual
        places. columns: name in the rows → name that formats have."""
        self._column = reference_column
        self._columns = columns or {}
        self._named_in = named_in
        self._answered: RowReader | None = None
        self._pairs: RowReader | None = None

    def read(self, row: object) -> Prompt:
        """Raises RowError for a bad row, DataError when the first one is of no known format."""
        if not isinstance(row, dict):
            raise RowError(f"is {kind_of(row)}; expected an object with named columns")
        row = rename_columns(row, self._columns)
        if is_prompt_alone(row):
            return Prompt(_prompt_alone(row), self._reference(row, None), row)
        likeliest = likeliest_format(row)
        if likeliest and FORMATS[likeliest].rows == "pairs":
            self._pairs = self._pairs or RowReader("auto", "pairs")
            document = self._pairs.read(row)[0]
        else:
            self._answered = self._answered or RowReader("auto", "examples")
            (document,) = self._answered.read({name: value for name, value in row.items() if name != "label"})
        asked, answer = _before_the_answer(document)
        return Prompt(asked, self._reference(row, None if has_bad_answer(row) else answer), row)

    def _reference(self, row: dict[str, Any], answer: str | None) -> str | None:
        if self._column is not None:
            if row.get(self._column) is None:
                raise RowError(f"has nothing in `{self._column}`, which `{self._named_in}` names")
            return _as_text(row[self._column])
        if answer is not None:
            return answer
        return next((_as_text(row[name]) for name in REFERENCE_COLUMNS if row.get(name) is not None), None)


def is_prompt_alone(row: dict[str, Any]) -> bool:
    """Whether a row asks, and has no answer in a place where a model would learn it."""
    if "prompt" in row:
        return not {"completion", "chosen"} & row.keys()
    messages = None if row.get("chosen") is not None else row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") in ("user", "tool", *RESULTS)


def _prompt_alone(row: dict[str, Any]) -> Document:
    column = "prompt" if "prompt" in row else "messages"
    check_row(row, (column,))
    asked = decoded(row[column]) if not isinstance(row[column], str) else row[column]
    if isinstance(asked, str) and not any(row.get(name) for name in ("system", "tools", "chat_template_kwargs")):
        return PlainText(parse_text(asked, column), "")
    messages = with_system(row, as_messages(with_tool_calls(asked), column, "user"))
    return Conversation(_ordered(messages), tools=parse_tools(row), variables=template_variables(row))


def _ordered(messages: list[Message]) -> list[Message]:
    """The same, if an answer may follow them. Raises RowError."""
    return ordered([*messages, make_message("assistant", "an answer")])[:-1]


def _before_the_answer(document: Document) -> tuple[Document, str | None]:
    """What is asked, and the answer; None where that is a call of tools."""
    if isinstance(document, PlainText):
        if not document.prompt:
            raise RowError("has text, but no prompt; expected columns `prompt`, `messages` or other conversations")
        return replace(document, completion=""), document.completion
    *before, last = document.messages
    return replace(document, messages=before, unlearned=frozenset()), last["content"] or None


def _as_text(value: object) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"has {kind_of(value)} as its right answer; expected text or a number")
