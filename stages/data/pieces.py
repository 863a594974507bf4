"""Pieces: what tokenizing makes of a part of a file, in a file each (safetensors), by the digest of what was read.

A piece does not know where its part lies: numbers of rows in it count from the part's beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.core.cache_entries import note_use
from stages.core.errors import DataError
from stages.core.files import write_atomically
from stages.core.strict import StrictModel
from stages.data.files import BadRow, Part
from stages.data.seen_rows import RowDigests
from stages.data.tokenizer import TokenizerNotes
from stages.data.tool_prompt import ToolPrompt
from stages.data.unit_arrays import Units
from stages.data.units import OverLong

SUFFIX = ".safetensors"
NOTES, DIGEST = "notes", "digest"
"""Metadata of a file: what is said of a piece, and the sha256 of that and of all arrays."""
UNIT_ARRAYS = tuple(Units.__dataclass_fields__)
ROW_ARRAYS = ("digests", "swapped", "numbers")


class PieceNotes(StrictModel):
    """All that is said of a piece but its arrays.

    num_earlier: pieces of the same part before this one, which is the last. num_source_rows: of the portion, bad ones
    included. num_tokenized_rows: which `over_long` looked at. num_text_tokens,
    num_text_bytes: of texts that are cut into rows. unread: columns and fields → rows that have them.
    tool_prompt: of the first row with tools that a server can be asked with.
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
    unread: dict[str, int]
    remarkable: dict[str, tuple[int, int, str]]
    tokenizer: TokenizerNotes
    tool_prompt: ToolPrompt | None = None


@dataclass(frozen=True)
class Piece:
    """Units of a part, and what was found in its rows."""

    notes: PieceNotes
    units: Units
    digests: NDArray[np.uint64]
    swapped: NDArray[np.uint64]
    numbers: NDArray[np.uint64]
    """As `RowDigests` has them."""

    @classmethod
    def of(cls, notes: PieceNotes, units: Units, rows: RowDigests) -> Piece:
        return cls(notes, units, *(np.array(getattr(rows, name), np.uint64) for name in ROW_ARRAYS))

    def bad_rows(self, part: Part) -> Iterator[BadRow]:
        return (BadRow(part.place(number), reason) for number, reason in self.notes.bad_rows)

    def over_long(self, part: Part, over_long: OverLong) -> OverLong:
        """As `over_long` of the same policy would have counted."""
        notes = self.notes
        named = [(part.place(number), tokens) for number, tokens in notes.over_long]
        counts = (notes.num_over_long, notes.longest_tokens, named, notes.num_kept)
        return OverLong(over_long.policy, over_long.sequence_length, *counts)


class PieceStore:
    """Pieces in a folder, which is there. Several processes may write the same one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, key: str) -> bool:
        """Return whether all pieces of a part are there as they were written: of one that is damaged, none is."""
        try:
            for _ in self.read(key):
                pass
        except (OSError, DataError):
            return False
        return True

    def has_written(self, key: str) -> bool:
        """Return whether all pieces of a part were written once, be they damaged or not."""
        return self._path(key).is_file()

    def write(self, key: str, pieces: Iterator[Piece]) -> None:
        """Keep the pieces of a part, of which there is at least one. Those before it are there once the last one is."""
        for number, piece in enumerate(pieces):
            self._write(f"{key}-{number}" if piece.notes.num_earlier is None else key, piece)

    def read(self, key: str) -> Iterator[Piece]:
        """The pieces of a part, one at a time. Raises DataError for one that holds other bytes than were written."""
        last = self._read(key)
        yield from (self._read(f"{key}-{number}") for number in range(last.notes.num_earlier or 0))
        yield last

    def _write(self, name: str, piece: Piece) -> None:
        from safetensors.numpy import save

        arrays = {one: getattr(piece.units, one) for one in UNIT_ARRAYS} | {
            one: getattr(piece, one) for one in ROW_ARRAYS
        }
        there = {one: array for one, array in arrays.items() if array is not None}
        notes = piece.notes.model_dump_json()
        metadata = {NOTES: notes, DIGEST: _digest(notes, there)}
        write_atomically(self._path(name), save(there, metadata=metadata))

    def _read(self, name: str) -> Piece:
        """Raises DataError for a piece that is not as it was written, OSError for none."""
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
        return Piece(PieceNotes.model_validate_json(metadata[NOTES]), Units(**arrays), *rows)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"


def _digest(notes: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the sha256 of all that a file says; some 1.6 GB/s, and a token takes 5 bytes."""
    digest = hashlib.sha256(notes.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _damaged(path: Path) -> DataError:
    return DataError(
        f"reading tokenized data: {path} holds other bytes than were written; start again to make it again"
    )
