"""A Parquet file, or what a pointer to one points to: of that, no more is fetched than is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
