"""Pieces: what tokenizing makes of a part of a file, in a file each (safetensors), by the digest of what was read.

A piece does not know where its part lies: numbers of rows in it count from the part's beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.files import write_atomically
from stages.core.strict import StrictModel
from stages.data.files import BadRow, Part
from stages.data.seen_rows import RowDigests
from stages.data.tokenizer import TokenizerNotes
from stages.data.tool_prompt import ToolPrompt
from stages.data.unit_arrays import Units
from stages.data.units import OverLong

SUFFIX = ".safetensors"
NOTES = "notes"
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
        """Whether all pieces of a part are there and can be read: of one that is cut off or damaged, none is."""
        from safetensors import SafetensorError, safe_open

        def num_earlier(name: str) -> int:
            with safe_open(self._path(name), "np") as stored:
                return PieceNotes.model_validate_json(stored.metadata()[NOTES]).num_earlier or 0

        try:
            return not any(num_earlier(f"{key}-{number}") for number in range(num_earlier(key)))
        except (OSError, SafetensorError, ValueError):
            return False

    def write(self, key: str, pieces: Iterator[Piece]) -> None:
        """Keep the pieces of a part, of which there is at least one. Those before it are there once the last one is."""
        for number, piece in enumerate(pieces):
            self._write(f"{key}-{number}" if piece.notes.num_earlier is None else key, piece)

    def read(self, key: str) -> Iterator[Piece]:
        """The pieces of a part, one at a time."""
        last = self._read(key)
        yield from (self._read(f"{key}-{number}") for number in range(last.notes.num_earlier or 0))
        yield last

    def _write(self, name: str, piece: Piece) -> None:
        from safetensors.numpy import save

        arrays = {one: getattr(piece.units, one) for one in UNIT_ARRAYS} | {
            one: getattr(piece, one) for one in ROW_ARRAYS
        }
        there = {one: array for one, array in arrays.items() if array is not None}
        write_atomically(self._path(name), save(there, metadata={NOTES: piece.notes.model_dump_json()}))

    def _read(self, name: str) -> Piece:
        from safetensors import safe_open

        with safe_open(self._path(name), "np") as stored:
            notes = PieceNotes.model_validate_json(stored.metadata()[NOTES])
            arrays = {one: stored.get_tensor(one) for one in stored.keys()}  # noqa: SIM118 (no mapping)
        rows = [arrays.pop(name) for name in ROW_ARRAYS]
        return Piece(notes, Units(**arrays), *rows)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"
