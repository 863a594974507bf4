"""Readers of dataset files: they find the files of a split and yield the rows, without interpreting them.

Files may be compressed, or remote behind a pointer file; JSON Lines, JSON lists, CSV and Parquet are read in pieces, so
that memory stays flat. `Portion` selects the rows that are trained on or held out.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import os
import re
import stat
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TextIO

from stages.core.errors import DataError
from stages.core.redaction import quoted
from stages.data.config import DataConfig
from stages.data.json_values import DECODER, NOT_TEXT, JsonList, flaw_of
from stages.remote.pointers import is_pointer, open_file, size_bytes, without_pointer

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile


COMPRESSIONS = (".gz", ".zst")
BEGINNING_CHARACTERS = 1024
PARQUET_BATCH_ROWS = 1024
BLOCK_BYTES = 1 << 20
SAMPLED_BYTES = 64 << 20
SAMPLED_BYTES_COMPRESSED = 16 * SAMPLED_BYTES
"""Decompressed bytes of a compressed file that are read to estimate how many rows it has; this takes seconds."""
SAMPLED_BYTES_ELSEWHERE = 1 << 20
LONGEST_LINE_BYTES = 256 << 20
"""Largest length of a line of JSON Lines, in bytes; longer ones mean another kind of file and would fill the memory."""
JSON_LINES = (".jsonl", ".ndjson")
METADATA = {"dataset_info.json", "dataset_infos.json", "state.json"}
NUM_FILES_LISTED = 20
NO_PYTHON_VALUE = (ValueError, OverflowError, LookupError)
"""Errors that pyarrow raises for values that Python cannot represent: dates beyond its calendar, unknown time zones."""
SHARD = re.compile(r"(?P<before>.*?)-(?P<number>\d+)-of-(?P<count>\d+)(?P<after>\..*)")


@dataclass(frozen=True)
class RowLocation:
    """Place of a row for error messages: its line in a text file or its number in a Parquet file, counted from 1."""

    file: str
    number: int
    counts: Literal["line", "row"] = "line"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.counts == "line" else f"{self.file} row {self.number}"


@dataclass(frozen=True)
class Row:
    """Row as read from a file: any JSON value, before its meaning is checked."""

    place: RowLocation
    content: object


@dataclass(frozen=True)
class BadRow:
    """Row that cannot be learned from, with its place and the reason."""

    place: RowLocation
    reason: str


@dataclass(frozen=True)
class FilePart:
    """Part of a data file that one process reads: row groups of Parquet, or bytes [begin, end) of JSON Lines.

    name: the file's, in messages. num_before: number of lines, or of Parquet rows, before the part.
    """

    path: Path
    name: str
    begin: int = 0
    end: int | None = None
    num_before: int = 0

    def place(self, number: int) -> RowLocation:
        """Return a row's place in the file (line or row number), given its number within this part of the file."""
        return RowLocation(
            self.name, self.num_before + number, "row" if format_suffix(self.path) == ".parquet" else "line"
        )


def find_files(folder: Path, split: str) -> list[Path]:
    """Return the data files of a split in the order of their names; raise DataError, with all files, if there are none.

    These are `SPLIT.jsonl`, shards `SPLIT-00000-of-00002.parquet`, all in a folder `SPLIT/`, any of these in `data/`,
    or else names like `SPLIT_part1.jsonl`; for `train` also the only file there is.
    """
    there = [path for path in _all_files(folder, of_rows=True) if path.name not in METADATA]
    paths = _matching(there, folder, split) or (there if split == "train" and len(there) == 1 else [])
    if not paths:
        raise DataError(
            f"no files of the split {split!r} in the dataset {folder}. {_listing(folder)} Expected `{split}.jsonl`, "
            f"`{split}-*.parquet`, `{split}/…` or `data/{split}-*.parquet` ({', '.join(READERS)})."
        )
    suffixes = sorted({format_suffix(path) for path in paths})
    if len(suffixes) > 1:
        names = ", ".join(name_of(path, folder) for path in islice(paths, NUM_FILES_LISTED))
        raise DataError(f"the split {split!r} of {folder} is there in {' and '.join(suffixes)}: {names}. Keep one.")
    stems = Counter(path.parent / data_stem(path) for path in paths)
    if twice := [name_of(path, folder) for path in paths if stems[path.parent / data_stem(path)] > 1]:
        raise DataError(f"the split {split!r} of {folder} has files twice: {', '.join(twice)}. Keep one of each.")
    return paths


def name_of(path: Path, folder: Path) -> str:
    """Return the name of a data file for messages: its path within the dataset's folder."""
    return str(without_pointer(path).relative_to(folder))


def read_rows(folder: Path, files: list[Path]) -> Iterator[Row | BadRow]:
    """Yield all rows of the files in order; raise DataError for an unreadable file.

    A good row can be written as UTF-8 and walked recursively; its meaning is not checked here.
    """
    for path in files:
        yield from read_part(FilePart(path, name_of(path, folder)))


def read_part(part: FilePart) -> Iterator[Row | BadRow]:
    """Yield the rows of a data file, or of a part of one. Raises DataError for an unreadable file."""
    suffix = format_suffix(part.path)
    if suffix not in READERS:
        found = f"ends in {quoted(suffix, 40)}" if suffix else "has no suffix"
        raise DataError(
            f"reading rows: the name of {quoted(part.name, 200)} {found}; expected {', '.join(READERS)}, and after it "
            f"maybe {' or '.join(COMPRESSIONS)}: rename or convert it"
        )
    try:
        for row in READERS[suffix](part):
            flaw = flaw_of(row.content) if isinstance(row, Row) else None
            yield BadRow(row.place, flaw) if flaw else row
    except UnicodeDecodeError as error:
        raise DataError(f"{part.name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error


def num_places(path: Path) -> int:
    """Return a Parquet file's number of rows, or a text file's estimated lines, as counting would take minutes."""
    if format_suffix(path) == ".parquet":
        with open_parquet(path) as parquet:
            return int(parquet.metadata.num_rows)
    here_bytes = SAMPLED_BYTES_COMPRESSED if is_compressed(path) else SAMPLED_BYTES
    sampled_bytes = SAMPLED_BYTES_ELSEWHERE if is_pointer(path) else here_bytes
    with open_with_file(path, path.name) as (stream, file):
        blocks = iter(partial(stream.read, BLOCK_BYTES), b"")
        lines = sum(block.count(b"\n") for block in islice(blocks, sampled_bytes // BLOCK_BYTES))
        is_whole = not stream.read(1)
        # Lines for each byte of the file so far, times its size; the last line may have no line end.
        return (lines if is_whole else lines * size_bytes(path) // file.tell()) + 1


@dataclass(frozen=True)
class Portion:
    """Choice of some rows of a split: those to train on, or those that are held out for evaluation."""

    name: Literal["training", "evaluation"]
    split: str
    fraction: float | None = None

    def select(self, rows: Iterable[Row | BadRow], column: str | None = None) -> Iterator[Row | BadRow]:
        """Yield the rows chosen for training or evaluation, equal ones together; unreadable rows count as training.

        column: of rows that are objects, the only one that decides whether two are equal; None: all.
        """
        if self.fraction is None:
            yield from rows
            return
        for row in rows:
            held_out = isinstance(row, Row) and is_held_out(_cell(row.content, column), self.fraction)
            if held_out == (self.name == "evaluation"):
                yield row


def _cell(content: Any, column: str | None) -> object:
    return content[column] if column else content


def portions(config: DataConfig) -> list[Portion]:
    """Return the choice of rows to train on and, if the recipe holds out some, the choice of evaluation rows."""
    if config.evaluation_split:
        return [Portion("training", config.split), Portion("evaluation", config.evaluation_split)]
    if config.evaluation_fraction:
        return [
            Portion("training", config.split, config.evaluation_fraction),
            Portion("evaluation", config.split, config.evaluation_fraction),
        ]
    return [Portion("training", config.split)]


def is_held_out(content: object, fraction: float) -> bool:
    """Return whether a row belongs to the held-out fraction, decided by a hash of its content alone."""
    canonical = json.dumps(content, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(canonical, digest_size=8).digest()
    # Eight bytes of a hash are uniform below 2**64.
    return int.from_bytes(digest, "big") < fraction * 2**64


def missing_shards(folder: Path) -> list[str]:
    """Return an error sentence for each incomplete group of shard files (`NAME-00000-of-00004`) in a folder."""
    found: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    for path in sorted(folder.rglob("*")):
        if shard := SHARD.fullmatch(path.relative_to(folder).as_posix()):
            found[shard["before"], int(shard["count"]), shard["after"]].add(int(shard["number"]))
    return [
        f"of {before}-*-of-{count:05}{after}, {len(there)} of {count} shards are there; missing: "
        + _missing(there, count)
        for (before, count, after), there in found.items()
        if len(there) != count
    ]


def _missing(there: set[int], count: int) -> str:
    # Some count from 1: then the last number is the count itself.
    first = 1 if count in there else 0
    missing = [f"{number:05}" for number in range(first, first + count) if number not in there]
    return ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")


def _matching(there: list[Path], folder: Path, split: str) -> list[Path]:
    exact = re.compile(rf"{re.escape(split)}(-\d+-of-\d+)?")
    loose = re.compile(rf"{re.escape(split)}[-_.].*")
    for root in (folder, folder / "data"):
        inside = [path for path in there if path.parent == root]
        for matching in (
            [path for path in inside if exact.fullmatch(data_stem(path))],
            [path for path in there if root / split in path.parents],
            [path for path in inside if loose.fullmatch(data_stem(path))],
        ):
            if matching:
                return matching
    return []


def _all_files(folder: Path, *, of_rows: bool = False) -> list[Path]:
    """Return a dataset folder's files, not hidden ones; DataError for dangling links, FIFOs, names not in UTF-8.

    of_rows: only those whose names say that they hold rows; beside them may lie 100,000 pictures, which get no Path.
    """
    paths, folders = [], [str(folder)] if folder.is_dir() else []
    while folders:
        with suppress(PermissionError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                is_plain = entry.is_file(follow_symlinks=False)
                if not is_plain and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.path.isascii() and NOT_TEXT.search(entry.path):
                    raise DataError(f"the name of the file {os.fsencode(entry.path)!r} is not UTF-8; rename it")
                elif is_plain or _is_file(entry):
                    if not of_rows or holds_rows(entry.name):
                        paths.append(Path(entry.path))
                elif Path(entry.path).is_dir() or holds_rows(entry.name):
                    path = Path(entry.path)
                    raise DataError(
                        f"looking for data in {folder}, {name_of(path, folder)} is {_kind_of(path)}; expected a file; "
                        "remove it, or put a copy of the file there"
                    )
    return sorted(paths)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # of a link to itself
        return False


def holds_rows(name: str) -> bool:
    """Return whether a file of this name holds rows; fast for pictures, of which there may be 100,000."""
    return MAY_HOLD_ROWS.search(name) is not None and format_suffix(Path(name)) in READERS


def _kind_of(path: Path) -> str:
    """Return in words what a path is that is no regular file, for errors: a link, a FIFO, a socket, a device."""
    if path.is_symlink():
        return f"a link {'to a folder' if path.is_dir() else 'that leads nowhere, or to itself'}"
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(path.stat().st_mode), "no regular file")


def _listing(folder: Path) -> str:
    names = [name_of(path, folder) for path in _all_files(folder)]
    if not names:
        return "The folder is empty." if folder.is_dir() else "There is no such folder."
    more = f" and {len(names) - NUM_FILES_LISTED} more" if len(names) > NUM_FILES_LISTED else ""
    return f"There are: {', '.join(names[:NUM_FILES_LISTED])}{more}."


def _read_json_lines(part: FilePart) -> Iterator[Row | BadRow]:
    left = math.inf if part.end is None else part.end - part.begin
    first = part.num_before + 1
    with open_bytes(part.path, part.name) as stream:
        if part.begin:
            # One byte earlier: where that byte is a line end, the part begins with a whole line.
            stream.seek(part.begin - 1)
            begun_before = len(stream.readline(LONGEST_LINE_BYTES + 1)) - 1  # of a line that is of the part before
            left -= begun_before
            first += begun_before > 0
            if left <= 0:
                return
        lines = iter(partial(stream.readline, LONGEST_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=first):
            if len(line) > LONGEST_LINE_BYTES:
                limit = f"{LONGEST_LINE_BYTES >> 20} MiB"
                raise DataError(f"{part.name}:{number} is longer than {limit}; expected a row of JSON in each line")
            if not line.isspace():
                yield _parse_line(line, RowLocation(part.name, number))
            # A line belongs to the part in which it begins, and is read beyond the part's end.
            left -= len(line)
            if left <= 0:
                return


def _parse_line(line: bytes, place: RowLocation) -> Row | BadRow:
    try:
        # A file may begin with a byte order mark.
        return Row(place, DECODER.decode(line.decode("utf-8-sig")))
    except json.JSONDecodeError as error:
        return BadRow(place, f"is not valid JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return BadRow(place, "is nested too deeply to be read; expected a row")
    except UnicodeDecodeError as error:
        return BadRow(place, f"is not UTF-8 text: {error.reason} at column {error.start + 1}")


def _read_json(part: FilePart) -> Iterator[Row | BadRow]:
    """Yield the rows of a `.json` file, which holds one JSON list or JSON Lines."""
    with open_text(part.path, part.name) as stream:
        start = stream.read(BEGINNING_CHARACTERS).lstrip()[:1]
    if start != "[":
        yield from _read_json_lines(part)
        return
    with open_text(part.path, part.name) as stream:
        for line, content in JsonList(stream, part.name).elements():
            yield Row(RowLocation(part.name, line), content)


def _read_csv(part: FilePart) -> Iterator[Row | BadRow]:
    name = part.name
    csv.field_size_limit(sys.maxsize)  # Python's default of 128 KiB is less than a long document
    with open_text(part.path, name) as stream:
        reader = csv.reader(stream, strict=True)
        try:
            columns = next(reader, [])
        except csv.Error as error:
            raise DataError(f"the header of {name} is not valid CSV: {error}; expected names of columns") from error
        _check_columns(columns, name)
        while True:
            # Taken before the row is read, which may span several lines.
            place = RowLocation(name, reader.line_num + 1)
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(place, f"is not valid CSV: {error}")
                continue
            if values and len(values) != len(columns):  # an empty line is an empty list
                yield BadRow(place, f"has {len(values)} columns, but the header names {len(columns)}")
            elif values:
                yield Row(place, dict(zip(columns, values, strict=True)))


def _read_parquet(part: FilePart) -> Iterator[Row | BadRow]:
    import pyarrow

    name, number = part.name, part.num_before
    try:
        with open_parquet(part.path) as file:
            _check_columns(file.schema_arrow.names, name)
            groups = range(part.begin, file.num_row_groups if part.end is None else part.end)
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, row_groups=list(groups)):
                for row in _rows_of(batch, name, number):
                    number += 1
                    yield row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} cannot be read as Parquet after row {number}: {error}; fetch it again") from error


def _rows_of(batch: Any, name: str, num_before: int) -> Iterator[Row | BadRow]:
    """Yield the rows of a pyarrow batch. A value that Python cannot represent makes only its own row a bad row."""
    try:
        # `to_pylist` converts all rows before the first is yielded, so that none comes twice.
        rows = map(as_row, batch.to_pylist())
        yield from (Row(RowLocation(name, num_before + at, "row"), row) for at, row in enumerate(rows, 1))
        return
    except NO_PYTHON_VALUE:
        pass
    for at in range(batch.num_rows):
        place = RowLocation(name, num_before + at + 1, "row")
        try:
            yield Row(place, as_row(batch.slice(at, 1).to_pylist()[0]))
        except NO_PYTHON_VALUE as error:
            yield BadRow(place, f"holds a value that Python cannot represent: {error}")


def _check_columns(columns: list[str], name: str) -> None:
    """Raise DataError for repeated column names, since one of the columns would be lost."""
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    if repeated:
        raise DataError(f"{name} has more than one column {', '.join(map(repr, repeated))}; rename or remove one")


def as_row(columns: dict[str, Any]) -> dict[str, Any]:
    """Return a Parquet row without the null fields that Parquet adds to nested objects, as TRL's `remove_none_values`.

    In a table every object has a field that one of them has: a call of one tool would be learned with the arguments of
    all others, each null. Original nulls are lost.
    """
    return {name: _without_nulls(value) for name, value in columns.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@contextmanager
def open_parquet(path: Path) -> Iterator[ParquetFile]:
    """Open a local Parquet file, or a remote one by its pointer file; raises pyarrow's errors and `open_file`'s."""
    from pyarrow.parquet import ParquetFile

    if not is_pointer(path):
        with ParquetFile(path) as parquet:
            yield parquet
        return
    with open_file(path) as file, ParquetFile(file) as parquet:
        yield parquet


@contextmanager
def open_bytes(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a data file for reading and decompress it while it is read. Raises DataError for a damaged file."""
    with open_with_file(path, name) as (stream, _):
        yield stream


@contextmanager
def open_with_file(path: Path, name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a data file like `open_bytes`, and also yield the compressed file, whose position shows the progress."""
    with open_file(path) as file:
        if not is_compressed(path):
            yield file, file
            return
        try:
            with _decompressed(file, without_pointer(path).suffix) as stream:
                yield stream, file
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{name} cannot be decompressed to its end: {error}; fetch it again") from error


@contextmanager
def open_text(path: Path, name: str) -> Iterator[TextIO]:
    """Open a data file as UTF-8 text, keeping its line ends. Raises DataError, UnicodeDecodeError."""
    with open_bytes(path, name) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        yield text


def _decompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file))
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))


def format_suffix(path: Path) -> str:
    """Return the suffix that names a data file's format: `.jsonl` for `train.jsonl.zst`."""
    return _uncompressed(path).suffix


def data_stem(path: Path) -> str:
    """Return a data file's name without the suffixes of format and compression: `train` for `train.jsonl.zst`."""
    return _uncompressed(path).stem


def is_compressed(path: Path) -> bool:
    """Return whether the file's name ends with a suffix of compression (`.gz` or `.zst`)."""
    return without_pointer(path).suffix in COMPRESSIONS


def _uncompressed(path: Path) -> Path:
    named = without_pointer(path)
    return named.with_suffix("") if is_compressed(path) else named


READERS: dict[str, Callable[[FilePart], Iterator[Row | BadRow]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
MAY_HOLD_ROWS = re.compile("|".join(map(re.escape, READERS)))
