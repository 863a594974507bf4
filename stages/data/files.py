"""Files of a dataset's folder → rows, one at a time; what a row means is not known here.

Finds the files of a split, opens them (compressed, or remote behind a pointer file) and reads JSON Lines, JSON lists,
CSV and Parquet in pieces, so that memory stays flat. `Portion` selects the rows that are trained on or held out.
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
from contextlib import contextmanager
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
"""As they are once decompressed, which takes seconds."""
SAMPLED_BYTES_ELSEWHERE = 1 << 20
LONGEST_LINE_BYTES = 256 << 20
"""Of JSON Lines, a row each. What has longer ones is no such file, and would fill the memory."""
JSON_LINES = (".jsonl", ".ndjson")
METADATA = {"dataset_info.json", "dataset_infos.json", "state.json"}
NUM_FILES_LISTED = 20
NO_PYTHON_VALUE = (ValueError, OverflowError, LookupError)
"""What pyarrow raises for dates that no calendar has, and for time zones that are not known."""
SHARD = re.compile(r"(?P<before>.*?)-(?P<number>\d+)-of-(?P<count>\d+)(?P<after>\..*)")


@dataclass(frozen=True)
class Place:
    """Where a row stands: its first line in a text file, its number in a Parquet file; both count from 1."""

    file: str
    number: int
    counts: Literal["line", "row"] = "line"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.counts == "line" else f"{self.file} row {self.number}"


@dataclass(frozen=True)
class Row:
    """What a file says at a place; any JSON value, not checked yet."""

    place: Place
    content: object


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be learned from, and why."""

    place: Place
    reason: str


@dataclass(frozen=True)
class Part:
    """A file, or what lies from `begin` to before `end`: row groups of Parquet, lines of JSON Lines that begin at these
    bytes.

    name: what messages call the file. num_before: lines, of Parquet rows, before the part.
    """

    path: Path
    name: str
    begin: int = 0
    end: int | None = None
    num_before: int = 0

    def place(self, number: int) -> Place:
        """Of the line, or of Parquet the row, that has this number in the part."""
        return Place(self.name, self.num_before + number, "row" if format_suffix(self.path) == ".parquet" else "line")


def find_files(folder: Path, split: str) -> list[Path]:
    """The data files of a split, in order: `SPLIT.jsonl`, shards `SPLIT-00000-of-00002.parquet`, all in a folder
    `SPLIT/`, any of these in `data/`, or else names like `SPLIT_part1.jsonl`; for `train` also the only file there is.

    Raises DataError that lists what is there.
    """
    there = [path for path in _all_files(folder) if format_suffix(path) in READERS and path.name not in METADATA]
    found = _matching(there, folder, split) or (there if split == "train" and len(there) == 1 else [])
    if not found:
        raise DataError(
            f"no files of the split {split!r} in the dataset {folder}. {_listing(folder)} Expected `{split}.jsonl`, "
            f"`{split}-*.parquet`, `{split}/…` or `data/{split}-*.parquet` ({', '.join(READERS)})."
        )
    suffixes = sorted({format_suffix(path) for path in found})
    if len(suffixes) > 1:
        names = ", ".join(name_of(path, folder) for path in islice(found, NUM_FILES_LISTED))
        raise DataError(f"the split {split!r} of {folder} is there in {' and '.join(suffixes)}: {names}. Keep one.")
    stems = Counter(path.parent / data_stem(path) for path in found)
    if twice := [name_of(path, folder) for path in found if stems[path.parent / data_stem(path)] > 1]:
        raise DataError(f"the split {split!r} of {folder} has files twice: {', '.join(twice)}. Keep one of each.")
    return found


def name_of(path: Path, folder: Path) -> str:
    """What messages call a file of a dataset's folder, wherever it lies."""
    return str(without_pointer(path).relative_to(folder))


def read_rows(folder: Path, files: list[Path]) -> Iterator[Row | BadRow]:
    """All rows of `files` in order, named relative to `folder`. Raises DataError for a file that cannot be read on.

    What a good row holds can be written as UTF-8 and worked with recursively; what it means is not checked.
    """
    for path in files:
        yield from read_part(Part(path, name_of(path, folder)))


def read_part(part: Part) -> Iterator[Row | BadRow]:
    """The rows of a file, or of a part of it, as `read_rows` gives them."""
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
    """The lines of a text file, the rows of a Parquet file: what the `Place` of its last row counts up to, roughly.

    Of a large text file, as many as there would be if all of it were like its beginning: to count them takes minutes.
    """
    if format_suffix(path) == ".parquet":
        with open_parquet(path) as parquet:
            return int(parquet.metadata.num_rows)
    here_bytes = SAMPLED_BYTES_COMPRESSED if is_compressed(path) else SAMPLED_BYTES
    sampled_bytes = SAMPLED_BYTES_ELSEWHERE if is_pointer(path) else here_bytes
    with open_with_file(path, path.name) as (stream, file):
        blocks = iter(partial(stream.read, BLOCK_BYTES), b"")
        lines = sum(block.count(b"\n") for block in islice(blocks, sampled_bytes // BLOCK_BYTES))
        is_whole = not stream.read(1)
        return (lines if is_whole else lines * size_bytes(path) // file.tell()) + 1


@dataclass(frozen=True)
class Portion:
    """All rows of a split, or one side of it: the `fraction` of it that is held out, or the rest."""

    name: Literal["training", "evaluation"]
    split: str
    fraction: float | None = None

    def select(self, rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The rows of this portion. Equal rows are on the same side; what cannot be read counts as training data."""
        if self.fraction is None:
            yield from rows
            return
        for row in rows:
            held_out = isinstance(row, Row) and is_held_out(row.content, self.fraction)
            if held_out == (self.name == "evaluation"):
                yield row


def portions(config: DataConfig) -> list[Portion]:
    """The training portion, and the evaluation portion if the recipe asks for one."""
    if config.evaluation_split:
        return [Portion("training", config.split), Portion("evaluation", config.evaluation_split)]
    if config.evaluation_fraction:
        return [
            Portion("training", config.split, config.evaluation_fraction),
            Portion("evaluation", config.split, config.evaluation_fraction),
        ]
    return [Portion("training", config.split)]


def is_held_out(content: object, fraction: float) -> bool:
    """Whether a row of this content is held out, by its hash alone: the same in every run and every order."""
    canonical = json.dumps(content, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(canonical, digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def missing_shards(folder: Path) -> list[str]:
    """A sentence for each set of shards below `folder` that is not whole, whether it counts from 0 or from 1."""
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
    first = 1 if count in there else 0
    missing = [f"{number:05}" for number in range(first, first + count) if number not in there]
    return ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")


def _matching(there: list[Path], folder: Path, split: str) -> list[Path]:
    exact = re.compile(rf"{re.escape(split)}(-\d+-of-\d+)?")
    loose = re.compile(rf"{re.escape(split)}[-_.].*")
    for root in (folder, folder / "data"):
        inside = [path for path in there if path.parent == root]
        for found in (
            [path for path in inside if exact.fullmatch(data_stem(path))],
            [path for path in there if root / split in path.parents],
            [path for path in inside if loose.fullmatch(data_stem(path))],
        ):
            if found:
                return found
    return []


def _all_files(folder: Path) -> list[Path]:
    """Return every file that is not hidden, nor in a hidden folder.

    Raises DataError for a name that is not UTF-8, and for what is named like data and is no file: a link that leads
    nowhere or to a folder, a FIFO.
    """
    paths = [
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    for path in paths:
        if NOT_TEXT.search(str(path)):
            raise DataError(f"the name of the file {os.fsencode(path)!r} is not UTF-8; rename it")
        if not path.is_file() and (format_suffix(path) in READERS or path.is_dir()):
            raise DataError(
                f"looking for data in {folder}, {name_of(path, folder)} is {_kind_of(path)}; expected a file; remove "
                "it, or put a copy of the file there"
            )
    return sorted(path for path in paths if path.is_file())


def _kind_of(path: Path) -> str:
    """Name what is at a path and is no file."""
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


def _read_json_lines(part: Part) -> Iterator[Row | BadRow]:
    left = math.inf if part.end is None else part.end - part.begin
    first = part.num_before + 1
    with open_bytes(part.path, part.name) as stream:
        if part.begin:
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
                yield _parse_line(line, Place(part.name, number))
            left -= len(line)
            if left <= 0:
                return


def _parse_line(line: bytes, place: Place) -> Row | BadRow:
    try:
        return Row(place, DECODER.decode(line.decode("utf-8-sig")))
    except json.JSONDecodeError as error:
        return BadRow(place, f"is not valid JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return BadRow(place, "is nested too deeply to be read; expected a row")
    except UnicodeDecodeError as error:
        return BadRow(place, f"is not UTF-8 text: {error.reason} at column {error.start + 1}")


def _read_json(part: Part) -> Iterator[Row | BadRow]:
    """A list of rows; a file that starts otherwise is read as JSON Lines, which often bear this suffix too."""
    with open_text(part.path, part.name) as stream:
        start = stream.read(BEGINNING_CHARACTERS).lstrip()[:1]
    if start != "[":
        yield from _read_json_lines(part)
        return
    with open_text(part.path, part.name) as stream:
        for line, content in JsonList(stream, part.name).elements():
            yield Row(Place(part.name, line), content)


def _read_csv(part: Part) -> Iterator[Row | BadRow]:
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
            place = Place(name, reader.line_num + 1)
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(place, f"is not valid CSV: {error}")
                continue
            if values and len(values) != len(columns):
                yield BadRow(place, f"has {len(values)} columns, but the header names {len(columns)}")
            elif values:
                yield Row(place, dict(zip(columns, values, strict=True)))


def _read_parquet(part: Part) -> Iterator[Row | BadRow]:
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
    """The rows of a pyarrow batch; one by one where Python has no value for what a row holds, to find that row."""
    try:
        rows = map(as_row, batch.to_pylist())
        yield from (Row(Place(name, num_before + at, "row"), row) for at, row in enumerate(rows, 1))
        return
    except NO_PYTHON_VALUE:
        pass
    for at in range(batch.num_rows):
        place = Place(name, num_before + at + 1, "row")
        try:
            yield Row(place, as_row(batch.slice(at, 1).to_pylist()[0]))
        except NO_PYTHON_VALUE as error:
            yield BadRow(place, f"holds a value that Python cannot represent: {error}")


def _check_columns(columns: list[str], name: str) -> None:
    """Of two columns of one name, one would be lost."""
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    if repeated:
        raise DataError(f"{name} has more than one column {', '.join(map(repr, repeated))}; rename or remove one")


def as_row(columns: dict[str, Any]) -> dict[str, Any]:
    """A table's row without the fields of its objects that are null.

    A table has a field in every object where one has it: a call of one tool would be learned with the arguments of all
    others, each null. TRL's `remove_none_values` does so too; what was null in truth cannot be told from it.
    """
    return {name: _without_nulls(value) for name, value in columns.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@contextmanager
def open_parquet(path: Path) -> Iterator[ParquetFile]:
    """Raises pyarrow's errors for what is none, and what `open_file` raises."""
    from pyarrow.parquet import ParquetFile

    if not is_pointer(path):
        with ParquetFile(path) as parquet:
            yield parquet
        return
    with open_file(path) as file, ParquetFile(file) as parquet:
        yield parquet


@contextmanager
def open_bytes(path: Path, name: str) -> Iterator[BinaryIO]:
    """The content, decompressed piece by piece; `name` is what errors call it. Raises DataError for a damaged file."""
    with open_with_file(path, name) as (stream, _):
        yield stream


@contextmanager
def open_with_file(path: Path, name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The same, and the file that is decompressed: where it is at tells how much of it the content so far has taken."""
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
    """The same as text, line ends as they are. Raises DataError, and UnicodeDecodeError for what is not UTF-8."""
    with open_bytes(path, name) as stream, io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        yield text


def _decompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file))
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))


def format_suffix(path: Path) -> str:
    """The suffix that names the format: `.jsonl` of `train.jsonl.zst`."""
    return _uncompressed(path).suffix


def data_stem(path: Path) -> str:
    """The name without the suffixes of format and compression."""
    return _uncompressed(path).stem


def is_compressed(path: Path) -> bool:
    """Whether its name says so."""
    return without_pointer(path).suffix in COMPRESSIONS


def _uncompressed(path: Path) -> Path:
    named = without_pointer(path)
    return named.with_suffix("") if is_compressed(path) else named


READERS: dict[str, Callable[[Part], Iterator[Row | BadRow]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
