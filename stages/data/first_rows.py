"""The first rows of a dataset on this machine, read as a training will: found while a refresh is planned."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

from stages.core.errors import DataError
from stages.data.bad_rows import BadRows
from stages.data.config import METHODS_FOR, DataConfig, RowKind
from stages.data.files import BadRow, Row, read_rows
from stages.data.formats import FORMATS, WORDS_FOR, RowReader, likeliest_format, rename_columns
from stages.data.messages import RowError

NUM_ROWS = 1000
SECONDS = 0.5
"""After so many, what was read is enough: a plan is waited for."""


def check_first_rows(
    folder: Path, files: list[Path], config: DataConfig, rows: RowKind, read: Callable[[object], object] | None = None
) -> None:
    """Read the first rows of a split. read: a reader of other rows than those that are learned from, such as prompts.

    Raises DataError for rows that the method does not learn from, and for bad rows as training would.
    """
    read_learned = read or RowReader(config.format, rows, config.columns).read
    bad, kinds, num_read, is_whole = BadRows(io.StringIO()), set[RowKind | None](), 0, True
    deadline_s = time.monotonic() + SECONDS
    for row in read_rows(folder, files):
        if num_read == NUM_ROWS or time.monotonic() > deadline_s:
            is_whole = False
            break
        num_read += 1
        try:
            if isinstance(row, BadRow):
                bad.add(row)
            else:
                read_learned(row.content)
        except RowError as error:
            bad.add(BadRow(row.place, str(error)))
            kinds.add(_kind_of(row, config))
    if read is None and bad.num_rows == num_read and len(kinds) == 1 and (kind := kinds.pop()) not in (None, rows):
        raise DataError(
            f"none of the first {num_read} rows are {WORDS_FOR[rows]}, from which this method learns. They look like "
            f"{WORDS_FOR[kind]}: {METHODS_FOR[kind]}."
        )
    if config.on_bad_rows == "fail" or is_whole:  # else the share of bad rows is not known yet
        bad.check(config.on_bad_rows, config.max_bad_row_fraction, num_read, is_whole=is_whole)


def _kind_of(row: Row | BadRow, config: DataConfig) -> RowKind | None:
    """Return what a row is for, by its columns; None where nothing says it."""
    if not isinstance(row, Row) or not isinstance(row.content, dict):
        return None
    try:
        likeliest = likeliest_format(rename_columns(row.content, config.columns))
    except RowError:
        return None
    return FORMATS[likeliest].rows if likeliest else None
