"""Media of curated rows: their files go along, under the names by which the rows call them."""

import shutil
from pathlib import Path, PurePosixPath

from stages.core.cache import file_digest
from stages.core.errors import DataError
from stages.kinds.curate.spool import SpooledRow
from stages.remote.pointers import SUFFIX


def copy_media(row: SpooledRow, source: Path, target: Path, copied: set[tuple[str, str]]) -> None:
    """Copy the files of a row's media from its dataset's folder into that of the curated rows.

    copied: dataset and path of each file that is there already, to which this adds. Raises DataError where two datasets
    have different files of one name.
    """
    for path in row.media:
        if (row.place.dataset, path) in copied:
            continue
        copied.add((row.place.dataset, path))
        file = source / path
        if not file.is_file():
            file = file.with_name(file.name + SUFFIX)  # of a streamed dataset
        for name in _names(path, row.place.place.file):
            copy = target / name
            copy = copy.with_name(copy.name + SUFFIX) if file.suffix == SUFFIX else copy
            if copy.exists():
                if copy.stat().st_size != file.stat().st_size or file_digest(copy) != file_digest(file):
                    raise DataError(
                        f"curating: {row.place} names {path}, and another dataset has another file of that name; "
                        "expected one; rename the folder of one, or curate each by itself"
                    )
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _names(path: str, rows_file: str) -> list[str]:
    """Return the names under which rows may call a file: from the dataset's folder, and from that of their own file."""
    parent = PurePosixPath(rows_file).parent
    inner = PurePosixPath(path)
    beside = [str(inner.relative_to(parent))] if str(parent) != "." and inner.is_relative_to(parent) else []
    return [path, *beside]
