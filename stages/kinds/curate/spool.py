"""Temporary files for rows that passed curation's single-row steps, until the steps that compare all rows run.

Files only grow, and a note says how far they belong together: after a kill they are cut back to that.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from stages.core.files import write_atomically
from stages.data.files import RowLocation
from stages.data.media.embedded import as_json

NOTE = "kept.json"
SPOOL_FILES = ROWS, OFFSETS, DIGESTS = "rows.jsonl", "offsets.bin", "digests.bin"


@dataclass(frozen=True)
class SourcePlace:
    """Origin of a row: the dataset's stage, the file, and the line or row number."""

    dataset: str
    place: RowLocation

    def __str__(self) -> str:
        return f"{self.dataset} {self.place}"

    def columns(self) -> dict[str, object]:
        return {"dataset": self.dataset, "file": self.place.file, self.place.counts: self.place.number}


@dataclass(frozen=True)
class SpooledRow:
    """Row that curation's single-row steps kept, with its origin and its number in the temporary files, from 0."""

    number: int
    place: SourcePlace
    content: dict[str, Any]
    media: tuple[str, ...] = ()
    """Paths of its media's files in the dataset's folder."""


class KeptFiles:
    """Append-only files, cut back to the last checkpoint after a kill. state: what it was given, or None."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        folder.mkdir(exist_ok=True)
        self._note = folder / NOTE
        note = json.loads(self._note.read_bytes()) if self._note.exists() else {}
        self.state: dict[str, Any] | None = note.get("state")
        self._streams = {name: (folder / name).open("ab") for name in names}
        for name, stream in self._streams.items():  # drop what was written after the last `keep`
            stream.truncate(note.get("sizes", {}).get(name, 0))
            stream.seek(0, os.SEEK_END)

    def __getitem__(self, name: str) -> BinaryIO:
        return self._streams[name]

    def keep(self, state: dict[str, Any]) -> None:
        """Save a checkpoint: flush all files to the disk, and store `state` (JSON) with their sizes."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())  # before the note, which must not count bytes that a power cut could take
        sizes = {name: stream.tell() for name, stream in self._streams.items()}
        write_atomically(self._note, json.dumps({"sizes": sizes, "state": state}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()


def spool_line(place: SourcePlace, content: dict[str, Any], media: Sequence[str] = ()) -> bytes:
    """Return the line of a row that the single-row steps keep. media: paths of its media's files."""
    at = place.place
    row = [place.dataset, at.file, at.number, at.counts, content, *media]
    return json.dumps(row, ensure_ascii=False, default=as_json).encode() + b"\n"


def digest_of(canonical: str) -> bytes:
    """Return the hash of a row by its canonical text, which is equal for exact duplicates."""
    return hashlib.blake2b(canonical.encode(), digest_size=8).digest()


def spool_row(files: KeptFiles, line: bytes, digest: bytes) -> None:
    """Append a row that the single-row steps keep to the files."""
    files[OFFSETS].write(files[ROWS].tell().to_bytes(8, "little"))  # where the row will begin
    files[DIGESTS].write(digest)
    files[ROWS].write(line)


class Spool:
    """Reader of the temporary files with the rows that curation's single-row steps kept."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROWS
        self._offsets = np.fromfile(folder / OFFSETS, "<u8")
        self.digests: NDArray[np.uint64] = np.fromfile(folder / DIGESTS, "<u8")
        """Hash of each row's canonical text, uint64 [rows]; equal for exact duplicates."""

    def __len__(self) -> int:
        return len(self._offsets)

    def rows(self) -> Iterator[SpooledRow]:
        with self._path.open("rb") as stream:
            yield from (_parsed(number, line) for number, line in enumerate(stream))

    def row(self, number: int) -> SpooledRow:
        with self._path.open("rb") as stream:
            stream.seek(int(self._offsets[number]))
            return _parsed(number, stream.readline())


def _parsed(number: int, line: bytes) -> SpooledRow:
    dataset, file, at, counts, content, *media = json.loads(line)
    return SpooledRow(number, SourcePlace(dataset, RowLocation(file, at, counts)), content, tuple(media))
