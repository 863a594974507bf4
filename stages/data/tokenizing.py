"""Rows of a part of a dataset → pieces: read, check, render, tokenize, fit to the length of a row.

Every step is a generator over the one before it, so that memory does not grow with the number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from stages.core.errors import DataError
from stages.core.redaction import redact
from stages.data.answers import AnswerCheck, vocabulary_size
from stages.data.config import DataConfig, RowKind
from stages.data.documents import Conversation, Document
from stages.data.files import BadRow, Part, Place, Row
from stages.data.formats import RowReader
from stages.data.messages import RowError
from stages.data.pieces import Piece, PieceNotes
from stages.data.portion import Portion
from stages.data.row_fields import Unread
from stages.data.seen_rows import RowDigests
from stages.data.templates import Rendered, TemplateLimitError
from stages.data.tokenizer import DocumentTokenizer, TokenizerError, Tokens
from stages.data.tool_prompt import ToolPrompt
from stages.data.unit_arrays import Units
from stages.data.units import OverLong, Unit, check_learnable

CHUNK_ROWS = 1024
RENDERED_ROWS = 64
"""Asked of the template's process at once: what a question costs by itself is spread over them."""
PIECE_TOKENS = 1 << 22
"""From which on a piece ends, and another one begins."""

RenderedRow = tuple[Place, list[tuple[Rendered, ...]], bool | None, float | None]
"""Where a row stands, its units, and whether its answer is a good one."""


@dataclass(frozen=True)
class Tokenizing:
    """What decides the tokens of a part. reader: has seen the rows that decide the format of all."""

    portion: Portion
    config: DataConfig
    tokenizer_folder: Path
    rows: RowKind
    reader: RowReader


@dataclass
class _Found:
    """Of the piece at hand."""

    over_long: OverLong
    bad_rows: list[tuple[Place, str]] = field(default_factory=list)
    rows: RowDigests = field(default_factory=RowDigests)
    units: list[Unit] = field(default_factory=list)
    num_tokens: int = 0
    num_source_rows: int = 0
    num_tokenized_rows: int = 0
    num_text_tokens: int = 0
    num_text_bytes: int = 0
    tool_prompt: ToolPrompt | None = None


class PartTokenizer:
    """Makes pieces of one part after the other."""

    def __init__(self, task: Tokenizing) -> None:
        """Raises ModelError for a folder without a usable tokenizer."""
        config = task.config
        self._task = task
        self._reader = task.reader
        self.tokenizer = DocumentTokenizer(
            task.tokenizer_folder,
            config.chat_template,
            config.train_on,
            turns=config.turns,
            template_date=config.template_date,
            special_tokens_in_content=config.special_tokens_in_content,
        )
        self._answers = AnswerCheck(self.tokenizer.special_tokens, vocabulary_size(task.tokenizer_folder))

    def pieces(self, part: Part, rows: Iterable[Row | BadRow]) -> Iterator[Piece]:
        """The last one says how many are before it. `rows` are those of `part`."""
        self._begin()
        num_earlier = 0
        for chunk in _chunks(self._rendered(part, rows)):
            if self._found.bad_rows and self._task.config.on_bad_rows == "fail":
                continue  # it will fail: only look for further bad rows, which is much faster
            texts = [document for _, units, _, _ in chunk for unit in units for document in unit]
            encoded = self._encoded(chunk, texts)
            if self._task.config.packing == "cut":
                self._found.num_text_tokens += sum(map(len, encoded))
                self._found.num_text_bytes += sum(map(self.tokenizer.num_bytes, texts))
            tokens = iter(encoded)
            for place, units, is_good, margin in chunk:
                self._fit([Unit(tuple(islice(tokens, len(unit))), is_good, margin) for unit in units], place)
            if self._found.num_tokens >= PIECE_TOKENS:
                yield self._finished(part, None)
                num_earlier += 1
        yield self._finished(part, num_earlier)

    def _encoded(self, chunk: list[RenderedRow], texts: list[Rendered]) -> list[Tokens]:
        """Return the tokens of a chunk's texts. Raises DataError that names a row where the tokenizer fails."""
        try:
            return self.tokenizer.encode(texts)
        except TokenizerError:
            for place, units, _, _ in chunk:
                try:
                    self.tokenizer.encode([document for unit in units for document in unit])
                except TokenizerError as error:
                    raise DataError(f"{place}: {error}") from error
            raise

    def _begin(self) -> None:
        self._found = _Found(over_long_of(self._task.config))
        self._reader.unread = Unread()
        self.tokenizer.take_notes()

    def _rendered(self, part: Part, rows: Iterable[Row | BadRow]) -> Iterator[RenderedRow]:
        """Where each good row stands, and its units as text."""
        selected = iter(self._task.portion.select(rows))
        while batch := list(islice(selected, RENDERED_ROWS)):
            read = [self._read(row) for row in batch]
            rendered = self.tokenizer.render_rows([outcome for outcome in read if not isinstance(outcome, RowError)])
            for row, documents in zip(batch, read, strict=True):
                self._found.num_source_rows += 1
                try:
                    if isinstance(documents, RowError):
                        raise documents
                    assert isinstance(row, Row)
                    units = next(rendered)
                    if isinstance(units, RowError):
                        raise units
                    is_good, margin = self._reader.label(row.content), self._reader.margin(row.content)
                    self._found.tool_prompt = self._found.tool_prompt or self._tool_prompt(documents[0], units[-1][0])
                    self._found.rows.add(row.place.number - part.num_before, documents, is_good)
                    yield row.place, units, is_good, margin
                except RowError as error:
                    self._found.bad_rows.append((row.place, str(error)))
                except (TemplateLimitError, TokenizerError) as error:
                    raise DataError(f"{row.place}: {error}") from error

    def _read(self, row: Row | BadRow) -> Sequence[Document] | RowError:
        """Return the documents of a row, or what is wrong with it."""
        if isinstance(row, BadRow):
            return RowError(row.reason)
        try:
            documents = self._reader.read(row.content)
            self._answers.check_text(documents)
        except RowError as error:
            return error
        return documents

    def _tool_prompt(self, document: Document, rendered: Rendered) -> ToolPrompt | None:
        """Return what a server is asked where `document` is learned last; None of one without tools."""
        if not isinstance(document, Conversation) or not document.tools or rendered.is_shielded:
            return None
        turns = document.learned_turns
        (learned,) = self.tokenizer.encode([rendered])
        return self.tokenizer.tool_prompt(document.before(turns[-1]), learned.ids.tolist()) if turns else None

    def _fit(self, units: list[Unit], place: Place) -> None:
        """Keep what is left of a row's units. One that teaches nothing makes the row a bad one."""
        found = self._found
        found.num_tokenized_rows += 1
        kept = []
        try:
            for unit in units:
                if (fitted := found.over_long.fit(unit, place)) is not None:
                    self._answers.check_tokens(fitted)
                    check_learnable(fitted, was_truncated=len(fitted) < len(unit))
                    kept.append(fitted)
        except RowError as error:
            found.bad_rows.append((place, str(error)))
            return
        found.units += kept
        found.num_tokens += sum(map(len, kept))

    def _finished(self, part: Part, num_earlier: int | None) -> Piece:
        found, over_long = self._found, self._found.over_long
        notes = PieceNotes(
            num_earlier=num_earlier,
            num_source_rows=found.num_source_rows,
            num_tokenized_rows=found.num_tokenized_rows,
            num_text_tokens=found.num_text_tokens,
            num_text_bytes=found.num_text_bytes,
            bad_rows=tuple((place.number - part.num_before, redact(reason)) for place, reason in found.bad_rows),
            num_over_long=over_long.num_over_long,
            longest_tokens=over_long.longest_tokens,
            over_long=tuple((place.number - part.num_before, tokens) for place, tokens in over_long.named),
            num_kept=over_long.num_kept,
            unread=dict(self._reader.unread.counts),
            remarkable=found.rows.remarkable,
            tokenizer=self.tokenizer.take_notes(),
            tool_prompt=found.tool_prompt,
        )
        is_labelled = self._task.rows == "labelled"
        units = Units.of(found.units, is_labelled=is_labelled, has_margins=self._reader.has_margins)
        self._begin()
        return Piece.of(notes, units, found.rows)


def over_long_of(config: DataConfig) -> OverLong:
    """What is cut into rows may be of any length."""
    return OverLong(config.over_long, sys.maxsize if config.packing == "cut" else config.sequence_length)


def first_rows_read(reader: RowReader, portion: Portion, rows: Iterable[Row | BadRow]) -> RowReader:
    """The same, after it has read the first good row, which decides what all are. Raises DataError for a row of no
    suitable format."""
    for row in portion.select(rows):
        try:
            if isinstance(row, Row):
                reader.read(row.content)
                break
        except RowError:
            continue
    return reader


def _chunks(rendered: Iterator[RenderedRow]) -> Iterator[list[RenderedRow]]:
    while chunk := list(islice(rendered, CHUNK_ROWS)):
        yield chunk
