"""Curation of one row at a time, by this process or several side by side: whichever judges a row, the outcome is equal.

The stage's process reads the files and writes what is kept, in the rows' order; only what lies between is divided.
"""

import copy
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stages.core.contract import StageContext
from stages.core.errors import DataError
from stages.core.worker_pool import num_processes, worked
from stages.data.any_rows import AnyRowReader
from stages.data.files import BadRow, Row, find_files, num_places, read_rows
from stages.data.media.folder import MediaFolder
from stages.data.messages import RowError
from stages.kinds.curate.config import CurateConfig
from stages.kinds.curate.contamination import Benchmarks
from stages.kinds.curate.near_duplicates import MinHash, set_of
from stages.kinds.curate.report import BAD_ROWS
from stages.kinds.curate.row_steps import benchmarks_of, first_reason, redacted_row, row_steps
from stages.kinds.curate.spool import SourcePlace, digest_of, spool_line
from stages.kinds.curate.words import Hashes
from stages.remote.pointers import size_bytes

BATCH_ROWS, BATCH_CHARACTERS = 64, 4 << 20
"""Number of rows, or of their characters, with which a batch is full: a queue of long rows would fill the memory."""
BYTES_PER_PROCESS = 8 << 20
"""Smallest number of bytes of rows for which a further process is started, since starting takes seconds."""


@dataclass(frozen=True)
class RowBatch:
    """Rows of a dataset that one process judges. number: the first one's, of about `num_all` of the dataset, from 0."""

    dataset: str
    number: int
    num_all: int
    rows: list[Row | BadRow]
    reader: AnyRowReader
    """Reader that knows the dataset's format from its first rows."""


@dataclass(frozen=True)
class KeptRow:
    """Row that all steps on one row keep. line, digest: for the spool. runs, signature: for comparing rows."""

    line: bytes
    digest: bytes
    masked: Counter[str]
    runs: Hashes
    signature: NDArray[np.uint32]


@dataclass(frozen=True)
class DroppedRow:
    """Row that cannot be read, or that a step drops. content: None if there is none."""

    place: SourcePlace
    step: str
    reason: str
    content: object = None
    masked: Counter[str] = field(default_factory=Counter)


Outcome = KeptRow | DroppedRow | DataError
Judgement = tuple[RowBatch, list[Outcome]]


class RowJudge:
    """Function, sent to processes, that returns the outcome of each row of a batch."""

    def __init__(self, config: CurateConfig, benchmarks: Benchmarks | None) -> None:
        self._config = config
        self._benchmarks = benchmarks

    def __call__(self, batch: RowBatch) -> list[Outcome]:
        """Return the outcomes, in order; that of a row with which the stage must end is an error, and the last."""
        outcomes: list[Outcome] = []
        for row in batch.rows:
            try:
                outcomes.append(self._outcome(SourcePlace(batch.dataset, row.place), row, batch.reader))
            except DataError as error:
                return [*outcomes, error]
        return outcomes

    def _outcome(self, place: SourcePlace, row: Row | BadRow, reader: AnyRowReader) -> KeptRow | DroppedRow:
        if isinstance(row, BadRow):
            return DroppedRow(place, BAD_ROWS, row.reason)
        try:
            read = reader.read(row.content)
        except RowError as error:
            return DroppedRow(place, BAD_ROWS, str(error), row.content)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        masked: Counter[str] = Counter()
        dropped = first_reason(self._steps, place, read)
        if not dropped and self._config.redact:
            read, dropped = redacted_row(read, self._config.redact, masked, reader)
        if dropped:
            return DroppedRow(place, *dropped, read.content, masked)
        line = spool_line(place, read.content, read.media_files)
        compared = self._config.compared
        runs = set_of(read.parts, read.label, compared.words) if compared else np.zeros(0, np.uint64)
        return KeptRow(line, digest_of(read.canonical()), masked, runs, self._min_hash.signature(runs))

    @cached_property  # made where rows are judged: languages are not sent
    def _steps(self) -> list:
        return list(row_steps(self._config, self._benchmarks))

    @cached_property
    def _min_hash(self) -> MinHash:
        return MinHash()


def judged(config: CurateConfig, context: StageContext, num_known: int) -> Generator[Judgement]:
    """Yield the rows of all datasets, but for the first `num_known`, in order, with their outcomes.

    Raises DataError for datasets that are not of one format, EvaluationError for unreadable tasks to compare with.
    """
    return judgements(config, context, batches_of(config, context, num_known))


def judgements(config: CurateConfig, context: StageContext, batches: Iterable[RowBatch]) -> Generator[Judgement]:
    """Yield batches in order with their rows' outcomes, which this process finds, or several side by side."""
    judge = RowJudge(config, benchmarks_of(config.decontaminate, context) if config.decontaminate else None)
    files = (file for name in config.datasets for file in find_files(context.inputs[name] / "data", config.split))
    processes = num_processes(sum(map(size_bytes, files)), BYTES_PER_PROCESS)
    if processes == 1:
        yield from ((batch, judge(batch)) for batch in batches)
        return
    with closing(worked(judge, batches, processes, "curation goes on where it was")) as found:
        yield from found


def batches_of(config: CurateConfig, context: StageContext, num_known: int) -> Iterator[RowBatch]:
    """Yield the rows of all datasets, but for the first `num_known`, in batches that depend on nothing else."""
    forms: dict[str, str] = {}
    for name in config.datasets:
        folder = context.inputs[name] / "data"
        files = find_files(folder, config.split)
        num_all = sum(map(num_places, files))
        reader = AnyRowReader(MediaFolder.of(folder, files))
        rows = enumerate(read_rows(folder, files))
        while batch := _next_batch(rows):
            if not reader.form:
                reader = copy.deepcopy(reader)  # the batch before may still be on its way with what was known then
                _learn_format(reader, (row for _, row in batch))
                _check_one_format(forms, name, reader.form)
            known, num_known = batch[:num_known], max(0, num_known - len(batch))
            if remaining := batch[len(known) :]:
                yield RowBatch(name, remaining[0][0], num_all, [row for _, row in remaining], reader)
            else:
                context.progress(batch[0][0], num_all, "rows", f"reading {name}")


def _next_batch(rows: Iterator[tuple[int, Row | BadRow]]) -> list[tuple[int, Row | BadRow]]:
    batch, num_characters = [], 0
    for number, row in rows:
        batch.append((number, row))
        num_characters += len(repr(row))
        if len(batch) >= BATCH_ROWS or num_characters >= BATCH_CHARACTERS:
            break
    return batch


def _learn_format(reader: AnyRowReader, rows: Iterable[Row | BadRow]) -> None:
    for row in rows:
        if isinstance(row, Row) and not reader.form:
            with suppress(RowError, DataError):  # the row's outcome says so
                reader.read(row.content)


def _check_one_format(forms: dict[str, str], dataset: str, form: str | None) -> None:
    """Raise DataError if the datasets have several formats, since training reads all rows in the first row's format."""
    if form:
        forms[dataset] = form
    for first, expected in list(forms.items())[:1]:
        if form and form != expected:
            raise DataError(
                f"{first} has {expected}, {dataset} has {form}: they cannot be one dataset, which training reads in "
                "one format; curate each by itself"
            )
