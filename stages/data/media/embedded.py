"""Media whose bytes lie inside a dataset's rows: in Parquet as Hugging Face's `datasets` writes it, or as base64.

They stay where they are: a reference names file and row, and is found there again by its digest. So they lie in Parquet
or in uncompressed JSON Lines, whose rows are read one at a time.
"""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from stages.core.errors import DataError
from stages.data.files import (
    JSON_LINES,
    LONGEST_LINE_BYTES,
    RowLocation,
    as_row,
    format_suffix,
    is_compressed,
    open_parquet,
)
from stages.data.media.images import PictureError, from_data_address
from stages.remote.pointers import is_pointer

SEPARATOR = "#"
MAX_GROUP_BYTES = 512 << 20
"""Largest row group of Parquet, in bytes, of which single rows are read: it is in memory as a whole."""
KEPT_GROUPS = 2


def embedded_bytes(source: object) -> bytes | None:
    """Return the bytes that a row's cell or part holds itself; None if it names a file. Raises PictureError."""
    if isinstance(source, dict):
        if isinstance(source.get("bytes"), bytes):
            return bytes(source["bytes"])
        if _is_input_audio(source):
            return from_data_address(f"data:;base64,{source['data']}")
        source = next((source[key] for key in ("url", "data", "bytes") if source.get(key)), None)
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or not source.startswith("data:"):
        return None
    return from_data_address(source)


def _is_input_audio(value: dict[str, Any]) -> bool:
    """Return whether an object is OpenAI's `input_audio`, {data, format}, whose data are base64 alone."""
    data = value.get("data")
    return "format" in value and isinstance(data, str) and not data.startswith("data:")


def as_json(value: object) -> str:
    """Return what stands in JSON for a value that JSON lacks: base64 for bytes, else its text; for `json.dumps`."""
    return f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)


def without_pixels(value: Any) -> Any:
    """Return a row's value with a digest, `sha256:…`, in place of each medium that it holds itself."""
    if isinstance(value, dict):
        value = {**value, "data": f"data:;base64,{value['data']}"} if _is_input_audio(value) else value
        return {name: without_pixels(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_pixels(one) for one in value]
    if isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:")):
        return f"sha256:{hashlib.sha256(_bytes_in(value)).hexdigest()}"
    return value


def _bytes_in(value: bytes | str) -> bytes:
    """Return the bytes that a value holds as base64, else its own."""
    try:
        return embedded_bytes(value) or b""
    except PictureError:
        return value if isinstance(value, bytes) else value.encode()


def place_of(root: Path, row: RowLocation) -> str:
    """Return the path of media inside a row: `FILE#NUMBER`. Raises PictureError for a file of another kind."""
    path = root / row.file
    if not is_pointer(path) and path.is_file():
        if format_suffix(path) == ".parquet":
            _check_group(path, row.number)
            return f"{row.file}{SEPARATOR}{row.number}"
        if format_suffix(path) in JSON_LINES and not is_compressed(path):
            return f"{row.file}{SEPARATOR}{row.number}"
    raise PictureError(
        f"lies inside a row of {row.file}, of which single rows cannot be read; expected Parquet or uncompressed JSON "
        "Lines on this machine, or files beside it"
    )


def read_embedded(root: Path, place: str, sha256: str) -> bytes | None:
    """Return the bytes with this digest inside the row that `place_of` named; None if they are no longer there."""
    name, _, number = place.rpartition(SEPARATOR)
    path = root / name
    row = _parquet_row(path, int(number)) if format_suffix(path) == ".parquet" else _line(path, int(number))
    return next((data for data in _media_in(row) if hashlib.sha256(data).hexdigest() == sha256), None)


def is_embedded(path: str) -> bool:
    """Return whether a reference's path names a row instead of a file."""
    name, separator, number = path.rpartition(SEPARATOR)
    return bool(separator) and number.isdecimal() and format_suffix(Path(name)) in (".parquet", *JSON_LINES)


def _media_in(value: Any) -> Iterator[bytes]:
    """Yield the bytes of all media inside a row, and of what only looks like media, such as a text "data: …"."""
    if isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:")):
        yield _bytes_in(value)
    elif isinstance(value, dict) and _is_input_audio(value):
        with suppress(PictureError):  # of what only looks like a sound, such as a tool's arguments
            yield embedded_bytes(value) or b""
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _media_in(item)


def _parquet_row(path: Path, number: int) -> object:
    status = path.stat()
    group, begin = _group_of(path, number)
    table = _row_group(path, status.st_size, status.st_mtime_ns, group)
    return as_row(table.slice(number - 1 - begin, 1).to_pylist()[0])


@lru_cache(KEPT_GROUPS)
def _row_group(path: Path, _size: int, _changed_ns: int, group: int) -> Any:
    """Return a row group of a Parquet file as a table. Size and time are of the file, so that a changed one is read."""
    with open_parquet(path) as file:
        return file.read_row_group(group)


def _group_of(path: Path, number: int) -> tuple[int, int]:
    """Return the row group in which a row lies, with the number of rows before the group."""
    status, before = path.stat(), 0
    for group, (num_rows, _) in enumerate(_groups(path, status.st_size, status.st_mtime_ns)):
        if number <= before + num_rows:
            return group, before
        before += num_rows
    raise DataError(f"{path} has {before} rows, and no row {number}; download the dataset again")


def _check_group(path: Path, number: int) -> None:
    status = path.stat()
    group, _ = _group_of(path, number)
    _, num_bytes = _groups(path, status.st_size, status.st_mtime_ns)[group]
    if num_bytes > MAX_GROUP_BYTES:
        raise PictureError(
            f"lies in a row group of {num_bytes:,} bytes, which is read as a whole; expected at most "
            f"{MAX_GROUP_BYTES:,}: write {path.name} with smaller row groups"
        )


@lru_cache(64)
def _groups(path: Path, _size: int, _changed_ns: int) -> tuple[tuple[int, int], ...]:
    """Return the number of rows, and of bytes in memory, of each row group of a Parquet file."""
    with open_parquet(path) as file:
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        return tuple((group.num_rows, group.total_byte_size) for group in groups)


def _line(path: Path, number: int) -> object:
    status = path.stat()
    starts = _line_starts(path, status.st_size, status.st_mtime_ns)
    if number > len(starts):
        raise DataError(f"{path} has {len(starts)} lines, and no line {number}; download the dataset again")
    with path.open("rb") as stream:
        stream.seek(starts[number - 1])
        return json.loads(stream.readline(LONGEST_LINE_BYTES).decode("utf-8-sig"))


@lru_cache(16)
def _line_starts(path: Path, _size: int, _changed_ns: int) -> array[int]:
    """Return where each line of a file begins, in bytes: 8 bytes a line, found by reading the file once."""
    starts = array("q")
    with path.open("rb") as stream:
        end = 0
        for line in stream:
            starts.append(end)
            end += len(line)
    return starts
