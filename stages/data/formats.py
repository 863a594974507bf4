"""Table of the row formats of datasets, and the readers that turn rows into documents or say why a row is bad.

`FORMATS` is the one table: rows are read by it, `lifecycle init` and the page on recipes use it. Where some of
`prompt`, `completion`, `chosen`, `rejected` are messages and others strings, the strings are messages too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.core.errors import DataError
from stages.data.config import ROW_KINDS, DataFormat, RowKind
from stages.data.files import RowLocation
from stages.data.media.rows import MediaSource, with_media
from stages.data.messages import (
    SHAREGPT_ROLES,
    Conversation,
    Document,
    Message,
    PlainText,
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
    IgnoredFields,
    check_no_conversation,
    check_row,
    is_label,
    parse_label,
    parse_margin,
    says_something,
    template_variables,
    unlearned_turns,
    with_system,
    with_tool_calls,
)

OTHER_FORMATS = {
    frozenset({"prompt", "completions", "labels"}): "stepwise supervision (TRL), which no method here learns from",
    frozenset({"input_ids"}): "tokens; give the text, which is tokenized here",
    frozenset({"anchor", "positive"}): "embedding pairs, which no method here learns from",
}
"""Descriptions of known but unsupported formats, by their columns, for error messages."""
LISTS = ("messages", "conversations", "conversation", "chosen_messages", "rejected_messages")
"""Columns that hold lists in every format. In a CSV file, which cannot hold lists, their values are JSON text."""
OTHER_NAMES = {"kto_tag": "label"}
"""LLaMA-Factory's names of columns, with the name of the same column in the formats here."""
OF_CONVERSATIONS = ("system", "tools", "chat_template_kwargs")
OF_PAIRS = ("margin", *OF_CONVERSATIONS)


@dataclass(frozen=True)
class Format:
    """Format of a dataset's rows: the columns that identify it, and the function that reads a row.

    read: reads a row into one document, or into chosen and rejected. described: the columns, in words for the page on
    recipes. rows: kind of row that methods learn from. suits: a further condition on a row.
    """

    columns: tuple[str, ...]
    read: Callable[[Columns], tuple[Document, ...]]
    described: str
    optional: tuple[str, ...] = OF_CONVERSATIONS
    rows: RowKind = "examples"
    suits: Callable[[Columns], bool] | None = None


def choose_format(wanted: DataFormat, first_row: Columns, rows: RowKind, columns: Mapping[str, str]) -> Format:
    """Return the format that the recipe names, or for `auto` the one that fits the columns of the first row.

    Raises DataError when no format fits these columns, or the one that fits is not for the training method.
    """
    possible = {name: form for name, form in FORMATS.items() if form.rows == rows}
    if wanted != "auto":
        if wanted not in possible:
            raise DataError(f"format {wanted!r} does not suit the method; expected {_describe(possible)}")
        return possible[wanted]
    for name in fitting_formats(first_row):
        if name in possible:
            return possible[name]
    renamed = f" (of which `columns` renames {listed(list(columns))})" if columns else ""
    raise DataError(
        f"the first row has the columns {listed(first_row)}{renamed}; expected {_describe(possible)}.{_hint(first_row)}"
    )


def fitting_formats(row: Columns) -> list[DataFormat]:
    """Return all formats whose columns a row has, in `auto`'s order; null columns count if nothing else fits."""
    for has in (lambda column: row.get(column) is not None, row.__contains__):
        names = [
            name
            for name, form in FORMATS.items()
            if all(map(has, form.columns)) and (not form.suits or form.suits(row))
        ]
        if names:
            return names
    return []


def likeliest_format(row: Columns) -> DataFormat | None:
    """Return the fitting format with the most columns, or None; a `label` neither true nor false is no answer's."""
    names = [
        name for name in fitting_formats(row) if not ROW_KINDS[FORMATS[name].rows].has_labels or is_label(row["label"])
    ]
    return max(names, key=lambda name: len(FORMATS[name].columns), default=None)


def other_format(row: Columns) -> str | None:
    """Return a description of rows in a known but unsupported format, for an error message; None for other rows."""
    return next((name for columns, name in OTHER_FORMATS.items() if columns <= row.keys()), None)


def rename_columns(row: Columns, columns: Mapping[str, str]) -> Columns:
    """Return the row with renamed columns, and with lists decoded where they are JSON text. Raises RowError."""
    names = {name: columns.get(name, OTHER_NAMES.get(name, name)) for name in row}
    renamed: Columns = {}
    for name, value in row.items():
        own = names[name]
        if says_something(renamed.get(own)) and says_something(value):
            both = listed([other for other in row if names[other] == own])
            raise RowError(f"has {both}, which are both read as `{own}`; expected one of them")
        if own not in renamed or says_something(value):
            renamed[own] = decoded(value) if own in LISTS else value
    return renamed


def _hint(first_row: Columns) -> str:
    """Return a hint for the error that no format fits: what the rows look like, or which method uses them."""
    if named := other_format(first_row):
        return f" These look like {named}."
    likeliest = likeliest_format(first_row)
    if likeliest is None:
        return " Columns of other names need `columns`, such as `columns: {question: query, answer: response}`."
    found = ROW_KINDS[FORMATS[likeliest].rows]
    return f" These are {found.title}: {found.methods}."


class RowReader:
    """Reader that turns the rows of one dataset, all in the format of the first row, into documents."""

    def __init__(
        self,
        wanted: DataFormat,
        rows: RowKind,
        columns: Mapping[str, str] | None = None,
        media: MediaSource | None = None,
    ) -> None:
        """Create a reader of dataset rows in the given format.

        columns: new name of each column to rename. media: where the rows' media are; None refuses rows with media.
        """
        self._media = media
        self._wanted = wanted
        self._rows = rows
        self._columns = columns or {}
        self._format: Format | None = None
        self.has_margins = False
        self._is_plain: bool | None = None
        self.unread = IgnoredFields()

    def __str__(self) -> str:  # what the first rows have decided
        return f"{self._format and self._format.columns} {self.has_margins} {self._is_plain}"

    def read(self, content: object, place: RowLocation | None = None) -> tuple[Document, ...]:
        """Return the documents of a row: one, or for a preference pair the chosen and the rejected one.

        place: of the row, for those who will read the media inside of it again. Raises RowError for a bad row,
        DataError when the columns of the first row fit no suitable format.
        """
        if not isinstance(content, dict):
            raise RowError(f"is {kind_of(content)}; expected an object with named columns")
        content = rename_columns(content, self._columns)
        if self._format is None:
            self._format = choose_format(self._wanted, content, self._rows, self._columns)
            self.has_margins = self._rows == "pairs" and content.get("margin") is not None
        missing = [column for column in self._format.columns if column not in content]
        if missing:
            raise RowError(f"has no {listed(missing)}; found {listed(content)}")
        read = self._format.columns + self._format.optional
        check_row(content, read)
        documents = with_media(self._format.read(content), content, self._media, place)
        self._check_form(isinstance(documents[0], PlainText))
        self.unread.add(content, read)
        return documents

    def label(self, content: Any) -> bool | None:
        """Return whether the answer of a labelled row is good; None for other kinds of rows. Raises RowError."""
        return (
            parse_label(rename_columns(content, self._columns)["label"]) if ROW_KINDS[self._rows].has_labels else None
        )

    def margin(self, content: Any) -> float | None:
        """Return how much better a pair's chosen answer is, or None; raise RowError if only some rows have a margin."""
        value = rename_columns(content, self._columns).get("margin") if self._rows == "pairs" else None
        if (value is not None) != self.has_margins:
            raise RowError(
                f"has {'a' if value is not None else 'no'} `margin`, unlike the first row; expected it in all"
            )
        return None if value is None else parse_margin(value)

    def _check_form(self, is_plain: bool) -> None:
        """Raise RowError if a dataset mixes conversations, which use the chat template, with plain texts."""
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
    """Read a conversation whose last message is the labelled answer."""
    return _of_last_answer(row, with_tool_calls(row["messages"]), "messages", ("role", "content"), None)


def _read_labelled_sharegpt(row: Columns) -> tuple[Document, ...]:
    raw = with_tool_calls(row["conversations"], "from", "value")
    return _of_last_answer(row, raw, "conversations", ("from", "value"), SHAREGPT_ROLES)


def _of_last_answer(
    row: Columns, raw: object, column: str, keys: tuple[str, str], roles: dict[str, str] | None
) -> tuple[Document, ...]:
    messages = parse_messages(raw, column, keys, roles)
    return (_conversation(row, messages, raw, len(messages) - 1),)


def _read_human_assistant(row: Columns) -> tuple[Document, ...]:
    turns = row["conversation"]
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


def _read_rejected(row: Columns, chosen: object, rejected: object, named: str = "messages") -> tuple[Document, ...]:
    for column, messages in ((named, chosen), ("rejected_messages", rejected)):
        parse_messages(messages, column)
    return read_preference({**_shared(row), "chosen": chosen, "rejected": rejected})


def _read_chosen_messages(row: Columns) -> tuple[Document, ...]:
    chosen, rejected = (with_tool_calls(row[column]) for column in ("chosen_messages", "rejected_messages"))
    return _read_rejected(row, chosen, rejected, "chosen_messages")


def _read_sharegpt_preference(row: Columns) -> tuple[Document, ...]:
    return read_preference({**_shared(row), **_answers(row), "prompt": _not_text(row, "conversations")})


def _has_answer_messages(row: Columns) -> bool:
    """Return whether `chosen` is a single message; a list is a conversation, repeated by `messages` (UltraFeedback)."""
    return isinstance(row["chosen"], dict)


def _read_messages_preference(row: Columns) -> tuple[Document, ...]:
    return read_preference({**_shared(row), **_answers(row), "prompt": _not_text(row, "messages")})


def _read_alpaca_preference(row: Columns) -> tuple[Document, ...]:
    asked = [*_turns(_history(row)), make_message("user", _alpaca_question(row))]
    return read_preference({**_shared(row), **_answers(row), "prompt": asked})


def _answers(row: Columns) -> Columns:
    return {column: row[column] for column in ("chosen", "rejected")}


def _not_text(row: Columns, column: str) -> object:
    if isinstance(row[column], list):
        return row[column]
    raise RowError(f"has {kind_of(row[column])} in `{column}`; expected a list of messages")


def _shared(row: Columns) -> Columns:
    """Return a row's columns that conversations of every format may have, such as `system` and `tools`."""
    return {column: row[column] for column in OF_CONVERSATIONS if column in row}


def _read_sharegpt(row: Columns) -> tuple[Document, ...]:
    raw = with_tool_calls(row["conversations"], "from", "value")
    return (_conversation(row, parse_messages(raw, "conversations", ("from", "value"), SHAREGPT_ROLES), raw),)


def _conversation(row: Columns, messages: list[Message], marked: object, num_prompt_messages: int = 0) -> Conversation:
    """Return a conversation from its messages, with the row's system message, tools and template variables."""
    whole = ordered(with_system(row, messages))
    # Marks are counted from their own list, which lacks the row's system message, or the prompt.
    num_before = len(whole) - len(marked) if isinstance(marked, list) else 0
    roles = [message["role"] == "assistant" for message in whole[num_before:]]
    unlearned = unlearned_turns(marked, roles, num_before) if isinstance(marked, list) else frozenset()
    # A system message that was added is part of the prompt.
    num_prompt_messages += len(whole) - len(messages) if num_prompt_messages else 0
    return Conversation(whole, num_prompt_messages, parse_tools(row), unlearned, template_variables(row))


def _read_alpaca(row: Columns) -> tuple[Document, ...]:
    last = _alpaca_question(row), parse_text(row["output"], "output")
    return (_conversation(row, _turns([*_history(row), last]), None),)


def _read_labelled_alpaca(row: Columns) -> tuple[Document, ...]:
    messages = _turns([*_history(row), (_alpaca_question(row), parse_text(row["output"], "output"))])
    return (_conversation(row, messages, None, len(messages) - 1),)


def _alpaca_question(row: Columns) -> str:
    question = parse_text(row["instruction"], "instruction")
    if row.get("input") not in (None, ""):
        question += "\n" + parse_text(row["input"], "input")  # one newline, as LLaMA-Factory and ms-swift
    return question


def _turns(turns: list[tuple[str, str]]) -> list[Message]:
    """Return user and assistant messages for pairs of a question and its answer."""
    return [make_message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def _history(row: Columns) -> list[tuple[str, str]]:
    """Return the earlier turns of a row (column `history`) as pairs of a question and its answer."""
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


def _describe(formats: Mapping[DataFormat, Format]) -> str:
    return "; ".join(f"{name} ({listed(form.columns)})" for name, form in formats.items())


FORMATS: dict[DataFormat, Format] = {
    "messages": Format(
        ("messages",),
        _read_messages,
        "`messages`: list of `{role, content}`; content may be a list of parts",
    ),
    "sharegpt": Format(
        ("conversations",),
        _read_sharegpt,
        "`conversations`: list of `{from, value}`, of `human`, `gpt`, `system`; calls as `function_call`, what they "
        "gave as `observation`",
    ),
    "prompt_completion": Format(
        ("prompt", "completion"),
        _read_prompt_completion,
        "`prompt`, `completion`: strings, taken as they are, or lists of messages",
    ),
    "alpaca": Format(
        ("instruction", "output"),
        _read_alpaca,
        "`instruction`, `output`, optionally `input`, joined to the instruction by one newline, and `history`: list of "
        "`[question, answer]`, learned as well",
        ("input", "history", *OF_CONVERSATIONS),
    ),
    "query_response": Format(
        ("query", "response"),
        _read_query_response,
        "`query`, `response`, optionally `history`",
        ("history", *OF_CONVERSATIONS),
    ),
    "human_assistant": Format(("conversation",), _read_human_assistant, "`conversation`: list of `{human, assistant}`"),
    "text": Format(("text",), _read_text, "`text`: a string, taken as it is", ()),
    "sharegpt_preference": Format(
        ("conversations", "chosen", "rejected"),
        _read_sharegpt_preference,
        "`conversations` up to the question; `chosen`, `rejected`: a message `{from, value}` each",
        OF_PAIRS,
        "pairs",
    ),
    "messages_preference": Format(
        ("messages", "chosen", "rejected"),
        _read_messages_preference,
        "`messages` up to the question; `chosen`, `rejected`: a message `{role, content}` each",
        OF_PAIRS,
        "pairs",
        _has_answer_messages,
    ),
    "alpaca_preference": Format(
        ("instruction", "chosen", "rejected"),
        _read_alpaca_preference,
        "`instruction`, optionally `input`, `history`; `chosen`, `rejected`: an answer each",
        ("input", "history", *OF_PAIRS),
        "pairs",
    ),
    "preference": Format(
        ("chosen", "rejected"),
        read_preference,
        "`chosen`, `rejected`, optionally `prompt`: strings, or lists of messages; for `reward` optionally `margin`: "
        "by how much the chosen one is better",
        ("prompt", *OF_PAIRS),
        "pairs",
    ),
    "rejected_response": Format(
        ("messages", "rejected_response"),
        _read_rejected_response,
        "`messages`, and `rejected_response`: a worse answer than their last",
        OF_PAIRS,
        "pairs",
    ),
    "rejected_messages": Format(
        ("messages", "rejected_messages"),
        _read_rejected_messages,
        "`messages`, and `rejected_messages`: the same with a worse answer",
        OF_PAIRS,
        "pairs",
    ),
    "chosen_messages": Format(
        ("chosen_messages", "rejected_messages"),
        _read_chosen_messages,
        "`chosen_messages`, `rejected_messages`: a whole conversation each",
        OF_PAIRS,
        "pairs",
    ),
    "labelled": Format(
        ("prompt", "completion", "label"),
        _read_prompt_completion,
        "`prompt`, `completion`: strings, or lists of messages; `label` (or `kto_tag`): true for a good answer, "
        "or false",
        rows="labelled",
    ),
    "labelled_messages": Format(
        ("messages", "label"), _read_labelled_messages, "`messages`; `label` of their last answer", rows="labelled"
    ),
    "labelled_sharegpt": Format(
        ("conversations", "label"),
        _read_labelled_sharegpt,
        "`conversations`; `label` of their last answer",
        rows="labelled",
    ),
    "labelled_alpaca": Format(
        ("instruction", "output", "label"),
        _read_labelled_alpaca,
        "`instruction`, `output`, optionally `input`, `history`; `label` of the output",
        ("input", "history", *OF_CONVERSATIONS),
        "labelled",
    ),
}
"""Supported row formats by name, in the order of `auto`: rows with `messages` may also have `prompt` or `text`."""
COLUMN_NAMES = frozenset(
    {name for form in FORMATS.values() for name in form.columns + form.optional}
    | {"answer", "solution", "ground_truth"}  # the right answer of a prompt alone
)
"""Names of all columns that the formats read; the recipe's `columns` may rename other columns to these names."""
