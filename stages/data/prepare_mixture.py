"""The datasets of a mixture, each prepared as if it were alone → rows of all, those that are held out apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import DataError
from stages.data.config import DataConfig, RowKind
from stages.data.dataset import PackedDataset
from stages.data.mixed_formats import check_formats
from stages.data.mixture import joined
from stages.data.prepare import PreparedData, prepare
from stages.data.preprocessing import Report
from stages.data.seen_rows import check_held_out, rows_in_any_order


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
    names, is_mixture = config.names, config.is_mixture
    if is_mixture:
        check_formats(inputs, config, rows)
    prepared: dict[str, PreparedData] = {}
    for name, part in zip(names, config.parts.values(), strict=True):
        with saying_of(name) if is_mixture else nullcontext():
            prepared[name] = prepare(
                inputs[part.dataset_stage] / "data",
                part,
                tokenizer_folder,
                rows=rows,
                cache=cache,
                report=_NamedReport(report, name) if is_mixture else report,
                bad_rows_file=work / (f"bad_rows.{name}.jsonl" if is_mixture else "bad_rows.jsonl"),
            )
    held_out = {name: one.evaluation for name, one in prepared.items() if one.evaluation}
    training = {name: one.training for name, one in prepared.items()}
    for warning in check_together(training, held_out):
        report.warn(warning)
    return PreparedData(joined(training), joined(held_out) if held_out else None)


@contextmanager
def saying_of(name: str) -> Iterator[None]:
    """Errors say of which dataset they are."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def check_together(training: Mapping[str, PackedDataset], held_out: Mapping[str, PackedDataset]) -> list[str]:
    """What to warn of, of the datasets of a mixture by name, all of whose rows are there.

    Raises DataError for a copy of another dataset, in whatever order, and where all rows that one holds out are learned
    from another one.
    """
    known: dict[tuple[int, ...], str] = {}
    for name, one in training.items():
        first = known.setdefault(rows_in_any_order(one.folder), name)
        if first != name:
            raise DataError(
                f"{first} and {name} have the same rows, which would be there twice; name one of them, with the weight "
                "of both"
            )
    warnings = []
    for name, one in held_out.items():
        for other in (other for other in training if other != name):
            try:
                warning = check_held_out(training[other].folder, one.folder)
            except DataError as error:
                raise DataError(f"{name} holds out what is learned from {other}: {error}") from error
            warnings += [f"{name} holds out what is learned from {other}: {warning}"] if warning else []
    return warnings
