"""Source of a dataset's tokenized data, read from a store or tokenized now by several processes.

Files are cut into parts: JSON Lines at line ends, Parquet at row groups; a JSON list, CSV and compressed files are one
part each. A part's digest depends on its content alone, so equal rows are found again in another file or place; that of
a remote file is of the pointer and the position, since only the end of a Parquet file is read to know its parts.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stages.core.cache import content_key, file_digest
from stages.core.errors import DataError
from stages.core.lines import counted
from stages.core.worker_pool import num_processes, worked
from stages.data.files import (
    JSON_LINES,
    LONGEST_LINE_BYTES,
    BadRow,
    FilePart,
    Row,
    RowLocation,
    format_suffix,
    is_compressed,
    name_of,
    num_places,
    open_parquet,
    read_part,
    read_rows,
)
from stages.data.tokenizing import (
    CHUNK_ROWS,
    PartTokenizer,
    TokenizedRows,
    TokenizedRowsStore,
    Tokenizing,
    first_rows_read,
    key_parts,
)
from stages.remote.pointers import is_pointer, size_bytes

if TYPE_CHECKING:
    import pyarrow.parquet


PART_BYTES = 2 << 20
"""Size in bytes of parts of local files: JSON Lines up to the next line end, Parquet (uncompressed) a row group's."""
PART_BYTES_ELSEWHERE = 8 * PART_BYTES
"""Size in bytes of parts of remote JSON Lines; larger, since a part's last line may fetch one more buffer."""
BYTES_PER_PROCESS = 4 << 20
"""Smallest number of bytes to tokenize for which a further process is started, since starting takes a while."""
KEPT = "what is tokenized already is kept"


class Reporter(Protocol):
    """Interface for progress and warnings while data is prepared, implemented by a `StageContext`."""

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None: ...

    def warn(self, message: str) -> None: ...


class TokenizedRowsSource:
    """Source of a dataset's tokenized data, in groups of rows ("pieces") and in the order of the rows."""

    def __init__(
        self,
        task: Tokenizing,
        folder: Path,
        files: list[Path],
        kept: Path,
        report: Reporter,
        time_limit_s: float | None = None,
    ) -> None:
        """Create the source of a dataset's tokenized data, and load the tokenizer.

        kept: folder of stored pieces, which may not exist yet. time_limit_s: CPU time from the first tokenized row on.
        Raises ModelError for a folder without a usable tokenizer.
        """
        self.tokenizer = PartTokenizer(task)
        self._task = task
        self._folder = folder
        self._files = files
        self._kept = kept
        self._store = TokenizedRowsStore(kept)
        self._report = report
        self._time_limit_s = time_limit_s
        self._ends_s = math.inf
        self._begun_s = time.monotonic()
        self._num_rows = 0
        self.last_in_time: RowLocation | None = None
        """Last row that was read if the time limit ended reading early; None if all rows were read."""

    def pieces(self) -> Iterator[tuple[FilePart, TokenizedRows]]:
        """Yield each piece (group of tokenized rows) with the part of the data file that it comes from.

        Raises DataError for rows of no format, and for a file that cannot be read on or changes meanwhile.
        """
        first_rows_read(self._task.reader, self._task.portion, read_rows(self._folder, self._files))
        self._kept.mkdir(parents=True, exist_ok=True)
        self._begun_s = time.monotonic()
        if self._time_limit_s is not None:
            yield from self._pieces_in_time(self._time_limit_s)
            return
        parts = list(self._parts())
        missing = {key: part for part, key in parts if key not in self._store}
        if num_damaged := sum(map(self._store.has_written, missing)):
            self._report.warn(
                f"{counted(num_damaged, 'part')} of the tokenized data in {self._kept} held other bytes than were "
                "written: tokenized again"
            )
        with closing(self._tokenized([(part, key) for key, part in missing.items()])) as tokenized:
            for part, key in parts:
                # Equal parts share a key and are tokenized once; `missing` has the order in which `tokenized` yields.
                if missing.pop(key, None):
                    next(tokenized)
                yield from ((part.part, piece) for piece in self._store.read(key))

    def _tokenized(self, missing: list[KeyedPart]) -> Generator[KeyedPart]:
        """Tokenize those parts of data files whose tokens are not cached; yield each part once it is stored."""
        processes = min(num_processes(sum(part.num_bytes for part, _ in missing), BYTES_PER_PROCESS), len(missing))
        if processes <= 1:
            for data_part, key in missing:
                rows = self._reported(data_part.part)
                self._store.write(key, _of_unchanged(data_part, self.tokenizer.pieces(data_part.part, rows)))
                yield data_part, key
            return
        with closing(worked(_PartWork(self.tokenizer, self._kept), missing, processes, KEPT)) as tokenized:
            for (data_part, key), num_rows in tokenized:
                self._num_rows += num_rows
                self._say(data_part.part, data_part.part.place(num_rows))
                yield data_part, key

    def _parts(self) -> Iterator[KeyedPart]:
        """Yield all parts of the data files with their cache keys; a part is hashed only when it is reached."""
        task = self._task
        decided = key_parts(task.portion, task.config, task.model.folder, task.rows, task.media)
        decided |= {"first_rows": str(task.reader)}
        for path in self._files:
            for one in parts_of(path, name_of(path, self._folder)):
                # References to media inside of rows name the rows.
                place = f"{one.part.name}:{one.part.num_before}" if task.media else ""
                named = decided | ({"place": place} if place else {})
                yield one, content_key({**named, "file": format_suffix(path), "content": one.digest})

    def _pieces_in_time(self, limit_s: float) -> Iterator[tuple[FilePart, TokenizedRows]]:
        """Yield groups of tokenized rows until the CPU time limit is reached; the last group may be incomplete."""
        for data_part, key in self._parts():
            if key not in self._store:
                pieces = list(self.tokenizer.pieces(data_part.part, self._watched(read_part(data_part.part), limit_s)))
                if self.last_in_time:
                    yield from ((data_part.part, piece) for piece in pieces)
                    return
                data_part.state.check(data_part.part.path, data_part.part.name)
                self._store.write(key, iter(pieces))
            yield from ((data_part.part, piece) for piece in self._store.read(key))

    def _watched(self, rows: Iterable[Row | BadRow], limit_s: float) -> Iterator[Row | BadRow]:
        """Yield rows unchanged until the CPU time limit is reached, and keep the last row's place in `last_in_time`."""
        for row in rows:
            yield row
            cpu_s = time.process_time() + self.tokenizer.tokenizer.template_cpu_s
            # Set by the first row, so that CPU time for imports and the tokenizer does not count.
            self._ends_s = min(self._ends_s, cpu_s + limit_s)
            if cpu_s > self._ends_s:
                self.last_in_time = row.place
                return

    def _reported(self, part: FilePart) -> Iterator[Row | BadRow]:
        """Yield the rows of one part of a data file, and report progress."""
        for row in read_part(part):
            yield row
            if self._num_rows % CHUNK_ROWS == 0:
                self._say(part, row.place)
            self._num_rows += 1

    def _say(self, part: FilePart, place: RowLocation) -> None:
        places, total = self._places
        first, end = places[part.path]
        done = first + place.number
        if part.begin and not part.num_before:  # the number of its first line is unknown
            done += (end - first) * part.begin // size_bytes(part.path)
        seconds = time.monotonic() - self._begun_s
        rate = f" ({self._num_rows / seconds:,.0f} rows/s)" if self._num_rows and seconds else ""
        message = f"tokenizing {self._task.portion.name} data{rate}"
        self._report.progress(min(done, total), total, "rows", message)

    @cached_property
    def _places(self) -> tuple[dict[Path, tuple[int, int]], int]:
        """Range of row numbers of each data file, counted over all files, and the total, for progress reports."""
        places, total = {}, 0
        for path in self._files:
            count = num_places(path)
            places[path] = total, total + count
            total += count
        return places, total


@dataclass(frozen=True)
class _PartWork:
    """Work of a tokenizing process: tokenizes a file part, stores the result and returns the number of rows."""

    tokenizer: PartTokenizer
    store: Path

    def __call__(self, keyed: KeyedPart) -> int:
        part, key = keyed
        num_rows = 0

        def counted() -> Iterator[Row | BadRow]:
            nonlocal num_rows
            for row in read_part(part.part):
                num_rows += 1
                yield row

        TokenizedRowsStore(self.store).write(key, _of_unchanged(part, self.tokenizer.pieces(part.part, counted())))
        return num_rows


def _of_unchanged(part: DataPart, pieces: Iterable[TokenizedRows]) -> Iterator[TokenizedRows]:
    """Yield a file part's tokenized pieces; raise DataError before the last if the file has changed meanwhile.

    The last piece marks the part as complete in the store, whose key is the hash of what the file held at first.
    """
    for piece in pieces:
        if piece.notes.num_earlier is not None:
            part.state.check(part.part.path, part.part.name)
        yield piece


@dataclass(frozen=True)
class FileState:
    """Size and modification time of a file, to detect that it changed while it was read."""

    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)

    def check(self, path: Path, name: str) -> None:
        """Raise DataError if the file's size or modification time is no longer the recorded one."""
        if (now := FileState.of(path)) != self:
            raise DataError(
                f"{name} changed while it was read: it had {self.num_bytes:,} bytes and has {now.num_bytes:,} now; "
                "start again once what writes it is done"
            )


@dataclass(frozen=True)
class DataPart:
    """Part of a data file with a digest of its content, and the file's size and time when it was hashed."""

    part: FilePart
    digest: str
    num_bytes: int
    state: FileState


def parts_of(path: Path, name: str) -> Iterator[DataPart]:
    """Yield a data file's parts for tokenizing, at least one, each hashed only when it is reached."""
    if format_suffix(path) in JSON_LINES and not is_compressed(path):
        yield from _of_bytes(path, name) if is_pointer(path) else _of_lines(path, name)
    elif format_suffix(path) == ".parquet":
        yield from _of_row_groups(path, name)
    else:
        yield _whole(path, name)


def _whole(path: Path, name: str) -> DataPart:
    state = FileState.of(path)
    return DataPart(FilePart(path, name), file_digest(path), size_bytes(path), state)


def _of_bytes(path: Path, name: str) -> Iterator[DataPart]:
    """Yield the parts of a remote JSON Lines file as byte ranges; the numbers of their lines are unknown."""
    state, pointed = FileState.of(path), file_digest(path)
    num_bytes = size_bytes(path)
    # An empty file is one empty part.
    for begin in range(0, max(1, num_bytes), PART_BYTES_ELSEWHERE):
        end = min(begin + PART_BYTES_ELSEWHERE, num_bytes)
        part = FilePart(path, f"{name} (from byte {begin})" if begin else name, begin, end)
        yield DataPart(part, content_key({"pointer": pointed, "bytes": [begin, end]}), end - begin, state)


def _of_lines(path: Path, name: str) -> Iterator[DataPart]:
    state = FileState.of(path)
    begin = num_lines = 0
    with path.open("rb") as stream:
        # `not begin`: an empty file is one empty part.
        while (block := stream.read(PART_BYTES)) or not begin:
            rest = b"" if block.endswith(b"\n") else stream.readline(LONGEST_LINE_BYTES + 1)
            digest = hashlib.sha256(block)
            digest.update(rest)
            end = begin + len(block) + len(rest)
            yield DataPart(FilePart(path, name, begin, end, num_lines), digest.hexdigest(), end - begin, state)
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
        part = FilePart(path, name, begin, group + 1, num_before)
        yield DataPart(part, _digest(path, metadata, range(begin, group + 1)), num_bytes, state)
        begin, num_before, num_bytes = group + 1, num_rows, 0
    if not metadata.num_row_groups:
        yield _whole(path, name)


def _digest(path: Path, metadata: pyarrow.parquet.FileMetaData, groups: range) -> str:
    """Return a digest of some row groups of a Parquet file (bytes and metadata), for the cache key of their tokens."""
    if is_pointer(path):
        return content_key({"pointer": file_digest(path), "row_groups": [groups.start, groups.stop]})
    # The columns' bytes alone do not say of which type they are, or how they are compressed.
    digest = hashlib.sha256(str(metadata.schema).encode())
    with path.open("rb") as stream:
        for group in map(metadata.row_group, groups):
            for column in map(group.column, range(group.num_columns)):
                digest.update(f"{column.num_values} {column.compression} {column.encodings}".encode())
                # A column begins with its dictionary page if there is one; else that offset is None or 0.
                stream.seek(min(filter(None, (column.dictionary_page_offset, column.data_page_offset))))
                digest.update(stream.read(column.total_compressed_size))
    return digest.hexdigest()


KeyedPart = tuple[DataPart, str]
"""Part of a data file, with the cache key under which the tokens of its rows are stored."""
