"""A Parquet file, or what a pointer to one points to: of that, no more is fetched than is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stages.remote.pointers import is_pointer, open_file

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile


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
