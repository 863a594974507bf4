"""Bad rows of a dataset (rows that cannot be learned from): counted, listed in a file, an error if there are too many.

While a refresh is planned, `check_first_rows` reads the beginning of a dataset and applies the same rules.
"""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

from stages.core.errors import DataError
from stages.data.config import ROW_KINDS, DataConfig, RowKind
from stages.data.files import BadRow, Row, read_rows
from stages.data.formats import FORMATS, RowReader, likeliest_format, rename_columns
from stages.data.media.folder import MediaFolder
from stages.data.messages import RowError

NUM_NAMED = 10


class BadRows:
    """Collector of bad rows, which keeps counts and the first few in memory and writes all to a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._first: list[BadRow] = []
        self.num_rows = 0

    def add(self, bad: BadRow) -> None:
        self.num_rows += 1
        if len(self._first) < NUM_NAMED:
            self._first.append(bad)
        place = bad.place
        row = {"file": place.file, place.counts: place.number, "reason": bad.reason}
        self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")

    def check(
        self, policy: Literal["fail", "drop"], max_fraction: float, num_source_rows: int, *, is_whole: bool = True
    ) -> str | None:
        """Return a warning if any row is bad, or raise DataError if too many are. is_whole: all rows were seen."""
        if not self.num_rows:
            return None
        problem = f"{self.num_rows} of {'' if is_whole else 'the first '}{num_source_rows} rows cannot be learned from"
        if policy == "fail":
            needed = needed_fraction(self.num_rows, num_source_rows)
            fraction = f" and `max_bad_row_fraction: {needed:g}`" if needed > max_fraction else ""
            raise DataError(
                f"{problem}:\n{self._named()}\nFix these rows, or set `on_bad_rows: drop`{fraction} to skip them."
            )
        if self.num_rows > max_fraction * num_source_rows:
            raise DataError(
                f"{problem}, more than max_bad_row_fraction {max_fraction} allows to drop:\n{self._named()}\n"
                "Fix these rows, or raise `max_bad_row_fraction` to "
                f"{needed_fraction(self.num_rows, num_source_rows):g}."
            )
        return f"{problem} and were dropped: {self._first[0].place} {self._first[0].reason}"

    def _named(self) -> str:
        lines = [f"  {bad.place} {bad.reason}" for bad in self._first]
        if self.num_rows > len(lines):
            lines.append(f"  … and {self.num_rows - len(lines)} more")
        return "\n".join(lines)


def needed_fraction(num_bad: int, num_rows: int) -> float:
    """Return the smallest `max_bad_row_fraction` with which a recipe could drop these bad rows, for error messages."""
    ten_thousandths = -(-10_000 * num_bad // num_rows)  # rounded up
    if num_bad > ten_thousandths / 10_000 * num_rows:  # 29 of 100: 0.29 * 100 is less than 29
        ten_thousandths += 1
    return ten_thousandths / 10_000


def write_list(path: Path, lists: list[Path]) -> None:
    """Join the bad-row lists of several prepared datasets into one file; write no file if all are empty."""
    texts = [text for part in lists if (text := part.read_text(encoding="utf-8"))]
    if texts:
        path.write_text("".join(texts), encoding="utf-8")


NUM_ROWS = 1000
SECONDS = 0.5
"""Time limit, in seconds, for checking a dataset's first rows while a user waits for the plan of a refresh."""


def check_first_rows(
    folder: Path, files: list[Path], config: DataConfig, rows: RowKind, read: Callable[[object], object] | None = None
) -> bool:
    """Return, while a refresh is planned, whether first rows have media; raise DataError for rows that are refused."""
    read_learned = (
        read or RowReader(config.format, rows, config.columns, MediaFolder.of(folder, files, by_header=True)).read
    )
    bad, kinds, num_read, is_whole, has_media = BadRows(io.StringIO()), set[RowKind | None](), 0, True, False
    deadline_s = time.monotonic() + SECONDS
    for row in read_rows(folder, files):
        if num_read == NUM_ROWS or (num_read and time.monotonic() > deadline_s):  # the first may import PyArrow
            is_whole = False
            break
        num_read += 1
        try:
            if isinstance(row, BadRow):
                bad.add(row)
            else:
                has_media |= _has_media(read_learned(row.content))
        except RowError as error:
            bad.add(BadRow(row.place, str(error)))
            kinds.add(_kind_of(row, config))
    if read is None and bad.num_rows == num_read and len(kinds) == 1 and (kind := kinds.pop()) not in (None, rows):
        raise DataError(
            f"none of the first {num_read} rows are {ROW_KINDS[rows].title}, from which this method learns. They look "
            f"like {ROW_KINDS[kind].title}: {ROW_KINDS[kind].methods}."
        )
    if config.on_bad_rows == "fail" or is_whole:  # else the share of bad rows is not known yet
        bad.check(config.on_bad_rows, config.max_bad_row_fraction, num_read, is_whole=is_whole)
    return has_media


def _has_media(read: object) -> bool:
    """Return whether any document of a row has media. read: the documents, or a `Prompt`."""
    documents = read if isinstance(read, tuple) else (getattr(read, "document", None),)
    return any(getattr(document, "media", ()) for document in documents)


def _kind_of(row: Row | BadRow, config: DataConfig) -> RowKind | None:
    """Return the kind of data that a row's columns suggest (an example, a preference pair, …); None if none fits."""
    if not isinstance(row, Row) or not isinstance(row.content, dict):
        return None
    try:
        likeliest = likeliest_format(rename_columns(row.content, config.columns))
    except RowError:
        return None
    return FORMATS[likeliest].rows if likeliest else None
