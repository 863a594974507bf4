"""Data files → parts that are tokenized each by itself, and digests of what they hold.

JSON Lines and Parquet are cut; a JSON list, a table as CSV and what is compressed are one part each. A part of the same
digest holds the same rows, in whatever file it lies, and wherever in it.

Of what a pointer points to, nothing is read to know its parts but the end of a Parquet file: their digest is of the
pointer, and where they lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import DataError
from stages.data.cache import content_key, file_digest
from stages.data.compression import format_suffix, is_compressed
from stages.data.files import JSON_LINES, LONGEST_LINE_BYTES, Part
from stages.data.parquet import open_parquet
from stages.remote.pointers import is_pointer, size_bytes

if TYPE_CHECKING:
    import pyarrow.parquet

PART_BYTES = 2 << 20
"""Of JSON Lines, up to the end of a line, and of Parquet as it is uncompressed, up to the end of a row group."""
PART_BYTES_ELSEWHERE = 8 * PART_BYTES
"""Of JSON Lines: up to a buffer more than a part is fetched, to find the end of its last line."""


@dataclass(frozen=True)
class FileState:
    """A file when it was looked at; one that is written to later has another."""

    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)

    def check(self, path: Path, name: str) -> None:
        """Raises DataError where the file is not the same any more."""
        if (now := FileState.of(path)) != self:
            raise DataError(
                f"{name} changed while it was read: it had {self.num_bytes:,} bytes and has {now.num_bytes:,} now; "
                "start again once what writes it is done"
            )


@dataclass(frozen=True)
class DataPart:
    """A part, what it holds, and its file at that time. num_bytes: of the file, roughly."""

    part: Part
    digest: str
    num_bytes: int
    state: FileState


def parts_of(path: Path, name: str) -> Iterator[DataPart]:
    """The parts of a file in order, each hashed when it is asked for; at least one."""
    if format_suffix(path) in JSON_LINES and not is_compressed(path):
        yield from _of_bytes(path, name) if is_pointer(path) else _of_lines(path, name)
    elif format_suffix(path) == ".parquet":
        yield from _of_row_groups(path, name)
    else:
        yield _whole(path, name)


def _whole(path: Path, name: str) -> DataPart:
    state = FileState.of(path)
    return DataPart(Part(path, name), file_digest(path), size_bytes(path), state)


def _of_bytes(path: Path, name: str) -> Iterator[DataPart]:
    """Of what a pointer points to; which line is the first of a part, only all before would tell."""
    state, pointed = FileState.of(path), file_digest(path)
    num_bytes = size_bytes(path)
    for begin in range(0, max(1, num_bytes), PART_BYTES_ELSEWHERE):
        end = min(begin + PART_BYTES_ELSEWHERE, num_bytes)
        part = Part(path, f"{name} (from byte {begin})" if begin else name, begin, end)
        yield DataPart(part, content_key({"pointer": pointed, "bytes": [begin, end]}), end - begin, state)


def _of_lines(path: Path, name: str) -> Iterator[DataPart]:
    state = FileState.of(path)
    begin = num_lines = 0
    with path.open("rb") as stream:
        while (block := stream.read(PART_BYTES)) or not begin:
            rest = b"" if block.endswith(b"\n") else stream.readline(LONGEST_LINE_BYTES + 1)
            digest = hashlib.sha256(block)
            digest.update(rest)
            end = begin + len(block) + len(rest)
            yield DataPart(Part(path, name, begin, end, num_lines), digest.hexdigest(), end - begin, state)
            if begin == end:
                return
            num_lines += block.count(b"\n") + rest.count(b"\n")
            begin = end


def _of_row_groups(path: Path, name: str) -> Iterator[DataPart]:
    import pyarrow

    state = FileState.of(path)
    try:
        with open_parquet(path) as file:
            metadata = file.metadata
    except (pyarrow.ArrowException, OSError):
        yield _whole(path, name)  # reading says what is wrong with it
        return
    begin = num_before = num_rows = num_bytes = 0
    for group in range(metadata.num_row_groups):
        num_rows += metadata.row_group(group).num_rows
        num_bytes += metadata.row_group(group).total_byte_size
        if num_bytes < PART_BYTES and group + 1 < metadata.num_row_groups:
            continue
        part = Part(path, name, begin, group + 1, num_before)
        yield DataPart(part, _digest(path, metadata, range(begin, group + 1)), num_bytes, state)
        begin, num_before, num_bytes = group + 1, num_rows, 0
    if not metadata.num_row_groups:
        yield _whole(path, name)


def _digest(path: Path, metadata: pyarrow.parquet.FileMetaData, groups: range) -> str:
    """Of the bytes of row groups, and of what the end of the file says of them."""
    if is_pointer(path):
        return content_key({"pointer": file_digest(path), "row_groups": [groups.start, groups.stop]})
    digest = hashlib.sha256(str(metadata.schema).encode())
    with path.open("rb") as stream:
        for group in map(metadata.row_group, groups):
            for column in map(group.column, range(group.num_columns)):
                digest.update(f"{column.num_values} {column.compression} {column.encodings}".encode())
                stream.seek(min(filter(None, (column.dictionary_page_offset, column.data_page_offset))))
                digest.update(stream.read(column.total_compressed_size))
    return digest.hexdigest()
