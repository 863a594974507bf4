"""The datasets of a mixture, each prepared as if it were alone → rows of all, those that are held out apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import DataError
from stages.data.cache import file_digest
from stages.data.config import DataConfig, RowKind
from stages.data.mixed_formats import check_formats
from stages.data.mixture import joined
from stages.data.prepare import PreparedData, prepare
from stages.data.preprocessing import Report
from stages.data.seen_rows import ROW_DIGESTS, check_held_out


@dataclass(frozen=True)
class _NamedReport:
    """Says of which dataset a warning is."""

    report: Report
    name: str

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None:
        self.report.progress(done, total, unit, f"{message} of {self.name}")

    def warn(self, message: str) -> None:
        self.report.warn(f"{self.name}: {message}")


def prepare_mixture(
    inputs: Mapping[str, Path],
    config: DataConfig,
    tokenizer_folder: Path,
    *,
    rows: RowKind,
    cache: Path,
    report: Report,
    work: Path,
) -> PreparedData:
    """As `prepare`, of whose arguments these are, for one dataset or several.

    inputs: folders of artifacts by stage. Bad rows are listed in `bad_rows.jsonl` of the folder `work`; of a mixture,
    those of each dataset in a file of its name. Raises DataError also where no method learns from the rows of all
    together, and where all rows that one dataset holds out are learned from another one.
    """
    names, is_mixture = config.names, len(config.parts) > 1
    if is_mixture:
        check_formats(inputs, config, rows)
    prepared: dict[str, PreparedData] = {}
    for name, part in zip(names, config.parts.values(), strict=True):
        with _named(name) if is_mixture else nullcontext():
            prepared[name] = prepare(
                inputs[part.dataset_stage] / "data",
                part,
                tokenizer_folder,
                rows=rows,
                cache=cache,
                report=_NamedReport(report, name) if is_mixture else report,
                bad_rows_file=work / (f"bad_rows.{name}.jsonl" if is_mixture else "bad_rows.jsonl"),
            )
    _check_same_rows(prepared)
    _check_held_out_of_others(prepared, report)
    held_out = {name: one.evaluation for name, one in prepared.items() if one.evaluation}
    training = joined({name: one.training for name, one in prepared.items()})
    return PreparedData(training, joined(held_out) if held_out else None)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors say of which dataset they are."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _check_same_rows(prepared: Mapping[str, PreparedData]) -> None:
    """Raises DataError for a copy of another dataset, whatever its files are called."""
    known: dict[str, str] = {}
    for name, one in prepared.items():
        first = known.setdefault(file_digest(one.training.folder / ROW_DIGESTS), name)
        if first != name:
            raise DataError(
                f"{first} and {name} have the same rows, which would be there twice; name one of them, with the weight "
                "of both"
            )


def _check_held_out_of_others(prepared: Mapping[str, PreparedData], report: Report) -> None:
    for name, one in prepared.items():
        for other, another in prepared.items():
            if other == name or not one.evaluation:
                continue
            try:
                warning = check_held_out(another.training.folder, one.evaluation.folder)
            except DataError as error:
                raise DataError(f"{name} holds out what is learned from {other}: {error}") from error
            if warning:
                report.warn(f"{name} holds out what is learned from {other}: {warning}")
