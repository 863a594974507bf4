"""Readers of dataset rows in any supported format, for code that serves all training methods (prompts, curation).

`PromptReader` returns what a model is asked, and the right answer where the row has one:

| row                                                        | asked                    | right answer          |
| ---------------------------------------------------------- | ------------------------ | --------------------- |
| `prompt` alone: text, or messages                          | the prompt               | `answer`, `solution`, |
|                                                            |                          | or `ground_truth`     |
| `messages` that end with a question                        | the messages             | the same              |
| of a format with answers (`stages/data/formats.py`)        | all before the last one  | the last answer       |
| of labelled answers                                        | all before the answer    | a good answer         |
| of preferences                                             | what both answer         | the chosen answer     |

`AnyRowReader` returns all texts of a row, for code that compares and counts rows. `check_formats` refuses mixtures of
datasets from which no one method learns.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.core.errors import DataError, DownloadError, TransientError
from stages.data.config import ROW_KINDS, DataConfig, DataFormat, RowKind
from stages.data.files import Row, RowLocation, find_files, read_rows
from stages.data.formats import (
    FORMATS,
    RowReader,
    choose_format,
    fitting_formats,
    likeliest_format,
    rename_columns,
)
from stages.data.media.rows import MediaSource, with_media
from stages.data.messages import (
    THOUGHTS,
    Conversation,
    Document,
    Message,
    PlainText,
    RowError,
    as_messages,
    decoded,
    fields_of,
    kind_of,
    listed,
    make_message,
    ordered,
    parse_text,
    parse_tools,
    texts_of,
)
from stages.data.row_fields import (
    MEDIA_COLUMNS,
    RESULTS,
    check_row,
    has_bad_answer,
    template_variables,
    with_system,
    with_tool_calls,
)

REFERENCE_COLUMNS = ("answer", "solution", "ground_truth")
ONLY_IN_CHATS = ("system", "tools", "chat_template_kwargs", *MEDIA_COLUMNS)
"""Columns beside a prompt's text for which plain text has no place: with them, the text is a user's message."""


@dataclass(frozen=True)
class Prompt:
    """Prompt of a dataset row: a conversation that ends with a question, or a plain text before its completion."""

    document: Document
    reference: str | None
    row: dict[str, Any]


class PromptReader:
    """Reader of the prompts of a dataset's rows, with the right answer where the row has one."""

    def __init__(
        self,
        reference_column: str | None,
        named_in: str = "prompts.reference",
        columns: Mapping[str, str] | None = None,
        media: MediaSource | None = None,
    ) -> None:
        """Create the reader of prompts for the rows of one dataset.

        reference_column: of the right answer, as the recipe's field `named_in` says; None for the usual ones. columns:
        name in the rows → name that formats have. media: as of `RowReader`.
        """
        self._media = media
        self._column = reference_column
        self._columns = columns or {}
        self._named_in = named_in
        self._answered: RowReader | None = None
        self._pairs: RowReader | None = None

    def read(self, row: object, place: RowLocation | None = None) -> Prompt:
        """Return a row's prompt and right answer; raise RowError for a bad row, DataError for one of unknown format.

        place: of the row, as of `RowReader.read`.
        """
        if not isinstance(row, dict):
            raise RowError(f"is {kind_of(row)}; expected an object with named columns")
        row = rename_columns(row, self._columns)
        if is_prompt_alone(row):
            (document,) = with_media((_prompt_alone(row),), row, self._media, place)
            return Prompt(document, self._reference(row, None), row)
        likeliest = likeliest_format(row)
        if likeliest and FORMATS[likeliest].rows == "pairs":
            self._pairs = self._pairs or RowReader("auto", "pairs", media=self._media)
            document = self._pairs.read(row, place)[0]
        else:
            self._answered = self._answered or RowReader("auto", "examples", media=self._media)
            # A bad answer (`label: false`) would be refused, but only its prompt is wanted.
            (document,) = self._answered.read({name: cell for name, cell in row.items() if name != "label"}, place)
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
    """Return whether a dataset row is only a prompt, such as a question, without an answer to learn from."""
    if "prompt" in row:
        return not {"completion", "chosen"} & row.keys()
    messages = None if row.get("chosen") is not None else row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") in ("user", "tool", *RESULTS)


def likeliest_kind(row: dict[str, Any]) -> tuple[RowKind, DataFormat] | None:
    """Return the kind and the format that fit a row best, with `auto` for a prompt alone; None if none fits."""
    if is_prompt_alone(row):
        return "prompts", "auto"
    form = likeliest_format(row)
    return (FORMATS[form].rows, form) if form else None


@dataclass(frozen=True)
class ReadRow:
    """Row of a dataset in any supported format, with the documents (conversations or plain texts) that it holds.

    documents: one; two of a preference pair (chosen, rejected); for a prompt alone, the question. reference: right
    answer of a prompt alone, where the row has one.
    """

    content: dict[str, Any]
    documents: tuple[Document, ...]
    label: bool | None = None
    reference: str | None = None
    is_prompt: bool = False

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Message texts of a row's first document and, for a preference pair, those of the rejected answer."""
        first, *others = self.documents
        return (tuple(_texts(first, 0)), *(tuple(_texts(other, _num_prompt_texts(other))) for other in others))

    @property
    def asked(self) -> tuple[str, ...]:
        """Questions of a row: the user's messages, or the prompt of a plain text (the whole text if it has none)."""
        document = self.documents[0]
        if isinstance(document, PlainText):
            return (document.prompt or document.completion,)
        return tuple(text for message in document.messages if message["role"] == "user" for text in texts_of(message))

    @property
    def media_files(self) -> list[str]:
        """Paths, in the dataset's folder, of the files of the row's media; those inside of the row have none."""
        media = (one for document in self.documents if isinstance(document, Conversation) for one in document.media)
        return [*dict.fromkeys(one.path for one in media if one.path)]

    @property
    def num_turns(self) -> int | None:
        """Number of messages in the row's first conversation, without the system message; None for plain text."""
        document = self.documents[0]
        if isinstance(document, PlainText):
            return None
        return sum(message["role"] != "system" for message in document.messages)

    def canonical(self) -> str:
        """Return a text that is equal for two rows exactly when both teach the model the same (to find duplicates)."""
        documents = [fields_of(document) for document in self.documents]
        return json.dumps([documents, self.label, self.reference], sort_keys=True, default=sorted)


class AnyRowReader:
    """Reader of all texts of a dataset's rows, which must have the format of the first row."""

    def __init__(self, media: MediaSource | None = None) -> None:
        """Create the reader. media: as of `RowReader`."""
        self._media = media
        self._prompts: PromptReader | None = None
        self._answers: RowReader | None = None
        self.form: str | None = None
        """Description of the format of the dataset's rows, shown to users; None until the first row has been read."""

    def read(self, content: object, place: RowLocation | None = None) -> ReadRow:
        """Return a row with its documents; raise RowError for a bad row, DataError for an unknown format.

        place: of the row, as of `RowReader.read`.
        """
        if not isinstance(content, dict):
            raise RowError(f"is {kind_of(content)}; expected an object with named columns")
        if not self._prompts and not self._answers:
            self._choose(content)
        if self._answers:
            row = ReadRow(content, self._answers.read(content, place), self._answers.label(content))
        elif self._prompts and is_prompt_alone(content):
            prompt = self._prompts.read(content, place)
            row = ReadRow(content, (prompt.document,), reference=prompt.reference, is_prompt=True)
        else:
            raise RowError("has an answer, but the first row is a prompt alone; expected one form")
        is_plain = isinstance(row.documents[0], PlainText)
        self.form = self.form or f"{self._columns} ({'plain text' if is_plain else 'conversations'})"
        return row

    def _choose(self, first_row: dict[str, Any]) -> None:
        """Choose the reader that fits the first row: for prompts, or for the fitting format with the most columns."""
        if is_prompt_alone(first_row):
            self._prompts, self._columns = PromptReader(None, media=self._media), "prompts alone"
            return
        named = rename_columns(first_row, {})
        likeliest = likeliest_format(named)
        rows: RowKind = FORMATS[likeliest].rows if likeliest else "examples"
        self._columns = listed(choose_format("auto", named, rows, {}).columns)
        self._answers = RowReader("auto", rows, media=self._media)


def check_formats(inputs: Mapping[str, Path], config: DataConfig, rows: RowKind) -> None:
    """Raise DataError if no method could learn from all datasets, naming two of them, their formats and methods.

    Problems of a single dataset are left to its preparation. inputs: folders of artifacts by stage.
    """
    formats = {
        name: found
        for name, part in zip(config.names, config.parts.values(), strict=True)
        if (found := _format_of(part, inputs[part.dataset_stage] / "data", rows))
    }
    if problem := next(not_to_be_mixed(formats, rows), None):
        raise DataError(problem)


def not_to_be_mixed(formats: Mapping[str, DataFormat], rows: RowKind) -> Iterator[str]:
    """Yield an error for each mixture dataset that the method cannot learn from. formats: by dataset, if known."""
    suitable = next((name for name, form in formats.items() if FORMATS[form].rows == rows), None)
    for name, form in formats.items():
        kind = FORMATS[form].rows
        if suitable and kind != rows:
            learned, other = ROW_KINDS[rows], ROW_KINDS[kind]
            yield (
                f"{suitable} and {name} cannot be mixed: {suitable} has {learned.title} (`{formats[suitable]}`), from "
                f"which this method learns, and {name} has {other.title} (`{form}`): {other.methods}; leave {name} "
                "out, or let a stage of its own learn from it"
            )


def _format_of(config: DataConfig, folder: Path, rows: RowKind) -> DataFormat | None:
    """Return a dataset's format: the one in the recipe, or the one that fits its first row best; None if none fits."""
    if config.format != "auto":
        return config.format
    try:
        files = find_files(folder, config.split)
        first = next((row.content for row in read_rows(folder, files) if isinstance(row, Row)), None)
    except (DataError, DownloadError, TransientError):
        return None
    if not isinstance(first, dict):
        return None
    try:
        row = rename_columns(first, config.columns)
    except RowError:
        return None
    suitable = [name for name in fitting_formats(row) if FORMATS[name].rows == rows]
    return next(iter(suitable), likeliest_format(row))


def _prompt_alone(row: dict[str, Any]) -> Document:
    column = "prompt" if "prompt" in row else "messages"
    check_row(row, (column,))
    asked = decoded(row[column]) if not isinstance(row[column], str) else row[column]
    if isinstance(asked, str) and not any(row.get(name) for name in ONLY_IN_CHATS):
        return PlainText(parse_text(asked, column), "")
    messages = with_system(row, as_messages(with_tool_calls(asked), column, "user"))
    return Conversation(_ordered(messages), tools=parse_tools(row), variables=template_variables(row))


def _ordered(messages: list[Message]) -> list[Message]:
    """Return the messages; raise RowError unless an assistant's answer may follow them."""
    return ordered([*messages, make_message("assistant", "an answer")])[:-1]


def _before_the_answer(document: Document) -> tuple[Document, str | None]:
    """Split a conversation into the question and its answer; the answer is None if it is only a tool call."""
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


def _texts(document: Document, first: int) -> Iterator[str]:
    """Yield the non-empty texts of a document's messages (or of prompt and completion), from message `first` on."""
    if isinstance(document, PlainText):
        texts = [document.prompt, document.completion]
    else:
        texts = [_text(message) for message in document.messages]
    yield from (text for text in texts[first:] if text)


def _num_prompt_texts(document: Document) -> int:
    return 1 if isinstance(document, PlainText) else document.num_prompt_messages


def _text(message: Message) -> str:
    calls = [json.dumps(message["tool_calls"], ensure_ascii=False)] if "tool_calls" in message else []
    return "\n".join(
        text for text in (*(message.get(name, "") for name in THOUGHTS), *texts_of(message), *calls) if text
    )
