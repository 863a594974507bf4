"""Units of training data, each a tokenized document or a preference pair, and their packing into rows.

Checked, fitted to the sequence length, and packed a window at a time so that memory stays flat, by best-fit decreasing
(Johnson 1973): the longest unit first, each into the row with the least room that it fits into.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError
from stages.core.redaction import quoted
from stages.data.files import RowLocation
from stages.data.media_reference import as_records
from stages.data.messages import INVISIBLE, Document, RowError, answers_of
from stages.data.tokenizer import TokenizedDocument

NUM_NAMED = 10
WINDOW_UNITS = 1 << 16
WINDOW_TOKENS = 1 << 22
WINDOW_ROWS = 256


@dataclass(frozen=True)
class Unit:
    """Training unit that must stay in one packed row: a document, or a pair (chosen, rejected); `len`: tokens."""

    documents: tuple[TokenizedDocument, ...]
    is_good: bool | None = None
    """Label of a labelled answer (KTO): True if it is good, False if it is bad; None for other data."""
    margin: float | None = None
    """Margin by which the chosen answer of a pair is better than the rejected one; None if the data has no margins."""

    def __len__(self) -> int:
        return sum(map(len, self.documents))


@dataclass
class OverlongPolicy:
    """Policy for documents or pairs longer than a packed row, with counts of the truncated and dropped ones."""

    policy: Literal["truncate", "drop", "fail"]
    sequence_length: int
    num_over_long: int = 0
    longest_tokens: int = 0
    named: list[tuple[RowLocation, int]] = field(default_factory=list)
    """Places and token counts of the first rows that are too long, for error messages."""
    num_kept: int = 0
    num_media_cut: int = 0
    """Number of rows that were left out because their media would have been cut."""
    _last_place: RowLocation | None = None

    def fit(self, unit: Unit, place: RowLocation) -> Unit | None:
        """Return a document or pair that fits into a packed row: whole or truncated, or None if it is dropped."""
        if len(unit) <= self.sequence_length:
            self.num_kept += 1
            return unit
        self.longest_tokens = max(self.longest_tokens, len(unit))
        if place != self._last_place:  # a row of several units counts once
            self._last_place = place
            self.num_over_long += 1
            if len(self.named) < NUM_NAMED:
                self.named.append((place, len(unit)))
        if self.policy != "truncate":
            return None
        truncated = self._truncated(unit)
        if any(document.media_end > len(document) for document in truncated.documents):
            self.num_media_cut += 1
            return None
        return truncated

    def add(self, other: OverlongPolicy) -> None:
        self.num_over_long += other.num_over_long
        self.longest_tokens = max(self.longest_tokens, other.longest_tokens)
        self.named = [*self.named, *other.named][:NUM_NAMED]
        self.num_kept += other.num_kept
        self.num_media_cut += other.num_media_cut

    def check(self, num_rows: int) -> str | None:
        """Return a warning about too long documents and pairs; raise DataError if the policy is `fail`."""
        if not self.num_over_long:
            return None
        problem = (
            f"{self.num_over_long} of {num_rows} rows have more than sequence_length {self.sequence_length} tokens, "
            f"up to {self.longest_tokens}"
        )
        if self.policy == "fail":
            raise DataError(
                f"{problem}: {', '.join(f'{place} ({tokens} tokens)' for place, tokens in self.named)}"
                f"{', …' if self.num_over_long > len(self.named) else ''}. Raise "
                "`sequence_length`, or say `over_long: truncate` or `over_long: drop`."
            )
        if self.policy == "drop" and self.num_over_long == num_rows and not self.num_kept:
            raise DataError(f"{problem}, and `over_long: drop` leaves nothing to learn from. Raise `sequence_length`.")
        if self.policy == "drop":
            return f"{problem}: they were left out"
        cut_media = (
            f"; {self.num_media_cut} were left out, whose media would have been cut" if self.num_media_cut else ""
        )
        return f"{problem}: their ends were cut off{cut_media}"

    def _truncated(self, unit: Unit) -> Unit:
        """Return a document or pair truncated at its end. Of a pair, each document keeps at least half a row."""
        lengths = [len(document) for document in unit.documents]
        share = self.sequence_length // len(lengths)
        # lengths [900, 300] in a row of 1,000: share 500, spare 200, so both are cut at 700 -> [700, 300]
        spare = sum(max(0, share - length) for length in lengths)
        return replace(unit, documents=tuple(document.cut(share + spare) for document in unit.documents))


def check_learnable(unit: Unit, was_truncated: bool) -> None:
    """Raise RowError for a document or pair that has no token with loss, or a pair whose answers are equal."""
    where = "in the part that sequence_length leaves" if was_truncated else "once it is rendered and tokenized"
    if not all(document.loss.any() for document in unit.documents):
        raise RowError(f"has nothing to learn from {where}: no token of an answer; expected at least one")
    if len(unit.documents) > 1 and np.array_equal(unit.documents[0].ids, unit.documents[1].ids):
        raise RowError(f"has the same `chosen` and `rejected` {where}; expected two different answers")


class AnswerCheck:
    """Checks that each answer has text, and that the model has an embedding for every token."""

    def __init__(self, special_tokens: Sequence[str], vocabulary_size: int | None) -> None:
        """Create the checks of answers. vocabulary_size: that of the model; None if unknown."""
        written = [
            r"\s",
            INVISIBLE,
            *(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token),
        ]
        # `*+` never backtracks, so that a long answer takes linear time.
        self._no_text = re.compile(f"(?:{'|'.join(written)})*+")
        self._vocabulary_size = vocabulary_size

    def check_text(self, documents: Iterable[Document]) -> None:
        """Raise RowError for an answer that consists of special tokens or invisible characters only."""
        for answer in (answer for document in documents for answer in answers_of(document)):
            if self._no_text.fullmatch(answer):
                raise RowError(
                    f"has the answer {quoted(answer, 40)}, nothing but special tokens or invisible characters; "
                    "expected text"
                )

    def check_tokens(self, unit: Unit) -> None:
        """Raise RowError if a document or pair has a token id outside the model's vocabulary."""
        largest = max(int(document.ids.max(initial=0)) for document in unit.documents)
        if self._vocabulary_size is not None and largest >= self._vocabulary_size:
            raise RowError(
                f"has the token {largest}, but the model's vocabulary ends at {self._vocabulary_size - 1}; expected "
                "the tokenizer that the model was trained with"
            )


@dataclass(frozen=True)
class Units:
    """Many training units (documents or preference pairs) joined to flat arrays; `len` counts units."""

    tokens: NDArray[np.int32]
    """Token ids of all documents, int32 [tokens]."""
    loss: NDArray[np.bool_]
    """Loss mask, bool [tokens]: True for tokens that carry loss."""
    document_lengths: NDArray[np.int64]
    """Number of tokens of each document, int64 [documents]."""
    num_documents: NDArray[np.int64]
    """Number of documents in each training unit, int64 [units]: 1, or 2 for a pair."""
    labels: NDArray[np.bool_] | None = None
    """Label of each labelled answer, bool [units]: True for a good one; None for other data."""
    margins: NDArray[np.float32] | None = None
    """Margin of each preference pair, float32 [units]; None if the data has no margins."""
    media: NDArray[np.uint8] | None = None
    """Records of the media of all documents (`stages/data/media_reference.py`), uint8; None for text alone."""
    media_lengths: NDArray[np.int64] | None = None
    """Number of bytes of each document's records of media, int64 [documents]; None for text alone."""

    def __len__(self) -> int:
        return len(self.num_documents)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each training unit (document or pair), int64 [units]."""
        # Both are one longer than their counts: where each document ends in tokens, and each unit in documents.
        ends = np.concatenate([[0], np.cumsum(self.document_lengths)])
        return np.diff(ends[np.concatenate([[0], np.cumsum(self.num_documents)])])

    def take(self, numbers: Sequence[int] | NDArray[np.int64]) -> Units:
        """Return the training units (documents or pairs) with these numbers, in the given order."""
        order = np.asarray(numbers, np.int64)
        # Indices into `document_lengths` and, below, into `tokens` and `loss`.
        documents = _ranges(self.num_documents, order)
        tokens = _ranges(self.lengths, order)
        media = media_lengths = None
        if self.media is not None and self.media_lengths is not None:
            media = self.media[_ranges(self.media_lengths, documents)]
            media_lengths = self.media_lengths[documents]
        return Units(
            self.tokens[tokens],
            self.loss[tokens],
            self.document_lengths[documents],
            self.num_documents[order],
            None if self.labels is None else self.labels[order],
            None if self.margins is None else self.margins[order],
            media,
            media_lengths,
        )

    @classmethod
    def of(
        cls,
        units: Sequence[Unit],
        *,
        is_labelled: bool = False,
        has_margins: bool = False,
        has_media: bool = False,
    ) -> Units:
        """Return units as flat arrays.

        is_labelled, has_margins: all units have a label or a margin. has_media: some documents may have media.
        """
        documents = [document for unit in units for document in unit.documents]
        records = [as_records(document.media) for document in documents] if has_media else []
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(document.ids for document in documents)]),
            np.concatenate([np.zeros(0, np.bool_), *(document.loss for document in documents)]),
            np.array([len(document) for document in documents], np.int64),
            np.array([len(unit.documents) for unit in units], np.int64),
            np.array([unit.is_good for unit in units], np.bool_) if is_labelled else None,
            np.array([unit.margin for unit in units], np.float32) if has_margins else None,
            np.frombuffer(b"".join(records), np.uint8) if has_media else None,
            np.array(list(map(len, records)), np.int64) if has_media else None,
        )

    @classmethod
    def joined(cls, parts: Sequence[Units]) -> Units:
        """Return one or several groups of units joined; all of them have labels (or margins), or none has."""

        def whole(name: str) -> Any:
            return None if getattr(parts[0], name) is None else np.concatenate([getattr(one, name) for one in parts])

        return parts[0] if len(parts) == 1 else cls(**{name: whole(name) for name in cls.__dataclass_fields__})


def _ranges(lengths: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices, in a flat array of consecutive groups, of all elements of the groups selected by `order`."""
    # lengths [3, 2], order [1, 0] -> starts [0, 3], moved [3, -2], indices [3, 4, 0, 1, 2]
    starts = np.cumsum(lengths) - lengths
    wanted = lengths[order]
    # Distance from an element's place in the result to its place in the source: constant within a group.
    moved = starts[order] - (np.cumsum(wanted) - wanted)
    return np.repeat(moved, wanted) + np.arange(int(wanted.sum()))


def pack(
    batches: Iterable[Units], capacity: int, sizes: Callable[[Units], NDArray[np.int64]] | None = None
) -> Iterator[PackedRows]:
    """Yield packed rows: whole training units whose sizes add up to at most `capacity`, as full as possible.

    sizes: function that returns the size of each unit, int64 [units], at least its length; by default the length.
    Of a window of units the fuller three quarters of its rows are final, the others are packed again with the next
    units. The result does not depend on how units come in batches.
    """
    window: list[Units] = []
    num_units = num_tokens = 0
    max_tokens = max(WINDOW_TOKENS, WINDOW_ROWS * capacity)
    for batch in batches:
        begin = 0
        while begin < len(batch):
            # At least one unit, so that each round makes progress.
            room = max(1, WINDOW_UNITS - num_units)
            # A window ends after the same unit, however units come in batches.
            end = min(_first_beyond(batch, begin, max_tokens - num_tokens), begin + room)
            window.append(batch if (begin, end) == (0, len(batch)) else batch.take(range(begin, end)))
            num_units += end - begin
            num_tokens += int(batch.lengths[begin:end].sum())
            begin = end
            if num_tokens < max_tokens and num_units < WINDOW_UNITS:
                continue
            units = Units.joined(window)
            rows = _fullest_first(units, capacity, sizes)
            # The fuller rows are final; units of the emptier ones may fit better beside those that come next.
            num_final = (3 * len(rows) + 3) // 4  # rounded up: a single row is final
            yield _taken(units, rows[:num_final])
            window = [_taken(units, rows[num_final:])[0]]
            num_units, num_tokens = len(window[0]), int(window[0].lengths.sum())
    if num_units:
        units = Units.joined(window)
        yield _taken(units, _fullest_first(units, capacity, sizes))


def cut(texts: Iterable[Units], row_tokens: int) -> Iterator[PackedRows]:
    """Yield rows of exactly `row_tokens` tokens, cut from the joined texts; tokens left at the end are dropped."""
    left = np.array([], np.int32)
    for batch in texts:
        # Rows run across texts and batches; `left` is shorter than a row.
        tokens = np.concatenate([left, batch.tokens])
        num_rows = len(tokens) // row_tokens
        left = tokens[num_rows * row_tokens :]
        ones = np.ones(num_rows, np.int64)
        # Nothing in its row predicts a row's first token.
        loss = np.tile(np.arange(row_tokens) > 0, num_rows)
        # Each row is one unit of one document.
        yield Units(tokens[: num_rows * row_tokens], loss, ones * row_tokens, ones), [1] * num_rows


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return a best-fit decreasing packing into rows of `capacity` tokens, as indices into `lengths`.

    Sorting takes O(n log n), and each unit a search in `capacity` bits.
    """
    rows: list[list[int]] = []
    # rows_by_room[r]: rows in which r tokens are free
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # a bit for each amount of room that some row has
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        enough = rooms >> length  # bit i: some row has room for length + i tokens
        if enough:
            # The lowest set bit is the least room that is enough.
            room = length + (enough & -enough).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
            rows[row].append(index)
        else:
            room, row = capacity, len(rows)
            rows.append([index])
        rows_by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def _first_beyond(batch: Units, begin: int, num_tokens: int) -> int:
    """Return the index after the shortest run of training units, from `begin` on, with at least `num_tokens` tokens."""
    # lengths [4, 4, 4], num_tokens 5 -> ends [4, 8, 12] -> 2 units
    ends = batch.lengths[begin:].cumsum()
    return begin + min(int(ends.searchsorted(num_tokens)) + 1, len(ends))


def _fullest_first(units: Units, capacity: int, sizes: Callable[[Units], NDArray[np.int64]] | None) -> list[list[int]]:
    lengths = (sizes(units) if sizes else units.lengths).tolist()
    rows = best_fit_decreasing(lengths, capacity)
    rows.sort(key=lambda row: sum(lengths[number] for number in row), reverse=True)
    return rows


def _taken(units: Units, rows: list[list[int]]) -> PackedRows:
    return units.take([number for row in rows for number in row]), [len(row) for row in rows]


PackedRows = tuple[Units, list[int]]
"""Training units in the order of their packed rows, and the number of training units in each row."""
