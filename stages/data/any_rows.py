"""A row of a dataset, in any format that is read here → what it says: for what compares and counts rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.data.config import RowKind
from stages.data.documents import Document, PlainText
from stages.data.formats import FORMATS, RowReader, choose_format, likeliest_format, rename_columns
from stages.data.messages import THOUGHTS, Message, RowError, kind_of, listed
from stages.data.prompts import PromptReader, is_prompt_alone


@dataclass(frozen=True)
class ReadRow:
    """content: as the file has it. documents: one, or of a pair the chosen and the rejected; of a prompt alone, what is
    asked.

    label: of a labelled answer. reference: of a prompt alone, the right answer where the row has one.
    """

    content: dict[str, Any]
    documents: tuple[Document, ...]
    label: bool | None = None
    reference: str | None = None
    is_prompt: bool = False

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The texts of the first document, one a message, and of a pair those of the rejected answer."""
        first, *others = self.documents
        return (tuple(_texts(first, 0)), *(tuple(_texts(other, _num_prompt_texts(other))) for other in others))

    @property
    def asked(self) -> tuple[str, ...]:
        """What a person says in the first document: the user's messages, a prompt, or all of a text without one."""
        document = self.documents[0]
        if isinstance(document, PlainText):
            return (document.prompt or document.completion,)
        return tuple(message["content"] for message in document.messages if message["role"] == "user")

    @property
    def num_turns(self) -> int | None:
        """Messages of the first document, but for the system's; None of plain text, which has none."""
        document = self.documents[0]
        if isinstance(document, PlainText):
            return None
        return sum(message["role"] != "system" for message in document.messages)

    def canonical(self) -> str:
        """The same text for two rows if and only if the same is learned from them."""
        documents = [vars(document) for document in self.documents]
        return json.dumps([documents, self.label, self.reference], sort_keys=True, default=sorted)


class AnyRowReader:
    """Reads the rows of one dataset: all are of the format that its first row has."""

    def __init__(self) -> None:
        self._prompts: PromptReader | None = None
        self._answers: RowReader | None = None
        self.form: str | None = None
        """What all rows are, in words, once one was read."""

    def read(self, content: object) -> ReadRow:
        """Raises RowError for a bad row, DataError when the first one is of no known format."""
        if not isinstance(content, dict):
            raise RowError(f"is {kind_of(content)}; expected an object with named columns")
        if not self._prompts and not self._answers:
            self._choose(content)
        if self._answers:
            row = ReadRow(content, self._answers.read(content), self._answers.label(content))
        elif self._prompts and is_prompt_alone(content):
            prompt = self._prompts.read(content)
            row = ReadRow(content, (prompt.document,), reference=prompt.reference, is_prompt=True)
        else:
            raise RowError("has an answer, but the first row is a prompt alone; expected one form")
        is_plain = isinstance(row.documents[0], PlainText)
        self.form = self.form or f"{self._columns} ({'plain text' if is_plain else 'conversations'})"
        return row

    def _choose(self, first_row: dict[str, Any]) -> None:
        """By the format with the most columns of those that fit."""
        if is_prompt_alone(first_row):
            self._prompts, self._columns = PromptReader(None), "prompts alone"
            return
        named = rename_columns(first_row, {})
        likeliest = likeliest_format(named)
        rows: RowKind = FORMATS[likeliest].rows if likeliest else "examples"
        self._columns = listed(choose_format("auto", named, rows, {}).columns)
        self._answers = RowReader("auto", rows)


def _texts(document: Document, first: int) -> Iterator[str]:
    """Of each message, or of prompt and completion, from number `first` on; what says nothing is left out."""
    if isinstance(document, PlainText):
        texts = [document.prompt, document.completion]
    else:
        texts = [_text(message) for message in document.messages]
    yield from (text for text in texts[first:] if text)


def _num_prompt_texts(document: Document) -> int:
    return 1 if isinstance(document, PlainText) else document.num_prompt_messages


def _text(message: Message) -> str:
    """Thoughts and tool calls included."""
    calls = [json.dumps(message["tool_calls"], ensure_ascii=False)] if "tool_calls" in message else []
    return "\n".join(
        text for text in (*(message.get(name, "") for name in THOUGHTS), message["content"], *calls) if text
    )
