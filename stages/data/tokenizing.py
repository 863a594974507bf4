"""Tokenization of one part of a data file: rows are read, checked, rendered and tokenized, and the result is stored.

Every step is a generator over the one before it, so that memory stays flat. A piece is a safetensors file named by the
digest of what was read; its row numbers count from its part's beginning.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from stages.core.cache import file_digest, note_use
from stages.core.errors import DataError
from stages.core.fields import StrictModel
from stages.core.files import write_atomically
from stages.core.redaction import redact
from stages.data.config import ROW_KINDS, DataConfig, RowKind
from stages.data.files import BadRow, FilePart, Portion, Row, RowLocation
from stages.data.formats import RowReader
from stages.data.media.folder import MediaFolder
from stages.data.media.prompts import MOST_PROMPTS, PicturePrompt
from stages.data.messages import Conversation, Document, RowError
from stages.data.row_fields import IgnoredFields
from stages.data.seen_rows import RowDigests
from stages.data.templates import Rendered, TemplateLimitError
from stages.data.tokenizer import DocumentTokenizer, TokenizedDocument, TokenizerError, TokenizerNotes
from stages.data.units import AnswerCheck, OverlongPolicy, Unit, Units, check_learnable
from stages.models.facts import CONFIG_FILE, PROCESSOR_FILES, ModelFacts
from stages.models.recorded import ToolPrompt

SUFFIX = ".safetensors"
NOTES, DIGEST = "notes", "digest"
"""Metadata keys in a file of tokenized rows: counts as JSON, and a sha256 of the counts and arrays."""
UNIT_ARRAYS = tuple(Units.__dataclass_fields__)
ROW_ARRAYS = ("digests", "swapped", "numbers")
PREPARATION_VERSION = 10
"""Version of data preparation in cache keys, raised when the same input gives other tokens, masks or rows."""
TOKENIZER_FILES = (
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
TEMPLATE_FILES = ("chat_template*",)
OPTIONS = {
    "format",
    "columns",
    "template_date",
    "train_on",
    "turns",
    "sequence_length",
    "special_tokens_in_content",
    "packing",
    "over_long",
    "on_bad_rows",
    "max_bad_row_fraction",
}
CHUNK_ROWS = 1024
RENDERED_ROWS = 64
"""Number of rows in one request to the process that renders chat templates, so that the cost of a request is shared."""
PIECE_TOKENS = 1 << 22
"""Number of tokens after which a file of tokenized rows (a "piece") ends and the next one begins."""
RenderedRow = tuple[RowLocation, list[tuple[Rendered, ...]], bool | None, float | None]
"""Row rendered to text, with its place in a file, its training units (document or pair), its label and its margin."""


@dataclass(frozen=True)
class Tokenizing:
    """Options that decide how rows become tokens. reader: knows the dataset's format from its first row."""

    portion: Portion
    config: DataConfig
    model: ModelFacts
    rows: RowKind
    reader: RowReader
    media: MediaFolder | None = None


def key_parts(
    portion: Portion, config: DataConfig, tokenizer_folder: Path, rows: RowKind, media: MediaFolder | None = None
) -> dict[str, JsonValue]:
    """Return all inputs except the data files that decide a dataset's tokens and bad rows, for the cache key.

    Media files count by path, size and time of change; their content is compared with the digests in prepared rows when
    they are decoded.
    """
    template = config.chat_template
    # The model's own template counts only where the recipe has none.
    tokenizer_files = TOKENIZER_FILES if template else TOKENIZER_FILES + TEMPLATE_FILES
    return {
        "preparation": PREPARATION_VERSION,
        "libraries": {name: version(name) for name in ("tokenizers", "transformers", "numpy")},
        # Without the split's name: equal rows of another split have the same tokens.
        "portion": [portion.name, portion.fraction],
        "options": config.model_dump(mode="json", include=OPTIONS),
        "preference": {"examples": False, "pairs": True}.get(rows, rows),  # as caches that exist have it
        "tokenizer": {
            path.name: file_digest(path)
            for pattern in tokenizer_files
            for path in sorted(tokenizer_folder.glob(pattern))
            if path.is_file()
        },
        "chat_template": file_digest(template) if template and template.is_file() else None,
        **({} if media is None else {"media": _media_parts(media, tokenizer_folder)}),
    }


def _media_parts(media: MediaFolder, tokenizer_folder: Path) -> dict[str, JsonValue]:
    files = [path for path in map(tokenizer_folder.joinpath, PROCESSOR_FILES) if path.is_file()]
    return {
        "files": media.listing_digest(),
        "processor": {path.name: file_digest(path) for path in files},
        "libraries": {name: version(name) for name in ("pillow",)},
        "counts": "patches",  # in the description, since pictures are read
    }


class PartTokenizer:
    """Tokenizer of parts of data files, which yields groups of tokenized rows ("pieces") to be stored."""

    def __init__(self, task: Tokenizing) -> None:
        """Load the tokenizer of the model folder. Raises ModelError if there is no usable one."""
        config = task.config
        self._task = task
        self._reader = task.reader
        self.tokenizer = DocumentTokenizer(
            task.model.folder,
            config.chat_template,
            config.train_on,
            turns=config.turns,
            template_date=config.template_date,
            special_tokens_in_content=config.special_tokens_in_content,
        )
        has_config = (task.model.folder / CONFIG_FILE).is_file()  # `lifecycle init` fetches a tokenizer alone
        size = task.model.vocabulary_size if has_config else None
        self._answers = AnswerCheck(self.tokenizer.special_tokens, size)

    def pieces(self, part: FilePart, rows: Iterable[Row | BadRow]) -> Iterator[TokenizedRows]:
        """Yield the tokenized rows of a file part in groups; the last group records how many groups came before it."""
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

    def _encoded(self, chunk: list[RenderedRow], texts: list[Rendered]) -> list[TokenizedDocument]:
        """Return the tokens of some rows' texts. Raises DataError that names the row on which the tokenizer fails."""
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
        self._reader.unread = IgnoredFields()
        # Clears what was counted for texts before this piece.
        self.tokenizer.take_notes()

    def _rendered(self, part: FilePart, rows: Iterable[Row | BadRow]) -> Iterator[RenderedRow]:
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
                    # Only good rows were asked for; their answers come in the same order.
                    units = next(rendered)
                    if isinstance(units, RowError):
                        raise units
                    is_good, margin = self._reader.label(row.content), self._reader.margin(row.content)
                    self._note_prompt(documents[0], units[-1][0])
                    # Counted from the part's beginning, so that the piece is also right where the part lies elsewhere.
                    self._found.rows.add(row.place.number - part.num_before, documents, is_good)
                    yield row.place, units, is_good, margin
                except RowError as error:
                    self._found.bad_rows.append((row.place, str(error)))
                except (TemplateLimitError, TokenizerError) as error:
                    raise DataError(f"{row.place}: {error}") from error

    def _read(self, row: Row | BadRow) -> Sequence[Document] | RowError:
        """Return the documents of a dataset row, or an error for a row that cannot be learned from."""
        if isinstance(row, BadRow):
            return RowError(row.reason)
        try:
            documents = self._reader.read(row.content, row.place)
            self._answers.check_text(documents)
        except RowError as error:
            return error
        return documents

    def _note_prompt(self, document: Document, rendered: Rendered) -> None:
        """Keep the first prompts with tools or with pictures, to check that a server renders them equally."""
        if not isinstance(document, Conversation) or rendered.is_shielded or not document.learned_turns:
            return
        has_room = len(self._found.picture_prompts) < MOST_PROMPTS
        if not (has_room if document.media else document.tools and not self._found.tool_prompt):
            return
        question = document.before(document.learned_turns[-1])
        (learned,) = self.tokenizer.encode([rendered])
        prompt = self.tokenizer.tool_prompt(question, learned.ids.tolist())
        if prompt and question.media:
            self._found.picture_prompts.append(PicturePrompt(prompt=prompt, media=question.media))
        elif prompt:
            self._found.tool_prompt = prompt

    def _fit(self, units: list[Unit], place: RowLocation) -> None:
        """Add a row's units (documents or pairs), shortened or dropped if too long; one that teaches nothing is bad."""
        piece = self._found
        piece.num_tokenized_rows += 1
        kept = []
        try:
            for unit in units:
                if (fitted := piece.over_long.fit(unit, place)) is not None:
                    self._answers.check_tokens(fitted)
                    check_learnable(fitted, was_truncated=len(fitted) < len(unit))
                    kept.append(fitted)
        except RowError as error:
            piece.bad_rows.append((place, str(error)))
            return
        piece.units += kept
        piece.num_tokens += sum(map(len, kept))

    def _finished(self, part: FilePart, num_earlier: int | None) -> TokenizedRows:
        piece, over_long = self._found, self._found.over_long
        notes = TokenizationNotes(
            num_earlier=num_earlier,
            num_source_rows=piece.num_source_rows,
            num_tokenized_rows=piece.num_tokenized_rows,
            num_text_tokens=piece.num_text_tokens,
            num_text_bytes=piece.num_text_bytes,
            bad_rows=tuple((place.number - part.num_before, redact(reason)) for place, reason in piece.bad_rows),
            num_over_long=over_long.num_over_long,
            longest_tokens=over_long.longest_tokens,
            over_long=tuple((place.number - part.num_before, tokens) for place, tokens in over_long.named),
            num_kept=over_long.num_kept,
            num_media_cut=over_long.num_media_cut,
            unread=dict(self._reader.unread.counts),
            remarkable=piece.rows.remarkable,
            tokenizer=self.tokenizer.take_notes(),
            tool_prompt=piece.tool_prompt,
            picture_prompts=tuple(piece.picture_prompts),
        )
        is_labelled = ROW_KINDS[self._task.rows].has_labels
        units = Units.of(
            piece.units,
            is_labelled=is_labelled,
            has_margins=self._reader.has_margins,
            has_media=self._task.media is not None,
        )
        self._begin()
        return TokenizedRows.of(notes, units, piece.rows)


@dataclass
class _Found:
    """Training units (documents or pairs) and counts collected so far for the next group of tokenized rows."""

    over_long: OverlongPolicy
    bad_rows: list[tuple[RowLocation, str]] = field(default_factory=list)
    rows: RowDigests = field(default_factory=RowDigests)
    units: list[Unit] = field(default_factory=list)
    num_tokens: int = 0
    num_source_rows: int = 0
    num_tokenized_rows: int = 0
    num_text_tokens: int = 0
    num_text_bytes: int = 0
    tool_prompt: ToolPrompt | None = None
    picture_prompts: list[PicturePrompt] = field(default_factory=list)


def over_long_of(config: DataConfig) -> OverlongPolicy:
    """Return the policy for documents that are longer than a packed row. With `packing: cut`, none is too long."""
    return OverlongPolicy(config.over_long, sys.maxsize if config.packing == "cut" else config.sequence_length)


def first_rows_read(reader: RowReader, portion: Portion, rows: Iterable[Row | BadRow]) -> RowReader:
    """Determine a row reader's format by the first good row, and return it; DataError for no suitable format."""
    for row in portion.select(rows):
        try:
            if isinstance(row, Row):
                reader.read(row.content, row.place)
                break
        except RowError:
            continue
    return reader


def _chunks(rendered: Iterator[RenderedRow]) -> Iterator[list[RenderedRow]]:
    while chunk := list(islice(rendered, CHUNK_ROWS)):
        yield chunk


class TokenizationNotes(StrictModel):
    """Counts and warnings about a group of tokenized rows, stored with its arrays.

    num_earlier: pieces of the part before this one, if this is the last. num_source_rows: rows of the portion, bad ones
    included. num_tokenized_rows: rows to which `over_long` was applied. num_text_tokens, num_text_bytes: size of texts
    cut into rows. unread: columns and fields that are not read → number of rows. tool_prompt: of the first row with
    tools that a server can be asked with.
    """

    num_earlier: int | None = None
    num_source_rows: int
    num_tokenized_rows: int
    num_text_tokens: int
    num_text_bytes: int
    bad_rows: tuple[tuple[int, str], ...]
    num_over_long: int
    longest_tokens: int
    over_long: tuple[tuple[int, int], ...]
    num_kept: int
    num_media_cut: int = 0
    unread: dict[str, int]
    remarkable: dict[str, tuple[int, int, str]]
    tokenizer: TokenizerNotes
    tool_prompt: ToolPrompt | None = None
    picture_prompts: tuple[PicturePrompt, ...] = ()


@dataclass(frozen=True)
class TokenizedRows:
    """Group of tokenized rows: their training units (documents or pairs), with counts and digests of the rows."""

    notes: TokenizationNotes
    units: Units
    digests: NDArray[np.uint64]
    swapped: NDArray[np.uint64]
    numbers: NDArray[np.uint64]
    """Row numbers of the tokenized rows, counted within their part of a data file: uint64, one for each digest."""

    @classmethod
    def of(cls, notes: TokenizationNotes, units: Units, rows: RowDigests) -> TokenizedRows:
        return cls(notes, units, *(np.array(getattr(rows, name), np.uint64) for name in ROW_ARRAYS))

    def bad_rows(self, part: FilePart) -> Iterator[BadRow]:
        return (BadRow(part.place(number), reason) for number, reason in self.notes.bad_rows)

    def over_long(self, part: FilePart, over_long: OverlongPolicy) -> OverlongPolicy:
        """Return the counts of this group's documents and pairs that are longer than a packed row."""
        notes = self.notes
        named = [(part.place(number), tokens) for number, tokens in notes.over_long]
        counts = (notes.num_over_long, notes.longest_tokens, named, notes.num_kept, notes.num_media_cut)
        return OverlongPolicy(over_long.policy, over_long.sequence_length, *counts)


class TokenizedRowsStore:
    """Cache folder of tokenized rows; several processes may write the same file at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, key: str) -> bool:
        """Return whether all tokenized rows of a file part are stored and undamaged."""
        try:
            for _ in self.read(key):  # compares each piece with its digest
                pass
        except (OSError, DataError):
            return False
        return True

    def has_written(self, key: str) -> bool:
        """Return whether all tokenized rows of a file part were written, even if they are damaged now."""
        return self._path(key).is_file()

    def write(self, key: str, pieces: Iterator[TokenizedRows]) -> None:
        """Write the tokenized rows of a file part as one or more files; the last one marks the part as complete."""
        for number, piece in enumerate(pieces):
            self._write(f"{key}-{number}" if piece.notes.num_earlier is None else key, piece)

    def read(self, key: str) -> Iterator[TokenizedRows]:
        """Yield the stored groups of tokenized rows of a file part. Raises DataError for a damaged one."""
        last = self._read(key)
        yield from (self._read(f"{key}-{number}") for number in range(last.notes.num_earlier or 0))
        yield last

    def _write(self, name: str, piece: TokenizedRows) -> None:
        from safetensors.numpy import save

        arrays = {one: getattr(piece.units, one) for one in UNIT_ARRAYS} | {
            one: getattr(piece, one) for one in ROW_ARRAYS
        }
        there = {one: array for one, array in arrays.items() if array is not None}
        notes = piece.notes.model_dump_json()
        metadata = {NOTES: notes, DIGEST: _digest(notes, there)}
        write_atomically(self._path(name), save(there, metadata=metadata))

    def _read(self, name: str) -> TokenizedRows:
        """Read a file of tokenized rows. Raises DataError if it is damaged, OSError if it is missing."""
        from safetensors import SafetensorError, safe_open

        path = self._path(name)
        try:
            with safe_open(path, "np") as stored:
                metadata = stored.metadata() or {}
                arrays = {one: stored.get_tensor(one) for one in stored.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, ValueError, TypeError) as error:
            raise _damaged(path) from error
        if metadata.get(DIGEST) != _digest(metadata.get(NOTES, ""), arrays):
            raise _damaged(path)
        note_use(path)
        rows = [arrays.pop(name) for name in ROW_ARRAYS]
        return TokenizedRows(TokenizationNotes.model_validate_json(metadata[NOTES]), Units(**arrays), *rows)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"


def _digest(notes: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a sha256 of the counts and arrays of tokenized rows (5 bytes a token, some 1.6 GB/s), to detect damage."""
    digest = hashlib.sha256(notes.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _damaged(path: Path) -> DataError:
    return DataError(
        f"reading tokenized data: {path} holds other bytes than were written; start again to make it again"
    )
