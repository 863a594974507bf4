"""Media of a row put where its text has them: TRL's, ms-swift's, LLaMA-Factory's and OpenAI's forms become one.

| a row's text                                        | its media                                                     |
| --------------------------------------------------- | ------------------------------------------------------------- |
| parts {type: image} in `content` (TRL), perhaps     | the next of `images` each                                     |
| with its number: {type: image, index: 0}            |                                                               |
| parts with a payload: {type: image, image: PATH},   | the payload                                                   |
| {type: image_url, image_url: {url}} (OpenAI)        |                                                               |
| `<image>` (ms-swift, LLaMA-Factory)                 | the next of `images`; without that column, `<image>` is text  |
| neither (TRL)                                       | all of `images`, before the first question                    |

A cell is a path, a base64 text (`data:…`), or {bytes, path} as Parquet files of Hugging Face's `datasets` have it. Of
a preference pair, each answer's conversation takes the row's media from the first on.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from stages.core.lines import counted
from stages.data.files import RowLocation
from stages.data.media_reference import KINDS, MediaKind, MediaReference
from stages.data.messages import (
    INDEX,
    SOURCE,
    Conversation,
    Document,
    Message,
    PlainText,
    RowError,
    listed,
    num_media,
)
from stages.data.row_fields import MEDIA_COLUMNS, says_something

TAG = re.compile(r"<(image|video|audio)>")
TEXT_ALONE = (
    "which this model, or this stage, does not read: the text means something else without them; expected text alone, "
    "or a model with a processor of images"
)


class MediaSource(Protocol):
    """Maker of references from the cells and parts of a row, and of requests; implemented by `MediaFolder`."""

    def reference(self, kind: MediaKind, source: object, row: RowLocation | None) -> MediaReference: ...

    def data_address(self, reference: MediaReference) -> str:
        """Return a picture as a `data:` address for a request. Raises DataError if it is gone, or another now."""


def with_media(
    documents: tuple[Document, ...],
    row: Mapping[str, Any],
    source: MediaSource | None,
    place: RowLocation | None = None,
) -> tuple[Document, ...]:
    """Return a row's documents with its media in place; those of text are returned unchanged.

    source: None where media are refused. place: of the row, as of `MediaFolder.reference`. Raises RowError for media
    that do not match the places in the text, and as `MediaFolder.reference` does.
    """
    columns = _columns(row)
    if not columns and not any(map(_has_parts, documents)):
        return documents
    if source is None:
        found = listed(list(columns)) if columns else "media in `content`"
        raise RowError(f"has {found}, {TEXT_ALONE}")
    known: dict[int, MediaReference] = {}

    def reference(kind: MediaKind, cell: object) -> MediaReference:
        if id(cell) not in known:  # the documents of a pair share their cells
            known[id(cell)] = source.reference(kind, cell, place)
        return known[id(cell)]

    return tuple(_placed(document, columns, reference) for document in documents)


def _placed(
    document: Document,
    columns: Mapping[str, list[Any]],
    reference: Callable[[MediaKind, object], MediaReference],
) -> Conversation:
    """Return a document with its media. reference: makes the reference to a cell's medium."""
    if isinstance(document, PlainText):
        raise RowError(f"has {listed(list(columns))} beside plain text, which has no place for them; expected messages")
    of_kind = {MEDIA_COLUMNS[column]: cells for column, cells in columns.items()}
    messages = [_with_tags(message, of_kind) for message in document.messages]
    if of_kind and not num_media(messages):
        messages = _before_the_question(messages, of_kind)
    media = tuple(reference(kind, cell) for kind, cell in _cells(messages, of_kind))
    return replace(document, messages=[_without_sources(message) for message in messages], media=media)


def _cells(messages: Sequence[Message], of_kind: Mapping[MediaKind, Sequence[Any]]) -> Iterator[tuple[MediaKind, Any]]:
    """Yield kind and cell of each medium in the order of the parts. Raises RowError for too few or too many cells."""
    used = dict.fromkeys(KINDS, 0)
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            kind, own = part["type"], part.get(SOURCE)
            if kind == "text":
                continue
            if own is not None:
                yield kind, own
                continue
            if part.get(INDEX) not in (None, used[kind]):
                raise RowError(
                    f"has the index {part[INDEX]!r} in the place for {kind} {used[kind] + 1} in its text; expected "
                    f"{used[kind]}: {kind}s stand beside the text in the order of their places"
                )
            cells = of_kind.get(kind, ())
            if used[kind] == len(cells):
                raise RowError(
                    f"has a place for {kind} {used[kind] + 1} in its text, but {counted(len(cells), kind)} beside it; "
                    "expected one for each"
                )
            yield kind, cells[used[kind]]
            used[kind] += 1
    for kind, cells in of_kind.items():
        if used[kind] != len(cells):
            raise RowError(
                f"has {counted(len(cells), kind)}, but {counted(used[kind], 'place')} for them in its text; expected "
                "as many, or no place at all (then they stand before the first question)"
            )


def _columns(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the cells of a row's columns of media, by column. Raises RowError for `image` beside `images`."""
    columns: dict[str, list[Any]] = {}
    for name, kind in MEDIA_COLUMNS.items():
        if not says_something(row.get(name)):
            continue
        if any(MEDIA_COLUMNS[other] == kind for other in columns):
            raise RowError(f"has `{kind}` and `{kind}s`; expected one of the two")
        columns[name] = row[name] if isinstance(row[name], list) else [row[name]]
    return columns


def _has_parts(document: Document) -> bool:
    return not isinstance(document, PlainText) and any(isinstance(one["content"], list) for one in document.messages)


def _with_tags(message: Message, of_kind: Mapping[MediaKind, Sequence[Any]]) -> Message:
    """Return a message whose tags, such as `<image>`, are parts, if the row has such media."""
    content = message["content"]
    tags = [tag[0] for tag in TAG.finditer(content) if tag[1] in of_kind] if isinstance(content, str) else []
    if not tags:
        return message
    if message["role"] == "assistant":
        raise RowError(
            f"has `{tags[0]}` in what the assistant says; expected text: models here read media, and write text"
        )
    return {**message, "content": list(_parts_of(content, of_kind))}


def _parts_of(content: str, of_kind: Mapping[MediaKind, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    end = 0
    for tag in TAG.finditer(content):
        if tag[1] not in of_kind:
            continue
        if text := content[end : tag.start()]:
            yield {"type": "text", "text": text}
        yield {"type": tag[1]}
        end = tag.end()
    if text := content[end:]:
        yield {"type": "text", "text": text}


def _before_the_question(messages: list[Message], of_kind: Mapping[MediaKind, Sequence[Any]]) -> list[Message]:
    first = next((number for number, one in enumerate(messages) if one["role"] == "user"), None)
    if first is None:
        raise RowError("has media, but no question before which they could stand; expected a message of the user")
    content = messages[first]["content"]
    places: list[dict[str, Any]] = [{"type": kind} for kind, cells in of_kind.items() for _ in cells]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*messages[:first], {**messages[first], "content": places + parts}, *messages[first + 1 :]]


def _without_sources(message: Message) -> Message:
    """Return a message whose media parts are {type} alone, as vLLM gives them to chat templates."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": [part if part["type"] == "text" else {"type": part["type"]} for part in content]}
