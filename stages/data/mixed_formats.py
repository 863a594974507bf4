"""Whether the datasets of a mixture have rows of the kind that one method learns from: by the first row of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from stages.core.errors import DataError, DownloadError, TransientError
from stages.data.config import METHODS_FOR, DataConfig, RowKind
from stages.data.files import Row, find_files, read_rows
from stages.data.formats import FORMATS, WORDS_FOR, fitting_formats, likeliest_format, rename_columns
from stages.data.messages import RowError


def check_formats(inputs: Mapping[str, Path], config: DataConfig, rows: RowKind) -> None:
    """Raises DataError that names two datasets which no method learns from together, their formats, and whom each is
    for. inputs: folders of artifacts by stage. What is wrong with one dataset alone, its preparation says."""
    formats = {
        name: found
        for name, part in zip(config.names, config.parts.values(), strict=True)
        if (found := _format_of(part, inputs[part.dataset_stage] / "data", rows))
    }
    if problem := next(not_to_be_mixed(formats, rows), None):
        raise DataError(problem)


def not_to_be_mixed(formats: Mapping[str, str], rows: RowKind) -> Iterator[str]:
    """A sentence for each dataset whose rows are not what the method learns from, where those of another one are.

    formats: by name of the dataset, of those that are known."""
    suitable = next((name for name, form in formats.items() if FORMATS[form].rows == rows), None)
    for name, form in formats.items():
        kind = FORMATS[form].rows
        if suitable and kind != rows:
            yield (
                f"{suitable} and {name} cannot be mixed: {suitable} has {WORDS_FOR[rows]} (`{formats[suitable]}`), "
                f"from which this method learns, and {name} has {WORDS_FOR[kind]} (`{form}`): {METHODS_FOR[kind]}; "
                f"leave {name} out, or let a stage of its own learn from it"
            )


def _format_of(config: DataConfig, folder: Path, rows: RowKind) -> str | None:
    """The one that the recipe names, or that fits the first row, best one for this method; None where none is known."""
    if config.format != "auto":
        return config.format
    try:
        files = find_files(folder, config.split)
        first = next((row.content for row in read_rows(folder, files) if isinstance(row, Row)), None)
    except (DataError, DownloadError, TransientError):
        return None
    if not isinstance(first, dict):
        return None
    try:
        row = rename_columns(first, config.columns)
    except RowError:
        return None
    suitable = [name for name in fitting_formats(row) if FORMATS[name].rows == rows]
    return next(iter(suitable), likeliest_format(row))
