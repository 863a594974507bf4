"""Data files that are compressed as a whole (`train.jsonl.gz`, `train.csv.zst`): their names, and what they hold.

A pointer to such a file is as good as the file.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from stages.core.errors import DataError
from stages.remote.pointers import open_file, without_pointer

COMPRESSIONS = (".gz", ".zst")


def format_suffix(path: Path) -> str:
    """The suffix that names the format: `.jsonl` of `train.jsonl.zst`."""
    return _uncompressed(path).suffix


def data_stem(path: Path) -> str:
    """The name without the suffixes of format and compression."""
    return _uncompressed(path).stem


def is_compressed(path: Path) -> bool:
    """Whether its name says so."""
    return without_pointer(path).suffix in COMPRESSIONS


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


def _uncompressed(path: Path) -> Path:
    named = without_pointer(path)
    return named.with_suffix("") if is_compressed(path) else named
