"""Reading of a curation's datasets: their rows, one at a time, as training would read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from stages.core.contract import StageContext
from stages.core.errors import DataError
from stages.data.any_rows import AnyRowReader, ReadRow
from stages.data.files import BadRow, Row, find_files, num_places, read_rows
from stages.data.messages import RowError
from stages.kinds.curate.config import CurateConfig
from stages.kinds.curate.report import BAD_ROWS, Report
from stages.kinds.curate.spool import SourcePlace

PROGRESS_EVERY = 1000
Readers = dict[str, AnyRowReader]


def rows_of(
    config: CurateConfig, context: StageContext, report: Report, readers: Readers, num_known: int
) -> Iterator[tuple[SourcePlace, ReadRow]]:
    """Yield each good row and where it stands; bad rows are reported.

    readers: gets a reader for each dataset.
    num_known: rows that an earlier attempt has seen; they only determine which format is read.

    Raises DataError for datasets that are not of one format.
    """
    for name in config.datasets:
        folder = context.inputs[name] / "data"
        files = find_files(folder, config.split)
        num_all = sum(map(num_places, files))
        reader = readers[name] = AnyRowReader()
        for number, row in enumerate(read_rows(folder, files)):
            if number % PROGRESS_EVERY == 0:
                context.progress(number, num_all, "rows", f"reading {name}")
            if num_known:
                num_known -= 1
                _learn_format(reader, row)
                continue
            place = SourcePlace(name, row.place)
            report.read(name)
            try:
                if isinstance(row, BadRow):
                    raise RowError(row.reason)
                read = reader.read(row.content)
            except RowError as error:
                report.drop(place, BAD_ROWS, str(error), row.content if not isinstance(row, BadRow) else None)
                continue
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            _check_one_format(readers)
            yield place, read


def _learn_format(reader: AnyRowReader, row: Row | BadRow) -> None:
    with suppress(RowError):
        if not reader.form and isinstance(row, Row):
            reader.read(row.content)


def _check_one_format(readers: Readers) -> None:
    """Raise DataError for datasets of several formats: training reads all rows in the format of the first."""
    forms = {name: reader.form for name, reader in readers.items() if reader.form}
    (first, expected), *rest = forms.items()
    for name, form in rest:
        if form != expected:
            raise DataError(
                f"{first} has {expected}, {name} has {form}: they cannot be one dataset, which training reads in one "
                "format; curate each by itself"
            )
